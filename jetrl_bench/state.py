"""Resumable state on disk: one folder per save, complete or not there at all.

    STATE/step-000040/{trainer.pt, engine.pt, loop.pt, ..., DONE}

Parts are written into a hidden folder, synced, the DONE marker last; then the folder is renamed and only then are older
ones removed. A kill at any moment leaves the previous state or the new one, never a mix of two steps.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from jetrl_bench.record import write_text


def save(folder: Path, step: int, parts: dict[str, Any], identity: dict[str, str]) -> None:
    """Write every part (anything that torch.load reads with weights_only) as state `step` of a run."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".step-{step:06d}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for name, value in parts.items():
        with open(temporary / f"{name}.pt", "wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
    write_text(temporary / "DONE", json.dumps(identity, sort_keys=True) + "\n")
    final = folder / f"step-{step:06d}"
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    for other in [*folder.glob("step-*"), *folder.glob(".step-*")]:
        if other != final:
            shutil.rmtree(other, ignore_errors=True)


def load(folder: Path, identity: dict[str, str]) -> dict[str, Any] | None:
    """The parts of the newest complete state, None where there is none.

    ValueError, one line, where `digest` or `base` is another run's. A state written by other source code is left out
    (the run starts over, and says so): half a run of each would be a record of neither.
    """
    complete = sorted(path for path in Path(folder).glob("step-*") if (path / "DONE").exists())
    if not complete:
        return None
    newest = complete[-1]
    written = json.loads((newest / "DONE").read_text(encoding="utf-8"))
    for key in ("digest", "base"):
        if written.get(key) != identity[key]:
            raise ValueError(
                f"{newest}: state of another {'run' if key == 'digest' else 'base checkpoint'}: its {key} is "
                f"{written.get(key)}, this run's is {identity[key]}; remove the folder or give another --state"
            )
    if written.get("source") != identity["source"]:
        print(f"{newest}: written by another version of the source; starting over", flush=True)
        return None
    return {path.stem: torch.load(path, map_location="cpu", weights_only=True) for path in sorted(newest.glob("*.pt"))}


def next_attempt(folder: Path) -> int:
    """1 for the first process that works on this state, 2 for the next; counted before any work is done."""
    path = Path(folder) / "attempts"
    attempt = 1 + (int(path.read_text(encoding="utf-8")) if path.exists() else 0)
    write_text(path, f"{attempt}\n")
    return attempt


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
