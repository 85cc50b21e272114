"""Tables, drawn from records alone: each builder takes a study and returns one Table.

Every mean stands with its spread over seeds (95 % t interval); one seed has no interval and says so. Differences and
ratios are paired by seed. A slow-down is printed as a slow-down.
"""

from collections.abc import Callable
from pathlib import Path

from jetrl_bench import stats
from jetrl_bench.quantities import (
    MARGIN,
    baselines,
    deployed,
    last,
    over_seeds,
    paired_difference,
    paired_ratio,
    schedules,
    step_max,
    step_mean,
)
from jetrl_bench.record import FLOWS, write_text
from jetrl_bench.render import DASH, Cell, Table, markdown, write
from jetrl_bench.strict import nearest
from jetrl_bench.study import Records, RunRecord, Study, load, source_note
from jetrl_bench.tables_benchmarks import benchmarks, paired, plumbing
from jetrl_bench.tables_time import SEEDS, inflight, lag, sensitivity, speed_measured, time_modelled

PRIMARY = (
    "Held-out accuracy: share of held-out problems of the training task whose sampled answer is right (avg@1). "
    "Deployment: the rollout's precision; training: the trainer's; bf16: everything in bf16."
)


def accuracy(study: Study) -> Table:
    rows: list[list[Cell]] = []
    notes: list[str] = []
    for records in study.experiments.values():
        base = over_seeds(_one_per_seed(records), lambda run: run.accuracy("bf16", "base"))
        rows.append([records.name, "warm-up (step 0)", len(_one_per_seed(records)), None, None, None, base, None, None])
        for arm, runs in records.arms.items():
            difference, word = paired_difference(records, arm, deployed)
            start = over_seeds(runs, lambda run: run.accuracy("deployment", "base"))
            cells = [over_seeds(runs, lambda run, flow=flow: run.accuracy(flow)) for flow in FLOWS]
            rows.append([records.name, arm, len(runs), start, *cells, difference, word])
        if not _same_start(records):
            notes.append(f"WARNING: {records.name}: arms of one seed differ at step 0 in the bf16 flow.")
    return Table(
        name="accuracy",
        title="Held-out accuracy of the final checkpoint in three precision flows",
        kind="measured on emulated formats",
        columns=[
            "experiment",
            "method",
            "seeds",
            "step 0, deployment",
            "deployment",
            "training",
            "bf16",
            "deployment - baseline",
            "verdict",
        ],
        rows=rows,
        glossary=[
            PRIMARY,
            SEEDS,
            "Step 0: the warm-up checkpoint that every arm of a seed starts from.",
            f"Verdict: paired by seed against the experiment's baseline, margin {MARGIN}.",
        ],
        source=source_note(study, "table accuracy"),
        notes=[*baselines(list(study.experiments.values())), *notes],
    )


def mismatch(study: Study) -> Table:
    rows: list[list[Cell]] = []
    for records in study.experiments.values():
        for arm, runs in records.arms.items():
            means = [
                over_seeds(runs, step_mean("mismatch", name)) for name in ("mean_abs", "p99_abs", "kl", "k3", "nonzero")
            ]
            largest = step_max(runs, "mismatch", "max_abs")
            sequence = over_seeds(runs, step_mean("kl_sequence"))
            rows.append([records.name, arm, len(runs), _lag_words(runs), *means[:2], largest, *means[2:], sequence])
    return Table(
        name="mismatch",
        title="Mismatch between the rollout engine's and the trainer's log-probabilities",
        kind="measured on emulated formats",
        columns=[
            "experiment",
            "method",
            "seeds",
            "contains",
            "mean |Δlogp|",
            "p99 |Δlogp|",
            "max |Δlogp|",
            "KL exact",
            "k3",
            "share ≠ 0",
            "k3 per sequence",
        ],
        rows=rows,
        glossary=[
            "Δlogp = rollout - proximal in nats, per response token at the version of the proximal log-probabilities; "
            "means over rollout steps, the maximum over all steps and seeds. Losses without a proximal pass: over "
            "the first optimizer step of a batch.",
            "KL exact: KL(rollout || proximal) summed over the whole vocabulary. k3 = exp(d) - 1 - d with d = -Δlogp.",
            "contains: precision alone, or precision and lag (concurrent and in-flight schedules).",
            SEEDS,
        ],
        source=source_note(study, "table mismatch"),
    )


def ess(study: Study) -> Table:
    names = [f"ess_{level}_{kind}" for level in ("token", "sequence") for kind in ("proximal", "current", "clamped")]
    rows: list[list[Cell]] = []
    for records in study.experiments.values():
        for arm, runs in records.arms.items():
            cells = [over_seeds(runs, step_mean(name)) for name in names]
            lowest = [run.column("ess_sequence_proximal") for run in runs]
            worst = None if any(c is None for c in lowest) else min(float(c.min()) for c in lowest)
            rows.append([records.name, arm, len(runs), *cells, worst])
    return Table(
        name="ess",
        title="Effective sample size of the importance weights, as a share of the batch",
        kind="measured on emulated formats",
        columns=["experiment", "method", "seeds"]
        + [f"{level}, {kind}" for level in ("token", "sequence") for kind in ("proximal", "current", "clamped")]
        + ["lowest sequence, proximal"],
        rows=rows,
        glossary=[
            "ESS = (sum w)^2 / (n sum w^2); 1 on-policy.",
            "proximal: w = exp(proximal - rollout); current: exp(current - rollout) at the gradient; clamped: current, "
            "cut at the loss's cap. Levels: one weight per token or their product per sequence.",
            SEEDS,
        ],
        source=source_note(study, "table ess"),
    )


def collapse(study: Study) -> Table:
    rows: list[list[Cell]] = []
    for records in study.experiments.values():
        for arm, runs in records.arms.items():
            outcomes = [run.outcome() for run in runs]
            counts = [sum(o == word for o in outcomes) for word in ("learned", "did not learn", "collapse", "NaN")]
            known = None not in outcomes
            rate = stats.clopper_pearson(counts[2] + counts[3], len(runs)) if known else None
            rows.append(
                [
                    records.name,
                    arm,
                    len(runs),
                    *(counts if known else ["too few steps", None, None, None]),
                    rate,
                    over_seeds(runs, lambda run: run.final_reward()),
                    over_seeds(runs, deployed),
                    step_max(runs, "grad_norm"),
                ]
            )
    return Table(
        name="collapse",
        title="What became of the runs",
        kind="measured on emulated formats",
        columns=[
            "experiment",
            "method",
            "seeds",
            "learned",
            "did not learn",
            "collapsed",
            "NaN",
            "collapse or NaN rate",
            "final reward",
            "held-out accuracy, deployment",
            "max gradient norm",
        ],
        rows=rows,
        glossary=[
            f"Collapsed: in each of the last {stats.FINAL_WINDOWS} windows of {stats.WINDOW} rollout steps before the "
            "horizon the mean rollout reward is below half of the run's own best window.",
            f"Did not learn: no collapse, and those windows are not {stats.LEARNED_MARGIN} above the first one.",
            "Rate: exact (Clopper-Pearson) 95 % interval; 0 of 3 leaves an upper bound of 0.708.",
            "Final reward: mean rollout reward of the last 20 % of the samples.",
            "Gradient norm: before clipping, largest of all steps and seeds.",
            SEEDS,
        ],
        source=source_note(study, "table collapse"),
    )


def headline(study: Study) -> Table:
    rows: list[list[Cell]] = []
    for records in study.experiments.values():
        for arm, runs in records.arms.items():
            outcomes = [run.outcome() for run in runs]
            failed = sum(o in ("collapse", "NaN") for o in outcomes)
            difference, word = paired_difference(records, arm, deployed)
            rows.append(
                [
                    records.name,
                    arm,
                    records.summaries.get(arm) or None,
                    f"{outcomes.count('learned')} of {len(runs)}" if None not in outcomes else None,
                    f"{failed} of {len(runs)}" if None not in outcomes else None,
                    " ".join(DASH if (score := deployed(run)) is None else f"{score:.2f}" for run in runs),
                    over_seeds(runs, deployed),
                    word if difference is not None else ("baseline" if arm == records.baseline else None),
                    over_seeds(runs, step_mean("mismatch", "k3")),
                    paired_ratio(records, arm, last("clock")) if records in schedules(study) else None,
                ]
            )
    return Table(
        name="headline",
        title="What happened at this scale",
        kind="accuracy and mismatch measured on emulated formats; units modelled",
        columns=[
            "experiment",
            "method",
            "what it is",
            "learned",
            "collapsed",
            "held-out accuracy, each seed",
            "held-out accuracy",
            "against baseline",
            "mismatch k3",
            "modelled units / baseline",
        ],
        rows=rows,
        glossary=[
            "Learned, collapsed: as table collapse defines them (the rest did not learn). Held-out accuracy: avg@1 on "
            "the training task in the precision of the rollout.",
            f"Against baseline: paired by seed, margin {MARGIN}. k3: mean per token, nats (precision, and lag too "
            "where generation and training overlap).",
            "Modelled units: time to train on the same samples at equal accelerators, as a ratio; below 1 is faster.",
            SEEDS,
        ],
        source=source_note(study, "table headline"),
        notes=baselines(list(study.experiments.values())),
    )


BUILDERS: dict[str, Callable[..., Table]] = {
    "accuracy": accuracy,
    "mismatch": mismatch,
    "ess": ess,
    "collapse": collapse,
    "speed_measured": speed_measured,
    "time_modelled": time_modelled,
    "inflight": inflight,
    "lag": lag,
    "sensitivity": sensitivity,
    "paired": paired,
    "benchmarks": benchmarks,
    "plumbing": plumbing,
    "headline": headline,
}


def replace_between(text: str, content: str, marker: str, path: Path) -> str:
    """`text` with what stands between <!-- marker:start --> and <!-- marker:end --> replaced."""
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"{path}: needs {start} and {end}, once each, in this order")
    head, rest = text.split(start)
    return f"{head}{start}\n{content}{end}{rest.split(end)[1]}"


def _one_per_seed(records: Records) -> list[RunRecord]:
    """One run of every seed that knows its step-0 score."""
    chosen: dict[int | None, RunRecord] = {}
    for run in records.runs:
        if run.accuracy("bf16", "base") is not None:
            chosen.setdefault(run.seed, run)
    return list(chosen.values())


def _same_start(records: Records) -> bool:
    starts: dict[int | None, set[float]] = {}
    for run in records.runs:
        value = run.accuracy("bf16", "base")
        if value is not None:
            starts.setdefault(run.seed, set()).add(value)
    return all(len(values) == 1 for values in starts.values())


def _lag_words(runs: list[RunRecord]) -> str:
    flags = {row.proximal_contains_lag for run in runs for row in run.steps}
    return {frozenset({True}): "precision, lag", frozenset({False}): "precision"}.get(frozenset(flags), DASH)


def add_arguments(parser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"tables to render (default: all of {', '.join(BUILDERS)})"
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of records")
    parser.add_argument("--config", type=Path, help="resolved config; without it, every record under --runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for <name>.md, .csv and .tex")
    parser.add_argument("--scripted", type=Path, help="answers of the scripted models (gold and empty)")
    parser.add_argument("--readme", type=Path, help="replace the headline table between this file's markers")
    parser.add_argument("--partial", action="store_true", help="render the records that exist")


def run(args) -> int:
    for name in args.names:
        if name not in BUILDERS:
            raise ValueError(f"table {name!r} is unknown; {nearest(name, BUILDERS)}")
    study = load(args.runs, args.config, args.partial)
    readme = None if args.readme is None else args.readme.read_text(encoding="utf-8")
    for name in args.names or BUILDERS:
        table = BUILDERS[name](study, args.scripted) if name == "plumbing" else BUILDERS[name](study)
        write(table, args.out)
        if name == "headline" and readme is not None:
            write_text(args.readme, replace_between(readme, markdown(table), "headline", args.readme))
    print(f"{len(args.names or BUILDERS)} tables in {args.out}")
    return 0
