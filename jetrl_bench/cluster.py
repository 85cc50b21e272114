"""A discrete-event simulation of an RL run on a cluster: what the schedules cost at equal hardware.

Generation replicas decode with continuous batching under a KV limit (newest sequence preempted and recomputed, as
vLLM does), a trainer takes batches, weights travel back. Three schedules, as in weight_sync.py:

  conventional  all GPUs generate G x B sequences, then all train G optimizer steps of B (colocated)
  concurrent    generation of the next batch overlaps training on the last (one step off); disaggregated
  inflight      generation never stops, weights are swapped between decode steps; disaggregated

A replica advances from event to event (a sequence ends, the cache fills, weights arrive), never token by token: a
decode step costs base(batch) + slope x live context, so n steps of an unchanged batch have a closed form. Times come
from `costs.Costs` (seconds) or `costs.UnitCosts` (the training loop's units). Same seed, same result. *Modelled* time.
"""

import heapq
import math
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import simpy

from .replica import Replica, Sequence
from .workload import Lengths, Result, Schedule


class _Run:
    """One simulated run: replicas, trainer, what waits between them, and the result so far."""

    def __init__(self, costs, lengths: Lengths, schedule: Schedule, prompt: int, steps: int, seed: int, trace: bool):
        self.costs, self.lengths, self.schedule, self.prompt = costs, lengths, schedule, prompt
        self.num_updates, self.trace, self.layout = steps, trace, schedule.layout
        self.rng = np.random.default_rng(np.random.SeedSequence([seed, 0x4A52]))
        self.env = simpy.Environment()
        self.capacity = costs.kv_capacity()
        self.slots = min(schedule.slots or costs.max_num_seqs, costs.max_num_seqs)
        self.interruptible = schedule.kind == "inflight"
        generation = schedule.generation_gpus or schedule.gpus
        if generation % costs.tp:
            raise ValueError(f"tp {costs.tp} does not divide the {generation} generation GPUs")
        per_rollout = 1 if schedule.kind == "inflight" else schedule.updates_per_rollout
        self.result = Result(costs.unit, schedule.gpus, steps, schedule.samples_per_update, per_rollout)
        self.result.generation_gpus, self.result.training_gpus = generation, schedule.training_gpus
        self.replicas = [Replica(self, i) for i in range(generation // costs.tp)]
        self.version = 0
        self.serial = 0
        self.done: deque[Sequence] = deque()
        self.arrival = self.broadcast = None
        self.needed = 0
        self.lengths_buffer: deque[int] = deque()
        self.engine_version = 0  # of what is submitted from now on
        self.in_flight = self.in_hand = self.loading = 0
        self.born: Counter = Counter()
        self.closed = False

    def log(self, resource: str, start: float, end: float, label: str, version: int) -> None:
        if self.trace:
            self.result.timeline.append((resource, start, end, label, version))

    def phase(self, name: str, seconds: float) -> None:
        self.result.phases[name] = self.result.phases.get(name, 0.0) + seconds

    def fill_stationary(self) -> None:
        """Start in the middle of a long run: each slot holds a sequence met at a random moment of its generation."""
        count = self.slots * len(self.replicas)
        pool = self.lengths.draw(self.rng, max(4096, count))
        lengths = self.rng.choice(pool, count, p=pool / pool.sum())  # a longer sequence is met more often
        ages = np.floor(self.rng.random(count) * lengths).astype(np.int64)
        for i, (length, age) in enumerate(zip(lengths.tolist(), ages.tolist())):
            self.serial += 1
            sequence = Sequence(self.prompt, length - age, self.serial, 0)
            sequence.done, sequence.cached = age, self.prompt + age
            self.replicas[i % len(self.replicas)].add(sequence)
        self.in_flight = self.born[0] = count

    def new_sequence(self) -> Sequence:
        if not self.lengths_buffer:
            self.lengths_buffer.extend(self.lengths.draw(self.rng, 4096, self.serial).tolist())
        self.serial += 1
        return Sequence(self.prompt, self.lengths_buffer.popleft(), self.serial, self.engine_version)

    def submit(self, count: int) -> None:
        """Spread a batch over the replicas in turn (sequences are not moved later)."""
        for i in range(count):
            self.replicas[i % len(self.replicas)].add(self.new_sequence())

    def finished(self, replica: Replica, sequence: Sequence) -> None:
        self.done.append(sequence)
        if self.schedule.kind == "inflight":
            self.in_flight -= 1
            self.born[sequence.born] -= 1
            if not self.born[sequence.born]:
                del self.born[sequence.born]
            self.refill([replica])
        if self.arrival is not None and len(self.done) >= self.needed and not self.arrival.triggered:
            self.arrival.succeed()

    def refill(self, replicas: list[Replica]) -> None:
        """Admission, as in weight_sync.InFlight: fill the free slots unless a whole batch waits for the trainer, and as
        far as the lag bound allows: n live sequences, o the oldest running one's version, and
        n <= B (max_lag - (version - o) + 1)."""
        size, bound = self.schedule.samples_per_update, self.schedule.max_lag
        self.closed = False
        for replica in replicas:
            while replica.load < self.slots and len(self.done) < size:
                if bound is not None:
                    oldest = min(self.born, default=self.engine_version)
                    live = self.in_flight + len(self.done) + self.in_hand
                    if live >= size * (bound - (self.version - oldest) + 1):
                        self.closed = True
                        return
                replica.add(self.new_sequence())
                self.in_flight += 1
                self.born[self.engine_version] += 1

    def loaded(self) -> None:
        """A replica has new weights; the trainer goes on when all have them."""
        self.loading -= 1
        if not self.loading:
            self.broadcast.succeed()

    def take(self, count: int):
        """Wait for `count` finished sequences and take the oldest."""
        if len(self.done) < count:
            self.needed, self.arrival = count, self.env.event()
            yield self.arrival
            self.arrival = None
        batch = [self.done.popleft() for _ in range(count)]
        if self.schedule.kind == "inflight":
            self.in_hand = count
            self.refill(self.replicas)
        return batch

    def busiest(self, batch: list[Sequence]) -> tuple[float, float]:
        """Tokens of the busiest training rank, prompts included, and the mean sequence length seen by attention."""
        sizes = sorted((s.prompt + s.done for s in batch), reverse=True)
        total = sum(sizes)
        mean = sum(size * size for size in sizes) / total  # attention sees the length-weighted mean
        ranks = self.layout.ranks
        if self.schedule.balance == "ideal":
            return total / ranks, mean
        loads = [0.0] * min(ranks, len(sizes))
        for size in sizes:
            heapq.heapreplace(loads, loads[0] + size)
        return max(loads), mean

    def logprob(self, batch: list[Sequence]):
        """Proximal log-probabilities of a batch, once, when it reaches the trainer; process generator."""
        if not self.schedule.logprob_passes:
            return
        tokens, length = self.busiest(batch)
        seconds = self.schedule.logprob_passes * self.costs.logprob_s(tokens, length, self.layout)
        self.phase("logprob", seconds)
        self.result.training_busy += seconds
        start = self.env.now
        yield self.env.timeout(seconds)
        self.log("trainer", start, self.env.now, "logprob", self.version)

    def train_rollout(self, batch: list[Sequence]):
        """The optimizer steps of one rollout batch, shuffled once; process generator."""
        yield from self.logprob(batch)
        size, order = self.schedule.samples_per_update, self.rng.permutation(len(batch))
        for start in range(0, len(batch), size):
            if self.version == self.num_updates:
                return
            yield from self.train([batch[j] for j in order[start : start + size]])

    def train(self, batch: list[Sequence]):
        """One optimizer step on `batch`; process generator."""
        env = self.env
        tokens, length = self.busiest(batch)
        seconds = self.costs.train_step_s(tokens, length, self.layout)
        self.phase("train", seconds)
        self.result.training_busy += seconds
        start = env.now
        yield env.timeout(seconds)
        self.log("trainer", start, env.now, "train", self.version)
        for sequence in batch:
            self.result.tokens += sequence.done
            self.result.sequences += 1
            self.result.at_cap += sequence.done >= self.lengths.cap
            for version, count in sequence.segments:
                self.result.lags[self.version - version] += count
        self.version += 1
        self.result.completed.append(env.now)

    def _rollout_batches(self) -> int:
        return self.num_updates // self.schedule.updates_per_rollout

    def _load_everywhere(self) -> None:
        for replica in self.replicas:
            replica.marks.append((replica.steps, self.version))

    def conventional(self):
        env, schedule = self.env, self.schedule
        per_rollout, size = schedule.updates_per_rollout, schedule.samples_per_update
        for _ in range(self._rollout_batches()):
            start = env.now
            self.submit(per_rollout * size)
            batch = yield from self.take(per_rollout * size)
            self.phase("generation", env.now - start)
            yield from self.train_rollout(batch)
            yield from self._transfer()

    def _transfer(self):
        seconds = self.costs.transfer_s(self.schedule.gpus, self.schedule.kind == "conventional")
        self.phase("transfer", seconds)
        start = self.env.now
        yield self.env.timeout(seconds)
        self.log("link", start, self.env.now, "transfer", self.version)
        self._load_everywhere()

    def concurrent(self):
        env, schedule = self.env, self.schedule
        per_rollout, size = schedule.updates_per_rollout, schedule.samples_per_update
        self.submit(per_rollout * size)
        start = env.now
        batch = yield from self.take(per_rollout * size)
        self.phase("wait", env.now - start)
        for _ in range(self._rollout_batches()):
            self.submit(per_rollout * size)  # sampled with the weights before this batch's updates: one batch off
            yield from self.train_rollout(batch)
            if self.version == self.num_updates:
                return
            start = env.now
            batch = yield from self.take(per_rollout * size)
            self.phase("wait", env.now - start)
            yield from self._transfer()

    def inflight(self):
        env, schedule = self.env, self.schedule
        if schedule.start == "stationary":
            self.fill_stationary()
        else:
            self.refill(self.replicas)
        while self.version < self.num_updates:
            start = env.now
            batch = yield from self.take(schedule.samples_per_update)
            self.phase("stall" if self.closed else "wait", env.now - start)
            yield from self.logprob(batch)
            yield from self.train(batch)
            self.in_hand = 0
            if self.version % schedule.updates_per_sync == 0:
                start = env.now
                self.engine_version, self.loading, self.broadcast = self.version, len(self.replicas), env.event()
                for replica in self.replicas:
                    replica.pending.append(self.version)
                    replica.interrupt()
                yield self.broadcast  # every replica stops at its next decode step, the trainer waits for all
                self.phase("transfer", env.now - start)


def simulate(
    costs,
    lengths: Lengths,
    schedule: Schedule,
    *,
    prompt: int = 256,
    optimizer_steps: int = 20,
    seed: int = 0,
    trace: bool = False,
) -> Result:
    """Run `optimizer_steps` of a schedule; `trace` keeps the time line (for figures)."""
    if optimizer_steps < 1:
        raise ValueError(f"optimizer_steps {optimizer_steps} must be at least 1")
    if schedule.kind != "inflight" and optimizer_steps % schedule.updates_per_rollout:
        raise ValueError(
            f"optimizer_steps {optimizer_steps} is not a multiple of updates_per_rollout {schedule.updates_per_rollout}"
        )
    run = _Run(costs, lengths, schedule, prompt, optimizer_steps, seed, trace)
    for replica in run.replicas:
        run.env.process(replica.process())
    trainer = run.env.process(getattr(run, schedule.kind)())
    run.env.run(until=trainer)
    result = run.result
    result.total = run.env.now
    result.generation_busy = sum(r.busy for r in run.replicas) / len(run.replicas)
    result.at_cap /= max(1, result.sequences)
    return result


def generate(costs, lengths: Lengths, *, replicas: int, sequences: int, prompt: int, seed: int = 0) -> float:
    """Time for `replicas` engines to answer `sequences` requests that are all submitted at once."""
    schedule = Schedule("conventional", replicas * costs.tp, sequences)
    run = _Run(costs, lengths, schedule, prompt, 1, seed, False)
    for replica in run.replicas:
        run.env.process(replica.process())
    run.submit(sequences)
    run.env.run(until=run.env.process(run.take(sequences)))
    return run.env.now


def best_split(costs, lengths: Lengths, schedule: Schedule, *, max_lag: int | None = None, **kwargs):
    """(generation GPUs, result) of the split with the shortest steady step.

    The half-and-half split tells how busy each side is, the busy shares give the balanced split, and a walk with
    shrinking strides ends where no neighbour is faster. With `max_lag` (optimizer steps) runs that exceed it are out.
    """
    split = schedule.layout.split
    options = [g for g in range(costs.tp, schedule.gpus, costs.tp) if (schedule.gpus - g) % split == 0]
    if not options:
        raise ValueError(f"no split of {schedule.gpus} GPUs fits tp {costs.tp} and a training rank of {split}")
    seen: dict[int, Result] = {}

    def score(i: int) -> float:
        if not 0 <= i < len(options):
            return math.inf
        if i not in seen:
            seen[i] = simulate(costs, lengths, replace(schedule, generation_gpus=options[i]), **kwargs)
        if max_lag is not None and seen[i].lag()["max"] > max_lag:
            return math.inf
        return seen[i].steady_step

    best = len(options) // 2
    score(best)
    work_generation = seen[best].generation_busy * options[best]
    work_training = seen[best].training_busy * (schedule.gpus - options[best])
    balanced = schedule.gpus * work_generation / (work_generation + work_training)
    best = min(best, min(range(len(options)), key=lambda i: abs(options[i] - balanced)), key=score)
    stride = max(1, len(options) // 8)
    while stride:
        near = min((best, best - stride, best + stride), key=score)
        if near == best:
            stride //= 2
        best = near
    if math.isinf(score(best)):
        raise ValueError(f"no split keeps the lag within {max_lag} optimizer steps")
    return options[best], seen[best]
