"""Who holds Snakemake's lock, and is that process alive?

Snakemake's lock names files, not owners, and a killed Snakemake leaves it behind. The Snakefile therefore registers
every process that may take the lock (host, pid, start time) before it does. `unlock` clears a lock only where every
registered process is dead, on this host; it never guesses.
"""

import argparse
import json
import os
import shutil
import socket
import time
from pathlib import Path

import psutil

from jetrl_bench.record import write_json

OWNERS = ".snakemake/owners"
LOCKS = ".snakemake/locks"


def register(folder: Path) -> None:
    """Record this process as one that may take the lock of the working folder `folder`; forget the dead."""
    for owner in owners(folder):
        if owner["alive"] is False:
            owner["path"].unlink(missing_ok=True)
    pid = os.getpid()
    path = Path(folder) / OWNERS / f"{socket.gethostname()}-{pid}.json"
    write_json(path, {"host": socket.gethostname(), "pid": pid, "started": psutil.Process(pid).create_time()})


def owners(folder: Path) -> list[dict]:
    """Registered processes: host, pid, started (Unix seconds), alive (None on another host: unknown)."""
    out = []
    for path in sorted((Path(folder) / OWNERS).glob("*.json")):
        owner = json.loads(path.read_text(encoding="utf-8"))
        out.append({**owner, "alive": _alive(owner), "path": path})
    return out


def _alive(owner: dict) -> bool | None:
    if owner["host"] != socket.gethostname():
        return None
    try:
        process = psutil.Process(owner["pid"])
        return abs(process.create_time() - owner["started"]) < 2.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def unlock(folder: Path) -> str:
    """Clear the lock where its owners are dead; return one line, empty where there was no lock."""
    folder = Path(folder)
    held = owners(folder)
    locked = any((folder / LOCKS).glob("*.lock"))
    undead = [owner for owner in held if owner["alive"] is not False]
    if not undead:
        for owner in held:
            owner["path"].unlink(missing_ok=True)
    if not locked:
        return ""
    if undead:
        raise ValueError(
            f"{LOCKS}: locked by {_who(undead[-1])}, still running or on another host; wait for it, or end it"
        )
    if not held:
        raise ValueError(
            f"{LOCKS}: locked by an unknown process; if no snakemake is running here, run snakemake --unlock"
        )
    shutil.rmtree(folder / LOCKS)
    return f"cleared the lock of {_who(held[-1])}, which is dead"


def _who(owner: dict) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["started"]))
    return f"snakemake pid {owner['pid']} on {owner['host']}, started {started}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path(), help="the workflow's working folder")


def run(args: argparse.Namespace) -> int:
    line = unlock(args.folder)
    if line:
        print(line)
    return 0
