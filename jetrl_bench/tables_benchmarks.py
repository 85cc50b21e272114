"""Tables of answers problem by problem: benchmarks of a pretrained model, the benchmark path's check, paired tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jetrl_bench import stats
from jetrl_bench.quantities import MARGIN, baselines
from jetrl_bench.record import SampleRow, read_rows
from jetrl_bench.render import Cell, Table
from jetrl_bench.study import BENCHMARKS, RunRecord, Study, source_note

PROBLEMS = "95 % bootstrap interval over problems, and over samples within a problem"


def benchmark_answers(run: RunRecord, task: str, study: Study, checkpoint: str = "final"):
    """Answers [P][K] in the deployment flow; refuses another number of samples or problems than was asked."""
    answers = run.answers(task, "deployment", checkpoint)
    if answers is None or study.config is None:
        return answers
    asked, limit = study.config.evaluate.samples, study.config.evaluate.limit_of(task)
    if len(answers[0]) != asked:
        raise ValueError(f"{run.folder}: {task}: {len(answers[0])} samples a problem, {asked} asked")
    if limit is not None and len(answers) > limit:
        raise ValueError(f"{run.folder}: {task}: {len(answers)} problems, the first {limit} asked")
    return answers


def benchmarks(study: Study) -> Table:
    """Scores of runs that start from a pretrained checkpoint; a toy model's stand in `plumbing`."""
    rows: list[list[Cell]] = []
    for records in study.experiments.values():
        for arm, runs in records.arms.items():
            runs = [run for run in runs if run.setting("base", "checkpoint")]
            for task, label in BENCHMARKS.items():
                final = _pooled(runs, task, study, "final")
                if final is None:
                    continue
                base = _pooled(runs, task, study, "base")
                statuses = [row.status for run in runs for a in benchmark_answers(run, task, study) for row in a]
                shares = stats.shares(statuses)
                k = final.shape[1]
                rows.append(
                    [
                        records.name,
                        arm,
                        f"{label}, {len(final)} problems",
                        len(runs),
                        k // len(runs),
                        None if base is None else stats.hierarchical(base),
                        stats.hierarchical(final),
                        None if base is None else stats.paired_by_problem(final, base),
                        stats.mean_pass_at_k(final, k) if k > 1 else None,
                        _majority([benchmark_answers(run, task, study) for run in runs]),
                        shares.truncated,
                        shares.no_answer,
                        shares.finished,
                    ]
                )
    return Table(
        name="benchmarks",
        title="Benchmarks of a pretrained model, before and after",
        kind="measured",
        columns=[
            "experiment",
            "method",
            "benchmark",
            "seeds",
            "k",
            "avg@k, step 0",
            "avg@k, final",
            "final - step 0",
            "pass@(k x seeds)",
            "maj@k",
            "truncated",
            "no answer",
            "score on finished answers",
        ],
        rows=rows,
        glossary=[
            f"avg@k: mean over problems of the mean over k samples of every seed; {PROBLEMS}.",
            "final - step 0: paired by problem, bootstrap over problems. pass@n: unbiased, mean over problems of the "
            "probability that one of n samples is right.",
            "maj@k: the most frequent answer of a problem's k samples, ties in proportion; mean over seeds. All right "
            "answers are one answer, wrong ones are told apart by their canonical spelling.",
            "Truncated: cut off at the token budget. Finished answers: all that were not.",
        ],
        source=source_note(study, "table benchmarks"),
    )


def paired(study: Study) -> Table:
    """Every arm against its baseline on the same held-out problems, by seed and by problem."""
    rows: list[list[Cell]] = []
    for records in study.experiments.values():
        if records.baseline is None or records.baseline not in records.arms:
            continue
        control = {run.seed: run for run in records.arms[records.baseline]}
        for arm, runs in records.arms.items():
            pairs = [(run, control[run.seed]) for run in runs if run.seed in control]
            if arm == records.baseline or not pairs:
                continue
            for flow in ("deployment", "bf16"):
                scores = [(_held_out(a, flow), _held_out(b, flow)) for a, b in pairs]
                if any(a is None or b is None for a, b in scores):
                    continue
                ours, theirs = (np.concatenate([pair[side] for pair in scores], axis=1) for side in (0, 1))
                tests = [stats.mcnemar(a[:, 0] > 0, b[:, 0] > 0) for a, b in scores]
                by_seed = [float(a.mean() - b.mean()) for a, b in scores]
                rows.append(
                    [
                        records.name,
                        arm,
                        flow,
                        len(pairs),
                        stats.mean_t(by_seed),
                        stats.paired_by_problem(ours, theirs),
                        sum(test[0] for test in tests),
                        sum(test[1] for test in tests),
                        ", ".join(_p(test[2]) for test in tests),
                        stats.verdict(by_seed, MARGIN),
                    ]
                )
    return Table(
        name="paired",
        title="Held-out accuracy against the baseline, paired by seed and by problem",
        kind="measured on emulated formats",
        columns=[
            "experiment",
            "method",
            "flow",
            "seeds",
            "difference, by seed",
            "difference, by problem",
            "only this arm",
            "only the baseline",
            "McNemar p of each seed",
            "verdict",
        ],
        rows=rows,
        glossary=[
            "By seed: 95 % t interval over seeds: what other seeds would show. By problem: bootstrap over the same "
            "problems with the seeds fixed: what other problems would show.",
            "Only this arm / only the baseline: problems, summed over seeds, that one of the two solves.",
            "McNemar: exact, two-sided, one sample a problem; a small p in one seed speaks of these two checkpoints, "
            "not of the methods.",
            f"Verdict: by seed, margin {MARGIN}.",
        ],
        source=source_note(study, "table paired"),
        notes=baselines(list(study.experiments.values())),
    )


def plumbing(study: Study, scripted: Path | None = None) -> Table:
    """The benchmark path end to end, with models that must score exactly 1 and exactly 0."""
    asked = study.config.evaluate.benchmarks if study.config else BENCHMARKS
    tasks = [task for task in BENCHMARKS if task in asked]
    k = study.config.evaluate.samples if study.config else None
    rows: list[list[Cell]] = []
    for name, expected in (("gold", 1.0), ("empty", 0.0)):
        cells: list[Cell] = []
        for task in tasks:
            statuses = _scripted(scripted, name, task)
            if isinstance(statuses, str):
                cells += [statuses, None, None]
                continue
            shares = stats.shares(statuses)
            if shares.correct != expected:
                raise ValueError(f"scripted model {name}: {task} scores {shares.correct}, not {expected}")
            cells += [shares.correct, shares.truncated, shares.no_answer]
        rows.append([f"scripted: {name} answers", None, *cells])
    by_method: dict[str, list[RunRecord]] = {}
    for run in study.runs:
        if not run.setting("base", "checkpoint"):  # a pretrained model's scores stand in `benchmarks`
            by_method.setdefault(run.method, []).append(run)
    for method, runs in by_method.items():
        cells = []
        for task in tasks:
            answers = [benchmark_answers(run, task, study) for run in runs]
            if None in answers:
                cells += [f"not evaluated: {runs[answers.index(None)].absent(task)}", None, None]
                continue
            shares_of = [stats.shares([row.status for rows_ in a for row in rows_]) for a in answers]
            for value in ("correct", "truncated", "no_answer"):
                cells.append(stats.mean_t([getattr(s, value) for s in shares_of]))
        rows.append([method, len(runs), *cells])
    columns = ["model", "runs"]
    for task in tasks:
        label = BENCHMARKS[task]
        columns += [f"{label} avg@{k or 'k'}", f"{label} truncated", f"{label} no answer"]
    limits = {task: study.config.evaluate.limit_of(task) for task in tasks} if study.config else {}
    budget = f", {study.config.evaluate.max_tokens} new tokens" if study.config else ""
    return Table(
        name="plumbing",
        title="The benchmark path checked end to end: this checks the pipeline, not the models",
        kind="measured",
        columns=columns,
        rows=rows,
        glossary=[
            f"avg@k: mean over problems of the mean over k samples{budget}" + _limited(limits),
            "Truncated: cut off at the token budget. No answer: nothing to grade was found.",
            "Scripted models answer with the gold answers (must score exactly 1) and with nothing (exactly 0).",
            "A chain model cannot read competition mathematics: its scores here say nothing about it.",
            "±: 95 % t interval over runs; (n = 1): one run, no interval.",
        ],
        source=source_note(study, "table plumbing"),
    )


def _limited(limits: dict[str, int | None]) -> str:
    """How a glossary line ends that says which benchmarks were cut."""
    if limits and len(set(limits.values())) == 1 and None not in limits.values():
        return f"; only the first {next(iter(limits.values()))} problems of each benchmark."
    cut = [f"{limit} of {BENCHMARKS[task]}" for task, limit in limits.items() if limit is not None]
    return f"; only the first problems of a benchmark: {', '.join(cut)}." if cut else "."


def _pooled(runs: Sequence[RunRecord], task: str, study: Study, checkpoint: str) -> np.ndarray | None:
    """Scores [P, seeds x K] of all seeds; None where a run was not evaluated."""
    answers = [benchmark_answers(run, task, study, checkpoint) for run in runs]
    if not answers or None in answers:
        return None
    if len({len(a) for a in answers}) > 1:
        raise ValueError(f"{task}: seeds of {runs[0].method} were evaluated on different numbers of problems")
    scores = [np.array([[float(row.status == "correct") for row in rows] for rows in a]) for a in answers]
    return np.concatenate(scores, axis=1)


def _majority(runs: Sequence[Sequence[Sequence[SampleRow]]]) -> float | None:
    """Mean over runs of maj@k of answers [P][K]; None where k is 1."""
    if any(len(rows) < 2 for answers in runs for rows in answers):
        return None
    votes = []
    for answers in runs:
        correct = np.array([[float(row.status == "correct") for row in rows] for rows in answers])
        spelled = [[True if row.status == "correct" else row.answer for row in rows] for rows in answers]
        votes.append(stats.maj_at_k(spelled, correct))
    return float(np.mean(votes))


def _held_out(run: RunRecord, flow: str) -> np.ndarray | None:
    return None if run.task is None else run.scores(run.task, flow)


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


def _scripted(folder: Path | None, name: str, task: str) -> list[str] | str:
    """Statuses of a scripted model, or why there are none."""
    if folder is None:
        return "not evaluated: no --scripted folder"
    path = Path(folder) / name / f"{task}.jsonl"
    absent = path.with_suffix(".absent")
    if absent.exists():
        return f"not evaluated: {absent.read_text(encoding='utf-8').strip()}"
    if path.exists():
        return [row.status for row in read_rows(path, SampleRow)]
    return "not evaluated: no record"
