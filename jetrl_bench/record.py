"""Records: what a run writes, and the only thing tables and figures read.

results/runs/<method>/seed<n>-<digest>/
    manifest.json    settings, digest, provenance, hash and row count of train.jsonl
    train.jsonl      one StepRow per rollout step: deterministic values only, equal byte for byte on a rerun
    timing.jsonl     one TimingRow per rollout step and attempt: measured, never compared
    eval/<task>.jsonl  one SampleRow per answer
Files appear under a temporary name and are renamed; reading checks schema, hash and row count.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from jetrl_bench.strict import Strict

Status = Literal["correct", "wrong", "no_answer", "truncated", "timeout", "error"]
FLOWS = ("deployment", "training", "bf16")


class Mismatch(Strict):
    """Engine log-probs against the trainer's recomputed ones, over the valid tokens of one rollout step."""

    mean_abs: float
    """Mean of |dlogp|."""
    p99_abs: float
    max_abs: float
    kl: float | None
    """KL(mu || pi) summed over the vocabulary, exact, mean per token; None where the vocabulary is too large."""
    k1: float
    """Mean of rollout - proximal."""
    k3: float
    """Mean of exp(d) - 1 - d with d = proximal - rollout."""
    outside: float
    """Share of tokens whose ratio lies outside [0.5, 2]."""
    nonzero: float
    """Share of tokens with dlogp != 0."""


class StepRow(Strict):
    """One rollout step: the n-th batch that the trainer takes."""

    rollout_step: int = Field(ge=0)
    optimizer_steps: int
    """Optimizer steps done after this batch."""
    samples: int
    """Sequences trained on so far, this batch included."""
    reward: float
    """Mean over the batch's sequences."""
    reward_std_within: float
    """Mean within-group standard deviation (0: no signal)."""
    groups_without_signal: float
    """Share of groups whose rewards are all equal."""
    entropy: float
    """Nats per token of the trainer's policy on the batch, before the update."""
    response_tokens_mean: float
    response_tokens_max: int
    truncated: float
    """Share of sequences that ended at the token limit."""
    generated_tokens: int
    """Cumulative over the run: generated = trained + filtered + dropped + in flight."""
    trained_tokens: int
    filtered_tokens: int
    dropped_tokens: int
    in_flight_tokens: int
    loss: float
    """Mean over the batch's optimizer steps."""
    grad_norm: float
    """Largest of the batch's optimizer steps, before clipping."""
    clip_fraction: float
    mismatch: Mismatch
    """At the version that the proximal log-probs were computed with."""
    proximal_contains_lag: bool
    """True where proximal - rollout mixes precision and lag (concurrent and in-flight schedules)."""
    ess_token_proximal: float
    """Effective sample size / n of the token weights exp(proximal - rollout), unclamped."""
    ess_sequence_proximal: float
    ess_token_current: float
    """The same with the log-probs that the gradient is taken at, mean over the batch's optimizer steps."""
    ess_sequence_current: float
    ess_token_clamped: float
    """Token weights of the current policy clamped at the loss's cap."""
    ess_sequence_clamped: float
    kl_sequence: float
    """k3 summed over a sequence, mean over sequences, nats."""
    lag_mean: float
    """Trainer's version at the gradient minus the token's version, optimizer steps."""
    lag_p95: float
    lag_max: int
    lag_first_half: float
    """Mean lag of the first half of each response (in-flight: older)."""
    lag_second_half: float
    kl_by_lag: dict[str, float]
    """lag -> mean k3 of its tokens."""
    versions_per_sequence: float
    """Mean number of policy versions that wrote a sequence."""
    clock: float
    """Modelled time at the end of this batch's training, units of the cost preset."""
    clock_generate: float
    """Modelled time the engine was busy so far."""
    clock_train: float
    clock_transfer: float
    clock_stall: float
    """Modelled time in which the trainer waited because of the lag bound."""


class TimingRow(Strict):
    """Measured on this machine: attempt, seconds by phase."""

    rollout_step: int
    attempt: int
    wall_s: float
    cpu_s: float
    rollout_cpu_s: float
    logprob_cpu_s: float
    train_cpu_s: float
    sync_cpu_s: float
    rollout_tokens: int
    train_tokens: int
    max_rss_mib: float


class SampleRow(Strict):
    """One answer."""

    task: str
    problem: str
    sample: int = Field(ge=0)
    status: Status
    tokens: int
    finish_reason: Literal["stop", "length"]
    flow: Literal["deployment", "training", "bf16"]
    checkpoint: Literal["base", "final"] = "final"
    """base: the warm-up (the step-0 row of every arm)."""
    answer: str | None = Field(None, exclude_if=lambda answer: answer is None)
    """What was read out of a benchmark's reply, where a problem has several (for majority votes)."""


class Manifest(Strict):
    method: str
    seed: int
    digest: str
    settings: dict[str, Any]
    """RunSettings, resolved."""
    outcome: Literal["finished", "nan"]
    train_rows: int
    train_sha256: str
    base: dict[str, Any]
    """Warm-up checkpoint: digest, sha256 of its weights, pass@1, updates."""
    description: dict[str, str]
    """The flow's own words (PrecisionFlow.describe) and the loss's formula."""
    environment: dict[str, str]
    """Versions, hardware, ISA, threads, thread environment, kernels (compiled or eager)."""
    source: dict[str, Any]
    """git sha, dirty (code paths only), hash of the modules on the numerical path."""
    resume: Literal["exact", "drained"] = "exact"
    data: dict[str, Any] = {}
    dropped_prompts: list[str] = []
    complete: Literal[True] = True


Row = TypeVar("Row", bound=Strict)


def dumps(row: Strict | dict) -> str:
    """One canonical JSON line: sorted keys, no NaN."""
    data = row.model_dump(mode="json") if isinstance(row, Strict) else row
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def write_text(path: Path, text: str) -> str:
    """Write under a temporary name, sync, rename; return the SHA-256."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = text.encode("utf-8")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return hashlib.sha256(data).hexdigest()


def write_rows(path: Path, rows: Iterable[Strict | dict]) -> tuple[int, str]:
    """Write JSONL; return (rows, SHA-256)."""
    lines = [dumps(row) for row in rows]
    return len(lines), write_text(path, "".join(line + "\n" for line in lines))


def write_json(path: Path, value: Strict | dict) -> str:
    data = value.model_dump(mode="json") if isinstance(value, Strict) else value
    return write_text(path, json.dumps(data, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_rows(path: Path, model: type[Row]) -> list[Row]:
    """Read JSONL and validate every row; ValueError names file and line."""
    rows = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if text and not text.endswith("\n"):
        raise ValueError(f"{path}: truncated: the last line has no line end")
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            rows.append(model.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path}:{number}: {where or 'row'}: {first['msg']}") from None
    return rows


class Run(Strict):
    """One complete record, read back and checked."""

    folder: str
    manifest: Manifest
    steps: list[StepRow]
    samples: list[SampleRow] = []


def read_run(folder: Path, evaluations: bool = True) -> Run:
    """Read a record; ValueError where it is incomplete, truncated, altered or of another schema."""
    folder = Path(folder)
    path = folder / "manifest.json"
    try:
        manifest = Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: not a complete record") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    train = folder / "train.jsonl"
    steps = read_rows(train, StepRow)
    if len(steps) != manifest.train_rows:
        raise ValueError(f"{train}: {len(steps)} rows, the manifest says {manifest.train_rows}")
    if hashlib.sha256(train.read_bytes()).hexdigest() != manifest.train_sha256:
        raise ValueError(f"{train}: altered: its SHA-256 is not the manifest's")
    samples = []
    if evaluations:
        for file in sorted((folder / "eval").glob("*.jsonl")):
            samples += read_rows(file, SampleRow)
    return Run(folder=str(folder), manifest=manifest, steps=steps, samples=samples)
