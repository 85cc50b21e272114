"""How far the sampled policy is from the trained one: the numbers of a StepRow, as pure functions over packed tokens.

d = policy - rollout is the log-ratio of a token. Shapes: T packed tokens, B sequences, V vocabulary. All sums run in
fp64 and no exponential is taken of anything that has not been shifted or clamped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_bench.loss import kl_k1, kl_k3
from jetrl_bench.record import Mismatch


@dataclass(frozen=True)
class StepTokens:
    """Every token of a rollout step, in training order, with the log-probabilities at which its gradient was taken."""

    rollout_T: Tensor
    current_T: Tensor
    lags_T: Tensor
    """int64: the trainer's version at the gradient minus the token's version, optimizer steps."""
    versions_T: Tensor
    sequence_ids_T: Tensor
    """int64, 0 to B - 1, each sequence contiguous."""
    lengths_B: Tensor


def mismatch(rollout_T: Tensor, proximal_T: Tensor, kl_T: Tensor | None) -> Mismatch:
    """Engine log-probs against the trainer's; kl_T is the exact KL(mu || pi) per token where it was computed."""
    rollout_T, proximal_T = rollout_T.double(), proximal_T.double()
    gap_T = (proximal_T - rollout_T).abs()
    rank = max(1, -(-99 * len(gap_T) // 100))
    return Mismatch(
        mean_abs=float(gap_T.mean()),
        p99_abs=float(gap_T.kthvalue(rank).values),
        max_abs=float(gap_T.max()),
        kl=None if kl_T is None else float(kl_T.double().mean()),
        k1=float(kl_k1(rollout_T, proximal_T).mean()),
        k3=float(kl_k3(rollout_T, proximal_T).mean()),
        outside=float((gap_T > torch.log(torch.tensor(2.0, dtype=torch.float64))).double().mean()),
        nonzero=float((gap_T != 0).double().mean()),
    )


def exact_kl(log_mu_TV: Tensor, log_pi_TV: Tensor) -> Tensor:
    """KL(mu || pi) [T] over the vocabulary; mu = 0 (log mu = -inf) adds nothing, equal inputs give exactly 0."""
    if torch.equal(log_mu_TV, log_pi_TV):
        return torch.zeros(len(log_mu_TV))
    kl_T = (log_mu_TV - log_pi_TV).mul_(log_mu_TV.exp()).sum(-1)
    if not kl_T.isfinite().all():
        gap_TV = torch.where(log_mu_TV == -torch.inf, 0.0, log_mu_TV - log_pi_TV)
        kl_T = (log_mu_TV.exp() * gap_TV).sum(-1)
    return kl_T


def ess(log_weights: Tensor, cap: float | None = None) -> float:
    """Effective sample size / n = (sum w)^2 / (n sum w^2), in (0, 1]; weights as logs, clamped at `cap` if given."""
    log_w = log_weights.double()
    if cap is not None:
        log_w = log_w.clamp(max=float(torch.log(torch.tensor(cap, dtype=torch.float64))))
    weights = (log_w - log_w.max()).exp()
    return float(weights.sum().square() / (len(weights) * weights.square().sum()))


def sequence_sums(values_T: Tensor, sequence_ids_T: Tensor, num_sequences: int) -> Tensor:
    """[B] fp64 sums of each sequence's tokens."""
    return torch.zeros(num_sequences, dtype=torch.float64).index_add(0, sequence_ids_T, values_T.double())


def policy_distance(rollout_T: Tensor, proximal_T: Tensor, sequence_ids_T: Tensor, num_sequences: int) -> dict:
    """ESS of the proximal policy's weights by level, and k3 summed over a sequence."""
    gap_T = proximal_T.double() - rollout_T.double()
    return {
        "ess_token_proximal": ess(gap_T),
        "ess_sequence_proximal": ess(sequence_sums(gap_T, sequence_ids_T, num_sequences)),
        "kl_sequence": float(
            sequence_sums(kl_k3(-gap_T, torch.zeros_like(gap_T)), sequence_ids_T, num_sequences).mean()
        ),
    }


def current_distance(tokens: StepTokens, cap: float) -> dict:
    """ESS of the weights at one optimizer step's gradient, by level, raw and clamped at the loss's cap."""
    gap_T = tokens.current_T.double() - tokens.rollout_T.double()
    gap_B = sequence_sums(gap_T, tokens.sequence_ids_T, len(tokens.lengths_B))
    return {
        "ess_token_current": ess(gap_T),
        "ess_sequence_current": ess(gap_B),
        "ess_token_clamped": ess(gap_T, cap),
        "ess_sequence_clamped": ess(gap_B, cap),
    }


def lag_metrics(tokens: StepTokens) -> dict:
    """Lag: mean, p95, largest, by half of the response, k3 by lag, and how many versions wrote a sequence."""
    lags_T, lengths_B, ids_T = tokens.lags_T, tokens.lengths_B, tokens.sequence_ids_T
    starts_B = torch.cumsum(lengths_B, 0) - lengths_B
    first_T = 2 * (torch.arange(len(lags_T)) - starts_B[ids_T]) < lengths_B[ids_T]
    lags = lags_T.double()
    k3_T = kl_k3(tokens.rollout_T.double(), tokens.current_T.double())
    counts = torch.bincount(lags_T)
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add(0, lags_T, k3_T)
    changes = (tokens.versions_T[1:] != tokens.versions_T[:-1]) & (ids_T[1:] == ids_T[:-1])
    second = lags[~first_T]
    return {
        "lag_mean": float(lags.mean()),
        "lag_p95": float(lags.kthvalue(max(1, -(-95 * len(lags) // 100))).values),
        "lag_max": int(lags_T.max()),
        "lag_first_half": float(lags[first_T].mean()),
        "lag_second_half": float(second.mean()) if len(second) else float(lags.mean()),
        "kl_by_lag": {str(lag): float(sums[lag] / counts[lag]) for lag in range(len(counts)) if counts[lag]},
        "versions_per_sequence": 1.0 + float(changes.sum()) / len(lengths_B),
    }
