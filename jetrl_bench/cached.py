"""What dozens of short processes would each work out again, kept in $XDG_CACHE_HOME/jetrl-bench."""

import os
from collections.abc import Callable
from pathlib import Path


def folder() -> Path:
    """The user's cache folder of this project; made where it is missing."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetrl-bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def once(name: str, compute: Callable[[], str]) -> str:
    """compute(), whose text stays on this machine under `name`, which must name everything that decides it."""
    path = folder() / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = compute()
    scratch = path.with_name(f".{name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
    return text
