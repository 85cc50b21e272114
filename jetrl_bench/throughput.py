"""PipelineRL's throughput model (arXiv 2509.19128, appendix A), in its own unit: tokens per flash.

A flash is the time a GPU at its peak needs for the FLOPs of one token's forward pass, so a matrix product at
utilisation U(h) with h rows gives U(h) tokens per flash. N accelerators, batch B, G optimizer steps per rollout batch,
response limit L and mean Lbar, I generation accelerators with H sequences each, tau flashes of training per token.

The paper prints `S - 1` as the conventional lag; in optimizer steps, which is what g_max counts, it is G - 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .costs import Costs

Utilisation = Callable[[float], float]


def rate_training(accelerators: float, tau: float) -> float:
    """r_train = accelerators / tau (equations 15 and 18)."""
    return accelerators / tau


def rate_generation(utilisation: float, accelerators: float) -> float:
    """r_gen = U(H) I of steady generation (equation 17)."""
    return utilisation * accelerators


def rate_conventional(r_generation: float, r_training: float) -> float:
    """Harmonic sum: all accelerators generate, then all train (equation 13)."""
    return 1 / (1 / r_generation + 1 / r_training)


def rate_pipeline(r_generation: float, r_training: float) -> float:
    """The slower side (equation 16)."""
    return min(r_generation, r_training)


def max_lag(slots: float, generation: float, limit: float, mean: float, batch: float) -> int:
    """g_max = ceil(H I L / (Lbar B)) optimizer steps."""
    return math.ceil(slots * generation * limit / (mean * batch) - 1e-9)


def rate_generation_draining(per_accelerator: int, limit: int, utilisation: Utilisation) -> float:
    """Rate per accelerator of a batch that drains, lengths uniform on 1..limit (equation 14).

    After l steps (limit - l) / limit of the batch is still running; a step of h sequences lasts h / U(h) flashes.
    """
    running = per_accelerator * (limit - np.arange(limit)) / limit
    flashes = sum(h / utilisation(h) for h in running)
    return per_accelerator * (limit + 1) / 2 / flashes


def utilisation(hardware: str = "H100", n: int = 16384, k: int = 4096, fmt: str = "bf16") -> Utilisation:
    """U(h) of this project's kernel fit: share of peak of (h x k)(k x n), the best of padding by up to 64 rows."""
    price = Costs("Qwen2.5-7B", hardware)
    peak = price.hw["bf16_flops" if fmt == "bf16" else "fp8_flops"]
    largest = 4096
    times = np.array([price.gemm_s(h, n, k, fmt) for h in range(1, largest + 65)])
    best = np.minimum.accumulate(times[::-1])[::-1]

    def at(h: float) -> float:
        return 2.0 * h * n * k / (peak * best[min(largest, max(1, math.ceil(h))) - 1])

    return at


def linear_utilisation(slope: float = 0.384 / 192, cap: float = 0.7) -> Utilisation:
    """U linear through the paper's U(192) = 0.384, up to a cap."""
    return lambda h: min(slope * h, cap)


@dataclass(frozen=True)
class Split:
    """A point of the search: I generation accelerators, H slots each, its rate and its maximum lag in steps."""

    generation: int
    slots: int
    rate: float
    lag: int


def best_pipeline(
    accelerators: int,
    batch: int,
    limit: int,
    mean: float,
    tau: float,
    u: Utilisation,
    lag: int,
    slots=range(8, 1025, 8),
) -> Split | None:
    """Brute force over (H, I) for the highest rate within the lag bound, as the appendix does."""
    best = None
    for generation in range(1, accelerators):
        for h in slots:
            g = max_lag(h, generation, limit, mean, batch)
            if g > lag:
                break
            rate = rate_pipeline(rate_generation(u(h), generation), rate_training(accelerators - generation, tau))
            if best is None or rate > best.rate + 1e-12:
                best = Split(generation, h, rate, g)
    return best


def best_conventional(
    accelerators: int, batch: int, limit: int, tau: float, u: Utilisation, lag: int
) -> tuple[int, float]:
    """(G, rate) of the fastest conventional run whose lag G - 1 stays within the bound."""
    best = (1, 0.0)
    for updates in range(1, lag + 2):
        load = batch * updates / accelerators
        # the rate depends on the shape of the drain, not on its length: 256 steps draw it finely enough
        generation = accelerators * rate_generation_draining(max(1, round(load)), min(limit, 256), u)
        rate = rate_conventional(generation, rate_training(accelerators, tau))
        if rate > best[1]:
            best = (updates, rate)
    return best


PUBLISHED = {
    "N": 128,
    "B": 128,
    "I": 44,
    "H": 192,
    "r_gen": 16.9,
    "r_train": 17.08,
    "conv_gen": 18.3,
    "conv_train": 26.02,
}


def identities() -> dict[str, float]:
    """The appendix's printed results recomputed from its printed inputs."""
    p = PUBLISHED
    tau = (p["N"] - p["I"]) / p["r_train"]
    u192 = p["r_gen"] / p["I"]
    conventional = rate_conventional(p["conv_gen"], rate_training(p["N"], tau))
    pipeline = rate_pipeline(rate_generation(u192, p["I"]), rate_training(p["N"] - p["I"], tau))
    return {
        "pipelinerl-tau": tau,
        "pipelinerl-u192": u192,
        "pipelinerl-r-conv": conventional,
        "pipelinerl-r-pipe": pipeline,
        "pipelinerl-speedup": pipeline / conventional,
        "pipelinerl-gmax-128": max_lag(p["H"], p["I"], 2, 1, p["B"]),
        "pipelinerl-gmax-2048": max_lag(p["H"], p["I"], 2, 1, 2048),
    }
