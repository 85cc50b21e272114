"""Where a record comes from: commit, edits since, and a hash of everything that makes the numbers."""

import ast
import hashlib
import re
import subprocess
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent
CODE_PATHS = ("jetrl_bench", "Snakefile", "workflow", "pyproject.toml", "constraints")
NUMERICAL = (
    "backends", "base", "clock", "diagnostics", "fp8", "kernels", "learner", "loop", "loss", "model", "precision",
    "rollout", "run", "schedule", "seeds", "step_row", "tasks", "trainer", "weight_sync",
)  # fmt: skip
"""Modules on the numerical path: these and any file whose name continues one of them with an underscore."""


@cache
def source() -> dict:
    """git_sha, dirty (code paths only; True where git cannot say), hash of the modules on the numerical path."""
    sha = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--", *CODE_PATHS)
    return {"git_sha": sha or "unknown", "dirty": status is None or bool(status), "hash": source_hash()}


@cache
def source_hash(package: Path = PACKAGE) -> str:
    """16 hex digits over the numerical modules without comments, docstrings and layout, and over their C sources."""
    digest = hashlib.sha256()
    for path in numerical_files(package):
        text = path.read_text(encoding="utf-8")
        code = (
            without_comments(text) if path.suffix == ".py" else re.sub(r"/\*.*?\*/|//[^\n]*|\s+", " ", text, flags=re.S)
        )
        digest.update(f"{path.relative_to(package).as_posix()}\0{code}\0".encode())
    return digest.hexdigest()[:16]


def numerical_files(package: Path = PACKAGE) -> list[Path]:
    names = "|".join(NUMERICAL)
    return sorted(p for p in package.rglob("*") if re.fullmatch(rf"(?:{names})(?:_\w+)?\.(?:py|c|h)", p.name))


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
