"""Our records beside published numbers: `python -m jetrl_bench compare RUNS...`.

A score is compared with a published one only where the protocols agree in every field (model, training, k,
temperature, token budget, prompt, grader); otherwise the differing fields are listed and nothing is concluded. An
unknown field of a publication is a difference.
"""

from pathlib import Path
from typing import NamedTuple

from jetrl_bench import config as configs
from jetrl_bench import stats
from jetrl_bench.published import DEFAULT, Entry, Published, entries, load
from jetrl_bench.render import Table, number, write
from jetrl_bench.study import BENCHMARKS, RunRecord, Study, find, read, source_note
from jetrl_bench.study import Records as StudyRecords

GRADER = "jetrl_bench verify, boxed answer"


class Ours(NamedTuple):
    """Runs of one method on one benchmark, with their protocol."""

    model: str
    method: str
    data: str
    training: str
    protocol: dict[str, object]
    score: stats.Interval


def model_name(run: RunRecord) -> str:
    checkpoint = run.setting("base", "checkpoint")
    if checkpoint:
        return Path(checkpoint).name
    if run.setting("model") is None:
        return f"imported from {run.method}"
    width, layers = run.setting("model", "hidden_size"), run.setting("model", "num_layers")
    return f"toy {run.setting('model', 'arch')} decoder, {width} wide, {layers} layers"


def collect(runs: list[RunRecord], suite: configs.Config | None) -> list[Ours]:
    """Scores of every method and benchmark; the interval is over seeds, or over problems where there is one seed."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for run in runs:
        groups.setdefault((model_name(run), run.method), []).append(run)
    out = []
    for (model, method), members in sorted(groups.items()):
        for task, label in BENCHMARKS.items():
            scores = [run.scores(task, "deployment") for run in members]
            if any(s is None for s in scores):
                continue
            ks = {s.shape[1] for s in scores}
            if len(ks) > 1:
                raise ValueError(f"{method}: {label} was sampled with different k: {sorted(ks)}")
            score = (
                stats.mean_t([float(s.mean()) for s in scores]) if len(scores) > 1 else stats.hierarchical(scores[0])
            )
            protocol = {
                "k": ks.pop(),
                "temperature": None if suite is None else suite.evaluate.temperature,
                "max_tokens": None if suite is None else suite.evaluate.max_tokens,
                "prompt": f"jetrl_{task}",
                "grader": GRADER,
            }
            training = f"{members[0].task}, {members[0].setting('train', 'max_tokens')} tokens"
            out.append(Ours(model, method, label, training, protocol, score))
    return out


def differences(ours: Ours, entry: Entry) -> list[str]:
    """Fields in which the protocols differ, in words; empty: comparable."""
    out = []
    if entry.fields["model"] != ours.model:
        out.append(f"model ({entry.fields['model'] or 'unknown'})")
    if entry.fields["condition"] != ours.training:
        out.append(f"training ({entry.fields['condition'] or 'unknown'})")
    theirs = entry.protocol.model_dump()
    for name, value in ours.protocol.items():
        if theirs[name] is None:
            out.append(f"{name} (unknown)")
        elif theirs[name] != value:
            out.append(f"{name} ({theirs[name]})")
    if entry.value is None or entry.qualifier:
        out.append(f"value ({entry.printed})")
    return out


def verdict(ours: Ours, entry: Entry) -> tuple[str, str | None]:
    """(inside the interval | outside it | not comparable, differing fields)."""
    found = differences(ours, entry)
    if found:
        return "not comparable", ", ".join(found)
    if ours.score.low is None:
        return "not comparable", "no interval"
    value = entry.value / 100 if entry.table.unit == "percent" else entry.value
    return ("inside the interval" if ours.score.low <= value <= ours.score.high else "outside it"), None


def table(ours: list[Ours], published: Published, note: str) -> Table:
    scores = [e for e in entries(published) if e.table.protocol is not None and e.table.known != "read_off_plot"]
    rows, grey = [], set()
    bundles: dict[tuple, list[Ours]] = {}
    for item in ours:
        bundles.setdefault((item.model, item.data, item.training, tuple(item.protocol.items())), []).append(item)
    for items in bundles.values():
        for entry in scores:
            if entry.fields["data"] != items[0].data:
                continue
            lines = [(item, *verdict(item, entry)) for item in items]
            comparable = [line for line in lines if line[1] != "not comparable"]
            for item, word, fields in comparable or lines[:1]:
                if entry.table.known != "seen":
                    grey.add(len(rows))
                together = len(items) > 1 and not comparable
                rows.append(
                    [
                        item.data,
                        item.model,
                        f"{len(items)} methods" if together else item.method,
                        _span(items) if together else item.score,
                        f"{entry.source.title}, {entry.source.ref}, {entry.table.where}",
                        entry.fields["model"],
                        entry.fields["method"],
                        entry.printed,
                        entry.table.unit,
                        entry.table.known.replace("_", " "),
                        word,
                        fields,
                    ]
                )
    return Table(
        name="comparison",
        title="Our scores beside published ones",
        kind="ours measured; theirs published",
        columns=[
            "data",
            "our model",
            "our method",
            "our score",
            "source",
            "their model",
            "their method",
            "their value",
            "their unit",
            "known",
            "verdict",
            "differs in",
        ],
        rows=rows,
        glossary=[
            "Inside the interval / outside it: their value against our 95 % interval (t over seeds; bootstrap over "
            "problems for one seed).",
            "Not comparable: the protocols differ in the fields listed (theirs in brackets); nothing follows from it.",
            "Grey: not seen in the source itself. Readings off plots stand in the table of published numbers alone.",
        ],
        source=note,
        grey=frozenset(grey),
    )


def _span(items: list[Ours]) -> str:
    low, high = (pick(item.score.estimate for item in items) for pick in (min, max))
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def add_arguments(parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="record folders, or folders of records")
    parser.add_argument("--published", type=Path, default=DEFAULT, help="published numbers (YAML)")
    parser.add_argument("--config", type=Path, help="resolved config: temperature and token budget of the evaluation")
    parser.add_argument(
        "--out", type=Path, default=Path("results/tables"), help="folder for comparison.md, .csv and .tex"
    )


def run(args) -> int:
    folders = [folder for root in args.runs for folder in find(root)]
    if not folders:
        raise ValueError(f"{args.runs[0]}: no records")
    suite = None if args.config is None else configs.load([args.config])
    runs = [read(folder) for folder in dict.fromkeys(folders)]
    arms: dict[str, list[RunRecord]] = {}
    for item in runs:
        arms.setdefault(item.method, []).append(item)
    study = Study({"comparison": StudyRecords("comparison", "", None, arms)}, suite)
    result = table(collect(runs, suite), load(args.published), source_note(study, "compare"))
    write(result, args.out)
    inside, outside = (sum(row[10] == word for row in result.rows) for word in ("inside the interval", "outside it"))
    print(f"{len(result.rows)} pairs: {inside} inside, {outside} outside, the rest not comparable")
    return 0
