r"""The policy-gradient loss: anchor x correction x level x surrogate, as pure functions over packed tokens [T].

Three policies, never two
-------------------------
    rollout    mu, what the engine sampled from: its weights (perhaps older), its number formats, its kernels
    proximal   the trainer's own log-probabilities, recomputed once when a batch reaches the trainer
    current    the trainer's log-probabilities at the gradient; carries the gradient

rollout differs from proximal by precision and kernels (and, where weights change while a batch is written, by lag);
current differs from proximal by the optimizer steps taken on the batch. A loss that knows only two of them must book
one difference under the other's name.

    anchor      denominator of the ratio r_t = exp(current_t - anchor_t): `proximal` or `rollout`
    correction  f(w), with log w = proximal - rollout, multiplies the loss and takes no gradient:
                `none` 1; `truncate` min(w, cap) (TIS); `mask` 1 if mask_low <= w <= mask_high, else rejected
    level       of w: `token` w_t; `sequence` prod_t w_t; `geometric` (prod_t w_t)^(1/n), for masks
    surrogate   `reinforce` sg(min(r, cap)) A log pi             PipelineRL, arXiv 2509.19128, eq. 5
                `ppo`       min(r A, clip(r) A)                  arXiv 1707.06347
                `dual_clip` the same, never below dual_clip * A where A < 0      arXiv 1912.09729
                `cispo`     sg(clip(r)) A log pi                 arXiv 2506.13585
                `gspo`      ppo with the sequence's r = (prod_t r_t)^(1/n)       arXiv 2507.18071

*Bare* BF16 training on an FP8 rollout is anchor proximal and correction none: nothing in the loss knows that mu was
sampled from. Anchor rollout is itself a correction. PPO with anchor rollout is not harmless: min() leaves A < 0, r >> 1
unbounded, so truncate it or use dual_clip.

Invariances
-----------
The loss of an optimizer step does not depend on how its sequences are cut into micro-batches, ordered or padded: the
divisor is counted over the whole step before the first backward (`totals`), and sequences are never cut. A rejected
token leaves numerator and divisor together, so masks are applied by `reject` before the totals are counted, from
`proximal`, which does not move during the step. Exponents are clamped at +-20 before exp: finite in value and gradient.

Shapes: T packed response tokens (sequence 0, then 1, ...), B sequences.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jetrl_bench.config import LossConfig

MAX_EXPONENT = 20.0


@dataclass(frozen=True)
class LossBatch:
    """What the loss reads beside the current log-probabilities; all [T] but for num_sequences."""

    rollout_logprobs_T: Tensor
    advantages_T: Tensor
    loss_mask_T: Tensor
    """bool: False for tokens that give no gradient (rejected)."""
    sequence_ids_T: Tensor
    """int64, 0 to num_sequences - 1."""
    num_sequences: int
    proximal_logprobs_T: Tensor | None = None
    """None: the current log-probabilities of this very pass are the proximal ones (no step was taken since)."""


@dataclass(frozen=True)
class Totals:
    """Counts over the whole optimizer step."""

    num_valid_tokens: int
    num_sequences: int
    """Sequences with at least one valid token."""
    max_tokens: int

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            self.num_valid_tokens + other.num_valid_tokens, self.num_sequences + other.num_sequences, self.max_tokens
        )


def needs_proximal(config: LossConfig) -> bool:
    """Whether the loss reads the proximal log-probabilities (else they would only serve the record)."""
    return config.anchor == "proximal" or config.correction != "none"


def totals_of(batch: LossBatch, max_tokens: int) -> Totals:
    counts_B = _sum_sequences(batch.loss_mask_T.float(), batch)
    return Totals(int(batch.loss_mask_T.sum()), int((counts_B > 0).sum()), max_tokens)


def reject(batch: LossBatch, config: LossConfig) -> LossBatch:
    """Apply correction `mask`: reject tokens (or whole sequences) with a weight outside [mask_low, mask_high]."""
    if config.correction != "mask":
        return batch
    assert batch.proximal_logprobs_T is not None, (
        "a mask is computed from the proximal log-probabilities, before the step"
    )
    weight_T = _exp(_at_level(batch.proximal_logprobs_T - batch.rollout_logprobs_T, batch, config.level))
    keep_T = (weight_T >= config.mask_low) & (weight_T <= config.mask_high)
    return replace(batch, loss_mask_T=batch.loss_mask_T & keep_T)


def policy_loss(logprobs_T: Tensor, batch: LossBatch, *, config: LossConfig, totals: Totals) -> tuple[Tensor, dict]:
    """The micro-batch's share of the optimizer step's loss (minimised), and counts for the record.

    metrics: clipped and truncated (tokens whose ratio, or correction weight, was cut), weight_sum (raw token weights
    proximal / rollout, before any truncation); sums over valid tokens, to be added up over micro-batches.
    """
    mask_T = batch.loss_mask_T
    proximal_T = logprobs_T.detach() if batch.proximal_logprobs_T is None else batch.proximal_logprobs_T
    anchor_T = proximal_T if config.anchor == "proximal" else batch.rollout_logprobs_T
    log_ratio_T = torch.where(mask_T, logprobs_T - anchor_T, 0.0)
    if config.surrogate == "gspo":
        log_ratio_T = _at_level(log_ratio_T, batch, "geometric")
    ratio_T = _exp(log_ratio_T)
    objective_T, clipped_T = _surrogate(ratio_T, logprobs_T, batch.advantages_T, config)

    log_weight_T = torch.where(mask_T, proximal_T - batch.rollout_logprobs_T, 0.0)
    truncated_T = torch.zeros_like(mask_T)
    if config.correction == "truncate":
        weight_T = _exp(_at_level(log_weight_T, batch, config.level))
        truncated_T = weight_T > config.cap
        objective_T = objective_T * weight_T.clamp(max=config.cap)

    objective_T = torch.where(mask_T, objective_T, 0.0)
    metrics = {
        "clipped": int((clipped_T & mask_T).sum()),
        "truncated": int((truncated_T & mask_T).sum()),
        "weight_sum": float(_exp(log_weight_T)[mask_T].sum()),
    }
    return -_normalise(objective_T, batch, config, totals), metrics


def _surrogate(ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.surrogate == "reinforce":
        weight_T = ratio_T.detach()
        return weight_T.clamp(max=config.cap) * advantages_T * logprobs_T, weight_T > config.cap
    if config.surrogate == "cispo":
        weight_T = ratio_T.detach()
        return weight_T.clamp(low, high) * advantages_T * logprobs_T, (weight_T < low) | (weight_T > high)
    free_T, clipped_T = ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T
    objective_T, is_clipped_T = torch.minimum(free_T, clipped_T), clipped_T < free_T
    if config.surrogate == "dual_clip":
        floor_T = config.dual_clip * advantages_T
        is_clipped_T = is_clipped_T | ((advantages_T < 0) & (objective_T < floor_T))
        objective_T = torch.where(advantages_T < 0, torch.maximum(objective_T, floor_T), objective_T)
    return objective_T, is_clipped_T


def _normalise(objective_T: Tensor, batch: LossBatch, config: LossConfig, totals: Totals) -> Tensor:
    if config.normalizer == "token":
        return objective_T.sum() / max(totals.num_valid_tokens, 1)
    if config.normalizer == "sequence":
        counts_B = _sum_sequences(batch.loss_mask_T.to(objective_T.dtype), batch)
        return (_sum_sequences(objective_T, batch) / counts_B.clamp(min=1)).sum() / max(totals.num_sequences, 1)
    divisor = max(totals.num_sequences, 1)
    return objective_T.sum() / (divisor * totals.max_tokens if config.normalizer == "constant" else divisor)


def _sum_sequences(values_T: Tensor, batch: LossBatch) -> Tensor:
    out_B = torch.zeros(batch.num_sequences, dtype=values_T.dtype, device=values_T.device)
    return out_B.index_add(0, batch.sequence_ids_T, values_T)


def _at_level(log_T: Tensor, batch: LossBatch, level: str) -> Tensor:
    """Token values summed (sequence) or averaged (geometric) over each sequence's valid tokens, spread back to [T]."""
    if level == "token":
        return log_T
    total_B = _sum_sequences(torch.where(batch.loss_mask_T, log_T, 0.0), batch)
    if level == "geometric":
        total_B = total_B / _sum_sequences(batch.loss_mask_T.to(log_T.dtype), batch).clamp(min=1)
    return total_B[batch.sequence_ids_T]


def _exp(log_T: Tensor) -> Tensor:
    return log_T.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


# Advantages


def group_spread(rewards_B: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """Per group, ordered by id: standard deviation (n - 1; 0 for a group of one), and whether all rewards are equal."""
    mean_B, count_B, index_B, groups = _group_mean(rewards_B, group_ids_B)
    squares = torch.zeros(groups, dtype=rewards_B.dtype).index_add(0, index_B, (rewards_B - mean_B) ** 2)
    counts = torch.zeros(groups, dtype=rewards_B.dtype).index_add(0, index_B, torch.ones_like(rewards_B))
    low = torch.full((groups,), torch.inf, dtype=rewards_B.dtype).scatter_reduce(0, index_B, rewards_B, "amin")
    high = torch.full((groups,), -torch.inf, dtype=rewards_B.dtype).scatter_reduce(0, index_B, rewards_B, "amax")
    flat = low == high
    return torch.where(flat, 0.0, (squares / (counts - 1).clamp(min=1)).sqrt()), flat


def _group_mean(rewards_B: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    ids, index_B = torch.unique(group_ids_B, return_inverse=True)
    zeros = torch.zeros(len(ids), dtype=rewards_B.dtype)
    count = zeros.index_add(0, index_B, torch.ones_like(rewards_B))
    mean = zeros.index_add(0, index_B, rewards_B) / count
    return mean[index_B], count[index_B], index_B, len(ids)


def advantages(rewards_B: Tensor, group_ids_B: Tensor, mode: str) -> Tensor:
    """Group baseline: r - mean (center), over std with n - 1 (center_scale), r - mean of the others (leave_one_out).

    Groups are found by id, never by stride, so their members may come in any order and number. A group whose rewards
    are all equal (a group of one included) has advantage exactly 0, whatever rounding does to its mean.
    """
    mean_B, count_B, index_B, _ = _group_mean(rewards_B, group_ids_B)
    spread, flat = group_spread(rewards_B, group_ids_B)
    centered_B = torch.where(flat[index_B], 0.0, rewards_B - mean_B)
    if mode == "center_scale":
        return torch.where(flat[index_B], 0.0, centered_B / spread[index_B].clamp(min=1e-12))
    if mode == "leave_one_out":
        return centered_B * count_B / (count_B - 1).clamp(min=1)
    assert mode == "center", mode
    return centered_B


# Estimators of KL(mu || pi) from tokens drawn from mu (Schulman, joschu.net/blog/kl-approx.html)


def kl_k1(rollout_T: Tensor, policy_T: Tensor) -> Tensor:
    """log mu - log pi: unbiased, high variance, may be negative."""
    return rollout_T - policy_T


def kl_k2(rollout_T: Tensor, policy_T: Tensor) -> Tensor:
    """(log mu - log pi)^2 / 2: biased, low variance."""
    return 0.5 * (rollout_T - policy_T).square()


def kl_k3(rollout_T: Tensor, policy_T: Tensor) -> Tensor:
    """expm1(d) - d with d = log pi - log mu: unbiased, never negative; d is clamped at +-20 before exp."""
    difference_T = (policy_T - rollout_T).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return torch.expm1(difference_T) - difference_T


def formula(config: LossConfig) -> str:
    """The loss in one line, for the record and the captions."""
    clip = f"clip(r, {1 - config.clip_low:g}, {1 + config.clip_high:g})"
    surrogate = {
        "reinforce": f"sg(min(r, {config.cap:g})) A log pi",
        "ppo": f"min(r A, {clip} A)",
        "dual_clip": f"max(min(r A, {clip} A), {config.dual_clip:g} A if A < 0)",
        "cispo": f"sg({clip}) A log pi",
        "gspo": f"min(r A, {clip} A)",
    }[config.surrogate]
    ratio = "(prod_t pi / {0})^(1/n)" if config.surrogate == "gspo" else "pi / {0}"
    weight = {"token": "w", "sequence": "prod_t w", "geometric": "(prod_t w)^(1/n)"}[config.level]
    factor = {
        "none": "",
        "truncate": f"sg(min({weight}, {config.cap:g})) * ",
        "mask": f"1[{config.mask_low:g} <= {weight} <= {config.mask_high:g}] * ",
    }[config.correction]
    where = [f"r = {ratio.format(config.anchor)}"] + (["w = proximal / rollout"] if factor else [])
    over = {
        "token": "sum_t / valid tokens",
        "sequence": "mean over tokens, then over sequences",
        "batch": "sum_t / sequences",
        "constant": "sum_t / (sequences * max_tokens)",
    }[config.normalizer]
    advantage = {
        "center": "A = R - mean(group)",
        "center_scale": "A = (R - mean(group)) / std(group)",
        "leave_one_out": "A = R - mean(others of the group)",
    }[config.advantage]
    return f"maximise {factor}{surrogate}, {over}; {', '.join(where)}; {advantage}"
