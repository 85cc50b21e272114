"""What a step costs against batch, length, width and depth: one axis varied at a time, bf16 beside FP8.

The step is the equal-work one of speed_arms (one optimizer step on all samples, no proximal pass); the point that all
axes share is measured once. All points take their turns in every round.
"""

from dataclasses import asdict, replace

from jetrl_bench.speed_arms import (
    SCHEMA,
    Arm,
    device_name,
    kind_of,
    play,
    ratio,
    seconds_of,
    step_arms,
    typical,
)
from jetrl_bench.speed_step import PHASES, Job
from jetrl_bench.strict import nearest

AXES = {
    "batch": ("prompts", (2, 8, 32), "sequences"),
    "length": ("new_tokens", (32, 64, 128, 256), "new tokens a sequence"),
    "width": ("hidden", (64, 128, 256, 512), "hidden size"),
    "depth": ("layers", (1, 2, 4, 8), "layers"),
}
"""Axis: the job's field that varies, its values, what the axis counts."""


def points(job: Job, axes: list[str]) -> dict[str, dict[int, Job]]:
    """Axis -> value -> job; a value is what the axis counts."""
    for axis in axes:
        if axis not in AXES:
            raise ValueError(f"--axes {axis!r} is unknown; {nearest(axis, AXES)}")
    found = {}
    for axis in axes:
        name, values, _ = AXES[axis]
        jobs = [replace(job, **{name: value}) for value in sorted({*values, getattr(job, name)})]
        found[axis] = {job.samples if axis == "batch" else getattr(job, name): job for job in jobs}
    return found


def measure(job: Job, axes: list[str], *, rounds: int, steps: int, warmup: int, device: str, backend: str) -> dict:
    """The record of `speed sweep`."""
    laid = points(job, axes)
    arms: dict[Job, dict[str, Arm]] = {}
    for one in [one for jobs in laid.values() for one in jobs.values()]:
        if one not in arms:
            arms[one] = {arm.name: arm for arm in step_arms(one, device, backend)}
            for name, arm in arms[one].items():
                if arm.turn is None:
                    raise ValueError(f"{name}: {arm.status}")
                arm.name = f"{len(arms)} {name}"
    every = [arm for pair in arms.values() for arm in pair.values()]
    played = play(every, rounds=rounds, steps=steps, warmup=warmup, device=device)
    return {
        "schema": SCHEMA,
        "what": "sweep",
        "kind": kind_of(every, device),
        "unit": f"{seconds_of(device)} of one step",
        "job": asdict(job),
        "device": device_name(device),
        "steps_per_round": steps,
        "warmup_rounds": warmup,
        "axes": {
            axis: {
                "counts": AXES[axis][2],
                "points": [_point(value, one, arms[one], played) for value, one in jobs.items()],
            }
            for axis, jobs in laid.items()
        },
        **played.facts,
    }


def _point(value: int, job: Job, arms: dict[str, Arm], played) -> dict:
    names = {flow: arm.name for flow, arm in arms.items()}

    def own(rows: list[dict]) -> list[dict]:
        return [{flow: row[name] for flow, name in names.items()} for row in rows]

    rounds = own(played.rounds)
    phases = [phase for phase in ("step", *PHASES) if all(r[f][phase] > 0 for r in rounds for f in names)]
    return {
        "value": value,
        "job": asdict(job),
        "parameters": arms["bf16"].parameters,
        "work": played.works[names["bf16"]],
        "warmup": own(played.warmup),
        "rounds": rounds,
        "median": {flow: typical(rounds, flow) for flow in names},
        "ratio": {phase: ratio(rounds, "e4m3", "bf16", phase) for phase in phases},
    }
