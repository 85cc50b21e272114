"""One StepRow from what a batch's optimizer steps saw."""

from dataclasses import dataclass

import torch

from jetrl_bench.clock import Clock
from jetrl_bench.diagnostics import StepTokens, current_distance, exact_kl, lag_metrics, mismatch, policy_distance
from jetrl_bench.loss import group_spread
from jetrl_bench.record import StepRow
from jetrl_bench.schedule import Ledger
from jetrl_bench.trainer import Pass, Step, TrainBatch


@dataclass(frozen=True)
class Taken:
    """One optimizer step of a batch."""

    batch: TrainBatch
    proximal: Pass | None
    """The trainer's pass at the version at which the batch reached it; None where nothing needed one."""
    step: Step
    version: int
    """The version at which the gradient was taken."""
    grad_norm: float


def step_row(
    rollout_step: int,
    taken: list[Taken],
    rewards_B: torch.Tensor,
    group_ids_B: torch.Tensor,
    truncated: int,
    *,
    ledger: Ledger,
    clock: Clock,
    samples: int,
    cap: float,
    contains_lag: bool,
) -> StepRow:
    """rewards_B, group_ids_B: of the whole batch, in any one order; samples: trained on so far, this batch included.

    Mismatch, entropy and the proximal ESS are taken over the sequences that have a proximal pass: all of them where the
    loss needs one, else those of the first optimizer step, whose own forward pass is it.
    """
    seen = [t for t in taken if t.proximal is not None]
    rollout_T = torch.cat([t.batch.loss.rollout_logprobs_T for t in seen])
    proximal_T = torch.cat([t.proximal.logprobs_T for t in seen])
    kl_T = None
    if all(t.batch.log_softmax_TV is not None and t.proximal.log_softmax_TV is not None for t in seen):
        kl_T = torch.cat([exact_kl(t.batch.log_softmax_TV, t.proximal.log_softmax_TV) for t in seen])
    seen_ids_T, seen_sequences = _sequence_ids(seen)
    spread, flat = group_spread(rewards_B, group_ids_B)
    lengths_B = torch.cat([t.batch.lengths_B for t in taken])
    current = [current_distance(_tokens([t]), cap) for t in taken]
    row = StepRow(
        rollout_step=rollout_step,
        optimizer_steps=taken[-1].version + 1,
        samples=samples,
        reward=float(rewards_B.double().mean()),
        reward_std_within=float(spread.double().mean()),
        groups_without_signal=float(flat.double().mean()),
        entropy=float(torch.cat([t.proximal.entropy_T for t in seen]).double().mean()),
        response_tokens_mean=float(lengths_B.double().mean()),
        response_tokens_max=int(lengths_B.max()),
        truncated=truncated / len(rewards_B),
        generated_tokens=ledger.generated_tokens,
        trained_tokens=ledger.trained_tokens,
        filtered_tokens=ledger.filtered_tokens,
        dropped_tokens=ledger.dropped_tokens,
        in_flight_tokens=ledger.in_flight_tokens(),
        loss=sum(t.step.loss for t in taken) / len(taken),
        grad_norm=max(t.grad_norm for t in taken),
        clip_fraction=sum(t.step.clipped for t in taken) / max(sum(t.step.valid_tokens for t in taken), 1),
        mismatch=mismatch(rollout_T, proximal_T, kl_T),
        proximal_contains_lag=contains_lag,
        **policy_distance(rollout_T, proximal_T, seen_ids_T, seen_sequences),
        **{name: sum(c[name] for c in current) / len(current) for name in current[0]},
        **lag_metrics(_tokens(taken)),
        clock=clock.now["trainer"],
        clock_generate=clock.busy["engine"],
        clock_train=clock.busy["trainer"],
        clock_transfer=clock.busy["link"],
        clock_stall=clock.stall,
    )
    return row


def _sequence_ids(taken: list[Taken]) -> tuple[torch.Tensor, int]:
    first, ids = 0, []
    for t in taken:
        ids.append(t.batch.loss.sequence_ids_T + first)
        first += t.batch.loss.num_sequences
    return torch.cat(ids), first


def _tokens(taken: list[Taken]) -> StepTokens:
    return StepTokens(
        rollout_T=torch.cat([t.batch.loss.rollout_logprobs_T for t in taken]),
        current_T=torch.cat([t.step.forward.logprobs_T for t in taken]),
        lags_T=torch.cat([t.version - t.batch.versions_T for t in taken]),
        versions_T=torch.cat([t.batch.versions_T for t in taken]),
        sequence_ids_T=_sequence_ids(taken)[0],
        lengths_B=torch.cat([t.batch.lengths_B for t in taken]),
    )
