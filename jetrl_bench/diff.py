"""Are two records equal where they must be? `python -m jetrl_bench diff A B`, exit code 1 on any difference.

Compared: the rows of train.jsonl byte for byte, the manifest's deterministic fields, and every evaluation row. Not
compared: measured time (timing.jsonl), the environment and the commit, which are printed where they differ.
"""

from pathlib import Path

from jetrl_bench.record import Manifest, dumps
from jetrl_bench.study import RunRecord, find, read

COMPARED = (
    *("method", "seed", "digest", "settings", "outcome", "train_rows", "train_sha256"),
    *("base", "resume", "data", "dropped_prompts"),
)
SHOWN = ("environment", "source", "description")


def differences(a: Path, b: Path) -> tuple[list[str], list[str]]:
    """(differences that must not be, differences that may be) of two record folders, one line each."""
    one, two = read(a), read(b)
    found, allowed = [], []
    if isinstance(one.manifest, Manifest) != isinstance(two.manifest, Manifest):
        return [f"{a} and {b}: one is an imported log"], []
    name = f"{one.method}/{one.folder.name}"
    if isinstance(one.manifest, Manifest):
        for key in COMPARED:
            found += _unequal(f"{name}: manifest.{key}", getattr(one.manifest, key), getattr(two.manifest, key))
        for key in SHOWN:
            allowed += _unequal(f"{name}: manifest.{key}", getattr(one.manifest, key), getattr(two.manifest, key))
    found += _lines(f"{name}: train.jsonl", *((Path(f) / "train.jsonl").read_bytes().splitlines(True) for f in (a, b)))
    found += _lines(f"{name}: evaluation", _rows(one), _rows(two))
    return found, allowed


def pairs(a: Path, b: Path) -> tuple[list[tuple[Path, Path]], list[str]]:
    """Records of two trees matched by their place in the tree, and what stands on one side only."""
    a, b = Path(a), Path(b)
    for root in (a, b):
        if not find(root):
            raise ValueError(f"{root}: no records")
    left = {folder.relative_to(a): folder for folder in find(a)}
    right = {folder.relative_to(b): folder for folder in find(b)}
    alone = [f"{path}: only in {a}" for path in sorted(left.keys() - right.keys())]
    alone += [f"{path}: only in {b}" for path in sorted(right.keys() - left.keys())]
    return [(left[path], right[path]) for path in sorted(left.keys() & right.keys())], alone


def _rows(run: RunRecord) -> list[str]:
    return sorted(dumps(row) for row in run.samples)


def _lines(name: str, a: list, b: list) -> list[str]:
    if a == b:
        return []
    for number, (one, two) in enumerate(zip(a, b), 1):
        if one != two:
            return [f"{name}: first difference in row {number} of {len(a)}"]
    return [f"{name}: {len(a)} rows against {len(b)}"]


def _unequal(name: str, a, b) -> list[str]:
    if a == b:
        return []
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line for key in sorted(a.keys() | b.keys()) for line in _unequal(f"{name}.{key}", a.get(key), b.get(key))
        ]
    return [f"{name}: {a!r} against {b!r}"]


def add_arguments(parser) -> None:
    parser.add_argument("a", type=Path, help="record folder, or a folder of records")
    parser.add_argument("b", type=Path)


def run(args) -> int:
    matched, found = pairs(args.a, args.b)
    for a, b in matched:
        wrong, allowed = differences(a, b)
        found += wrong
        for line in allowed:
            print(f"may differ: {line}")
    for line in found:
        print(f"DIFFERS: {line}")
    print(f"{len(matched)} records compared, {len(found)} differences")
    return 1 if found else 0
