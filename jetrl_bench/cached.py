"""What dozens of short processes would each work out again, kept in $XDG_CACHE_HOME/jetrl-bench."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def folder() -> Path:
    """The user's cache folder of this project; made where it is missing."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetrl-bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def once(name: str, compute: Callable[[], str]) -> str:
    """compute(), whose text stays on this machine under `name`, which must name everything that decides it.

    Where the folder cannot be written, the text is computed and not kept.
    """
    try:
        return (folder() / name).read_text(encoding="utf-8")
    except OSError:
        text = compute()
    with contextlib.suppress(OSError):
        path = folder() / name
        scratch = path.with_name(f".{name}.{os.getpid()}")
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    return text
