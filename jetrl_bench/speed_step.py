"""One arm of the measured step: a policy, its engine and its schedule, driven as training drives them, timed by phase.

    rollout     decoding, prompts included
    sync        weights out of the trainer and into the engine, prepared for its precision; a recomputed KV cache
    logprob     the pass that recomputes log-probabilities (proximal) where the loss reads them and none is at hand
    train       forward, loss, backward
    optimizer   clipping, AdamW, rounding of the masters where the flow says so
    other       scoring, advantages, batching

The phases add up to the step. Every response has a fixed length, so the work is known: tokens are valid ones
(generated, or trained and unpadded), FLOP and bytes are counted from the model's shape, the same in every precision.

    forward     2 x matrix parameters x tokens + 2 V C x response tokens + 4 layers H D x sum of contexts
    train       3 forwards; the rollout computes a prompt once for its group
    optimizer   28 bytes a parameter (AdamW reads p, g, m, v and writes p, m, v, all fp32)
    sync        6 bytes a parameter (fp32 in, bf16 out); not counted where the KV cache is computed again

On a CPU seconds are CPU time of this process. On a GPU they are wall time between synchronised points; everything is
then allocated there, and a real back end's bf16 products are torch's own.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from jetrl_bench.clock import Clock, Units
from jetrl_bench.config import BaseConfig, CostConfig, Method, ModelConfig, RunSettings, TaskConfig, TrainConfig
from jetrl_bench.loss import advantages, needs_proximal
from jetrl_bench.model import init_model
from jetrl_bench.precision import make_flow
from jetrl_bench.progress import Laps
from jetrl_bench.rollout import ReferenceEngine, Request
from jetrl_bench.schedule import Group, Ledger, batches, best_split
from jetrl_bench.seeds import seed_of
from jetrl_bench.trainer import Trainer, collate
from jetrl_bench.weight_sync import make_sync

PHASES = ("rollout", "sync", "logprob", "train", "optimizer", "other")


@dataclass(frozen=True)
class Job:
    """The work of one step: prompts x group completions of a Qwen2-shaped model, all of new_tokens tokens."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 64
    prompts: int = 8
    group: int = 8
    prompt_len: int = 16
    new_tokens: int = 64

    def __post_init__(self):
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} is below 1")
        if self.hidden % self.heads:
            raise ValueError(f"--hidden {self.hidden} is not a multiple of --heads {self.heads}")

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    def model(self) -> ModelConfig:
        return ModelConfig(
            arch="qwen2",
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            intermediate_size=4 * self.hidden,
            max_position=max(512, self.prompt_len + self.new_tokens),
        )

    def settings(self, method: Method, samples_per_update: int | None = None) -> RunSettings:
        """A run of `method` with that many samples an optimizer step (default: all of the job's)."""
        train = TrainConfig(
            group_size=self.group,
            samples_per_update=samples_per_update or self.samples,
            max_tokens=self.new_tokens,
            max_prompt_tokens=self.prompt_len,
        )
        return RunSettings(
            seed=0,
            base_index=0,
            replicate=0,
            lr=1e-3,
            model=self.model(),
            task=TaskConfig(),
            base=BaseConfig(),
            train=train,
            cost=CostConfig(),
            method=method,
        )


class Work(NamedTuple):
    """What a turn computed, whatever the precision."""

    samples: int
    optimizer_steps: int
    rollout_tokens: int
    """Generated."""
    train_tokens: int
    """Response tokens that the loss counted: no prompt, no padding, nothing masked out."""
    logprob_tokens: int
    """Response tokens scored by extra passes."""
    flop: dict[str, float]
    """By phase: rollout, logprob, train."""
    bytes: dict[str, float]
    """By phase: sync, optimizer."""


class Measured(NamedTuple):
    seconds: dict[str, float]
    """By phase, and their sum `step`: CPU time on a CPU, wall time on a GPU."""
    wall_s: float
    work: Work


def forward_flop(cfg: ModelConfig, vocab: int, prompt: int, response: int) -> float:
    """Of one sequence: its last token predicts nothing, the head runs where a response token is predicted."""
    return _layers_flop(cfg, 1, prompt + response - 1) + 2.0 * vocab * cfg.hidden_size * response


def rollout_flop(cfg: ModelConfig, vocab: int, prompt: int, response: int, group: int) -> float:
    """Of a whole group: the prompt (but its last token) once, then every response token by itself."""
    decoded = _layers_flop(cfg, prompt, prompt + response - 1) + 2.0 * vocab * cfg.hidden_size * response
    return _layers_flop(cfg, 1, prompt - 1) + group * decoded


def _layers_flop(cfg: ModelConfig, first: int, last: int) -> float:
    """Of the tokens whose contexts (themselves included) hold first to last tokens."""
    q, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    matrices = cfg.num_layers * cfg.hidden_size * (2 * q + 2 * kv + 3 * cfg.intermediate_size)
    contexts = (first + last) * (last - first + 1) / 2
    return 2.0 * matrices * (last - first + 1) + 4.0 * cfg.num_layers * q * contexts


class Watch(Laps):
    """CPU seconds; on a GPU wall seconds between synchronised points."""

    phases = PHASES

    def __init__(self, device: str):
        self.device = device
        super().__init__()

    def now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


class Stepper:
    """One arm. `turn()` is timed: whole rollout steps, at least `batches_per_turn` batches of the trainer."""

    def __init__(
        self, job: Job, settings: RunSettings, *, engine: str = "reference", device: str = "cpu",
        folder: Path | None = None,
    ):  # fmt: skip
        """engine: reference or vllm, which writes its model's config.json into `folder`."""
        self.job, self.settings, self.device = job, settings, device
        sync, config = settings.method.sync, settings.model
        with self._placed():
            flow = make_flow(settings.method.flow)
            with torch.device("cpu"):
                model = init_model(config, job.vocab, 0)
            self.trainer = Trainer(settings, model.to(device), flow)
            clock, self.ledger = Clock(), Ledger(job.group)
            split = best_split(settings, [job.new_tokens])
            self.sync = make_sync(sync, settings.train, Units(settings.cost), clock, split)
            self.watch = Watch(device)
            self.sync.timed = lambda: self.watch.inside("sync")
            sizes = {"max_slots": self.sync.max_slots, "max_len": job.prompt_len + job.new_tokens}
            if engine == "vllm":
                from jetrl_bench.rollout_vllm import make_vllm_engine

                named = self.trainer.model.named_parameters()
                self.engine = make_vllm_engine(config, job.vocab, flow, named, version=0, folder=folder, **sizes)
            else:
                self.engine = ReferenceEngine(config, job.vocab, flow, device=device, **sizes)
                self.engine.load_weights(self.trainer.named_weights(), version=0, kv="keep")
        self.batches_per_turn = 1
        if sync.schedule == "inflight":  # as many as the engine holds at once, so that tokens in and out agree
            self.batches_per_turn = -(-self.sync.max_slots // settings.train.samples_per_update)
        self.submitted = 0
        self.parameters = sum(p.numel() for p in self.trainer.model.parameters())
        self._stream = batches(self.sync, self.engine, self.trainer, self.ledger, self._submit)

    def turn(self) -> Measured:
        steps, generated, self._work = self.trainer.version, self.ledger.generated_tokens, []
        with self._placed():
            self.watch.restart()
            for _ in range(self.batches_per_turn):
                groups = next(self._stream)
                self.watch.lap("rollout")
                self._learn(groups)
        seconds, wall = dict(self.watch.seconds), self.watch.wall()
        seconds["step"] = sum(seconds.values())
        return Measured(
            seconds, wall, self._count(self.trainer.version - steps, self.ledger.generated_tokens - generated)
        )

    def close(self) -> None:
        self.engine.close()

    def _submit(self) -> None:
        """The next problem: random prompt tokens, responses of exactly new_tokens tokens."""
        job, number = self.job, self.submitted
        self.submitted += 1
        generator = torch.Generator().manual_seed(seed_of(0, "problems", number))
        prompt = torch.randint(0, job.vocab, (job.prompt_len,), generator=generator, device="cpu").tolist()
        self.ledger.submit(number, self.engine.policy_version)
        for sample in range(job.group):
            seed = seed_of(0, "rollout", number, sample)
            self.engine.add(Request(number * job.group + sample, number, sample, prompt, job.new_tokens, 1.0, seed, ()))

    def _learn(self, groups: list[Group]) -> None:
        """The optimizer steps of a batch, in the order of the training loop (learner.py)."""
        train, loss, watch, trainer = self.settings.train, self.settings.method.loss, self.watch, self.trainer
        completions = [group.completions[sample] for group in groups for sample in range(train.group_size)]
        rewards_B = torch.tensor([sum(c.token_ids) / len(c.token_ids) for c in completions])  # any will do
        groups_B = torch.tensor([group.problem_id for group in groups]).repeat_interleave(train.group_size)
        advantages_B = advantages(rewards_B, groups_B, loss.advantage)
        parts = torch.arange(len(completions)).split(train.samples_per_update)
        cut = [collate([completions[i] for i in part.tolist()], advantages_B[part]) for part in parts]
        watch.lap("other")
        proximal = [None] * len(cut)
        first = 0 if loss.correction == "mask" else 1  # unless it masks, the first step's own forward is its pass
        if needs_proximal(loss) and cut[first:]:
            proximal[first:] = [trainer.logprobs(batch) for batch in cut[first:]]
            watch.lap("logprob")
        for batch, own in zip(cut, proximal, strict=True):
            step = trainer.forward_backward(batch.with_proximal(own))
            watch.lap("train")
            trainer.optim_step()
            watch.lap("optimizer")
            self.sync.after_optim_step(trainer, self.engine, trainer.version, batch.num_tokens)
            self.ledger.trained_tokens += step.valid_tokens
            self._work.append((batch.inputs, step.valid_tokens, batch.num_tokens if own is not None else 0))
            watch.lap("other")

    def _count(self, optimizer_steps: int, generated: int) -> Work:
        cfg, vocab, group = self.settings.model, self.job.vocab, self.job.group
        forward = rollout = logprob = taken = valid = scored = samples = 0.0
        for inputs, valid_tokens, scored_tokens in self._work:
            pairs = [(p, t - p) for p, t in zip(inputs.prompt_lens.tolist(), inputs.total_lens.tolist())]
            own = sum(forward_flop(cfg, vocab, *pair) for pair in pairs)
            forward += own
            logprob += own if scored_tokens else 0
            rollout += sum(rollout_flop(cfg, vocab, *pair, group) for pair in pairs) / group
            taken += sum(response for _, response in pairs)
            samples, valid, scored = samples + len(pairs), valid + valid_tokens, scored + scored_tokens
        if self.engine.resume != "exact":  # vLLM's prefill steps give no token: count what came out
            generated = taken
        flop = {"rollout": rollout * generated / taken, "logprob": logprob, "train": 3 * forward}
        moved = {"sync": 6.0 * self.parameters, "optimizer": 28.0 * self.parameters * optimizer_steps}
        moved["sync"] *= optimizer_steps / self._steps_per_sync()
        if self.settings.method.sync.kv == "recompute":  # mostly a forward pass
            del moved["sync"]
        return Work(int(samples), optimizer_steps, int(generated), int(valid), int(scored), flop, moved)

    def _steps_per_sync(self) -> int:
        sync = self.settings.method.sync
        return 1 if sync.schedule == "inflight" else sync.updates_per_rollout

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        """Tensors are made on the arm's device."""
        with torch.device(self.device) if self.device != "cpu" else contextlib.nullcontext():
            yield
