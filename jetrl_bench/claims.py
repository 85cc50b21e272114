"""Claims: hypotheses written down before the run (config/claims.yaml) and their verdicts, generated from records.

A verdict is one of four phrases. A claim about one rollout format is decided by runs in that format alone; fewer
seeds or another horizon than the claim names make it untestable, never a weaker verdict.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from jetrl_bench import stats
from jetrl_bench.config import Format
from jetrl_bench.render import Table, number, write
from jetrl_bench.strict import Strict
from jetrl_bench.study import Records, RunRecord, Study, load, source_note

ALPHA = 0.05
Verdict = Literal["analogue seen", "not seen", "not separable", "untestable here"]
Metric = Literal["heldout_deployment", "heldout_bf16", "final_reward", "max_abs", "k3", "clock"]


class Zero(Strict):
    """Metric is exactly 0 at every rollout step of every seed."""

    kind: Literal["zero"]
    arm: str
    metric: Literal["max_abs"]


class Collapse(Strict):
    """More runs of arm collapse than of control (one-sided Fisher exact test)."""

    kind: Literal["collapse"]
    arm: str
    control: str


class Above(Strict):
    """arm - control > 0, paired by seed."""

    kind: Literal["above"]
    arm: str
    control: str
    metric: Metric


class Equal(Strict):
    """|arm - control| < margin, paired by seed."""

    kind: Literal["equal"]
    arm: str
    control: str
    metric: Metric
    margin: float = Field(gt=0)


class NotWorse(Strict):
    """arm - control > -margin, paired by seed."""

    kind: Literal["not_worse"]
    arm: str
    control: str
    metric: Metric
    margin: float = Field(gt=0)


class RatioBelow(Strict):
    """arm / control < bound, paired by seed."""

    kind: Literal["ratio_below"]
    arm: str
    control: str
    metric: Literal["k3", "clock"]
    bound: float = Field(gt=0)


class Untestable(Strict):
    kind: Literal["untestable"]
    reason: str


Test = Annotated[Zero | Collapse | Above | Equal | NotWorse | RatioBelow | Untestable, Field(discriminator="kind")]


class Claim(Strict):
    id: str = Field(pattern=r"^[a-z0-9_]+$")
    statement: str
    published: str
    """What was published, and where."""
    experiment: str
    format: Format | None
    """The only rollout format whose runs may speak about the claim; None: a claim about no format."""
    horizon: int = Field(ge=1)
    """Samples that every arm must have trained on."""
    test: Test
    seeds: int = Field(ge=1)
    """Fewest seeds that decide it; one is enough only for an exact zero."""

    @field_validator("seeds")
    @classmethod
    def _enough(cls, seeds: int, info: ValidationInfo) -> int:
        if seeds < 2 and not isinstance(info.data.get("test"), Zero):
            raise ValueError("1 seed has no interval; at least 2, except for a test of kind zero")
        return seeds


class Decision(NamedTuple):
    claim: Claim
    verdict: Verdict
    evidence: str


def read(path: Path) -> list[Claim]:
    """The claims file, strictly; ValueError names the claim and the key."""
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, list):
        raise ValueError(f"{path}: expected a list of claims")
    try:
        claims = TypeAdapter(list[Claim]).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        position = first["loc"][0]
        entry = data[position] if isinstance(position, int) else {}
        name = entry.get("id", f"entry {position}") if isinstance(entry, dict) else f"entry {position}"
        where = ".".join(str(part) for part in first["loc"][1:])
        raise ValueError(f"{path}: claim {name}: {where or 'entry'}: {first['msg']}") from None
    ids = [claim.id for claim in claims]
    for name in ids:
        if ids.count(name) > 1:
            raise ValueError(f"{path}: claim {name} stands twice")
    return claims


def metric(run: RunRecord, name: Metric) -> float | None:
    """One number per run, None where the record lacks it."""
    if name == "heldout_deployment":
        return run.accuracy("deployment")
    if name == "heldout_bf16":
        return run.accuracy("bf16")
    if name == "final_reward":
        return run.final_reward()
    if name == "clock":
        column = run.column("clock")
        return None if column is None or run.nan else float(column[-1])
    column = run.column("mismatch", name)
    if column is None:
        return None
    return float(column.max()) if name == "max_abs" else float(column[:10].mean())


def decide(claim: Claim, study: Study) -> Decision:
    test = claim.test
    if isinstance(test, Untestable):
        return Decision(claim, "untestable here", test.reason)
    records = study.experiments.get(claim.experiment)
    if records is None:
        return Decision(claim, "untestable here", f"experiment {claim.experiment} was not run")
    obstacle = _obstacle(claim, records)
    if obstacle:
        return Decision(claim, "untestable here", obstacle)
    return Decision(claim, *_DECIDERS[test.kind](test, records))


def _obstacle(claim: Claim, records: Records) -> str | None:
    arms = [claim.test.arm] + ([claim.test.control] if hasattr(claim.test, "control") else [])
    for arm in arms:
        runs = records.arms.get(arm, [])
        if len(runs) < claim.seeds:
            return f"{len(runs)} of {claim.seeds} seeds of {arm}"
        for run in runs:
            flow = run.setting("method", "flow")
            if flow is None:
                return f"{arm} was imported: its precision flow is not known"
            quantised = "fp8" in (flow["rollout"], flow["train"])
            if claim.format is not None and quantised and flow["format"] != claim.format:
                return f"{arm} runs in {flow['format']}, the claim is about {claim.format}"
            samples = run.steps[-1].samples if run.steps else 0
            if samples != claim.horizon and not run.nan:
                return f"{arm} seed {run.seed} trained on {samples} samples, the claim says {claim.horizon}"
    formats = {run.setting("method", "flow", "rollout") for arm in arms for run in records.arms[arm]}
    if claim.format is not None and "fp8" not in formats and claim.test.kind != "zero":
        return f"no arm rolls out in {claim.format}"
    return None


def _zero(test: Zero, records: Records) -> tuple[Verdict, str]:
    worst, steps = 0.0, 0
    for run in records.arms[test.arm]:
        column = run.column("mismatch", test.metric)
        if column is None:
            return "untestable here", f"{test.arm} has no {test.metric}"
        worst, steps = max(worst, float(np.abs(column).max())), steps + len(column)
    seen = worst == 0.0
    return (
        "analogue seen" if seen else "not seen"
    ), f"largest {test.metric} over {steps} rollout steps: {number(worst)}"


def _collapse(test: Collapse, records: Records) -> tuple[Verdict, str]:
    count, total = {}, {}
    for arm in (test.arm, test.control):
        outcomes = [run.outcome() for run in records.arms[arm]]
        if None in outcomes:
            return "untestable here", f"{arm}: too few rollout steps to tell an outcome"
        count[arm], total[arm] = sum(o in ("collapse", "NaN") for o in outcomes), len(outcomes)
    a, b = (count[test.arm], total[test.arm]), (count[test.control], total[test.control])
    p = stats.fisher_greater(*a, *b)
    words = f"{a[0]} of {a[1]} {test.arm} against {b[0]} of {b[1]} {test.control} collapsed, one-sided p = {number(p)}"
    if p <= ALPHA + 1e-12:
        return "analogue seen", words
    if a[0] == 0 or a[0] * b[1] <= b[0] * a[1]:
        return "not seen", words
    return "not separable", words


def _differences(test, records: Records) -> tuple[np.ndarray | None, str]:
    a, b = records.paired(test.arm, test.control, lambda run: metric(run, test.metric))
    if len(a) < min(len(records.arms[arm]) for arm in (test.arm, test.control)) or len(a) < 2:
        return None, f"{test.metric} is known on only {len(a)} paired seeds; runs that lack it are not left out"
    difference = np.asarray(a) - np.asarray(b)
    interval = stats.mean_t(difference)
    low, high = number(interval.low), number(interval.high)
    return difference, (
        f"{test.metric}: {test.arm} - {test.control} = {number(interval.estimate)} "
        f"[{low}, {high}] (95 %, {interval.n} seeds)"
    )


def _above(test: Above, records: Records) -> tuple[Verdict, str]:
    difference, words = _differences(test, records)
    if difference is None:
        return "untestable here", words
    interval = stats.mean_t(difference)
    return ("analogue seen" if interval.low > 0 else "not seen" if interval.high < 0 else "not separable"), words


def _equal(test: Equal, records: Records) -> tuple[Verdict, str]:
    difference, words = _differences(test, records)
    if difference is None:
        return "untestable here", words
    words += f", margin {number(test.margin)}, equivalence p = {number(stats.tost(difference, test.margin))}"
    if stats.tost(difference, test.margin) <= ALPHA:
        return "analogue seen", words
    interval = stats.mean_t(difference)
    outside = interval.low > test.margin or interval.high < -test.margin
    return ("not seen" if outside else "not separable"), words


def _not_worse(test: NotWorse, records: Records) -> tuple[Verdict, str]:
    difference, words = _differences(test, records)
    if difference is None:
        return "untestable here", words
    words += f", margin {number(test.margin)}"
    interval = stats.mean_t(difference, level=1 - 2 * ALPHA)
    if interval.low > -test.margin:
        return "analogue seen", words
    return ("not seen" if interval.high < -test.margin else "not separable"), words


def _ratio_below(test: RatioBelow, records: Records) -> tuple[Verdict, str]:
    a, b = records.paired(test.arm, test.control, lambda run: metric(run, test.metric))
    if len(a) < min(len(records.arms[arm]) for arm in (test.arm, test.control)) or len(a) < 2:
        return "untestable here", f"{test.metric} is known on only {len(a)} paired seeds"
    if min(a) <= 0 or min(b) <= 0:
        return "untestable here", f"{test.metric} is 0 in one arm: no ratio"
    ratio = stats.ratio_by_seed(a, b)
    words = (
        f"{test.metric}: {test.arm} / {test.control} = {number(ratio.estimate)} "
        f"[{number(ratio.low)}, {number(ratio.high)}] (95 %, {ratio.n} seeds)"
    )
    if ratio.high < test.bound:
        return "analogue seen", words
    return ("not seen" if ratio.low > test.bound else "not separable"), words


_DECIDERS: dict[str, Callable] = {
    "zero": _zero,
    "collapse": _collapse,
    "above": _above,
    "equal": _equal,
    "not_worse": _not_worse,
    "ratio_below": _ratio_below,
}


def concerning(claims: list[Claim], study: Study) -> list[Claim]:
    """The claims about experiments that the configuration selects; all of them where it selects none that has any."""
    if study.config is None:
        return claims
    return [claim for claim in claims if claim.experiment in study.config.selected()] or claims


def table(decisions: list[Decision], study: Study, command: str) -> Table:
    rows = [[d.claim.statement, d.verdict, d.evidence, d.claim.published] for d in decisions]
    return Table(
        name="claims",
        title="Claims, written down before the run, and what the records say",
        kind="measured, emulated and modelled, as each metric's own table says",
        columns=["claim", "verdict", "evidence", "published"],
        rows=rows,
        glossary=[
            "analogue seen / not seen: the test written down in config/claims.yaml is passed / fails.",
            "not separable: the interval holds both answers.",
            "untestable here: no records, too few seeds, another horizon, or beyond this machine.",
            "A small model's analogue is not a reproduction of the published experiment.",
        ],
        source=source_note(study, command),
    )


def add_arguments(parser) -> None:
    parser.add_argument("--runs", type=Path, required=True, help="folder of records")
    parser.add_argument("--config", type=Path, help="resolved config; without it, every record under --runs")
    parser.add_argument("--claims", type=Path, default=Path("config/claims.yaml"))
    parser.add_argument("--out", type=Path, required=True, help="folder for claims.md, .csv and .tex")
    parser.add_argument("--partial", action="store_true", help="decide with the records that exist")


def run(args) -> int:
    study = load(args.runs, args.config, args.partial)
    claims = concerning(read(args.claims), study)
    decisions = [decide(claim, study) for claim in claims]
    write(table(decisions, study, "claims"), args.out)
    for decision in decisions:
        print(f"{decision.verdict:16} {decision.claim.id}: {decision.evidence}")
    return 0
