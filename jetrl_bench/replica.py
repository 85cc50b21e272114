"""One generation engine of the cluster simulation: continuous batching under a KV limit, from event to event.

`run` is the simulated run (cluster.py): its clock, its costs, and whom to tell when a sequence ends or weights are in.
"""

import heapq
import math
from bisect import bisect_right
from collections import deque


class Sequence:
    """A request and its response so far."""

    __slots__ = ("prompt", "left", "done", "segments", "started", "end_step", "serial", "born", "cached")

    def __init__(self, prompt: int, length: int, serial: int, born: int):
        self.prompt, self.left, self.done, self.serial = prompt, length, 0, serial
        self.born = born  # the engine's version at submission: no token is older
        self.cached = 0  # tokens whose keys and values are there at time zero (a stationary start)
        self.segments: list[tuple[int, int]] = []  # (policy version, tokens)


class Replica:
    """One generation engine: waiting and running sequences, a KV budget, a decode-step counter and version marks."""

    def __init__(self, run, index: int):
        self.run, self.index, self.costs = run, index, run.costs
        self.waiting: deque[Sequence] = deque()
        self.running: list[tuple[int, int, Sequence]] = []  # heap by the decode step at which a sequence ends
        self.context = 0  # live KV tokens
        self.reserved = 0  # KV tokens promised to running sequences (engines that never evict)
        self.steps = 0
        self.marks: list[tuple[int, int]] = [(0, 0)]  # (decode step, version from then on)
        self.pending: list[int] = []  # versions to load before the next decode step
        self.busy = 0.0
        self.wake = None
        self.capacity = run.capacity

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        total = sequence.prompt + sequence.done + sequence.left
        if total > self.capacity:
            raise ValueError(f"a sequence of {total} tokens exceeds the KV cache of {self.capacity} tokens")
        self.waiting.append(sequence)
        self.interrupt()

    def interrupt(self) -> None:
        """Work or weights arrived: wake up, or cut the current run of decode steps at its next step boundary."""
        if self.wake is not None and not self.wake.triggered:
            self.wake.succeed()

    def _admit(self) -> float:
        """Move waiting sequences into the batch while slots and cache allow; returns the prefill time."""
        tokens = rows = 0
        limit = self.run.slots
        while self.waiting and len(self.running) < limit:
            sequence = self.waiting[0]
            need = sequence.prompt + sequence.done
            if self.costs.reserve_full:
                if self.running and self.reserved + need + sequence.left > self.capacity:
                    break
                self.reserved += need + sequence.left
            elif self.running and self.context + need + len(self.running) + 1 > self.capacity:
                break
            self.waiting.popleft()
            self.context += need
            if need > sequence.cached or self.run.env.now > 0:
                tokens, rows = tokens + need, rows + 1
            sequence.started = self.steps
            sequence.end_step = self.steps + sequence.left
            heapq.heappush(self.running, (sequence.end_step, sequence.serial, sequence))
        return self.costs.prefill_s(tokens, tokens / rows) if rows else 0.0

    def _close(self, sequence: Sequence) -> None:
        """Record which versions produced the tokens since the sequence was (re)admitted."""
        start, end = sequence.started, min(self.steps, sequence.end_step)
        i = bisect_right(self.marks, (start, 1 << 60)) - 1
        while start < end:
            stop = self.marks[i + 1][0] if i + 1 < len(self.marks) else end
            stop = min(stop, end)
            if stop > start:
                sequence.segments.append((self.marks[i][1], stop - start))
            start, i = max(start, stop), i + 1
        produced = end - sequence.started
        sequence.done += produced
        sequence.left -= produced

    def _preempt(self) -> None:
        """The newest running sequence loses its cache and is recomputed later."""
        newest = max(self.running, key=lambda item: (item[2].started, item[1]))
        self.running.remove(newest)
        heapq.heapify(self.running)
        sequence = newest[2]
        self._close(sequence)
        self.context -= sequence.prompt + sequence.done
        self.waiting.appendleft(sequence)
        self.run.result.preemptions += 1

    def process(self):
        env, run, costs = self.run.env, self.run, self.costs
        slope = costs.context_s
        while True:
            if self.pending:
                version = self.pending[-1]
                self.pending.clear()
                pause = costs.transfer_s(run.schedule.gpus, colocated=False)
                if run.schedule.kv == "recompute" and self.running:
                    pause += costs.prefill_s(self.context, self.context / len(self.running))
                run.log(f"replica {self.index}", env.now, env.now + pause, "transfer", version)
                yield env.timeout(pause)
                self.marks.append((self.steps, version))
                run.loaded()
            prefill = self._admit()
            if not self.running:
                self.wake = env.event()
                yield self.wake
                self.wake = None
                continue
            if prefill:
                self.busy += prefill
                yield env.timeout(prefill)
                continue  # more may have been added, or weights arrived, meanwhile
            batch = len(self.running)
            steps = self.running[0][0] - self.steps
            room = (self.capacity - self.context) // batch
            if room < 1:
                self._preempt()
                continue
            steps = min(steps, room)
            base = costs.decode_step_s(batch, 0.0)
            first = base + slope * self.context
            growth = slope * batch
            duration = steps * first + growth * steps * (steps - 1) / 2
            started = env.now
            if run.interruptible:
                self.wake = env.event()
                yield self.wake | env.timeout(duration)
                interrupted = self.wake.triggered and env.now < started + duration
                self.wake = None
                if interrupted:  # finish the decode step in flight, no more
                    steps = min(steps, _steps_within(env.now - started, first, growth))
                    duration = steps * first + growth * steps * (steps - 1) / 2
                    yield env.timeout(max(0.0, started + duration - env.now))
            else:
                yield env.timeout(duration)
            self.busy += duration
            run.log(f"replica {self.index}", started, env.now, "generate", self.marks[-1][1])
            self.steps += steps
            self.context += steps * batch
            while self.running and self.running[0][0] <= self.steps:
                sequence = heapq.heappop(self.running)[2]
                self._close(sequence)
                self.context -= sequence.prompt + sequence.done
                if costs.reserve_full:
                    self.reserved -= sequence.prompt + sequence.done
                run.finished(self, sequence)


def _steps_within(elapsed: float, first: float, growth: float) -> int:
    """Smallest n >= 1 whose n decode steps last at least `elapsed`."""
    if growth <= 0:
        return max(1, math.ceil(elapsed / first - 1e-9))
    b = first - growth / 2
    n = (-b + math.sqrt(b * b + 2 * growth * elapsed)) / growth
    return max(1, math.ceil(n - 1e-9))
