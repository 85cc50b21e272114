"""The paper: paper/main.typ compiled with the tables and figures that the records gave, and nothing else.

The text never states a result; numbers reach the page only through the tables, the claims and the figures, so the
paper of another configuration is a compilation, not an edit. No date enters the file: equal inputs, equal bytes.
"""

import json
import shutil
import tempfile
from pathlib import Path

TABLES = (
    *("headline", "accuracy", "mismatch", "ess", "collapse", "speed_measured", "time_modelled"),
    *("inflight", "lag", "sensitivity", "plumbing", "claims", "comparison"),
)
FIGURES = ("reward", "mismatch", "dose", "lag")


def read_markdown(path: Path) -> dict:
    """A table of ours (render.markdown) back from its file: title, kind, columns, rows, notes."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; render tables, claims and comparison first") from None
    if not lines or not lines[0].startswith("**"):
        raise ValueError(f"{path}: not a table of this suite")
    title, _, kind = lines[0][2:].partition("** (")
    rows = [_cells(line) for line in lines if line.startswith("| ")]
    notes = [line for line in lines[1:] if line and not line.startswith("|") and line != "No data."]
    return {
        "title": title,
        "kind": kind.rstrip(")"),
        "columns": rows[0] if rows else [],
        "rows": rows[2:],
        "notes": notes,
    }


def _cells(line: str) -> list[str]:
    parts = line.replace("\\|", "\0").strip().removeprefix("|").removesuffix("|").split("|")
    return [part.replace("\0", "|").strip() for part in parts]


def build(tables: Path, figures: Path, out: Path, source: Path) -> None:
    """Compile SOURCE/main.typ to OUT (PDF); ValueError says which input is missing or which line does not compile."""
    import typst

    if not (Path(source) / "main.typ").exists():
        raise ValueError(f"{source}/main.typ: missing")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path in sorted(Path(source).iterdir()):
            if path.suffix in (".typ", ".yml"):
                shutil.copyfile(path, root / path.name)
        (root / "tables").mkdir()
        (root / "figures").mkdir()
        for name in TABLES:
            data = read_markdown(Path(tables) / f"{name}.md")
            (root / "tables" / f"{name}.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
        for name in FIGURES:
            picture = Path(figures) / f"{name}.svg"
            if not picture.exists():
                raise ValueError(f"{picture}: missing; draw the figures first")
            shutil.copyfile(picture, root / "figures" / picture.name)
        try:
            data = typst.compile(str(root / "main.typ"), root=str(root), format="pdf", ignore_system_fonts=True)
        except RuntimeError as error:
            raise ValueError(f"{source}/main.typ: {' '.join(str(error).split())}") from None
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(out)


def add_arguments(parser) -> None:
    parser.add_argument("--tables", type=Path, default=Path("results/tables"))
    parser.add_argument("--figures", type=Path, default=Path("results/figures"))
    parser.add_argument(
        "--source", type=Path, default=Path(__file__).parent.parent / "paper", help="folder of main.typ"
    )
    parser.add_argument("--out", type=Path, default=Path("results/paper/paper.pdf"))


def run(args) -> int:
    build(args.tables, args.figures, args.out, args.source)
    print(f"{args.out}: {args.out.stat().st_size / 1000:.0f} kB")
    return 0
