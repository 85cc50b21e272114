"""The trainer: fp32 masters, AdamW, gradient clipping, micro-batches of whole sequences.

A policy version is the number of optimizer steps done. Gradients accumulate in fp32 over the micro-batches of one step;
the loss's divisors are counted over the whole step first (loss.py), so cuts do not matter.

Shapes: B sequences, L padded length, T packed response tokens (sequence 0, then 1, ...), V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_bench.config import RunSettings
from jetrl_bench.errors import NotFinite
from jetrl_bench.logprobs import Batch, nonfinite_gradient, sequence_logprobs
from jetrl_bench.loss import LossBatch, policy_loss, reject, totals_of
from jetrl_bench.model import Decoder
from jetrl_bench.optimizer import AdamW
from jetrl_bench.rollout import Completion
from jetrl_bench.seeds import seed_of


@dataclass(frozen=True)
class TrainBatch:
    """The sequences of one optimizer step."""

    inputs: Batch
    loss: LossBatch
    versions_T: Tensor
    """int64: the policy version that sampled each token."""
    log_softmax_TV: Tensor | None
    """The engine's whole distribution at every token, where it was recorded."""

    @property
    def lengths_B(self) -> Tensor:
        """Response tokens of each sequence."""
        return self.inputs.total_lens - self.inputs.prompt_lens

    @property
    def num_tokens(self) -> int:
        return len(self.versions_T)

    def to(self, device: torch.device | str) -> "TrainBatch":
        full = self.log_softmax_TV
        loss = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self.loss).items()}
        return TrainBatch(
            inputs=self.inputs.to(device),
            loss=LossBatch(**loss),
            versions_T=self.versions_T.to(device),
            log_softmax_TV=None if full is None else full.to(device),
        )

    def with_proximal(self, forward: "Pass | None") -> "TrainBatch":
        """The same batch with recomputed log-probabilities, or without."""
        logprobs_T = None if forward is None else forward.logprobs_T
        return replace(self, loss=replace(self.loss, proximal_logprobs_T=logprobs_T))

    def micro_batches(self, size: int) -> Iterator["TrainBatch"]:
        """Cut into at most `size` sequences each; a sequence is never cut."""
        if size >= self.loss.num_sequences:
            yield self
            return
        ends = torch.cumsum(self.lengths_B, 0).tolist()
        for first in range(0, self.loss.num_sequences, size):
            last = min(first + size, self.loss.num_sequences)
            tokens = slice(ends[first - 1] if first else 0, ends[last - 1])
            rows = slice(first, last)
            width = int(self.inputs.total_lens[rows].max())
            loss = self.loss
            yield TrainBatch(
                inputs=Batch(
                    self.inputs.token_ids[rows, :width], self.inputs.prompt_lens[rows], self.inputs.total_lens[rows]
                ),
                loss=LossBatch(
                    rollout_logprobs_T=loss.rollout_logprobs_T[tokens],
                    advantages_T=loss.advantages_T[tokens],
                    loss_mask_T=loss.loss_mask_T[tokens],
                    sequence_ids_T=loss.sequence_ids_T[tokens] - first,
                    num_sequences=last - first,
                    proximal_logprobs_T=None if loss.proximal_logprobs_T is None else loss.proximal_logprobs_T[tokens],
                ),
                versions_T=self.versions_T[tokens],
                log_softmax_TV=None if self.log_softmax_TV is None else self.log_softmax_TV[tokens],
            )


def collate(completions: list[Completion], advantages_B: Tensor) -> TrainBatch:
    """Pad and pack. Masks come from lengths, never from token values: the end token is trained."""
    rows = [torch.tensor(c.prompt_ids + c.token_ids) for c in completions]
    lengths_B = torch.tensor([len(c.token_ids) for c in completions])
    prompt_lens_B = torch.tensor([len(c.prompt_ids) for c in completions])
    recorded = completions[0].log_softmax is not None
    return TrainBatch(
        inputs=Batch(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), prompt_lens_B, prompt_lens_B + lengths_B),
        loss=LossBatch(
            rollout_logprobs_T=torch.tensor([x for c in completions for x in c.logprobs]),
            advantages_T=torch.repeat_interleave(advantages_B, lengths_B),
            loss_mask_T=torch.ones(int(lengths_B.sum()), dtype=torch.bool),
            sequence_ids_T=torch.repeat_interleave(torch.arange(len(completions)), lengths_B),
            num_sequences=len(completions),
        ),
        versions_T=torch.tensor([v for c in completions for v in c.versions]),
        log_softmax_TV=torch.cat([c.log_softmax for c in completions]) if recorded else None,
    )


class Pass(NamedTuple):
    """What one forward pass over a TrainBatch gave; all detached, on the CPU."""

    logprobs_T: Tensor
    entropy_T: Tensor
    log_softmax_TV: Tensor | None


class Step(NamedTuple):
    """One optimizer step's forward and backward."""

    forward: Pass
    loss: float
    clipped: int
    valid_tokens: int


class Trainer:
    """Trains on the device that the model's parameters are on; batches come from the CPU and results return there."""

    def __init__(self, settings: RunSettings, model: Decoder, flow):
        self.settings, self.model, self.flow = settings, model, flow
        self.device = model.head_weight.device
        self.version = 0
        self.grad_norm = 0.0
        """Of the last optimizer step, before clipping."""
        train = settings.train
        self._round_masters()
        self.optimizer = AdamW(
            model.parameters(), lr=settings.lr, betas=train.betas, weight_decay=train.weight_decay, foreach=True
        )

    def logprobs(self, batch: TrainBatch, *, record_full: bool = False) -> Pass:
        """The trainer's own log-probabilities at the current version, without gradient."""
        parts = []
        with torch.no_grad():
            for micro in batch.to(self.device).micro_batches(self.settings.train.micro_batch_sequences):
                parts.append(self._forward(micro, record_full))
        return _joined(parts)

    def forward_backward(self, batch: TrainBatch, *, record_full: bool = False) -> Step:
        """Accumulate one optimizer step's gradient. Raises NotFinite before any weight is touched."""
        config, train = self.settings.method.loss, self.settings.train
        batch = batch.to(self.device)
        batch = replace(batch, loss=reject(batch.loss, config))
        totals = totals_of(batch.loss, train.max_tokens)
        parts, loss, clipped = [], 0.0, 0
        for micro in batch.micro_batches(train.micro_batch_sequences):
            forward = self._forward(micro, record_full)
            value, metrics = policy_loss(forward.logprobs_T, micro.loss, config=config, totals=totals)
            loss += value.item()
            if not torch.isfinite(value):
                raise NotFinite(f"optimizer step {self.version + 1}: the loss is {value.item()}")
            value.backward()
            parts.append(Pass(forward.logprobs_T.detach(), *forward[1:]))
            clipped += metrics["clipped"]
        return Step(_joined(parts), loss, clipped, totals.num_valid_tokens)

    def optim_step(self) -> int:
        """Clip, step, round the masters where the flow says so; returns the new policy version."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.train.grad_clip)
        self.grad_norm = norm.item()
        if not torch.isfinite(norm):
            where = nonfinite_gradient(self.model) or "its norm"
            raise NotFinite(f"optimizer step {self.version + 1}: NaN or inf in the gradient of {where}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.version += 1
        self._round_masters()
        return self.version

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What the rollout engine receives: the flow's export of the masters."""
        return self.flow.export(self.model.named_parameters())

    def state_dict(self) -> dict:
        return {
            "version": self.version,
            "model": {name: value.detach() for name, value in self.model.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "noise_count": self.flow.noise_count,
        }

    def load_state_dict(self, state: dict) -> None:
        self.version = state["version"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.flow.noise_count = state["noise_count"]

    def _forward(self, batch: TrainBatch, record_full: bool) -> Pass:
        temperature = self.settings.train.temperature
        try:
            return Pass(*sequence_logprobs(self.model, self.flow, batch.inputs, temperature, record_full=record_full))
        except NotFinite as error:
            raise NotFinite(f"optimizer step {self.version + 1}: {error}") from None

    def _round_masters(self) -> None:
        """bf16 masters keep the nearest bf16 value of the update; bf16_sr one of the two neighbours, unbiased."""
        master = self.settings.method.flow.master
        if master == "fp32":
            return
        generator = torch.Generator().manual_seed(seed_of(self.settings.seed, "rounding", self.version))
        with torch.no_grad():
            for parameter in self.model.parameters():
                if master == "bf16":
                    parameter.copy_(parameter.bfloat16())
                else:
                    parameter.copy_(round_stochastically(parameter, generator))


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to one of its two bf16 neighbours (as fp32), with probabilities that make the mean x."""
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, dtype=torch.int32).to(x.device)
    return ((x.detach().contiguous().view(torch.int32) + noise) & -65536).view(torch.float32)


def _joined(parts: list[Pass]) -> Pass:
    columns = ([x for x in column if x is not None] for column in zip(*parts))
    return Pass(*((x[0] if len(x) == 1 else torch.cat(x)).cpu() if x else None for x in columns))
