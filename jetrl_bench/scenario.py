"""Scenarios: what a run would cost on a cluster, arm against arm at equal hardware; and the model's validation.

`python -m jetrl_bench simulate SCENARIO.yaml` prices the arms of a scenario and prints a table and, with --json, the
numbers; `simulate --validate` compares the model with published measurements, class by class. All times are modelled.
"""

import argparse
import difflib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from . import validation
from .cluster import best_split, simulate
from .costs import Costs
from .record import SampleRow, read_rows, write_text
from .shapes import Precision
from .workload import Lengths, Result, Schedule


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class PrecisionSettings(_Strict):
    rollout: Literal["bf16", "fp8_block", "fp8_tensor", "fp8_row"] = "bf16"
    """Linear layers of the rollout engine; lm_head and attention stay BF16."""
    train: Literal["bf16", "fp8_block", "fp8_tensor", "fp8_row"] = "bf16"
    """All three matrix products of the linear layers in training."""
    kv: Literal["bf16", "fp8"] = "bf16"
    """KV cache of the rollout engine."""


class LengthSettings(_Strict):
    prompt: int = Field(256, ge=1)
    """Prompt tokens of every problem."""
    mean: float = Field(2000.0, gt=0)
    """Mean response length in tokens, after the cap."""
    cv: float = Field(0.9, ge=0, le=3)
    """Standard deviation over mean of the log-normal before the cap."""
    cap: int = Field(8192, ge=1)
    """Response limit in tokens."""
    records: str | None = None
    """An eval/<task>.jsonl of this suite: its response lengths, in order, replace the log-normal."""


class TrainSettings(_Strict):
    """How training is spread; tensor x pipeline x sequence GPUs form a rank."""

    kind: Literal["fsdp", "megatron"] = "fsdp"
    """fsdp gathers weights for every micro-batch; megatron keeps them and pays a pipeline bubble."""
    tensor: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    sequence: int = Field(1, ge=1)
    shard: int | None = Field(None, ge=1)
    """FSDP group size (None: all training GPUs)."""
    micro_tokens: int = Field(8192, ge=1)
    """Tokens of a micro-batch."""
    recompute: Literal["none", "selective", "full"] = "full"
    """Activation recomputation."""


class ScheduleSettings(_Strict):
    kind: Literal["conventional", "concurrent", "inflight"] = "conventional"
    samples_per_update: int = Field(512, ge=1)
    """B, sequences per optimizer step."""
    updates_per_rollout: int = Field(1, ge=1)
    """G, optimizer steps per rollout batch (conventional and concurrent)."""
    generation_gpus: int | Literal["best"] | None = None
    """GPUs that generate in concurrent and inflight runs; best: searched. Conventional runs use all in both phases."""
    slots: int | None = Field(None, ge=1)
    """H, running sequences per replica (None: the engine's max_num_seqs)."""
    max_lag: int | None = Field(None, ge=1)
    """Bound on lag in optimizer steps (inflight): the trainer stalls rather than exceed it."""
    updates_per_sync: int = Field(1, ge=1)
    """Optimizer steps between two weight updates (inflight)."""
    kv: Literal["keep", "recompute"] = "keep"
    """inflight: running sequences keep their KV cache at a weight update, or it is computed again."""
    start: Literal["cold", "stationary"] = "stationary"
    """inflight: begin with empty slots, or in the middle of a long run (step times without the start-up bubble)."""
    logprob_passes: int = Field(1, ge=0)
    """Log-probability passes of the trainer once per batch: proximal, and reference where there is a KL term."""
    train: TrainSettings = TrainSettings()


class Arm(_Strict):
    """What an arm changes. Hardware and the number of GPUs are the scenario's, equal for every arm."""

    precision: dict[str, Any] = {}
    schedule: dict[str, Any] = {}
    engine: str | None = None
    tp: int | None = Field(None, ge=1)


class Scenario(_Strict):
    title: str
    why: str = ""
    """What the scenario shows, and where its settings come from."""
    model: str
    """A shape of costs.yaml or the path of a Hugging Face config.json."""
    hardware: str
    gpus: int = Field(ge=1)
    engine: str = "vllm"
    tp: int = Field(1, ge=1)
    """Tensor parallelism of a generation replica."""
    precision: PrecisionSettings = PrecisionSettings()
    lengths: LengthSettings = LengthSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    arms: dict[str, Arm] = Field(min_length=1)
    baseline: str
    """The arm that speed-ups are taken against."""
    optimizer_steps: int = Field(16, ge=2)
    seed: int = Field(0, ge=0)
    sensitivity: bool = True
    """Also print the speed-ups with mean length and training cost halved and doubled."""

    @model_validator(mode="after")
    def _baseline(self):
        if self.baseline not in self.arms:
            raise ValueError(f"baseline {self.baseline!r} is not an arm; arms: {', '.join(self.arms)}")
        return self


def load(path: str | Path) -> Scenario:
    """Read and check a scenario; a ValueError names file, key and nearest valid key."""
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"{path}: {reason}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a scenario is a mapping of keys, not {type(data).__name__}")
    return _checked(Scenario, data, str(path))


def _checked(model: type[BaseModel], data: dict, where: str):
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "settings"
        message = f"{where}: {key}: {first['msg'].removeprefix('Value error, ')}"
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(first["loc"][-1]), _keys(model, first["loc"][:-1]), n=1, cutoff=0.0)
            message = f"{where}: unknown key {key!r}; nearest: {near[0]!r}" if near else f"{where}: unknown key {key!r}"
        raise ValueError(message) from None


def _keys(model: type[BaseModel], loc: tuple) -> list[str]:
    for part in loc:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
        elif part not in model.model_fields:
            model = Arm  # a name under `arms`
    return list(model.model_fields)


class _Scaled:
    """Costs with training made `factor` times as expensive (sensitivity)."""

    def __init__(self, inner: Costs, factor: float):
        self._inner, self._factor = inner, factor

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def train_step_s(self, *args) -> float:
        return self._factor * self._inner.train_step_s(*args)

    def logprob_s(self, *args) -> float:
        return self._factor * self._inner.logprob_s(*args)


def _lengths(settings: LengthSettings, scale: float = 1.0) -> Lengths:
    if settings.records:
        measured = record_lengths(Path(settings.records))
        return Lengths(measured=tuple(max(1, round(x * scale)) for x in measured), cap=max(measured))
    mean = min(settings.mean * scale, 0.95 * settings.cap)
    return Lengths(mean=mean, cv=settings.cv, cap=settings.cap)


def record_lengths(path: Path) -> list[int]:
    """Response lengths in tokens of a record's sample rows (eval/<task>.jsonl)."""
    values = [max(1, row.tokens) for row in read_rows(path, SampleRow)]
    if not values:
        raise ValueError(f"{path}: no rows")
    return values


def run_arm(scenario: Scenario, name: str, *, length_scale: float = 1.0, train_scale: float = 1.0, trace: bool = False):
    """Simulate one arm; returns (Result, Costs, Schedule, Lengths)."""
    arm = scenario.arms[name]
    where = f"arm {name}"
    precision = _checked(PrecisionSettings, scenario.precision.model_dump() | arm.precision, where)
    settings = _checked(ScheduleSettings, scenario.schedule.model_dump() | arm.schedule, where)
    cost = Costs(
        scenario.model,
        scenario.hardware,
        precision=Precision(**precision.model_dump()),
        engine=arm.engine or scenario.engine,
        tp=arm.tp or scenario.tp,
        max_num_seqs=settings.slots,
    )
    price = cost if train_scale == 1.0 else _Scaled(cost, train_scale)
    lengths = _lengths(scenario.lengths, length_scale)
    values = settings.model_dump()
    search = settings.kind != "conventional" and settings.generation_gpus in (None, "best")
    if search:
        values["generation_gpus"] = cost.tp
    schedule = Schedule(gpus=scenario.gpus, **values)
    whole = 1 if settings.kind == "inflight" else settings.updates_per_rollout
    steps = math.ceil(scenario.optimizer_steps / whole) * whole  # whole rollout batches
    run = {"prompt": scenario.lengths.prompt, "optimizer_steps": steps, "seed": scenario.seed}
    if search:
        generation, result = best_split(price, lengths, schedule, max_lag=settings.max_lag, **run)
        schedule = replace(schedule, generation_gpus=generation)
        if not trace:
            return result, cost, schedule, lengths
    return simulate(price, lengths, schedule, trace=trace, **run), cost, schedule, lengths


def summary(result: Result, cost: Costs, schedule: Schedule, lengths: Lengths) -> dict:
    """The numbers a table row and the JSON hold; seconds, tokens and shares."""
    steps = result.optimizer_steps
    slots = schedule.slots or cost.max_num_seqs
    generation = result.phases.get("generation", result.generation_busy)
    training = result.phases.get("train", 0.0) + result.phases.get("logprob", 0.0)
    drawn = lengths.draw(np.random.default_rng(0), 20000)
    return {
        "gpus": schedule.gpus,
        "generation_gpus": result.generation_gpus,
        "training_gpus": result.training_gpus,
        "step_s": result.step if schedule.kind == "conventional" else result.steady_step,
        "phases_s": {name: seconds / steps for name, seconds in sorted(result.phases.items())},
        "tokens_per_s_per_gpu": result.tokens_per_gpu,
        "generation_utilisation": result.generation_busy / result.total,
        "training_utilisation": result.training_busy / result.total,
        "lag_steps": result.lag(),
        "lag_samples_max": result.lag()["max"] * schedule.samples_per_update,
        "preemptions": result.preemptions,
        "kv_capacity_tokens": cost.kv_capacity(),
        "share_at_cap": result.at_cap,
        "train_over_generation": training / generation if generation else math.inf,
        "slots_over_batch": (result.generation_gpus / cost.tp) * slots / schedule.samples_per_update,
        "length_p99_over_mean": float(np.quantile(drawn, 0.99) / drawn.mean()),
    }


def evaluate(scenario: Scenario) -> dict:
    """All arms of a scenario, with speed-ups over the baseline and the sensitivity sweep."""
    arms = {name: summary(*run_arm(scenario, name)) for name in scenario.arms}
    base = arms[scenario.baseline]["step_s"]
    for values in arms.values():
        values["speedup"] = base / values["step_s"]
    report = {
        "kind": "modelled",
        "title": scenario.title,
        "model": scenario.model,
        "hardware": f"{scenario.gpus} x {scenario.hardware} in every arm",
        "baseline": scenario.baseline,
        "seed": scenario.seed,
        "arms": arms,
    }
    if scenario.sensitivity:
        sweep = {}
        for label, change in {
            "lengths x1/2": {"length_scale": 0.5},
            "lengths x2": {"length_scale": 2.0},
            "training x1/2": {"train_scale": 0.5},
            "training x2": {"train_scale": 2.0},
        }.items():
            steps = {n: summary(*run_arm(scenario, n, **change))["step_s"] for n in scenario.arms}
            sweep[label] = {n: steps[scenario.baseline] / value for n, value in steps.items()}
        report["sensitivity_speedup"] = sweep
    return report


def _ratio(value: float) -> str:
    """1.19x; a ratio below one is called what it is."""
    return f"{value:.2f}x slower" if value < 0.995 else f"{value:.2f}x"


def table(report: dict) -> str:
    """The report as aligned text."""
    phases = sorted({p for a in report["arms"].values() for p in a["phases_s"]})
    head = ["arm", "GPUs gen/train", "step s", *[f"{p} s" for p in phases], "tok/s/GPU", "gen util", "train util"]
    head += ["lag mean", "lag max", "preempted", "speed-up"]
    rows = [head]
    for name, a in report["arms"].items():
        split = f"{a['generation_gpus']}/{a['training_gpus']}"
        rows.append(
            [name, split, f"{a['step_s']:.2f}", *[f"{a['phases_s'].get(p, 0.0):.2f}" for p in phases]]
            + [
                f"{a['tokens_per_s_per_gpu']:.0f}",
                f"{a['generation_utilisation']:.2f}",
                f"{a['training_utilisation']:.2f}",
            ]
            + [
                f"{a['lag_steps']['mean']:.2f}",
                f"{a['lag_steps']['max']:.0f}",
                str(a["preemptions"]),
                _ratio(a["speedup"]),
            ]
        )
    lines = [
        f"{report['title']} (modelled; {report['model']}, {report['hardware']}; baseline {report['baseline']})",
        "",
    ]
    lines += validation.aligned(rows)
    lines += ["", "ratios (t_train/t_gen, running sequences over batch, p99/mean length, share at the cap):"]
    for name, a in report["arms"].items():
        lines.append(
            f"  {name}: {a['train_over_generation']:.2f}, {a['slots_over_batch']:.2f}, "
            f"{a['length_p99_over_mean']:.2f}, {a['share_at_cap']:.3f}"
        )
    for label, values in report.get("sensitivity_speedup", {}).items():
        lines.append(f"speed-up with {label}: " + ", ".join(f"{n} {_ratio(v)}" for n, v in values.items()))
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", nargs="?", help="a scenario file (config/scenarios/*.yaml, docs/speed.md)")
    parser.add_argument("--validate", action="store_true", help="compare the model with published measurements")
    parser.add_argument("--figures", type=Path, metavar="OUT", help="write the modelled figures and tables to OUT")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers as JSON (-: print them first)")
    parser.add_argument("--text", metavar="FILE", help="also write what is printed")


def run(args: argparse.Namespace) -> int:
    if [bool(args.scenario), args.validate, bool(args.figures)].count(True) != 1:
        raise ValueError("simulate takes a scenario file, --validate or --figures OUT: one of them")
    if args.figures:
        from . import figures_modelled  # matplotlib is needed here only

        print("\n".join(map(str, figures_modelled.render_all(args.figures))))
        return 0
    if args.validate:
        data = validation.validate()
        text = validation.report(data)
    else:
        data = evaluate(load(args.scenario))
        text = table(data)
    numbers = json.dumps(data, indent=1, sort_keys=True)
    if args.json == "-":
        print(numbers)
    elif args.json:
        write_text(Path(args.json), numbers + "\n")
    if args.text:
        write_text(Path(args.text), text + "\n")
    print(text)
    return 0


def main_simulate(args: argparse.Namespace) -> int:
    """What the CLI verb `simulate` calls."""
    return run(args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="jetrl_bench simulate")
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
