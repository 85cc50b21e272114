"""Modelled time: one timeline per resource, and what a decode step, an optimizer step and a weight transfer cost.

The toy runs on one CPU core in any order it likes; the clock says when things would have happened on `accelerators`
devices of which some generate and some train. Units are normalised (a decode step of an empty batch is about 1); they
are never seconds of another machine. Prompts are free on both sides: no prefill is charged, and training is charged for
response tokens only.
"""

from math import ceil

from jetrl_bench.config import CostConfig

RESOURCES = ("engine", "trainer", "link")


class Clock:
    """Timelines that advance on their own and meet in `join`. `busy` is work, `now` is work and waiting."""

    def __init__(self):
        self.now = dict.fromkeys(RESOURCES, 0.0)
        self.busy = dict.fromkeys(RESOURCES, 0.0)
        self.stall = 0.0
        """Time in which the trainer waited because the lag bound kept the engine from starting new sequences."""

    def advance(self, resource: str, units: float) -> None:
        assert units >= 0, units
        self.now[resource] += units
        self.busy[resource] += units

    def join(self, *resources: str) -> float:
        """Every resource waits for the last one; returns the common time."""
        latest = max(self.now[r] for r in resources)
        for resource in resources:
            self.now[resource] = latest
        return latest

    def wait(self, resource: str, until: str) -> None:
        """`resource` idles until the other's time, if that lies ahead."""
        self.now[resource] = max(self.now[resource], self.now[until])

    def state_dict(self) -> dict:
        return {"now": dict(self.now), "busy": dict(self.busy), "stall": self.stall}

    def load_state_dict(self, state: dict) -> None:
        self.now, self.busy, self.stall = dict(state["now"]), dict(state["busy"]), state["stall"]


class Units:
    """Prices in units (config `cost`, preset `units`)."""

    def __init__(self, config: CostConfig):
        self.config = config

    def decode_step(self, batch: int, accelerators: int) -> float:
        """One token for each of `batch` running sequences spread evenly over the accelerators."""
        return self.config.decode_base + self.config.decode_per_sequence * ceil(batch / accelerators)

    def train(self, tokens: int, accelerators: int) -> float:
        """Forward, backward and update on `tokens` response tokens."""
        return self.config.train_per_token * tokens / accelerators

    def transfer(self) -> float:
        """A weight update: generation and training both pause."""
        return self.config.transfer
