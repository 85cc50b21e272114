"""Token log-probs with their gradient, and counter-based sampling: the definition of csrc/head.c, the same bits.

Shapes: R rows, V vocabulary. Logits are bf16 or fp32; everything inside is fp32 unless it says fp64.
"""

import numpy as np
import torch
import torch.nn.functional as F

from jetrl_bench.lanes import exp, fold, lane_sum, log, pad
from jetrl_bench.native import library_for, ptr


def _head(logits: torch.Tensor, temperature) -> tuple[torch.Tensor, ...]:
    """[R, V] -> z - max, exp(z - max) padded to 16, max [R], sum [R]; z = logits / temperature."""
    z = pad(logits.float() / temperature, 16, value=-torch.inf)
    top = z.amax(-1)
    d = z - top[:, None]
    e = exp(d)
    return d, e, top, lane_sum(e)


def token_logprobs(logits, tokens, temperature: float, *, full: bool):
    """Log-probs of `tokens` [R] under softmax(logits [R, V] / temperature), entropy [R], saved (max, sum) and, if
    asked, the whole log-softmax [R, V]. logits bf16 or fp32; everything out is fp32."""
    R, V = logits.shape
    native = library_for(logits)
    if native is not None:
        logp, entropy, top, total = torch.empty(4, R, dtype=torch.float32).unbind()
        everything = torch.empty(R, V, dtype=torch.float32) if full else None
        native.token_logprobs(
            ptr(logits), logits.dtype == torch.bfloat16, ptr(tokens), temperature, ptr(logp), ptr(entropy), ptr(top),
            ptr(total), ptr(everything), R, V,
        )  # fmt: skip
        return logp, entropy, (top, total), everything
    d, e, top, total = _head(logits, temperature)
    ln = log(total)
    logp = d.gather(1, tokens[:, None])[:, 0] - ln
    entropy = ln - lane_sum(e * torch.where(e > 0, d, 0.0)) / total
    return logp, entropy, (top, total), (d[:, :V] - ln[:, None] if full else None)


def token_logprobs_backward(grad, logits, tokens, temperature: float, saved) -> torch.Tensor:
    """d(logits) in the logits' dtype for fp32 grad [R]."""
    R, V = logits.shape
    top, total = saved
    out = torch.empty_like(logits)
    native = library_for(logits)
    if native is not None:
        native.token_logprobs_backward(
            ptr(grad),
            ptr(logits),
            logits.dtype == torch.bfloat16,
            ptr(tokens),
            temperature,
            ptr(top),
            ptr(total),
            ptr(out),
            R,
            V,
        )
        return out
    p = exp(logits.float() / temperature - top[:, None]) / total[:, None]
    one = torch.arange(V, device=logits.device) == tokens[:, None]
    out.copy_((grad / temperature)[:, None] * (one.float() - p))
    return out


def uniform(seeds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Uniforms in [0, 1) with 53 bits from (request seed, token index): splitmix64, a counter-based generator."""
    with np.errstate(over="ignore"):
        x = seeds.numpy().astype(np.uint64) + (counts.numpy().astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sample(logits, temperatures, seeds, counts, tokens, logprobs, full: torch.Tensor | None) -> None:
    """Draw one token a row by inverse CDF at uniform(seed, count); temperature 0 takes the first maximum, its log-prob
    at temperature 1. Fills tokens int64 [R], logprobs fp32 [R] and, if given, the log-softmax [R, V]."""
    R, V = logits.shape
    native = library_for(logits)
    if native is not None:
        native.sample(
            ptr(logits), logits.dtype == torch.bfloat16, ptr(temperatures), ptr(seeds), ptr(counts), ptr(tokens),
            ptr(logprobs), ptr(full), R, V,
        )  # fmt: skip
        return
    greedy = temperatures <= 0
    d, e, _, total = _head(logits, torch.where(greedy, 1.0, temperatures)[:, None])
    blocks = e.unflatten(1, (-1, 16))
    ends = F.pad(fold(blocks).double().cumsum(1), (1, 0))
    goal = uniform(seeds.cpu(), counts.cpu()).to(logits.device)[:, None] * ends[:, -1:]
    block = (ends[:, 1:-1] <= goal).sum(1)
    row = torch.arange(R, device=logits.device)
    inside = torch.cat([ends[row, block, None], blocks[row, block].double()], 1).cumsum(1)[:, 1:]
    drawn = 16 * block + (inside[:, :15] <= goal).sum(1)
    nonzero = torch.where(e > 0, torch.arange(e.shape[1], device=logits.device), 0).cummax(1).values
    drawn = nonzero.gather(1, drawn[:, None])[:, 0]  # a draw is never a token of probability 0
    tokens.copy_(torch.where(greedy, (d[:, :V] == 0).int().argmax(1), drawn))
    ln = log(total)
    logprobs.copy_(d.gather(1, tokens[:, None])[:, 0] - ln)
    if full is not None:
        full.copy_(d[:, :V] - ln[:, None])
