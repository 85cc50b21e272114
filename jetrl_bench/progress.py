"""What a run says while it works, and the seconds it measures. Nothing here reaches a compared file."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jetrl_bench.record import StepRow, TimingRow

PHASES = ("rollout", "logprob", "train", "sync")
LINE_EVERY = 10


class Laps:
    """Seconds by phase: `lap(phase)` books the time since the last lap; work inside `inside(phase)` is booked there."""

    phases: tuple[str, ...] = PHASES

    def __init__(self):
        self.restart()

    def now(self) -> float:
        return time.process_time()

    def restart(self) -> None:
        self.seconds = dict.fromkeys(self.phases, 0.0)
        self._wall = time.perf_counter()
        self._start = self._last = self.now()

    def lap(self, phase: str) -> None:
        now = self.now()
        self.seconds[phase] += now - self._last
        self._last = now

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        start = self.now()
        yield
        spent = self.now() - start
        self.seconds[phase] += spent
        self._last += spent

    def wall(self) -> float:
        return time.perf_counter() - self._wall


class Stopwatch(Laps):
    """CPU seconds of the training loop, a row for each rollout step."""

    def __init__(self, attempt: int):
        self.attempt = attempt
        super().__init__()

    def restart(self) -> None:
        super().restart()
        self.rollout_tokens = self.train_tokens = 0

    def row(self, rollout_step: int) -> TimingRow:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return TimingRow(
            rollout_step=rollout_step,
            attempt=self.attempt,
            wall_s=self.wall(),
            cpu_s=time.process_time() - self._start,
            **{f"{phase}_cpu_s": seconds for phase, seconds in self.seconds.items()},
            rollout_tokens=self.rollout_tokens,
            train_tokens=self.train_tokens,
            max_rss_mib=peak / (1 << 20 if sys.platform == "darwin" else 1 << 10),
        )


class Progress:
    """A bar on a terminal, else a plain line about every ten rollout steps."""

    def __init__(self, title: str, total: int):
        """total: optimizer steps."""
        self.title, self.total, self.bar = title, total, None

    def __call__(self, row: StepRow) -> None:
        text = (
            f"{self.title}: step {row.optimizer_steps}/{self.total} reward {row.reward:.3f} "
            f"entropy {row.entropy:.3f} grad {row.grad_norm:.2g} k3 {row.mismatch.k3:.2g} lag {row.lag_mean:.1f}"
        )
        if self.bar is not None:
            self.bar.update(self.task, completed=row.optimizer_steps, description=text)
        elif row.rollout_step % LINE_EVERY == LINE_EVERY - 1 or row.optimizer_steps >= self.total:
            print(text, flush=True)

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from rich.progress import Progress as Bar

            self.bar = Bar(transient=True)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total)
        return self

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.stop()
