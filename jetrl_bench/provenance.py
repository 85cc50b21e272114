"""Where a record comes from: commit, edits since, and a hash of everything that makes the numbers."""

import ast
import hashlib
import re
import subprocess
from functools import cache
from pathlib import Path

from jetrl_bench import cached

PACKAGE = Path(__file__).parent
CODE_PATHS = ("jetrl_bench", "Snakefile", "workflow", "pyproject.toml", "constraints")
ROOTS = ("base", "loop", "vllm_plugin")
"""Whatever these import, directly or not, is on the numerical path, with the C sources."""
LEFT_OUT = ("cached", "config", "devices", "errors", "progress", "provenance", "record", "state", "strict")
"""Imported there without moving a number: settings enter the digest by value."""


@cache
def source() -> dict:
    """git_sha, dirty (code paths only; True where git cannot say), hash of the modules on the numerical path."""
    sha = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--", *CODE_PATHS)
    return {"git_sha": sha or "unknown", "dirty": status is None or bool(status), "hash": source_hash()}


@cache
def source_hash(package: Path = PACKAGE) -> str:
    """16 hex digits over the numerical modules without comments, docstrings and layout, and over their C sources."""
    raw = hashlib.sha256()
    for path in sorted([*package.glob("*.py"), *package.glob("csrc/*")]):
        raw.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return cached.once(f"source-{raw.hexdigest()[:24]}", lambda: _source_hash(package))


def _source_hash(package: Path) -> str:
    digest = hashlib.sha256()
    for path in numerical_files(package):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            code = without_comments(text)
        else:
            code = " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S).split())
        digest.update(f"{path.relative_to(package).as_posix()}\0{code}\0".encode())
    return digest.hexdigest()[:16]


def numerical_files(package: Path = PACKAGE) -> list[Path]:
    found: set[str] = set()
    ahead = set(ROOTS)
    while ahead:
        name = ahead.pop()
        found.add(name)
        ahead |= _imports(package / f"{name}.py") - found - set(LEFT_OUT)
    return sorted([*(package / f"{name}.py" for name in found), *package.glob("csrc/*.[ch]")])


def _imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, at its top or inside a function."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in nodes if node.module == "jetrl_bench" for alias in node.names}
    names |= {node.module.split(".")[1] for node in nodes if (node.module or "").startswith("jetrl_bench.")}
    return {name for name in names if (path.parent / f"{name}.py").exists()}


def without_comments(text: str) -> str:
    """Python source as its syntax tree says it, docstrings (strings that stand alone) left out."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [item for item in body if not _is_string(item)]
            node.body = kept or [ast.Pass()]
    return ast.unparse(tree)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
