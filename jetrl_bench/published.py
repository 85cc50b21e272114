"""Published numbers (results/published.yaml): strict loading, arithmetic checks, and the table of them.

Every number stands with its protocol and with how it is known here. The sources' own slips are kept as printed and
flagged; a flag is itself checked, so it can be neither forgotten nor wrong. Comparison with our records: compare.py.
"""

import math
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from jetrl_bench.render import Table, number, write
from jetrl_bench.strict import Strict, nearest, read_yaml, validate

DEFAULT = Path("results/published.yaml")
Known = Literal["seen", "second_hand", "read_off_plot"]
FIELDS = ("model", "method", "data", "metric", "condition")
WORDS = ("did not converge", "collapsed", "stable", "slower", "no gain")
KS = (1, 4, 8, 16)  # samples a problem that evaluations of this kind use; more than 16 reach nearly every printed score
QUALIFIERS = {"~": "about", ">": "above", "<": "below", "up to ": "up to"}
Value = float | str | list[float] | None


class Source(Strict):
    title: str
    ref: str
    """arXiv id, repository#number, or page."""
    url: str


class Protocol(Strict):
    """How a score was sampled and graded; None: no source states it."""

    k: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    prompt: str | None = None
    grader: str | None = None


class Row(Strict):
    values: list[Value]
    model: str | None = None
    method: str | None = None
    data: str | None = None
    metric: str | None = None
    condition: str | None = None
    note: str | None = None
    delta: float | None = None
    """Printed gap of the last column to the BF16 row of the same model."""
    slip: str | None = None
    """What is wrong with the row as printed."""


class PublishedTable(Strict):
    id: str = Field(pattern=r"^[a-z0-9_]+$")
    source: str
    where: str
    known: Known
    copied: bool = Field(False, alias="copy")
    """Read in a text conversion of the source."""
    unit: str
    by: Literal["model", "method", "data", "metric", "condition"]
    """Which field of a row the columns fill."""
    columns: list[str]
    rows: list[Row] = Field(min_length=1)
    metric: str | None = None
    data: str | None = None
    condition: str | None = None
    note: str | None = None
    protocol: Protocol | None = None
    """Given for scores of a model on data."""
    mean_of: list[str] = []
    """Columns whose mean the last column must be."""
    problems: dict[str, int] = {}
    """Size of a column's data set: a score must be reachable with some k."""


class Check(Strict):
    """One piece of arithmetic on numbers that stand in the named tables."""

    tables: list[str] = Field(min_length=1)
    ratio: list[float] | None = None
    """a / b"""
    gain: list[float] | None = None
    """100 (a / b - 1)"""
    difference: list[float] | None = None
    sum: list[float] | None = None
    harmonic: list[float] | None = None
    """1 / (1/a + 1/b): throughput of two phases in turn."""
    percent_of_times: list[float] | None = None
    """100 (a - 1)"""
    printed: float
    tolerance: float | None = None
    """Default: half a unit of the printed number's last digit, and 1 % for roundings of the operands."""
    slip: str | None = None


class Published(Strict):
    sources: dict[str, Source]
    tables: list[PublishedTable]
    checks: list[Check] = []


class Entry(NamedTuple):
    """One published number."""

    table: PublishedTable
    source: Source
    fields: dict[str, str | None]
    value: float | None
    low: float | None
    high: float | None
    qualifier: str
    """'', about, above, below or up to."""
    word: str | None
    """An outcome where no number was printed."""
    printed: str
    note: str

    @property
    def protocol(self) -> Protocol:
        return self.table.protocol or Protocol()


def load(path: Path = DEFAULT) -> Published:
    """Read strictly and check all arithmetic; ValueError names table and row."""
    published = validate(Published, read_yaml(path), str(path))
    problems = audit(published)
    if problems:
        raise ValueError(f"{path}: {problems[0]}" + (f" (and {len(problems) - 1} more)" if problems[1:] else ""))
    return published


def entries(published: Published) -> list[Entry]:
    """Every number, one by one."""
    out = []
    for table in published.tables:
        for row in table.rows:
            for column, value in zip(table.columns, row.values):
                if value is None:
                    continue
                fields = {name: getattr(row, name) or getattr(table, name, None) for name in FIELDS}
                fields[table.by] = column
                notes = [table.note, row.note, row.slip and f"slip: {row.slip}", table.copied and "read in a text copy"]
                single, low, high, qualifier, word = parse(value)
                size = table.problems.get(column)
                if single is not None and size and not qualifier and not reachable(single, size, 1):
                    notes.append(f"cannot be one sample of each of {size} problems")
                printed = "–".join(number_as_printed(v) for v in value) if isinstance(value, list) else str(value)
                out.append(
                    Entry(
                        table,
                        published.sources[table.source],
                        fields,
                        single,
                        low,
                        high,
                        qualifier,
                        word,
                        number_as_printed(value) if isinstance(value, float) else printed,
                        "; ".join(note for note in notes if note),
                    )
                )
    return out


def parse(value: Value) -> tuple[float | None, float | None, float | None, str, str | None]:
    """(value, low, high, qualifier, word)."""
    if isinstance(value, list):
        if len(value) != 2 or value[0] >= value[1]:
            raise ValueError(f"a range is [low, high], not {value}")
        return None, value[0], value[1], "", None
    if isinstance(value, (int, float)):
        return float(value), None, None, "", None
    if value in WORDS:
        return None, None, None, "", value
    for sign, qualifier in QUALIFIERS.items():
        if value.startswith(sign):
            try:
                return float(value[len(sign) :]), None, None, qualifier, None
            except ValueError:
                break
    raise ValueError(f"{value!r} is neither a number, a range, a qualified number nor one of: {', '.join(WORDS)}")


def number_as_printed(value: float) -> str:
    return f"{value:g}" if 1e-4 <= abs(value) < 1e7 or value == 0 else f"{value:.0e}"


def reachable(percent: float, problems: int, k: int, digits: int = 1) -> bool:
    """Can a mean over problems x k answers round to this percentage?"""
    total = problems * k
    nearest = round(percent / 100 * total)
    half = 0.5 * 10**-digits + 1e-9
    return any(abs(100 * c / total - percent) <= half for c in (nearest - 1, nearest, nearest + 1) if 0 <= c <= total)


def audit(published: Published) -> list[str]:
    """Everything that is wrong with the file, one line each."""
    problems: list[str] = []
    ids = [table.id for table in published.tables]
    problems += [f"table {name} stands twice" for name in sorted({n for n in ids if ids.count(n) > 1})]
    for table in published.tables:
        where = f"table {table.id}"
        if table.source not in published.sources:
            problems.append(f"{where}: source {table.source!r} is unknown; {nearest(table.source, published.sources)}")
        for name in (*table.mean_of, *table.problems):
            if name not in table.columns:
                problems.append(f"{where}: column {name!r} is unknown; {nearest(name, table.columns)}")
        for index, row in enumerate(table.rows):
            place = f"{where}, row {index + 1}"
            if len(row.values) != len(table.columns):
                problems.append(f"{place}: {len(row.values)} values for {len(table.columns)} columns")
                continue
            try:
                parsed = [None if v is None else parse(v) for v in row.values]
            except ValueError as error:
                problems.append(f"{place}: {error}")
                continue
            failures = _failures(table, row, parsed)
            if failures and row.slip is None:
                problems.append(f"{place}: {failures[0]}; flag it with `slip`")
            if row.slip is not None and not failures:
                problems.append(f"{place}: flagged as a slip ({row.slip}), but its arithmetic is right")
    for check in published.checks:
        failure = _check(check, published)
        if failure == "" and check.slip is not None:
            problems.append(f"check {check.tables}: flagged as a slip ({check.slip}), but its arithmetic is right")
        if failure and (check.slip is None or failure.startswith("!")):
            problems.append(f"check {check.tables}: {failure.lstrip('!')}")
    return problems


def _failures(table: PublishedTable, row: Row, parsed: list) -> list[str]:
    failures = []
    values = dict(zip(table.columns, (p and p[0] for p in parsed)))
    last = table.columns[-1]
    if table.mean_of and values[last] is not None and all(values[name] is not None for name in table.mean_of):
        mean = math.fsum(values[name] for name in table.mean_of) / len(table.mean_of)
        if abs(mean - values[last]) > 0.1 + 1e-9:  # half a digit of the printed mean and of its rounded parts
            failures.append(f"{last} is printed as {values[last]}, the mean is {mean:.2f}")
    if row.delta is not None:
        anchor = next((r for r in table.rows if r.model == row.model and r.method == "BF16"), None)
        base = anchor.values[-1] if anchor else None
        if not isinstance(base, (int, float)) or abs(values[last] - base - row.delta) > 0.051:
            failures.append(f"delta is printed as {row.delta}, {last} differs by {values[last] - (base or 0):.1f}")
    for name, problems in table.problems.items():
        value = values[name]
        if value is not None and not any(reachable(value, problems, k) for k in KS):
            failures.append(f"{name} {value} cannot be a mean over {problems} problems with k of {KS}")
    return failures


def _check(check: Check, published: Published) -> str:
    """'' where the arithmetic holds; '!...' where the check itself is broken."""
    kinds = ("ratio", "gain", "difference", "sum", "harmonic", "percent_of_times")
    chosen = [kind for kind in kinds if getattr(check, kind) is not None]
    if len(chosen) != 1:
        return f"!needs exactly one of {', '.join(kinds)}"
    operands = getattr(check, chosen[0])
    for name in check.tables:
        if name not in {table.id for table in published.tables}:
            return f"!table {name!r} is unknown"
    known = set().union(*(_numbers(table) for table in published.tables if table.id in check.tables))
    for value in (*operands, check.printed):
        if value not in known:
            return f"!{number_as_printed(value)} does not stand in the tables"
    a, b = operands[0], operands[-1]
    result = {
        "ratio": lambda: a / b,
        "gain": lambda: 100 * (a / b - 1),
        "difference": lambda: a - b,
        "sum": lambda: math.fsum(operands),
        "harmonic": lambda: 1 / sum(1 / x for x in operands),
        "percent_of_times": lambda: 100 * (a - 1),
    }[chosen[0]]()
    tolerance = check.tolerance
    if tolerance is None:
        digits = len(number_as_printed(check.printed).partition(".")[2])
        tolerance = 0.5 * 10**-digits + 0.01 * abs(check.printed)
    if abs(result - check.printed) <= tolerance:
        return ""
    shown = ", ".join(map(number_as_printed, operands))
    return f"{chosen[0]} of {shown} is {number(result)}, printed {number_as_printed(check.printed)}"


def _numbers(table: PublishedTable) -> set[float]:
    """Every number that stands in a table; unreadable values are reported elsewhere."""
    out: set[float] = set()
    for value in (v for row in table.rows for v in row.values if v is not None):
        try:
            out.update(n for n in parse(value)[:3] if n is not None)
        except ValueError:
            continue
    return out


def table(published: Published) -> Table:
    rows, grey = [], set()
    for index, entry in enumerate(entries(published)):
        if entry.table.known != "seen":
            grey.add(index)
        known = entry.table.known.replace("_", " ")
        rows.append(
            [
                entry.source.title,
                entry.source.ref,
                entry.table.where,
                known,
                *(entry.fields[name] for name in FIELDS),
                entry.printed,
                entry.table.unit,
                _protocol_words(entry.protocol) if entry.table.protocol else None,
                entry.note or None,
            ]
        )
    slips = [f"{t.id}: {row.slip}" for t in published.tables for row in t.rows if row.slip]
    slips += [f"{', '.join(check.tables)}: {check.slip}" for check in published.checks if check.slip]
    return Table(
        name="published",
        title="Published numbers, with their protocols",
        kind="published",
        columns=["title", "source", "where", "known", *FIELDS, "value", "unit", "protocol", "note"],
        rows=rows,
        glossary=[
            "Known: seen in the source itself; second hand (somebody else's report of it); read off plot. Rows that "
            "are not seen are grey and enter no headline comparison.",
            "Protocol: k samples a problem, temperature, token budget, prompt, grader; unknown: no source states it.",
            "A value is printed as published: ~ about, > above, < below.",
        ],
        source=f"Source: results/published.yaml, {len(published.tables)} tables; `python -m jetrl_bench published`.",
        notes=[f"Slips of the sources, kept as printed: {'; '.join(slips)}."] if slips else [],
        grey=frozenset(grey),
    )


def _protocol_words(protocol: Protocol) -> str:
    stated = {name: value for name, value in protocol.model_dump().items() if value is not None}
    missing = [name for name in Protocol.model_fields if name not in stated]
    words = [f"{name} {value}" for name, value in stated.items()]
    return ", ".join(words + ([f"unknown: {', '.join(missing)}"] if missing else []))


def add_arguments(parser) -> None:
    parser.add_argument("--published", type=Path, default=DEFAULT, help="published numbers (YAML)")
    parser.add_argument(
        "--out", type=Path, default=Path("results/tables"), help="folder for published.md, .csv and .tex"
    )


def run(args) -> int:
    published = load(args.published)
    write(table(published), args.out)
    count = len(entries(published))
    seen = sum(entry.table.known == "seen" for entry in entries(published))
    print(f"{count} published numbers ({seen} seen in the source), {len(published.checks)} arithmetic checks pass")
    return 0
