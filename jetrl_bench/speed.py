"""Measured CPU seconds of one RL step on this machine: BF16, emulated FP8, and another trainer's script beside them.

`speed step` times whole steps of a fixed job (every completion runs to the token limit, so that the work is the same in
every arm): weights to the engine, rollout, loss, backward, one optimizer step; no proximal pass. Arms are interleaved
and process CPU time is read, so that a busy machine shifts all of them alike. FP8 is emulated: its ratio to BF16 is the
price of emulation on a CPU, and says nothing about FP8 hardware.

The shape is that of a small Qwen2, 64 completions of 64 tokens, which another framework's GRPO trainer can run too:
--peer SCRIPT is started as `SCRIPT --hidden 128 --threads 1 --dtype bf16 --steps N --json FILE` and answers with
{"cpu_s": {"step": seconds}}.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from jetrl_bench import record
from jetrl_bench.config import (
    BaseConfig,
    CostConfig,
    FlowConfig,
    LossConfig,
    Method,
    ModelConfig,
    RunSettings,
    TaskConfig,
    TrainConfig,
)

ARMS = {
    "bf16": FlowConfig(),
    "e4m3": FlowConfig(rollout="fp8", train="fp8", format="e4m3", scale="pow2"),
}
"""Ours: BF16 on both sides, and unified FP8 with power-of-two scales."""


@dataclass(frozen=True)
class Job:
    """The work of one step."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 64
    prompts: int = 8
    group: int = 8
    prompt_len: int = 16
    new_tokens: int = 64

    def settings(self, flow: FlowConfig) -> RunSettings:
        model = ModelConfig(
            arch="qwen2",
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            intermediate_size=4 * self.hidden,
            max_position=512,
        )
        loss = LossConfig(
            anchor="rollout", surrogate="reinforce", cap=5.0, normalizer="token", advantage="center_scale"
        )
        train = TrainConfig(
            group_size=self.group, samples_per_update=self.prompts * self.group, max_tokens=self.new_tokens
        )
        return RunSettings(
            seed=0,
            base_index=0,
            replicate=0,
            lr=1e-3,
            model=model,
            task=TaskConfig(),
            base=BaseConfig(),
            train=train,
            cost=CostConfig(),
            method=Method(flow=flow, loss=loss),
        )


class Stepper:
    """One arm: a policy, its engine, and the step that is timed."""

    def __init__(self, job: Job, flow: FlowConfig):
        import torch

        from jetrl_bench.model import init_model
        from jetrl_bench.precision import make_flow
        from jetrl_bench.rollout import ReferenceEngine
        from jetrl_bench.trainer import Trainer

        self.job, self.settings = job, job.settings(flow)
        precision = make_flow(flow)
        self.trainer = Trainer(self.settings, init_model(self.settings.model, job.vocab, 0), precision)
        slots, longest = job.prompts * job.group, job.prompt_len + job.new_tokens
        self.engine = ReferenceEngine(self.settings.model, job.vocab, precision, max_slots=slots, max_len=longest)
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(0, job.vocab, (job.prompts, job.prompt_len), generator=generator).tolist()

    def step(self) -> dict[str, float]:
        """CPU seconds: total, rollout (with the weight update), train."""
        import torch

        from jetrl_bench.loss import advantages
        from jetrl_bench.rollout import Request
        from jetrl_bench.trainer import collate

        job, start = self.job, time.process_time()
        self.engine.load_weights(self.trainer.named_weights(), version=self.trainer.version, kv="keep")
        for number in range(job.prompts * job.group):
            prompt, sample = divmod(number, job.group)
            seed = 1000 * self.trainer.version + number
            self.engine.add(Request(number, prompt, sample, self.prompts[prompt], job.new_tokens, 1.0, seed, ()))
        completions = []
        while self.engine.num_unfinished():
            completions += self.engine.step()
        completions.sort(key=lambda completion: completion.request_id)
        rolled = time.process_time()
        rewards_B = torch.tensor([completion.token_ids.count(7) / job.new_tokens for completion in completions])
        groups_B = torch.arange(len(completions)) // job.group
        batch = collate(completions, advantages(rewards_B, groups_B, self.settings.method.loss.advantage))
        self.trainer.forward_backward(batch)
        self.trainer.optim_step()
        end = time.process_time()
        assert all(len(completion.token_ids) == job.new_tokens for completion in completions)
        return {"step": end - start, "rollout": rolled - start, "train": end - rolled}


def peer_step(script: Path, python: str, job: Job, steps: int) -> float:
    """Median CPU seconds of a step of another trainer's script."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.json"
        command = [python, str(script), "--hidden", str(job.hidden), "--threads", "1", "--dtype", "bf16"]
        done = subprocess.run(
            [*command, "--steps", str(steps), "--json", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not out.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"{script}: ended with {done.returncode}: {last}")
        return float(json.loads(out.read_text(encoding="utf-8"))["cpu_s"]["step"])


def measure(job: Job, pairs: int, steps: int, peer: Path | None = None, python: str = sys.executable) -> dict:
    """Interleaved rounds; every value is a median over rounds, ratios are medians of the rounds' own ratios."""
    import torch

    torch.set_num_threads(1)
    arms = {name: Stepper(job, flow) for name, flow in ARMS.items()}
    for arm in arms.values():
        arm.step()
    rounds = []
    for _ in range(pairs):
        taken: dict[str, list] = {name: [] for name in arms}
        for _ in range(steps):
            for name, arm in arms.items():
                taken[name].append(arm.step())
        row = {
            name: {phase: statistics.median(s[phase] for s in many) for phase in ("step", "rollout", "train")}
            for name, many in taken.items()
        }
        if peer is not None:
            row["peer"] = {"step": peer_step(peer, python, job, steps + 2)}
        rounds.append(row)
    ratios = {"e4m3/bf16": [row["e4m3"]["step"] / row["bf16"]["step"] for row in rounds]}
    if peer is not None:
        ratios |= {f"{name}/peer": [row[name]["step"] / row["peer"]["step"] for row in rounds] for name in arms}
    return {
        "kind": "measured; FP8 emulated",
        "unit": "CPU seconds of one RL step",
        "job": vars(job),
        "rounds": rounds,
        "median": {
            name: {phase: statistics.median(row[name][phase] for row in rounds) for phase in rounds[0][name]}
            for name in rounds[0]
        },
        "ratio": {name: {"median": statistics.median(v), "min": min(v), "max": max(v)} for name, v in ratios.items()},
    }


def summary(result: dict) -> str:
    """Markdown: seconds by arm and phase, then ratios with their range over rounds."""
    lines = ["| arm | CPU s a step, measured | rollout | training |", "|---|---|---|---|"]
    for name, phases in result["median"].items():
        label = {"bf16": "bf16", "e4m3": "e4m3, emulated", "peer": "peer, bf16"}[name]
        cells = [f"{phases[p]:.3f}" if p in phases else "" for p in ("step", "rollout", "train")]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines.append("")
    for name, ratio in result["ratio"].items():
        lines.append(
            f"{name}: {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}, {len(result['rounds'])} rounds)"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True)
    step = what.add_parser("step", help="CPU seconds of a whole RL step", description=__doc__)
    step.formatter_class = argparse.RawDescriptionHelpFormatter
    step.add_argument("--pairs", type=int, default=5, help="interleaved rounds")
    step.add_argument("--steps", type=int, default=5, help="steps of each arm in a round")
    step.add_argument("--peer", type=Path, help="another trainer's script, run beside ours")
    step.add_argument("--peer-python", default=sys.executable, help="its interpreter")
    step.add_argument("--out", type=Path, help="write the numbers there as JSON, a table beside it")
    from jetrl_bench import speed_linear

    speed_linear.add_arguments(what.add_parser("linear", help="CPU or GPU seconds of one quantised linear layer"))


def run(args: argparse.Namespace) -> int:
    if args.what == "linear":
        from jetrl_bench import speed_linear

        return speed_linear.run(args)
    from jetrl_bench import devices

    result = measure(Job(), args.pairs, args.steps, args.peer, args.peer_python)
    result["environment"] = devices.environment()
    print(summary(result))
    if args.out:
        record.write_json(args.out, result)
        record.write_text(args.out.with_suffix(".md"), summary(result) + "\n")
    return 0
