"""Training logs of other frameworks as records: `python -m jetrl_bench import verl|prime-rl|nemo-rl|trl LOG --out DIR`.

An imported row has the names of our StepRow; what a framework does not log, or defines otherwise, is None and never
guessed. DIR then holds import.json and train.jsonl and can be given to `table`, `figure` and `compare`.

What is read (one map per framework below says which of its metrics equals which of ours, by definition)
    verl      console log: lines `step:3 - actor/grad_norm:0.02 - critic/score/mean:0.55 - ...`
    prime-rl  orchestrator and trainer logs (a file or a folder of *.log): `Step 3 | Time: .. | Reward: .. | ...`
    nemo-rl   the JSON that its tests/json_dump_tb_logs.py writes, {"train/loss": {"1": ..}}, or the console log
    trl       trainer_state.json (log_history), or console lines `{'loss': .., 'reward': .., ...}`
"""

import ast
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, create_model

from jetrl_bench.record import Mismatch, StepRow, read_rows, write_json, write_rows
from jetrl_bench.strict import Strict

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?inf|nan"


def _nullable(model: type[Strict], name: str, **replaced) -> type[Strict]:
    fields = {key: (info.annotation | None, None) for key, info in model.model_fields.items()}
    doc = f"{model.__name__} with every value optional."
    return create_model(name, __base__=Strict, __doc__=doc, **fields | replaced)


ImportedMismatch = _nullable(Mismatch, "ImportedMismatch")
ImportedRow = _nullable(StepRow, "ImportedRow", rollout_step=(int, ...), mismatch=(ImportedMismatch | None, None))


class ImportedManifest(Strict):
    framework: Literal["verl", "prime-rl", "nemo-rl", "trl"]
    method: str
    seed: int | None
    settings: dict[str, Any] = {}
    log_sha256: str
    train_rows: int
    train_sha256: str
    missing: list[str]
    """Names of StepRow that the log says nothing about."""
    assumed: list[str] = []
    """What the mapping takes for granted because no log says it."""


# metric of the framework -> ours; "mismatch.x" is nested
MAPS: dict[str, dict[str, str]] = {
    "verl": {
        "critic/score/mean": "reward",  # the verifier's score; critic/rewards/mean may contain a KL penalty
        "actor/entropy": "entropy",
        "actor/grad_norm": "grad_norm",
        "actor/pg_loss": "loss",
        "actor/pg_clipfrac": "clip_fraction",
        "response_length/mean": "response_tokens_mean",
        "response_length/max": "response_tokens_max",
        "response_length/clip_ratio": "truncated",
        "rollout_corr/kl": "mismatch.k1",
        "rollout_corr/k3_kl": "mismatch.k3",
    },
    "prime-rl": {
        "Reward": "reward",
        "Loss": "loss",
        "Entropy": "entropy",
        "Mismatch KL": "mismatch.k3",
        "Grad. Norm": "grad_norm",
    },
    "nemo-rl": {
        "train/reward": "reward",
        "train/loss": "loss",
        "train/grad_norm": "grad_norm",
        "train/gen_kl_error": "mismatch.k3",
        "train/mean_gen_tokens_per_sample": "response_tokens_mean",
        "train/truncation_rate": "truncated",
    },
    "trl": {
        "reward": "reward",
        "loss": "loss",
        "entropy": "entropy",
        "grad_norm": "grad_norm",
        "frac_reward_zero_std": "groups_without_signal",
        "completions/mean_length": "response_tokens_mean",
        "completions/max_length": "response_tokens_max",
        "completions/clipped_ratio": "truncated",
        "clip_ratio/region_mean": "clip_fraction",
        "sampling/sampling_logp_difference/mean": "mismatch.mean_abs",
        "sampling/sampling_logp_difference/max": "mismatch.max_abs",
    },
}
# the console names of NeMo-RL's "Training Results" block
_NEMO_CONSOLE = {
    "Loss": "train/loss",
    "Avg Reward": "train/reward",
    "Generation KL Error": "train/gen_kl_error",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
}
# what a mapping takes for granted because no log says it
ASSUMED = {
    "nemo-rl": ["train/gen_kl_error is k3: reference_policy_kl_type at its default"],
}
# maxima: averages of maxima where a framework logs means over several steps
_MAXIMA = {"response_tokens_max", "max_abs"}


def read_log(framework: str, log: Path) -> dict[int, dict[str, float]]:
    """{step: {the framework's metric: value}} of one log file (prime-rl: or a folder of *.log)."""
    log = Path(log)
    files = sorted(log.rglob("*.log")) if log.is_dir() else [log]
    try:
        texts = [ANSI.sub("", path.read_text(encoding="utf-8", errors="replace")) for path in files]
    except OSError as error:
        raise ValueError(f"{log}: {error.strerror}") from None
    steps: dict[int, dict[str, float]] = {}
    for text in texts:
        for step, metrics in _PARSERS[framework](text):
            steps.setdefault(step, {}).update(metrics)
    if not steps:
        raise ValueError(f"{log}: no training step of {framework} found; {_EXPECTED[framework]}")
    return steps


def convert(framework: str, steps: dict[int, dict[str, float]]) -> list[Strict]:
    """Rows in step order; a value that is not a finite number stays None.

    TRL averages every metric over the steps between two log entries: its maxima count only where every step is logged.
    """
    rows = []
    numbers = sorted(step for step, metrics in steps.items() if "step" in metrics)
    every_step = framework != "trl" or (len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1)
    for step in sorted(steps):
        row: dict[str, Any] = {"rollout_step": step}
        for theirs, ours in MAPS[framework].items():
            value = steps[step].get(theirs)
            if value is None or not math.isfinite(value):
                continue
            name = ours.removeprefix("mismatch.")
            if name in _MAXIMA and not every_step:
                continue
            target = row if name == ours else row.setdefault("mismatch", {})
            target[name] = round(value) if name == "response_tokens_max" else value
        if framework == "trl" and "step" in steps[step]:
            row["optimizer_steps"] = step  # the Trainer counts optimizer steps; its console does not print them
        if len(row) > 1:
            rows.append(ImportedRow.model_validate(row))
    if not rows:
        raise ValueError(f"no metric of {framework} that has a counterpart here: {', '.join(MAPS[framework])}")
    return rows


def import_log(framework: str, log: Path, out: Path, method: str | None = None, seed: int | None = None) -> Path:
    """Write the record folder `out` and return it."""
    log, out = Path(log), Path(out)
    rows = convert(framework, read_log(framework, log))
    count, digest = write_rows(out / "train.jsonl", rows)
    known = {key for row in rows for key, value in row.model_dump().items() if value is not None}
    files = sorted(log.rglob("*.log")) if log.is_dir() else [log]
    manifest = ImportedManifest(
        framework=framework,
        method=method or framework.replace("-", "_"),
        seed=seed,
        log_sha256=hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest(),
        train_rows=count,
        train_sha256=digest,
        missing=sorted(set(StepRow.model_fields) - known),
        assumed=ASSUMED.get(framework, []),
    )
    write_json(out / "import.json", manifest)
    return out


def read_import(folder: Path) -> tuple[ImportedManifest, list[Strict]]:
    """Read an imported record back, checked like our own."""
    folder = Path(folder)
    path = folder / "import.json"
    try:
        manifest = ImportedManifest.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    train = folder / "train.jsonl"
    rows = read_rows(train, ImportedRow)
    if len(rows) != manifest.train_rows or hashlib.sha256(train.read_bytes()).hexdigest() != manifest.train_sha256:
        raise ValueError(f"{train}: altered or truncated: not the {manifest.train_rows} rows of import.json")
    return manifest, rows


def _verl(text: str):
    for line in text.splitlines():
        found = re.search(r"\bstep:(\d+) - (.*)", line)
        if found:
            pairs = re.findall(rf"([\w./@-]+):({NUMBER})(?= - |\s*$)", found.group(2))
            metrics = {key: float(value) for key, value in pairs}
            if any(key.startswith("actor/") for key in metrics):  # validation before training has no actor metrics
                yield int(found.group(1)), metrics


def _prime(text: str):
    for line in text.splitlines():
        found = re.search(r"(?<!Micro )Step (\d+) \| (.*)", line)
        if found:
            pairs = re.findall(rf"([A-Z][\w. -]*?): ({NUMBER})", found.group(2))
            yield int(found.group(1)), {key.strip(): float(value) for key, value in pairs}


def _nemo(text: str):
    if text.lstrip().startswith("{"):
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"nemo-rl: not JSON: line {error.lineno}: {error.msg}") from None
        for metric, series in data.items():
            if isinstance(series, dict):
                for step, value in series.items():
                    if str(step).isdigit() and isinstance(value, (int, float)):
                        yield int(step), {metric: float(value)}
        return
    step = None
    for line in text.splitlines():
        header = re.search(r"=+ Step (\d+)/\d+ =+", line)
        if header:
            step = int(header.group(1))
        entry = re.search(rf"• ([A-Z][\w ]+): ({NUMBER})", line)
        if entry and step is not None and entry.group(1) in _NEMO_CONSOLE:
            yield step, {_NEMO_CONSOLE[entry.group(1)]: float(entry.group(2))}


def _trl(text: str):
    if text.lstrip().startswith('{"') or '"log_history"' in text:
        try:
            history = json.loads(text)["log_history"]
        except (json.JSONDecodeError, KeyError):
            raise ValueError("trl: a JSON log must be a trainer_state.json with log_history") from None
        for entry in history:
            if "reward" in entry and "step" in entry:
                yield int(entry["step"]), {k: float(v) for k, v in entry.items() if isinstance(v, (int, float))}
        return
    count = 0
    for line in text.splitlines():
        found = re.search(r"\{'.*\}", line)
        if found:
            try:
                entry = ast.literal_eval(found.group(0))
            except (ValueError, SyntaxError):
                continue
            if "reward" in entry:
                count += 1
                numbers = {k: _float(v) for k, v in entry.items()}
                yield int(entry.get("step", count)), {k: v for k, v in numbers.items() if v is not None}


def _float(value) -> float | None:
    try:
        return float(value)  # recent versions print numbers as strings
    except (TypeError, ValueError):
        return None


_PARSERS = {"verl": _verl, "prime-rl": _prime, "nemo-rl": _nemo, "trl": _trl}
_EXPECTED = {
    "verl": "expected console lines 'step:N - actor/...:value - ...'",
    "prime-rl": "expected lines 'Step N | Time: ... | Reward: ...' of the orchestrator or trainer log",
    "nemo-rl": 'expected metrics JSON {"train/loss": {"1": ...}} or console blocks \'=== Step N/M ===\'',
    "trl": "expected trainer_state.json or console lines {'loss': ..., 'reward': ...}",
}


def add_arguments(parser) -> None:
    parser.add_argument("framework", choices=sorted(MAPS), help="which framework wrote the log")
    parser.add_argument("log", type=Path, help="log file (prime-rl: or a folder of *.log)")
    parser.add_argument("--out", type=Path, required=True, help="record folder to write")
    parser.add_argument("--method", help="name of the arm (default: the framework's)")
    parser.add_argument("--seed", type=int, help="the run's seed, where it is known")


def run(args) -> int:
    if args.method is not None and not re.fullmatch(r"[a-z0-9_]+", args.method):
        raise ValueError(f"--method {args.method!r} must match [a-z0-9_]+")
    out = import_log(args.framework, args.log, args.out, args.method, args.seed)
    manifest, rows = read_import(out)
    print(f"{out}: {len(rows)} steps of {args.framework}; not logged: {', '.join(manifest.missing)}")
    for words in manifest.assumed:
        print(f"assumed: {words}")
    return 0
