"""One table, three files: Markdown to read, CSV to compute with, LaTeX (booktabs) to typeset.

A cell is text, a number, a stats.Interval, or None (nothing is known: a dash). The Markdown shows an interval as
`mean ± half` or `estimate [low, high]`; the CSV spreads it over the columns x, x_low, x_high and x_n.
"""

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path

from jetrl_bench.record import write_text
from jetrl_bench.stats import Interval

KINDS = ("measured", "modelled", "emulated", "published")
DASH = "–"
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "·": r"$\cdot$",
    "Δ": r"$\Delta$",
    "≠": r"$\neq$",
}
Cell = str | int | float | Interval | None


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    kind: str
    """measured, modelled, emulated or published, and of what."""
    columns: list[str]
    rows: list[list[Cell]]
    glossary: list[str]
    source: str
    """Commits, configuration and command."""
    notes: list[str] = field(default_factory=list)
    grey: frozenset[int] = frozenset()
    """Rows set in grey: not to be compared with."""

    def __post_init__(self):
        for row in self.rows:
            assert len(row) == len(self.columns), (self.name, row, self.columns)
        for column in self.columns:
            assert sum(kind in column for kind in KINDS) <= 1, f"{self.name}: {column} mixes kinds of numbers"


def number(value: float | int | str | None) -> str:
    """Three significant digits without exponents in the usual range; exactly zero is `0`."""
    if value is None:
        return DASH
    if isinstance(value, (str, bool)):
        return str(value)
    if isinstance(value, int):
        return str(value)
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:.{_decimals(abs(value))}f}"


def interval_text(interval: Interval) -> str:
    if interval.low is None:
        return f"{number(interval.estimate)} (n = {interval.n})"
    above, below = interval.high - interval.estimate, interval.estimate - interval.low
    if math.isclose(above, below, rel_tol=1e-6, abs_tol=1e-12):
        size = max(abs(interval.estimate), above)
        if size == 0:
            return "0 ± 0"
        if size < 1e-3:
            return f"{interval.estimate:.2e} ± {above:.1e}"
        digits = _decimals(size)
        return f"{interval.estimate:.{digits}f} ± {above:.{digits}f}"
    return f"{number(interval.estimate)} [{number(interval.low)}, {number(interval.high)}]"


def text(cell: Cell) -> str:
    return interval_text(cell) if isinstance(cell, Interval) else number(cell)


def markdown(table: Table) -> str:
    lines = [f"**{table.title}** ({table.kind})", ""]
    if table.rows:
        lines += [_md_row(table.columns), _md_row(["---"] * len(table.columns))]
        for index, row in enumerate(table.rows):
            cells = [text(cell) for cell in row]
            lines.append(_md_row([f"*{c}*" if c != DASH else c for c in cells] if index in table.grey else cells))
    else:
        lines.append("No data.")
    lines += ["", *_below(table)]
    return "\n".join(lines) + "\n"


def to_csv(table: Table) -> str:
    spread = [any(isinstance(row[i], Interval) for row in table.rows) for i in range(len(table.columns))]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    header: list[str] = []
    for column, wide in zip(table.columns, spread):
        header += [column, f"{column}_low", f"{column}_high", f"{column}_n"] if wide else [column]
    writer.writerow(header)
    for row in table.rows:
        out: list = []
        for cell, wide in zip(row, spread):
            if not wide:
                out.append("" if cell is None else cell)
            elif isinstance(cell, Interval):
                out += ["" if v is None else v for v in (cell.estimate, cell.low, cell.high, cell.n)]
            else:
                out += ["" if cell is None else cell, "", "", ""]
        writer.writerow(out)
    return buffer.getvalue()


def latex(table: Table) -> str:
    align = "l" + "".join("l" if _textual(table, i) else "r" for i in range(1, len(table.columns)))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape(table.title)} ({escape(table.kind)}).}}",
        rf"\label{{tab:{table.name.replace('_', '-')}}}",
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        " & ".join(escape(column) for column in table.columns) + r" \\",
        r"\midrule",
    ]
    for index, row in enumerate(table.rows):
        cells = [escape(text(cell)) for cell in row]
        if index in table.grey:
            cells = [rf"\textcolor{{gray}}{{{cell}}}" for cell in cells]
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\footnotesize {escape(line)}" for line in _below(table) if line]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def escape(value: str) -> str:
    """LaTeX-safe text."""
    return "".join(_LATEX.get(character, character) for character in value)


def write(table: Table, out: Path) -> None:
    """OUT/<name>.md, .csv and .tex."""
    out = Path(out)
    write_text(out / f"{table.name}.md", markdown(table))
    write_text(out / f"{table.name}.csv", to_csv(table))
    write_text(out / f"{table.name}.tex", latex(table))


def _decimals(size: float) -> int:
    return max(0, min(6, 2 - math.floor(math.log10(size))))


def _below(table: Table) -> list[str]:
    lines = [*table.notes]
    if table.glossary:
        lines.append("Glossary: " + " ".join(table.glossary))
    lines.append(table.source)
    return lines


def _md_row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _textual(table: Table, index: int) -> bool:
    return any(isinstance(row[index], str) for row in table.rows)


def save_figure(figure, stem: Path, note: str, **options) -> None:
    """STEM.pdf, .svg and .png of a matplotlib figure, without dates or software versions in them."""
    metadata = {
        "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None, "Subject": note},
        "svg": {"Date": None, "Creator": None, "Description": note},
        "png": {"Software": None, "Description": note},
    }
    for kind, values in metadata.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=values, **options)
        stem.with_name(f"{stem.name}.{kind}").write_bytes(buffer.getvalue())
