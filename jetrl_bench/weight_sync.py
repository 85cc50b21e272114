"""When the rollout engine receives weights: Barrier, Concurrent, InFlight.

A rollout engine decodes one token per `step()` for every running sequence; a trainer takes one optimizer step at a time
and then holds newer weights than the engine. Three ways to meet:

    Barrier      generate a batch of G * B sequences, then take G optimizer steps on it, then load the weights; all
                 accelerators do both in turn. Lag of the g-th step's tokens: g.   engine   BBBB....CCCC....
                                                                                   trainer  ....bbbb....cccc
    Concurrent   generate batch k+1 with the weights of the last boundary while batch k is trained on; accelerators are
                 split. Lag: G + g.                                                engine   BBBBCCCCDDDD
                                                                                   trainer  ....bbbbcccc
    InFlight     never wait for a batch to end: as soon as an optimizer step and its transfer are over, load the weights
                 between two decode steps, in the middle of every running sequence (PipelineRL, arXiv 2509.19128). A
                 sequence is then written by several policies; every token carries the version that sampled it. What the
                 new weights read of the old tokens is the setting `kv`: `keep` attends to keys and values that the old
                 weights wrote, `recompute` runs the new weights over the tokens so far.

In every schedule a group (all samples of a problem) is trained on only when it is complete, groups are taken in order
of completion, and problems are submitted in one order, the same for every method of a seed.

The lag bound
-------------
In flight, lag must never exceed `max_lag` optimizer steps, and nothing is thrown away to keep it: a bound kept by
discarding would never train on slow problems. It is kept by admission. Let v be the trainer's version, g the groups of
a batch, n the groups submitted and not yet trained on, o the version of a running group's first token. In the worst
case every other group completes before it, and it is trained on at version v + (n - 1) // g. An optimizer step moves v
by 1 and n by -g and leaves that number alone, so it is enough that no admission raises it above o + max_lag:

    n <= g * (max_lag - (v - min o) + 1)

A straggler holds min o back, admission closes, the finished groups run out, and the trainer stalls until the straggler
is done. The stall is counted (`Clock.stall`).
Admission is also paced: while a whole batch waits for the trainer, nothing is submitted.

Sequences run on `slots`; times come from `clock.Units`; nothing here knows a model.
"""

import contextlib
from math import ceil
from typing import Protocol

from jetrl_bench.clock import Clock, Units
from jetrl_bench.config import SyncConfig, TrainConfig


class WeightSync(Protocol):
    batch_groups: int
    """Complete groups that the trainer takes at a time."""
    max_slots: int
    """Sequences that the engine runs at once."""
    contains_lag: bool
    """Whether the proximal policy is newer than the one that sampled, so that proximal - rollout contains lag."""

    def admit(self, engine, ledger, version: int) -> int:
        """Groups to submit before the next decode step; `version` is the trainer's."""

    def may_step(self, engine, ledger, version: int) -> bool:
        """Whether the trainer takes a batch now."""

    def before_batch(self, trainer, engine) -> object | None:
        """The trainer takes a batch: wait for the other side, load weights where this is the boundary."""

    def decoded(self, sequences: int) -> None:
        """Charge one decode step of that many running sequences."""

    def between_steps(self, trainer, engine) -> object | None:
        """Called between any two decode steps: deliver weights that are due."""

    def after_optim_step(self, trainer, engine, version: int, tokens: int) -> object | None:
        """Charge an optimizer step on `tokens` tokens; load weights where the schedule says so."""


class _Sync:
    contains_lag = False
    timed = contextlib.nullcontext
    """A context manager around every load of weights (the loop measures it)."""

    def __init__(self, config: SyncConfig, train: TrainConfig, units: Units, clock: Clock, split: tuple[int, int]):
        """split: accelerators that generate, accelerators that train."""
        self.config, self.units, self.clock = config, units, clock
        self.generators, self.trainers = split
        self.group_size = train.group_size
        self.step_groups = train.samples_per_update // train.group_size
        self.batch_groups = self.step_groups * config.updates_per_rollout
        self.max_slots = self.batch_groups * train.group_size
        self.draining = False

    def admit(self, engine, ledger, version: int) -> int:
        return 0 if ledger.live or self.draining else self.batch_groups

    def may_step(self, engine, ledger, version: int) -> bool:
        return len(ledger.finished) == self.batch_groups

    def before_batch(self, trainer, engine):
        self.clock.join("engine", "trainer")

    def decoded(self, sequences: int) -> None:
        self.clock.advance("engine", self.units.decode_step(sequences, self.generators))

    def between_steps(self, trainer, engine):
        return None

    def after_optim_step(self, trainer, engine, version: int, tokens: int):
        self.clock.advance("trainer", self.units.train(tokens, self.trainers))

    def _load(self, trainer, engine, kv: str):
        """A transfer occupies the link, and both sides wait for its end."""
        self.clock.join("engine", "trainer", "link")
        self.clock.advance("link", self.units.transfer())
        self.clock.join("engine", "trainer", "link")
        with self.timed():
            return engine.load_weights(trainer.named_weights(), version=trainer.version, kv=kv)

    def state_dict(self) -> dict:
        return {"draining": self.draining}

    def load_state_dict(self, state: dict) -> None:
        self.draining = state["draining"]


class Barrier(_Sync):
    """G optimizer steps per rollout batch, everything in turn, on all accelerators."""

    def after_optim_step(self, trainer, engine, version: int, tokens: int):
        super().after_optim_step(trainer, engine, version, tokens)
        if version % self.config.updates_per_rollout == 0:
            return self._load(trainer, engine, "keep")
        return None


class Concurrent(_Sync):
    """The next batch is generated, with the weights of the boundary, while this one is trained on.

    The boundary is where the trainer takes a batch: both sides have finished, the weights go over, and only then are
    the next batch's requests submitted and this batch's optimizer steps taken.
    """

    contains_lag = True

    def before_batch(self, trainer, engine):
        super().before_batch(trainer, engine)
        if trainer.version > engine.policy_version:
            return self._load(trainer, engine, "keep")
        return None


class InFlight(_Sync):
    """Weights change between two decode steps, at the modelled time at which the optimizer step ends."""

    contains_lag = True

    def __init__(self, config: SyncConfig, train: TrainConfig, units: Units, clock: Clock, split: tuple[int, int]):
        super().__init__(config, train, units, clock, split)
        self.batch_groups = self.step_groups
        self.max_slots = ceil(config.slots_per_batch * train.samples_per_update)
        self.pending = False
        """An optimizer step was taken whose weights the engine does not have."""
        self.closed = False
        """The lag bound (or a drain) keeps free slots empty."""

    def admit(self, engine, ledger, version: int) -> int:
        """Fill the free slots, as far as the lag bound and the pacing allow."""
        wanted = ceil((self.max_slots - engine.num_unfinished()) / self.group_size)
        if wanted <= 0 or len(ledger.finished) >= self.batch_groups:
            self.closed = False
            return 0
        oldest = min([group.version for group in ledger.running.values()], default=engine.policy_version)
        room = self.batch_groups * (self.config.max_lag - (version - oldest) + 1) - ledger.live
        allowed = 0 if self.draining else max(0, min(wanted, room))
        self.closed = allowed < wanted
        return allowed

    def may_step(self, engine, ledger, version: int) -> bool:
        return not self.pending and len(ledger.finished) >= self.batch_groups

    def before_batch(self, trainer, engine):
        self.clock.wait("trainer", "engine")

    def decoded(self, sequences: int) -> None:
        if sequences == 0:
            assert self.pending, "nothing runs, nothing is due: the lag bound admits nothing"
            self.clock.wait("engine", "trainer")
            return
        units = self.units.decode_step(sequences, self.generators)
        if self.closed and not self.pending:
            self.clock.stall += units
        self.clock.advance("engine", units)

    def between_steps(self, trainer, engine):
        if self.pending and self.clock.now["engine"] >= self.clock.now["trainer"]:
            self.pending = False
            return self._load(trainer, engine, self.config.kv)
        return None

    def after_optim_step(self, trainer, engine, version: int, tokens: int):
        super().after_optim_step(trainer, engine, version, tokens)
        self.pending = True

    def state_dict(self) -> dict:
        return {"draining": self.draining, "pending": self.pending, "closed": self.closed}

    def load_state_dict(self, state: dict) -> None:
        self.draining, self.pending, self.closed = state["draining"], state["pending"], state["closed"]


def make_sync(
    config: SyncConfig, train: TrainConfig, units: Units, clock: Clock, split: tuple[int, int]
) -> Barrier | Concurrent | InFlight:
    kind = {"barrier": Barrier, "concurrent": Concurrent, "inflight": InFlight}[config.schedule]
    return kind(config, train, units, clock, split)
