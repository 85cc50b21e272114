"""The modelled clock, against hand-computed timelines."""

import pytest

from jetrl_bench.clock import Clock, Units
from jetrl_bench.config import CostConfig

COST = CostConfig(decode_base=1.0, decode_per_sequence=0.5, train_per_token=0.25, transfer=2.0)


def test_prices_by_hand():
    units = Units(COST)
    assert units.decode_step(8, 4) == 1 + 0.5 * 2
    assert units.decode_step(9, 4) == 1 + 0.5 * 3  # the fullest accelerator decides
    assert units.decode_step(1, 4) == 1.5
    assert units.train(40, 4) == 2.5 and units.transfer() == 2.0


def test_timelines_advance_apart_and_meet():
    clock = Clock()
    clock.advance("engine", 5)
    clock.advance("trainer", 2)
    assert clock.join("engine", "trainer") == 5
    assert clock.now == {"engine": 5, "trainer": 5, "link": 0}
    assert clock.busy == {"engine": 5, "trainer": 2, "link": 0}
    clock.advance("trainer", 1)
    clock.wait("trainer", "engine")
    assert clock.now["trainer"] == 6
    clock.wait("engine", "trainer")
    assert clock.now["engine"] == 6 and clock.busy["engine"] == 5


def test_time_never_runs_backwards():
    with pytest.raises(AssertionError):
        Clock().advance("link", -1)


def test_state_round_trip():
    clock = Clock()
    clock.advance("engine", 0.1)
    clock.stall = 3.5
    other = Clock()
    other.load_state_dict(clock.state_dict())
    clock.advance("engine", 1)
    assert other.now["engine"] == 0.1 and other.stall == 3.5 and other.busy["engine"] == 0.1
