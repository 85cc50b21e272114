"""Quantities of a run and of an arm, by their definitions: what tables, figures and claims average and compare.

A function of one run returns None where its record lacks what is needed (imported logs); an arm's mean is then None
too, since leaving runs out would flatter the arm.
"""

from collections.abc import Callable

import numpy as np

from jetrl_bench import stats
from jetrl_bench.render import Cell
from jetrl_bench.study import Records, RunRecord, Study

MARGIN = 0.05
TARGET_REWARD = 0.7
TARGET_SAMPLES = 256  # trailing samples that the reward is averaged over, the same for every schedule
WARMUP_STEPS = 1


def over_seeds(runs: list[RunRecord], value: Callable[[RunRecord], float | None]) -> stats.Interval | None:
    """Mean of value(run) with its interval; None where any run lacks it (dropping it would flatter the arm)."""
    values = [value(run) for run in runs]
    return None if not values or any(v is None for v in values) else stats.mean_t(values)


def step_mean(*path: str) -> Callable[[RunRecord], float | None]:
    def value(run: RunRecord) -> float | None:
        column = run.column(*path)
        return None if column is None else float(column.mean())

    return value


def last(*path: str) -> Callable[[RunRecord], float | None]:
    """Value at the horizon; a run that ended early (NaN) has none."""

    def value(run: RunRecord) -> float | None:
        column = run.column(*path)
        return None if column is None or run.nan else float(column[-1])

    return value


def step_max(runs: list[RunRecord], *path: str) -> float | None:
    """Largest value over all rollout steps of all seeds."""
    columns = [run.column(*path) for run in runs]
    return None if not columns or any(c is None for c in columns) else max(float(c.max()) for c in columns)


def paired_difference(records: Records, arm: str, value) -> tuple[stats.Interval | None, str | None]:
    """(arm - baseline with interval, verdict word)."""
    if records.baseline is None or arm == records.baseline or records.baseline not in records.arms:
        return None, None
    a, b = records.paired(arm, records.baseline, value)
    if not a or len(a) < len(records.arms[arm]):
        return None, None
    difference = np.asarray(a) - np.asarray(b)
    return stats.mean_t(difference), stats.verdict(difference, MARGIN)


def paired_ratio(records: Records, arm: str, value) -> stats.Interval | None:
    if records.baseline is None or arm == records.baseline or records.baseline not in records.arms:
        return None
    a, b = records.paired(arm, records.baseline, value)
    if not a or len(a) < len(records.arms[arm]) or min(a) <= 0 or min(b) <= 0:
        return None
    return stats.ratio_by_seed(a, b)


def deployed(run: RunRecord) -> float | None:
    return run.accuracy("deployment")


def time_to_target(run: RunRecord, target: float = TARGET_REWARD) -> float | None:
    """Modelled time at which the reward over the trailing TARGET_SAMPLES samples first reaches `target`, or None."""
    rewards, samples, clock = run.column("reward"), run.column("samples"), run.column("clock")
    if rewards is None or samples is None or clock is None:
        return None
    batch = np.diff(samples, prepend=0.0)
    for n in range(len(samples)):
        start = max(0.0, samples[n] - TARGET_SAMPLES)
        weight = np.clip(np.minimum(samples[: n + 1] - start, batch[: n + 1]), 0, None)
        if samples[n] >= TARGET_SAMPLES and float(np.average(rewards[: n + 1], weights=weight)) >= target:
            return float(clock[n])
    return None


def steady_rows(run: RunRecord) -> list:
    """Timing rows of the last attempt at each step, without the first step of each attempt."""
    latest = {}
    for row in run.timing:
        if row.rollout_step not in latest or row.attempt >= latest[row.rollout_step].attempt:
            latest[row.rollout_step] = row
    firsts: dict[int, int] = {}
    for row in run.timing:
        firsts[row.attempt] = min(firsts.get(row.attempt, row.rollout_step), row.rollout_step)
    return [row for row in latest.values() if row.rollout_step >= firsts[row.attempt] + WARMUP_STEPS]


def cpu_mean(name: str) -> Callable[[RunRecord], float | None]:
    def value(run: RunRecord) -> float | None:
        rows = steady_rows(run)
        return float(np.mean([getattr(row, name) for row in rows])) if rows else None

    return value


def token_rate(tokens: str, seconds: str) -> Callable[[RunRecord], float | None]:
    def value(run: RunRecord) -> float | None:
        rows = steady_rows(run)
        total = sum(getattr(row, seconds) for row in rows)
        return sum(getattr(row, tokens) for row in rows) / total if total > 0 else None

    return value


def cpu_per_sample(run: RunRecord) -> float | None:
    """CPU seconds per trained sample: comparable between schedules whose rollout steps differ in size."""
    rows, samples = steady_rows(run), run.column("samples")
    if not rows or samples is None:
        return None
    batch = np.diff(samples, prepend=0.0)
    return sum(row.cpu_s for row in rows) / float(
        sum(batch[row.rollout_step - run.steps[0].rollout_step] for row in rows)
    )


def cpu_drift(run: RunRecord) -> float | None:
    rows = sorted(steady_rows(run), key=lambda row: row.rollout_step)
    return stats.steady([row.cpu_s for row in rows], 0).drift if len(rows) >= 4 else None


def stall_share(run: RunRecord) -> float | None:
    stall, clock = last("clock_stall")(run), last("clock")(run)
    return None if stall is None or not clock else stall / clock


def train_over_generate(run: RunRecord) -> float | None:
    train, generate = last("clock_train")(run), last("clock_generate")(run)
    return None if train is None or not generate else train / generate


def sequences_over_batch(run: RunRecord) -> Cell:
    schedule = run.setting("method", "sync", "schedule")
    if schedule == "inflight":
        return run.setting("method", "sync", "slots_per_batch")
    return run.setting("method", "sync", "updates_per_rollout")


def samples_of(runs: list[RunRecord]) -> Cell:
    ends = {int(c[-1]) if (c := run.column("samples")) is not None else None for run in runs}
    return ends.pop() if len(ends) == 1 else "differ: " + ", ".join(sorted(map(str, ends)))


def accelerators_of(runs: list[RunRecord]) -> Cell:
    """How many generate and how many train, in the record's own words; the setting alone where there are none."""
    words = {getattr(run.manifest, "description", {}).get("accelerators") for run in runs}
    if len(words) == 1 and None not in words:
        return words.pop()
    return runs[0].setting("cost", "accelerators")


def baselines(experiments: list[Records]) -> list[str]:
    named = [f"{records.name}: {records.baseline}" for records in experiments if records.baseline]
    return [f"Baseline of {'; '.join(named)}."] if named else []


def schedules(study: Study) -> list[Records]:
    """Experiments that compare schedules (or whose schedules are unknown)."""
    out = []
    for records in study.experiments.values():
        kinds = {
            (run.setting("method", "sync", "schedule"), run.setting("method", "sync", "updates_per_rollout"))
            for run in records.runs
        }
        if len(kinds) > 1:
            out.append(records)
    return out
