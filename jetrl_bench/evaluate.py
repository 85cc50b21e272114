"""Held-out accuracy of checkpoints, in the precision flows they could be deployed in.

    deployment  the rollout's precision (the primary comparison between methods)
    training    the trainer's precision
    bf16        no quantisation

Flows that coincide are evaluated once, under the first of these names. A *unit* is one checkpoint in one flow on one
task: its rows are kept in a cache, keyed by everything that decides them (weights, flow, task, problems, seed, data),
so that a kill loses one unit, and the warm-up checkpoint, which every arm starts from, is sampled once per flow.
Problems and sampling seeds are the same for every method of a seed: comparisons are paired.

Sampling uses the reference engine; only a policy trained through vLLM has its deployment flow sampled there.
"""

import argparse
import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jetrl_bench import devices, record
from jetrl_bench.config import EvaluateConfig, FlowConfig, RunSettings, TaskConfig
from jetrl_bench.data import read_status
from jetrl_bench.record import FLOWS, SampleRow
from jetrl_bench.seeds import seed_of
from jetrl_bench.strict import Strict, read_yaml, validate

SLOTS, LARGE_SLOTS = 64, 128
"""Sequences decoded at once: their KV cache stays in the core's own (64 is a quarter faster than 256). A model whose
weights do not fit there reads them once a decode step, which then serves more of them (a third faster than 64)."""
LARGE = 10**7
"""Parameters of a model that counts as large here."""
PROBLEM_SEED = 0
"""Held-out problems are the same for every seed and method."""


def inference_flow(flow: FlowConfig, name: Literal["deployment", "training", "bf16"]) -> FlowConfig:
    """The rollout-side flow that samples in this precision; equal flows compare equal.

    What cannot matter is at its default: the format where nothing is quantised, everything of the backward pass, and
    the training kernels (two kernel sets of one precision are one flow here).
    """
    if name == "deployment":
        linear, rule, kv = flow.rollout, flow.rollout_rule, flow.kv_cache
    elif name == "training":
        linear, rule = flow.train, flow.train_rule
        kv = flow.kv_cache if flow.train == "fp8" else "bf16"
    else:
        linear, rule, kv = "bf16", "default", "bf16"
    kept = {"rollout": linear, "train": linear, "kv_cache": kv, "lm_head": flow.lm_head, "backend": flow.backend}
    if "fp8" in (linear, kv, flow.lm_head):
        for key in ("format", "scale", "activation_groups", "weight_groups"):
            kept[key] = getattr(flow, key)
        kept |= {"rollout_rule": rule, "train_rule": rule}
    return FlowConfig(**kept)


def distinct_flows(flow: FlowConfig) -> dict[str, FlowConfig]:
    """name -> flow; of flows that coincide only the first name."""
    out: dict[str, FlowConfig] = {}
    for name in FLOWS:
        candidate = inference_flow(flow, name)
        if candidate not in out.values():
            out[name] = candidate
    return out


@dataclass(frozen=True)
class Unit:
    """One checkpoint in one flow on one task: the training task, or a benchmark by name."""

    weights: Path
    tokenizer: Path
    """Folder of the warm-up checkpoint, where a pretrained model's tokenizer stands."""
    flow: FlowConfig
    task: TaskConfig | str
    seed: int
    max_tokens: int
    problems: int
    """Response limit and number of problems of the training task; benchmarks have their own."""
    engine: Literal["reference", "vllm"] = "reference"
    device: str = "cpu"


class Evaluator:
    """Evaluates units, each at most once: rows are cached under `cache`."""

    def __init__(self, config: EvaluateConfig, data: Path, cache: Path):
        self.config, self.data, self.cache = config, Path(data), Path(cache)
        status = {name: read_status(data, name) for name in config.benchmarks}
        self.present = [name for name, s in status.items() if s["status"] == "present"]
        self.absent = {name: s["reason"] for name, s in status.items() if s["status"] != "present"}
        self._hashes: dict[Path, str] = {}

    def rows(self, unit: Unit) -> list[SampleRow]:
        """The unit's rows, flow and checkpoint still to be named by the caller."""
        path = self.cache / f"{hashlib.sha256(record.dumps(self._key(unit)).encode()).hexdigest()[:24]}.jsonl"
        if not path.exists():
            sample = sample_benchmark if isinstance(unit.task, str) else sample_task
            record.write_rows(path, sample(unit, self.config, self.data))
        return record.read_rows(path, SampleRow)

    def _key(self, unit: Unit) -> dict:
        key = {
            "weights": self._hash(unit.weights / "model.safetensors"),
            "model": self._hash(unit.weights / "config.json"),
            "flow": unit.flow.model_dump(mode="json"),
            "temperature": self.config.temperature,
            "seed": unit.seed,
            "engine": unit.engine,
            "device": unit.device,
        }
        if isinstance(unit.task, str):
            return key | {
                "benchmark": unit.task,
                "data": self._hash(self.data / f"{unit.task}.jsonl"),
                **self.config.model_dump(mode="json", include={"samples", "max_tokens"}),
                "limit": self.config.limit_of(unit.task),
            }
        return key | {
            "task": unit.task.model_dump(mode="json"),
            "problems": unit.problems,
            "max_tokens": unit.max_tokens,
        }

    def _hash(self, path: Path) -> str:
        if path not in self._hashes:
            try:
                self._hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as error:
                raise ValueError(f"{path}: {error.strerror}") from None
        return self._hashes[path]


@functools.cache
def _heldout(task: TaskConfig, tokenizer: Path | None, count: int) -> tuple:
    """The task and its held-out problems, the same for every checkpoint of a process.

    `tokenizer`: folder of a pretrained model's tokenizer; None where the vocabulary is the task's own, so that the
    warm-up checkpoints of all seeds share their problems.
    """
    from jetrl_bench.tasks import load_tokenizer, make_task

    made = make_task(task, None if tokenizer is None else load_tokenizer(tokenizer))
    return made, made.problems("heldout", count, PROBLEM_SEED)


def sample_task(unit: Unit, config: EvaluateConfig, data: Path) -> list[SampleRow]:
    """One answer to each held-out problem of the training task."""
    from jetrl_bench.rollout import Request

    tokenizer = unit.tokenizer if (unit.tokenizer / "tokenizer.json").exists() else None
    task, problems = _heldout(unit.task, tokenizer, unit.problems)
    requests = [
        Request(
            request_id=number,
            problem_id=problem.problem_id,
            sample=0,
            token_ids=task.prompt(problem),
            max_tokens=unit.max_tokens,
            temperature=config.temperature,
            seed=seed_of(unit.seed, "evaluation", problem.problem_id, 0),
            stop_ids=task.stop_ids,
        )
        for number, problem in enumerate(problems)
    ]
    completions = complete(unit, requests)
    return [
        SampleRow(
            task=task.name,
            problem=problem.name,
            sample=0,
            status=task.verify(problem, completion).status,
            tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            flow="deployment",
        )
        for problem, completion in zip(problems, completions, strict=True)
    ]


def complete(unit: Unit, requests: list) -> list:
    """Completions of requests, in their order, from the unit's checkpoint in its precision."""
    from jetrl_bench.checkpoint import load_hf
    from jetrl_bench.precision import make_flow

    weights, flow = unit.weights, unit.flow
    config, vocab_size, state = load_hf(weights)
    longest = max(len(request.token_ids) + request.max_tokens for request in requests)
    if longest > config.max_position:
        raise ValueError(
            f"{weights}: prompt and answer take {longest} tokens, model.max_position is {config.max_position}"
        )
    slots = LARGE_SLOTS if sum(tensor.numel() for tensor in state.values()) > LARGE else SLOTS
    sizes = {"max_slots": min(slots, len(requests)), "max_len": longest}
    with tempfile.TemporaryDirectory() as scratch:
        if unit.engine == "vllm":
            from jetrl_bench.rollout_vllm import make_vllm_engine

            folder = Path(scratch) / "engine"
            sampler = make_vllm_engine(
                config, vocab_size, make_flow(flow), state.items(), version=0, folder=folder, **sizes
            )
        else:
            from jetrl_bench.rollout import ReferenceEngine

            precision = make_flow(flow)
            sampler = ReferenceEngine(config, vocab_size, precision, device=unit.device, **sizes)
            sampler.load_weights(precision.export(state.items()), version=0, kv="keep")
        for request in requests:
            sampler.add(request)
        done = {}
        while sampler.num_unfinished():
            done |= {completion.request_id: completion for completion in sampler.step()}
        sampler.close()
    return [done[request.request_id] for request in requests]


def sample_benchmark(unit: Unit, config: EvaluateConfig, data: Path) -> list[SampleRow]:
    """k answers to each problem of a benchmark, through the full path (lm-eval's task, our engine, our grader)."""
    from jetrl_bench import benchmarks

    return benchmarks.evaluate_benchmark(unit, config, data)


@dataclass(frozen=True)
class Evaluated:
    """A run whose checkpoint is to be evaluated: folder, settings, warm-up checkpoint, number of held-out problems."""

    folder: Path
    settings: RunSettings
    base: Path
    problems: int

    def unit(self, name: str, flow: FlowConfig, task: TaskConfig | str, checkpoint: str) -> Unit:
        final = checkpoint == "final"
        return Unit(
            weights=self.folder / "checkpoint" if final else self.base,
            tokenizer=self.base,
            flow=flow,
            task=task,
            seed=self.settings.seed if final else self.settings.base_index,
            max_tokens=self.settings.train.max_tokens,
            problems=self.problems,
            engine=self.settings.train.engine if name == "deployment" else "reference",
            device=devices.device_of(self.settings.train),
        )


def evaluate(run: Evaluated, evaluator: Evaluator, checkpoints: tuple[str, ...] = ("base", "final")) -> dict[str, list]:
    """task name -> rows of a run: the training task in every distinct flow, benchmarks in the deployment flow."""
    flows = distinct_flows(run.settings.method.flow)
    wanted = [(run.settings.task, name, flow) for name, flow in flows.items()]
    wanted += [(name, "deployment", flows["deployment"]) for name in evaluator.present]
    out: dict[str, list] = {}
    for task, name, flow in wanted:
        for checkpoint in checkpoints:
            rows = evaluator.rows(run.unit(name, flow, task, checkpoint))
            key = task if isinstance(task, str) else task.name
            out.setdefault(key, []).extend(r.model_copy(update={"flow": name, "checkpoint": checkpoint}) for r in rows)
            correct = sum(row.status == "correct" for row in rows) / len(rows)
            print(f"{run.folder} {key} {name} {checkpoint}: {correct:.4f} of {len(rows)}", flush=True)
    return out


class Settings(Strict):
    """results/evaluate.json."""

    evaluate: EvaluateConfig
    strict: bool = False
    problems: dict[str, int] = {}
    """Held-out problems by digest of the run's settings, where it is not evaluate.problems."""


def read_run(path: Path, bases: Path, config: Settings) -> Evaluated:
    """From a run's settings.json."""
    settings = validate(RunSettings, read_yaml(path), str(path))
    problems = config.problems.get(settings.digest(), config.evaluate.problems)
    return Evaluated(Path(path).parent, settings, Path(bases) / settings.base_digest(), problems)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", type=Path, metavar="SETTINGS", help="settings.json of each run")
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        help="results/evaluate.json, as the workflow writes it",
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that verb data wrote")
    parser.add_argument("--bases", type=Path, default=Path("state/base"), help="folder of the warm-up checkpoints")
    parser.add_argument(
        "--cache", type=Path, default=Path("state/evaluate"), help="rows by unit, so that a kill loses one"
    )
    parser.add_argument("--checkpoint", choices=["base", "both"], default="both", help="base: only fill the cache")
    parser.add_argument("--scripted", type=Path, metavar="DIR", help="write the rows of the two scripted models there")


def run(args: argparse.Namespace) -> int:
    config = validate(Settings, read_yaml(args.config), str(args.config))
    evaluator = Evaluator(config.evaluate, args.data, args.cache)
    if config.strict and evaluator.absent:
        name, reason = next(iter(evaluator.absent.items()))
        raise ValueError(f"{name}: {reason}; strict is true, set strict: false to print 'not evaluated' instead")
    if args.scripted:
        write_scripted(args.scripted, evaluator)
        return 0
    import torch

    torch.set_num_threads(int(os.environ.get("JETRL_THREADS", "1")))
    for path in args.settings:
        run = read_run(path, args.bases, config)
        devices.require(run.settings)
        if args.checkpoint == "base":
            evaluate(run, evaluator, ("base",))
            continue
        for task, rows in evaluate(run, evaluator).items():
            record.write_rows(run.folder / "eval" / f"{task}.jsonl", rows)
        _write_absent(run.folder / "eval", evaluator.absent, empty=True)
    return 0


def write_scripted(out: Path, evaluator: Evaluator) -> None:
    """Rows of a model that gives the gold answers and of one that says nothing, through every model's path."""
    from jetrl_bench import benchmarks

    for script in ("gold", "empty"):
        for name in evaluator.present:
            rows = benchmarks.scripted(script, name, evaluator.config, evaluator.data)
            record.write_rows(out / script / f"{name}.jsonl", rows)
        _write_absent(out / script, evaluator.absent)


def _write_absent(folder: Path, absent: dict[str, str], empty: bool = False) -> None:
    """`<name>.absent` with the reason; `empty` also writes the empty file of rows that a workflow declares."""
    for path in folder.glob("*.absent"):
        path.unlink()
    for name, reason in absent.items():
        record.write_text(folder / f"{name}.absent", reason + "\n")
        if empty:
            record.write_rows(folder / f"{name}.jsonl", [])
