"""Records read back as a study: experiments of arms of seeds. All that tables, figures and claims know of the disk.

A study is chosen by a resolved config (its selected experiments, methods, seeds and digests), or, without one, by
whatever records a folder holds: one experiment named after the folder. Imported logs (importers.py) are arms like
any other; what their framework did not log is None.
"""

import gzip
import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from jetrl_bench import config as configs
from jetrl_bench import stats
from jetrl_bench.evaluate import inference_flow
from jetrl_bench.importers import ImportedManifest, ImportedRow, read_import
from jetrl_bench.record import FLOWS, Manifest, SampleRow, StepRow, TimingRow, read_rows, read_run

BENCHMARKS = {"aime_2024": "AIME 2024", "math_500": "MATH-500", "gsm8k": "GSM8K"}
_STATUS = {"correct": "c", "wrong": "w", "no_answer": "n", "truncated": "t", "timeout": "o", "error": "e"}
_FINISH = {"stop": "s", "length": "l"}


@dataclass(frozen=True)
class RunRecord:
    folder: Path
    manifest: Manifest | ImportedManifest
    steps: list[StepRow] | list[ImportedRow]

    @property
    def method(self) -> str:
        return self.manifest.method

    @property
    def seed(self) -> int | None:
        return self.manifest.seed

    @property
    def nan(self) -> bool:
        return isinstance(self.manifest, Manifest) and self.manifest.outcome == "nan"

    def setting(self, *path: str):
        """A resolved setting by path, None where an imported log lacks it."""
        value = self.manifest.settings
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def task(self) -> str | None:
        return self.setting("task", "name")

    def column(self, *path: str) -> np.ndarray | None:
        """One value per rollout step as float64; None where any step lacks it."""
        values = []
        for row in self.steps:
            for key in path:
                row = None if row is None else getattr(row, key)
            values.append(row)
        return None if not values or any(v is None for v in values) else np.asarray(values, dtype=np.float64)

    @cached_property
    def samples(self) -> list[SampleRow]:
        return read_samples(self.folder / "eval")

    @cached_property
    def timing(self) -> list[TimingRow]:
        path = self.folder / "timing.jsonl"
        return read_rows(path, TimingRow) if path.exists() else []

    @cached_property
    def _grouped(self) -> dict[tuple[str, str, str], dict[str, dict[int, SampleRow]]]:
        groups: dict = {}
        for row in self.samples:
            problem = groups.setdefault((row.task, row.flow, row.checkpoint), {}).setdefault(row.problem, {})
            if row.sample in problem:
                raise ValueError(
                    f"{self.folder}: {row.task} {row.problem} {row.flow}: sample {row.sample} stands twice"
                )
            problem[row.sample] = row
        return groups

    def answers(self, task: str, flow: str, checkpoint: str = "final") -> list[list[SampleRow]] | None:
        """Answers [P][K] in the order of problem ids; of a flow that coincides with an evaluated one, that one's.

        Refuses problems with unequal numbers of samples. None where the task was not evaluated.
        """
        for candidate in coinciding(self.manifest.settings, flow):
            problems = self._grouped.get((task, candidate, checkpoint))
            if problems is None:
                continue
            k = max(len(rows) for rows in problems.values())
            try:
                stats.check_samples({name: len(rows) for name, rows in problems.items()}, k)
            except ValueError as error:
                raise ValueError(f"{self.folder}: {task} ({candidate}, {checkpoint}): {error}") from None
            return [[rows[i] for i in sorted(rows)] for _, rows in sorted(problems.items())]
        return None

    @cached_property
    def _scores(self) -> dict[tuple[str, str, str], np.ndarray | None]:
        return {}

    def scores(self, task: str, flow: str, checkpoint: str = "final") -> np.ndarray | None:
        """Scores [P, K], 1.0 for correct; every table asks for them, so they are kept."""
        key = (task, flow, checkpoint)
        if key not in self._scores:
            answers = self.answers(*key)
            correct = answers and [[float(row.status == "correct") for row in rows] for rows in answers]
            self._scores[key] = None if correct is None else np.array(correct)
        return self._scores[key]

    def accuracy(self, flow: str, checkpoint: str = "final") -> float | None:
        """Held-out accuracy on the training task."""
        scores = None if self.task is None else self.scores(self.task, flow, checkpoint)
        return None if scores is None else float(scores.mean())

    def absent(self, task: str) -> str:
        """Why a benchmark has no score."""
        path = self.folder / "eval" / f"{task}.absent"
        return path.read_text(encoding="utf-8").strip() if path.exists() else "no record"

    def final_reward(self, share: float = 0.2) -> float | None:
        """Mean rollout reward of the last share of the samples; None for a run that ended early (NaN)."""
        rewards, samples = self.column("reward"), self.column("samples")
        if rewards is None or samples is None or self.nan:
            return None
        batch = np.diff(samples, prepend=0.0)
        kept = samples > samples[-1] * (1 - share)
        return float(np.average(rewards[kept], weights=batch[kept]))

    def outcome(self) -> stats.Outcome | None:
        """None where the record holds no reward or too few rollout steps."""
        if self.nan:
            return "NaN"
        rewards = self.column("reward")
        if rewards is None or len(rewards) < stats.WINDOW * (stats.FINAL_WINDOWS + 1):
            return None
        return stats.outcome(rewards)


def coinciding(settings: dict, flow: str) -> list[str]:
    """Flows that are the same computation as `flow` under these settings (evaluate.py decides), itself first."""
    precision = (settings.get("method") or {}).get("flow")
    if precision is None:
        return [flow]
    own = configs.FlowConfig(**precision)
    return [flow, *(f for f in FLOWS if f != flow and inference_flow(own, f) == inference_flow(own, flow))]


@dataclass(frozen=True)
class Records:
    """One experiment: its arms in config order, each a list of runs in seed order."""

    name: str
    title: str
    baseline: str | None
    arms: dict[str, list[RunRecord]]
    summaries: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> list[RunRecord]:
        return [run for runs in self.arms.values() for run in runs]

    def paired(self, arm: str, control: str, value) -> tuple[list[float], list[float]]:
        """value(run) of two arms on the seeds that both have and that both know the value of."""
        one = {run.seed: value(run) for run in self.arms[arm]}
        two = {run.seed: value(run) for run in self.arms[control]}
        seeds = [s for s in one if s is not None and s in two and one[s] is not None and two[s] is not None]
        return [one[s] for s in seeds], [two[s] for s in seeds]

    def shas(self) -> list[str]:
        """Git commits of the runs, `+` where the tree was dirty, and the framework of imported logs."""
        out = set()
        for run in self.runs:
            if isinstance(run.manifest, Manifest):
                sha = str(run.manifest.source.get("git_sha") or "unknown")[:12]
                out.add(sha + ("+" if run.manifest.source.get("dirty") else ""))
            else:
                out.add(f"imported:{run.manifest.framework}")
        return sorted(out)


@dataclass(frozen=True)
class Study:
    experiments: dict[str, Records]
    config: configs.Config | None = None

    @property
    def runs(self) -> list[RunRecord]:
        """Every run once, however many experiments share it."""
        return list({run.folder: run for records in self.experiments.values() for run in records.runs}.values())

    def config_hash(self) -> str | None:
        """First 12 hex digits of the whole resolved configuration's SHA-256."""
        if self.config is None:
            return None
        text = json.dumps(self.config.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def load(runs: Path, config: Path | None, partial: bool = False) -> Study:
    """Read the records of a config's selected experiments (or all under `runs`); refuse mixed sources.

    A missing record is an error unless `partial`.
    """
    runs = Path(runs)
    if not runs.is_dir():
        raise ValueError(f"{runs}: no such folder of records")
    if config is None:
        found = [read(folder) for folder in find(runs)]
        if not found:
            raise ValueError(f"{runs}: no records")
        arms = _arms(found)
        return Study({runs.name: _checked(Records(runs.name, "", None, arms))})
    suite = configs.load([config])
    cache: dict[Path, RunRecord] = {}
    experiments = {}
    for name, experiment in suite.selected().items():
        arms = {}
        for method, settings in suite.experiment_runs(name):
            folder = runs / method / f"seed{settings.seed}-{settings.digest()}"
            if not (folder / "manifest.json").exists():
                if partial:
                    continue
                raise ValueError(f"{folder}: no record of experiment {name}, method {method}, seed {settings.seed}")
            if folder not in cache:
                cache[folder] = read(folder)
            arms.setdefault(method, []).append(cache[folder])
        summaries = {method: _summary(suite.method(method)) for method in arms}
        experiments[name] = _checked(Records(name, experiment.title, experiment.baseline, arms, summaries))
    return Study(experiments, suite)


def _arms(runs: list[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs by method, and by settings where one method ran with several (then named method@settings)."""
    groups: dict[str, dict[str, list[RunRecord]]] = {}
    for run in runs:
        settings = {k: v for k, v in run.manifest.settings.items() if k not in ("seed", "base_index", "replicate")}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
        groups.setdefault(run.method, {}).setdefault(key, []).append(run)
    return {
        method if len(variants) == 1 else f"{method}@{key}": sorted(
            members, key=lambda run: (run.seed is None, run.seed or 0, str(run.folder))
        )
        for method, variants in sorted(groups.items())
        for key, members in sorted(variants.items())
    }


def _summary(method: configs.Method) -> str:
    """The method's line, with the format's own name where it is not the usual FP8."""
    return method.summary if method.flow.format == "e4m3" else method.summary.replace("FP8", method.flow.format)


def source_note(study: Study, command: str) -> str:
    """The line under every table and figure: records, commits (+: uncommitted changes), configuration, command."""
    shas = sorted({sha for records in study.experiments.values() for sha in records.shas()})
    hashed = study.config_hash()
    config = f"configuration {hashed}" if hashed else "no configuration: every record found"
    code = {str(run.manifest.source.get("hash"))[:8] for run in study.runs if isinstance(run.manifest, Manifest)}
    origin = f"commit {', '.join(shas) or 'unknown'}" + (f", numerical code {', '.join(sorted(code))}" if code else "")
    return f"Source: {len(study.runs)} runs, {origin}; {config}; `python -m jetrl_bench {command}`."


def find(root: Path) -> list[Path]:
    """Folders of complete records at or below `root`, sorted."""
    names = ("manifest.json", "import.json")
    return sorted({path.parent for name in names for path in Path(root).rglob(name)})


def read(folder: Path) -> RunRecord:
    """One record, ours or imported, checked."""
    folder = Path(folder)
    if (folder / "import.json").exists():
        manifest, rows = read_import(folder)
        return RunRecord(folder, manifest, rows)
    run = read_run(folder, evaluations=False)
    return RunRecord(folder, run.manifest, run.steps)


def _checked(records: Records) -> Records:
    hashes: dict[str, str] = {}
    for run in records.runs:
        if isinstance(run.manifest, Manifest):
            hashes.setdefault(str(run.manifest.source.get("hash")), str(run.folder))
    if len(hashes) > 1:
        (one, first), (two, second) = list(hashes.items())[:2]
        raise ValueError(
            f"experiment {records.name} mixes source hashes: {first} has {one[:12]}, {second} has {two[:12]}; "
            "run its arms again with one version of the code"
        )
    return records


# Evaluation rows, plain or packed


def read_samples(folder: Path) -> list[SampleRow]:
    rows = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        rows += read_rows(path, SampleRow)
    for path in sorted(Path(folder).glob("*.jsonl.gz")):
        rows += unpack_samples(path.read_bytes(), path)
    return rows


def pack_samples(rows: list[SampleRow]) -> bytes:
    """Gzip (mtime 0) of one line per (task, checkpoint, flow, sample): columns over problems, a letter per status."""
    groups: dict[tuple, list[SampleRow]] = {}
    for row in rows:
        groups.setdefault((row.task, row.checkpoint, row.flow, row.sample), []).append(row)
    lines = []
    for (task, checkpoint, flow, sample), members in sorted(groups.items()):
        members.sort(key=lambda row: row.problem)
        line = {
            "task": task,
            "checkpoint": checkpoint,
            "flow": flow,
            "sample": sample,
            "problem": [row.problem for row in members],
            "status": "".join(_STATUS[row.status] for row in members),
            "finish": "".join(_FINISH[row.finish_reason] for row in members),
            "tokens": [row.tokens for row in members],
        }
        if any(row.answer is not None for row in members):
            line["answer"] = [row.answer for row in members]
        lines.append(json.dumps(line, sort_keys=True, separators=(",", ":"), ensure_ascii=False))
    return gzip.compress("".join(line + "\n" for line in lines).encode(), compresslevel=9, mtime=0)


def unpack_samples(data: bytes, path: Path | str = "samples") -> list[SampleRow]:
    status = {letter: word for word, letter in _STATUS.items()}
    finish = {letter: word for word, letter in _FINISH.items()}
    rows = []
    try:
        for text in gzip.decompress(data).decode().split("\n")[:-1]:
            line = json.loads(text)
            answers = line.get("answer", [None] * len(line["problem"]))
            columns = zip(line["problem"], line["status"], line["finish"], line["tokens"], answers, strict=True)
            for problem, letter, end, tokens, answer in columns:
                rows.append(
                    SampleRow(
                        task=line["task"],
                        problem=problem,
                        sample=line["sample"],
                        status=status[letter],
                        tokens=tokens,
                        finish_reason=finish[end],
                        flow=line["flow"],
                        checkpoint=line["checkpoint"],
                        answer=answer,
                    )
                )
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: not packed evaluation rows: {error}") from None
    return rows
