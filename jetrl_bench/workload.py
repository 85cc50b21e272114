"""What a simulated RL run is asked to do and what it did: response lengths, the schedule, the result."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .shapes import TrainLayout


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens: log-normal with a cap, the capped mean being `mean`; or a list, taken in order."""

    mean: float = 1000.0
    cv: float = 0.9
    cap: int = 4096
    measured: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.measured and not 0 < self.mean < self.cap:
            raise ValueError(f"lengths.mean {self.mean:g} must lie between 0 and lengths.cap {self.cap}")

    def draw(self, rng: np.random.Generator, count: int, offset: int = 0) -> np.ndarray:
        """count lengths [count] int64; `measured` continues at `offset` and wraps round."""
        if self.measured:
            return np.resize(np.roll(np.asarray(self.measured, dtype=np.int64), -(offset % len(self.measured))), count)
        if self.cv == 0:
            return np.full(count, round(self.mean), dtype=np.int64)
        sigma = math.sqrt(math.log1p(self.cv**2))
        x = np.exp(self._mu(sigma) + sigma * rng.standard_normal(count))
        return np.clip(np.ceil(x), 1, self.cap).astype(np.int64)

    def _mu(self, sigma: float) -> float:
        """Location whose capped mean E[min(x, cap)] is `mean` (closed form of a log-normal, bisected)."""

        def normal_cdf(z: float) -> float:
            return 0.5 * math.erfc(-z / math.sqrt(2))

        def capped_mean(mu: float) -> float:
            z = (math.log(self.cap) - mu) / sigma
            return math.exp(mu + sigma**2 / 2) * normal_cdf(z - sigma) + self.cap * normal_cdf(-z)

        low, high = math.log(self.mean) - 5, math.log(self.cap) + 20
        for _ in range(80):
            mid = (low + high) / 2
            low, high = (mid, high) if capped_mean(mid) < self.mean else (low, mid)
        return (low + high) / 2


@dataclass(frozen=True)
class Schedule:
    """Who generates and trains when. Counts are GPUs and sequences; `max_lag` is in optimizer steps.

    `start` of an in-flight run: cold begins with empty slots (a bubble, then short sequences first); stationary begins
    in the middle of a long run, which is what a step time should be taken from. `kv`: at an in-flight swap running
    sequences keep the cache that older weights wrote, or it is recomputed (a prefill of all live context).
    """

    kind: Literal["conventional", "concurrent", "inflight"]
    gpus: int
    samples_per_update: int
    updates_per_rollout: int = 1
    generation_gpus: int | None = None
    slots: int | None = None
    max_lag: int | None = None
    updates_per_sync: int = 1
    kv: Literal["keep", "recompute"] = "keep"
    logprob_passes: int = 1
    train: dict = field(default_factory=dict)
    balance: Literal["longest_first", "ideal"] = "longest_first"
    start: Literal["cold", "stationary"] = "cold"

    def __post_init__(self):
        if self.kind == "conventional":
            if self.generation_gpus not in (None, self.gpus):
                raise ValueError("schedule.generation_gpus: a conventional run uses all GPUs in both phases")
        elif self.generation_gpus is None or not 0 < self.generation_gpus < self.gpus:
            raise ValueError(f"schedule.generation_gpus must lie between 1 and {self.gpus - 1} for {self.kind}")
        TrainLayout(self.training_gpus, **self.train)

    @property
    def training_gpus(self) -> int:
        return self.gpus if self.kind == "conventional" else self.gpus - self.generation_gpus

    @property
    def layout(self) -> TrainLayout:
        """The training side; `train` holds the fields of costs.TrainLayout other than its GPUs."""
        return TrainLayout(self.training_gpus, **self.train)


@dataclass
class Result:
    """What a simulated run did. Times are in `unit`; lags in optimizer steps; tokens are response tokens."""

    unit: str
    gpus: int
    optimizer_steps: int
    samples_per_update: int
    updates_per_rollout: int = 1
    total: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    sequences: int = 0
    preemptions: int = 0
    generation_busy: float = 0.0
    generation_gpus: int = 0
    training_busy: float = 0.0
    training_gpus: int = 0
    lags: Counter = field(default_factory=Counter)
    timeline: list[tuple[str, float, float, str, int]] = field(default_factory=list)
    at_cap: float = 0.0
    completed: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        return self.total / self.optimizer_steps

    @property
    def tokens_per_gpu(self) -> float:
        """Response tokens trained per unit of time and GPU."""
        return self.tokens / self.total / self.gpus

    @property
    def steady_step(self) -> float:
        """Mean time of an optimizer step between rollout batches, the first quarter of the run left out."""
        ends = self.completed[self.updates_per_rollout - 1 :: self.updates_per_rollout]
        skip = len(ends) // 4
        if len(ends) - skip < 2:
            return self.step
        return (ends[-1] - ends[skip]) / (len(ends) - 1 - skip) / self.updates_per_rollout

    def lag(self) -> dict[str, float]:
        """Mean, 95th percentile and maximum lag of a trained token, in optimizer steps."""
        values, counts = np.array(sorted(self.lags.items()), dtype=float).T
        cumulative = np.cumsum(counts) / counts.sum()
        p95 = values[np.searchsorted(cumulative, 0.95)]
        return {"mean": float(values @ counts / counts.sum()), "p95": float(p95), "max": float(values[-1])}
