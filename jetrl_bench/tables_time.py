"""Tables of time: measured CPU seconds, modelled units of each schedule, and the lag that a schedule pays with."""

from jetrl_bench import stats
from jetrl_bench.quantities import (
    MARGIN,
    TARGET_REWARD,
    TARGET_SAMPLES,
    WARMUP_STEPS,
    accelerators_of,
    baselines,
    cpu_drift,
    cpu_mean,
    cpu_per_sample,
    deployed,
    last,
    over_seeds,
    paired_difference,
    paired_ratio,
    samples_of,
    schedules,
    sequences_over_batch,
    stall_share,
    step_max,
    step_mean,
    time_to_target,
    token_rate,
    train_over_generate,
)
from jetrl_bench.render import Cell, Table
from jetrl_bench.study import Study, source_note

SEEDS = "± and [ ]: 95 % t interval over seeds; (n = 1): one seed, no interval."


def speed_measured(study: Study) -> Table:
    rows: list[list[Cell]] = []
    drifting = []
    for records in study.experiments.values():
        for arm, runs in records.arms.items():
            phases = [over_seeds(runs, cpu_mean(f"{p}_cpu_s")) for p in ("rollout", "logprob", "train", "sync")]
            rates = [over_seeds(runs, token_rate(f"{p}_tokens", f"{p}_cpu_s")) for p in ("rollout", "train")]
            rows.append(
                [
                    records.name,
                    arm,
                    len(runs),
                    *phases,
                    over_seeds(runs, cpu_mean("cpu_s")),
                    *rates,
                    paired_ratio(records, arm, cpu_per_sample),
                ]
            )
            drifts = [abs(d) for run in runs if (d := cpu_drift(run)) is not None]
            if drifts and max(drifts) > 0.1:
                drifting.append(f"{records.name}/{arm}")
    notes = [
        "FP8 is emulated on a CPU: every value is rounded in software before a bf16 product, so emulated FP8 is slower "
        "than bf16 here and says nothing about FP8 hardware. A ratio above 1 is a slow-down.",
        *baselines(list(study.experiments.values())),
    ]
    if drifting:
        notes.append(f"Seconds drift by more than 10 % between the halves of a run: {', '.join(drifting)}.")
    return Table(
        name="speed_measured",
        title="CPU seconds of a rollout step by phase",
        kind="measured CPU seconds of one thread; never wall time",
        columns=[
            "experiment",
            "method",
            "seeds",
            "rollout s",
            "log-probs s",
            "train s",
            "sync s",
            "all s",
            "rollout tokens per s",
            "train tokens per s",
            "s per sample / baseline",
        ],
        rows=rows,
        glossary=[
            "A rollout step is the n-th batch that the trainer takes (G optimizer steps).",
            f"The first {WARMUP_STEPS} step of every attempt is warm-up and left out. Tokens are valid response "
            "tokens, never padding.",
            SEEDS,
            "Ratios: geometric mean over paired seeds.",
        ],
        source=source_note(study, "table speed_measured"),
        notes=notes,
    )


def time_modelled(study: Study) -> Table:
    rows: list[list[Cell]] = []
    for records in study.experiments.values():
        for arm, runs in records.arms.items():
            cells = [
                over_seeds(runs, last(name))
                for name in ("clock", "clock_generate", "clock_train", "clock_transfer", "clock_stall")
            ]
            rows.append(
                [
                    records.name,
                    arm,
                    len(runs),
                    accelerators_of(runs),
                    *cells,
                    paired_ratio(records, arm, last("clock")),
                ]
            )
    return Table(
        name="time_modelled",
        title="Time to train on all samples at equal accelerators, and what it was spent on",
        kind="modelled, units of the cost preset; not seconds of any machine",
        columns=[
            "experiment",
            "method",
            "seeds",
            "accelerators",
            "units in all",
            "generating",
            "training",
            "transfer",
            "stalled",
            "units / baseline",
        ],
        rows=rows,
        glossary=[
            "Generating and training: busy time of each side; they overlap in concurrent and in-flight schedules.",
            "A conventional run uses all accelerators in both phases; the others their best split.",
            "The preset prices every number format alike: it compares schedules, not precisions.",
            SEEDS,
            "Ratio: geometric mean over paired seeds; above 1 is a slow-down.",
        ],
        source=source_note(study, "table time_modelled"),
        notes=baselines(list(study.experiments.values())),
    )


def inflight(study: Study) -> Table:
    rows: list[list[Cell]] = []
    for records in schedules(study):
        for arm, runs in records.arms.items():
            reached = [time_to_target(run) for run in runs]
            times = None if None in reached else stats.mean_t(reached)
            rows.append(
                [
                    records.name,
                    arm,
                    len(runs),
                    accelerators_of(runs),
                    samples_of(runs),
                    over_seeds(runs, lambda run: run.final_reward()),
                    over_seeds(runs, deployed),
                    paired_difference(records, arm, deployed)[1],
                    over_seeds(runs, last("clock")),
                    paired_ratio(records, arm, last("clock")),
                    times if times is not None else _reached_words(reached),
                    paired_ratio(records, arm, time_to_target),
                ]
            )
    return Table(
        name="inflight",
        title="In-flight updates against conventional RL: learning per sample, and time at equal accelerators",
        kind="accuracy measured; units modelled",
        columns=[
            "experiment",
            "method",
            "seeds",
            "accelerators",
            "samples",
            "final reward",
            "held-out accuracy, deployment",
            "accuracy against baseline",
            "modelled units to finish",
            "modelled units / baseline",
            f"modelled units to reward {TARGET_REWARD}",
            "modelled units to it / baseline",
        ],
        rows=rows,
        glossary=[
            f"Reward {TARGET_REWARD}: first time at which the rollout reward, averaged over the trailing "
            f"{TARGET_SAMPLES} samples, reaches it.",
            "Units: of the cost preset; not seconds. Ratio: geometric mean over paired seeds; above 1 is a slow-down.",
            f"Accuracy verdict: paired by seed, margin {MARGIN}.",
            SEEDS,
        ],
        source=source_note(study, "table inflight"),
        notes=baselines(schedules(study)),
    )


def lag(study: Study) -> Table:
    rows: list[list[Cell]] = []
    for records in schedules(study):
        for arm, runs in records.arms.items():
            rows.append(
                [
                    records.name,
                    arm,
                    len(runs),
                    over_seeds(runs, step_mean("lag_mean")),
                    over_seeds(runs, step_mean("lag_p95")),
                    step_max(runs, "lag_max"),
                    over_seeds(runs, step_mean("lag_first_half")),
                    over_seeds(runs, step_mean("lag_second_half")),
                    over_seeds(runs, step_mean("versions_per_sequence")),
                    over_seeds(runs, stall_share),
                    over_seeds(runs, train_over_generate),
                    sequences_over_batch(runs[0]),
                    over_seeds(runs, step_mean("response_tokens_mean")),
                    step_max(runs, "response_tokens_max"),
                ]
            )
    return Table(
        name="lag",
        title="Lag, and the ratios that decide what a schedule can save",
        kind="lag and lengths measured; t_train / t_gen and stalls modelled",
        columns=[
            "experiment",
            "method",
            "seeds",
            "lag mean",
            "lag p95",
            "lag max",
            "lag, first half",
            "lag, second half",
            "versions per sequence",
            "modelled stall share",
            "modelled t_train / t_gen",
            "I·H / B",
            "response tokens, mean",
            "response tokens, max",
        ],
        rows=rows,
        glossary=[
            "Lag: the trainer's version when the gradient is taken minus the version that wrote the token, in "
            "optimizer steps. First and second half: of each response.",
            "Stall share: time in which the trainer waited because of the lag bound, over all time.",
            "I·H / B: sequences in generation over samples per optimizer step.",
            SEEDS,
        ],
        source=source_note(study, "table lag"),
    )


SWEEP = {
    "as run": {},
    "decode base x1/2": {"decode_base": 0.5},
    "decode base x2": {"decode_base": 2.0},
    "per sequence x1/2": {"decode_per_sequence": 0.5},
    "per sequence x2": {"decode_per_sequence": 2.0},
    "training x1/2": {"train_per_token": 0.5},
    "training x2": {"train_per_token": 2.0},
}
"""What the sensitivity table multiplies in the price list; every arm gets its best split again."""


def sensitivity(study: Study) -> Table:
    from jetrl_bench.config import RunSettings
    from jetrl_bench.schedule import best_split, dry_run, expected_lengths
    from jetrl_bench.tasks import make_task

    def units(settings: RunSettings, lengths: list[int], factors: dict[str, float]) -> tuple[float, str]:
        price = settings.cost.model_dump() | {k: f * getattr(settings.cost, k) for k, f in factors.items()}
        settings = settings.model_copy(update={"cost": type(settings.cost)(**price)})
        split = best_split(settings, lengths)
        clock = dry_run(settings, split, lengths, settings.train.optimizer_steps)
        return max(clock.now.values()), "all" if split[0] == split[1] else f"{split[0]}:{split[1]}"

    rows: list[list[Cell]] = []
    for records in schedules(study):
        if any(run.setting("task", "name") != "chain" for run in records.runs):
            continue
        arms = {arm: RunSettings.model_validate(runs[0].manifest.settings) for arm, runs in records.arms.items()}
        found = {}
        for arm, settings in arms.items():
            lengths = expected_lengths(make_task(settings.task), settings.train.max_tokens)
            found[arm] = [units(settings, lengths, factors) for factors in SWEEP.values()]
        base = found[records.baseline or next(iter(found))]
        for arm, results in found.items():
            ratios = [mine[0] / theirs[0] for mine, theirs in zip(results, base, strict=True)]
            rows.append([records.name, arm, results[0][1], results[0][0], *ratios])
    return Table(
        name="sensitivity",
        title="Would other prices change the order of the schedules?",
        kind="modelled by a dry run of the schedule, without a model; units / baseline",
        columns=["experiment", "method", "split, generate:train", "modelled units as run", *SWEEP],
        rows=rows,
        glossary=[
            "Each column multiplies one price of the cost preset; ratios are to the experiment's baseline under the "
            "same prices, above 1 is a slow-down. Accelerators are equal in every arm; split: as run.",
            "Lengths are those of a fixed stream of problems, not of the runs, so units differ a little from them.",
        ],
        source=source_note(study, "table sensitivity"),
        notes=baselines(schedules(study)),
    )


def _reached_words(reached: list[float | None]) -> str:
    return f"reached by {sum(t is not None for t in reached)} of {len(reached)}"
