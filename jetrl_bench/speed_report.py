"""Tables and figures of measured steps and sweeps, drawn from their records alone.

Seconds stand as the median round with the range over rounds; ratios as geometric means over paired rounds with a 95 % t
interval. A ratio above 1 is a slow-down and is printed as one.
"""

import json
from pathlib import Path

from jetrl_bench.record import write_text
from jetrl_bench.render import Cell, Table, markdown, save_figure, write
from jetrl_bench.stats import Interval

PHASES = {
    "rollout": "rollout",
    "sync": "weight update",
    "logprob": "log-probs",
    "train": "forward, backward",
    "optimizer": "optimizer",
    "other": "other",
}
"""Phase -> words, in the order of a step (speed_step.PHASES)."""
CEILINGS = {"rollout": "flop", "logprob": "flop", "train": "flop", "sync": "bytes", "optimizer": "bytes"}
"""What a phase's work is counted in, and so which ceiling it is compared with."""


def read(path: Path) -> dict:
    """A record of this schema, or ValueError with what is there instead."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != 2 or found.get("what") not in ("step", "sweep"):
        raise ValueError(f"{path}: not a record of `speed step` or `speed sweep`, schema 2")
    return found


def share_reached(record: dict, seconds: dict, work: dict) -> dict[str, float]:
    """Phase -> work per second over the ceiling measured in the same run."""
    top = {"flop": record["ceilings"]["product_flops"], "bytes": record["ceilings"]["copy_bytes_s"]}
    return {
        phase: work[kind][phase] / seconds[phase] / top[kind]
        for phase, kind in CEILINGS.items()
        if work[kind].get(phase) and seconds.get(phase)
    }


def tables(record: dict) -> list[Table]:
    if record["what"] == "sweep":
        return [sweep_table(record)]
    return [step_table(record), ratio_table(record), ceiling_table(record)]


def step_table(record: dict) -> Table:
    base = {name.rsplit("/", 1)[0]: value for name, value in record["ratio"].items() if not name.endswith("/peer")}
    rows: list[list[Cell]] = []
    for name, arm in arms_of(record).items():
        about: list[Cell] = [
            label(name, arm),
            arm["engine"],
            arm.get("rollout"),
            arm.get("train"),
            arm.get("schedule"),
        ]
        if name not in record["median"]:
            rows.append([*about, arm["status"], *[None] * (len(PHASES) + 5)])
            continue
        median, rounds = record["median"][name], [row[name] for row in record["rounds"]]
        work = arm["work"] or {"rollout_tokens": 0, "train_tokens": 0}
        whole = "step" in median
        rows.append(
            [
                *about,
                spread(rounds, "step") if whole else "rollout only",
                median.get("wall"),
                *[median.get(phase) if whole or phase == "rollout" else None for phase in PHASES],
                _rate(work["rollout_tokens"], median.get("rollout")),
                _rate(work["train_tokens"], median.get("train")),
                interval(base[name]) if name in base else None,
                _warm(record, name),
            ]
        )
    emulated = "emulated" in record["kind"]
    return Table(
        name="speed_step",
        title=f"{record['unit']} of RL steps by phase",
        kind=record["kind"],
        columns=["arm", "engine", "rollout in", "training in", "schedule", "whole step s", "wall s"]
        + [f"{words} s" for words in PHASES.values()]
        + ["generated tokens per s", "trained tokens per s", "step / bf16", "first warm-up round s"],
        rows=rows,
        glossary=[
            "step: one optimizer step on all samples without a proximal pass, which another trainer (peer) takes too; "
            "the other arms are methods, four optimizer steps on as many samples.",
            "[ ] of seconds: range over rounds; phases are those of the median round and add up to it; rounds of "
            "warm-up count nowhere. Tokens are generated, or trained and unpadded, response tokens.",
            _RATIOS,
        ],
        source=_source(record),
        notes=[_shape(record), *([_EMULATED] if emulated else [])],
    )


def ratio_table(record: dict) -> Table:
    rows: list[list[Cell]] = []
    arms = arms_of(record)
    pairs = sorted(record["ratio_by_phase"].items(), key=lambda item: list(arms).index(item[0].rsplit("/", 1)[0]))
    for pair, phases in pairs:
        name, over = pair.rsplit("/", 1)
        cells = [interval(phases[phase]) if phase in phases else None for phase in PHASES]
        rows.append(
            [
                label(name, arms[name]),
                over.split(":")[-1],
                arms[name]["engine"],
                *cells,
                interval(record["ratio"][pair]),
            ]
        )
    return Table(
        name="speed_ratios",
        title="Seconds of one arm over another's, phase by phase",
        kind=record["kind"],
        columns=["arm", "over", "engine", *PHASES.values(), "whole step"],
        rows=rows,
        glossary=[_RATIOS],
        source=_source(record),
        notes=[_EMULATED] if "emulated" in record["kind"] else [],
    )


def ceiling_table(record: dict) -> Table:
    rows: list[list[Cell]] = []
    for name, arm in arms_of(record).items():
        if name in record["median"] and arm["work"]:
            share = share_reached(record, record["median"][name], arm["work"])
            flop = sum(arm["work"]["flop"].values()) / 1e9
            rows.append([label(name, arm), arm["engine"], flop, *[share.get(phase) for phase in CEILINGS]])
    return Table(
        name="speed_ceilings",
        title="Share of this machine's ceilings that each phase reaches",
        kind=record["kind"],
        columns=["arm", "engine", "GFLOP", *[PHASES[phase] for phase in CEILINGS]],
        rows=rows,
        glossary=[
            "FLOP are the model's, counted from its shape and the same in every precision; no padding, recomputation "
            "or quantisation is counted. Rollout, log-probs and training are shares of the product's FLOP/s; weight "
            "update (6 bytes a parameter; none where the KV cache is computed again) and optimizer (28) of the copy's "
            "bytes/s. Above 1: the data stay in cache.",
        ],
        source=_source(record),
        notes=[_ceilings(record)],
    )


def sweep_table(record: dict) -> Table:
    rows: list[list[Cell]] = []
    for axis, found in axes_of(record).items():
        for point in found["points"]:
            reached = share_reached(record, point["median"]["bf16"], point["work"])
            rows.append(
                [
                    axis,
                    point["value"],
                    point["parameters"],
                    *[spread([row[flow] for row in point["rounds"]], "step") for flow in ("bf16", "e4m3")],
                    *[interval(point["ratio"][phase]) if phase in point["ratio"] else None for phase in SWEPT],
                    reached.get("rollout"),
                    reached.get("train"),
                ]
            )
    return Table(
        name="speed_sweep",
        title=f"{record['unit']} against batch, length, width and depth",
        kind=record["kind"],
        columns=["axis", "value", "parameters", "bf16 s", "e4m3 s"]
        + [f"{'whole step' if phase == 'step' else PHASES[phase]}, e4m3 / bf16" for phase in SWEPT]
        + ["bf16 rollout, share of the product", "bf16 forward, backward, share of the product"],
        rows=rows,
        glossary=[
            ", ".join(f"{axis}: {found['counts']}" for axis, found in axes_of(record).items()) + ".",
            "[ ] of seconds: median and range over rounds.",
            _RATIOS,
        ],
        source=_source(record),
        notes=[f"All else as in: {_shape(record)}", _ceilings(record)]
        + ([_EMULATED] if "emulated" in record["kind"] else []),
    )


SWEPT = ("step", "rollout", "train")
_RATIOS = "Ratios: geometric mean over paired rounds, 95 % t interval; above 1 is a slow-down."
_EMULATED = (
    "FP8 is emulated: every value is rounded in software before a bf16 product. A ratio is the price of that, and says "
    "nothing about FP8 hardware."
)


def text(record: dict) -> str:
    """All tables of a record, in Markdown."""
    return "\n".join(markdown(table) for table in tables(record))


def arms_of(record: dict) -> dict[str, dict]:
    """In reading order: steps, methods by engine (bf16 first), generate, peer."""

    def place(item: tuple[str, dict]) -> tuple:
        name, arm = item
        kinds = ("step", "method", "generate", "peer")
        return kinds.index(arm["kind"]), arm["engine"], not name.endswith("bf16"), name

    return dict(sorted(record["arms"].items(), key=place))


def axes_of(record: dict) -> dict[str, dict]:
    return {axis: record["axes"][axis] for axis in ("batch", "length", "width", "depth") if axis in record["axes"]}


def label(name: str, arm: dict) -> str:
    return f"step, {name}" if arm["kind"] == "step" else name.split(":")[-1]


def spread(rounds: list[dict], key: str) -> Interval:
    values = sorted(row[key] for row in rounds)
    middle = values[(len(values) - 1) // 2]
    return Interval(middle, *((values[0], values[-1]) if len(values) > 1 else (None, None)), len(values))


def interval(ratio: dict) -> Interval:
    return Interval(ratio["estimate"], ratio["low"], ratio["high"], ratio["n"])


def _rate(tokens: float, seconds: float | None) -> float | None:
    return round(tokens / seconds) if tokens and seconds else None


def _warm(record: dict, name: str) -> float | None:
    row = record["warmup"][0].get(name, {}) if record["warmup"] else {}
    return row.get("step", row.get("rollout"))


def _shape(record: dict) -> str:
    job = record["job"]
    return (
        f"{job['prompts'] * job['group']} sequences of {job['prompt_len']} + {job['new_tokens']} tokens; Qwen2 of "
        f"hidden size {job['hidden']}, {job['layers']} layers, {job['heads']} heads, {job['kv_heads']} key heads, "
        f"vocabulary {job['vocab']}; {record['device']}."
    )


def _ceilings(record: dict) -> str:
    top = record["ceilings"]
    return (
        f"Ceilings, best of the run's rounds: bf16 product {top['product_flops'] / 1e9:.0f} GFLOP/s, copy "
        f"{top['copy_bytes_s'] / 1e9:.1f} GB/s."
    )


def _source(record: dict) -> str:
    environment, source, load = record["environment"], record["source"], record["load_average"]
    rounds = len(
        record["rounds"] if record["what"] == "step" else next(iter(record["axes"].values()))["points"][0]["rounds"]
    )
    warm = len(record["warmup"]) if record["what"] == "step" else record["warmup_rounds"]
    edited = " with uncommitted changes" if source["dirty"] else ""
    return (
        f"Source: `python -m jetrl_bench speed {record['what']}`, {rounds} rounds of {record['steps_per_round']} after "
        f"{warm} of warm-up, {record['cost']['cpu_s']:.0f} CPU s; commit {source['git_sha'][:12]}{edited}; "
        f"{environment['cpu']}, torch {environment['torch']}; load average {load['before'][0]} before, "
        f"{load['after'][0]} after."
    )


def render(record: dict, out: Path) -> list[str]:
    """OUT/<table>.md, .csv, .tex and OUT/<figure>.pdf, .svg, .png, .csv; equal records give equal bytes."""
    from jetrl_bench.figures import STYLE, plt
    from jetrl_bench.speed_figures import FIGURES

    out = Path(out)
    for table in tables(record):
        write(table, out)
    name, draw = FIGURES[record["what"]]
    note = _source(record)
    name = f"{name}_figure"
    with plt.rc_context(STYLE):
        figure, numbers = draw(record)
        save_figure(figure, out / name, note)
        plt.close(figure)
    write_text(out / f"{name}.csv", f"# {record['kind']}. {note}\n{numbers}")
    return [table.name for table in tables(record)] + [name]
