"""cluster.py against hand-worked schedules, token-by-token simulations, and the training loop's own clock."""

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_bench.cluster import best_split, generate, simulate
from jetrl_bench.config import (
    BaseConfig,
    CostConfig,
    Method,
    ModelConfig,
    RunSettings,
    SyncConfig,
    TaskConfig,
    TrainConfig,
)
from jetrl_bench.costs import Costs, UnitCosts
from jetrl_bench.workload import Lengths, Schedule


class Flat:
    """Costs of a textbook: a decode step is a + b x batch + c x context, prefill and training are per token."""

    unit, tp, max_num_seqs, reserve_full = "s", 1, 4, False

    def __init__(self, capacity=10**9, a=1.0, b=0.1, c=0.001):
        self.capacity, self.a, self.b, self.context_s = capacity, a, b, c

    def decode_step_s(self, batch, context):
        return self.a + self.b * batch + self.context_s * context

    def prefill_s(self, tokens, length):
        return 0.01 * tokens

    def kv_capacity(self):
        return self.capacity

    def logprob_s(self, tokens, length, layout):
        return 0.02 * tokens

    def train_step_s(self, tokens, length, layout):
        return 0.05 * tokens

    def transfer_s(self, gpus, colocated):
        return 0.5


def token_by_token(cost, lengths, prompt, capacity):
    """One replica written as a loop over single decode steps: continuous batching with recompute preemption."""
    waiting, running, clock, preempted, order = [[prompt, n, 0] for n in lengths], [], 0.0, 0, 0
    while waiting or running:
        fresh = []
        while waiting and len(running) + len(fresh) < cost.max_num_seqs:
            need = waiting[0][0] + waiting[0][2]
            held = sum(s[0] + s[2] for s in running + fresh)
            if (running or fresh) and held + need + len(running) + len(fresh) + 1 > capacity:
                break
            order += 1
            fresh.append([*waiting.pop(0), order])
        if fresh:
            clock += cost.prefill_s(sum(s[0] + s[2] for s in fresh), 0)
        running += fresh
        context = sum(s[0] + s[2] for s in running)
        if context + len(running) > capacity:
            newest = running.pop()
            waiting.insert(0, newest[:3])
            preempted += 1
            continue
        clock += cost.decode_step_s(len(running), context)
        for sequence in running:
            sequence[1], sequence[2] = sequence[1] - 1, sequence[2] + 1
        running = [s for s in running if s[1]]
    return clock, preempted


@given(st.lists(st.integers(1, 60), min_size=1, max_size=14), st.integers(0, 20), st.sampled_from([10**9, 90, 150]))
def test_a_replica_equals_its_token_by_token_loop(lengths, prompt, capacity):
    cost = Flat(capacity)
    got = generate(cost, Lengths(measured=tuple(lengths), cap=60), replicas=1, sequences=len(lengths), prompt=prompt)
    assert got == pytest.approx(token_by_token(cost, lengths, prompt, capacity)[0], rel=1e-9)


def test_preemption_is_counted_and_costs_time():
    lengths = Lengths(measured=(40, 40, 40, 40), cap=40)
    schedule = Schedule("conventional", 1, 4)
    tight, roomy = (simulate(Flat(c), lengths, schedule, prompt=10, optimizer_steps=1) for c in (120, 10**9))
    assert roomy.preemptions == 0 < tight.preemptions
    assert tight.phases["generation"] > roomy.phases["generation"]


def test_an_engine_that_reserves_never_preempts():
    class Reserving(Flat):
        reserve_full = True

    schedule = Schedule("conventional", 1, 4)
    result = simulate(Reserving(120), Lengths(measured=(40,) * 4, cap=40), schedule, prompt=10, optimizer_steps=1)
    assert result.preemptions == 0
    # two of 50 tokens fit at a time: two waves of 40 steps
    wave = sum(1.0 + 0.1 * 2 + 0.001 * 2 * (10 + i) for i in range(40)) + 0.01 * 20
    assert result.phases["generation"] == pytest.approx(2 * wave)


def test_conventional_phases_by_hand():
    """2 GPUs, G = 2, B = 2, all responses 3 tokens, prompt 1: every number written out."""
    cost = Flat(c=0.0)
    result = simulate(
        cost, Lengths(measured=(3,), cap=3), Schedule("conventional", 2, 2, 2), prompt=1, optimizer_steps=4
    )
    generation = 0.01 * 2 + 3 * (1.0 + 0.1 * 2)  # two sequences a replica, together
    logprob = 0.02 * 2 * 4  # the busiest of two ranks holds two sequences of four tokens
    training = 2 * 0.05 * 4
    assert result.phases == pytest.approx(
        {"generation": 2 * generation, "logprob": 2 * logprob, "train": 2 * training, "transfer": 2 * 0.5}
    )
    assert result.total == pytest.approx(2 * (generation + logprob + training + 0.5))
    assert result.lag() == {"mean": 0.5, "p95": 1.0, "max": 1.0}
    assert result.tokens == 4 * 2 * 3


@pytest.mark.parametrize("updates", [1, 4, 8])
def test_conventional_lag_is_g_minus_one(updates):
    lengths = Lengths(mean=20, cv=0.8, cap=60)
    result = simulate(Flat(), lengths, Schedule("conventional", 2, 8, updates), prompt=2, optimizer_steps=16)
    assert result.lag()["max"] == updates - 1
    assert sum(result.lags.values()) == result.tokens


def test_concurrent_is_one_batch_off():
    lengths = Lengths(mean=20, cv=0.8, cap=60)
    schedule = Schedule("concurrent", 4, 8, 2, generation_gpus=2)
    result = simulate(Flat(), lengths, schedule, prompt=2, optimizer_steps=16)
    assert result.lag()["max"] == 2 * 2 - 1


@pytest.mark.parametrize("max_lag", [2, 4, 9])
def test_inflight_lag_never_exceeds_its_bound(max_lag):
    lengths = Lengths(mean=60, cv=1.2, cap=600)
    schedule = Schedule("inflight", 8, 8, generation_gpus=4, slots=4, max_lag=max_lag)
    result = simulate(Flat(), lengths, schedule, prompt=2, optimizer_steps=60)
    assert 0 < result.lag()["max"] <= max_lag
    free = simulate(
        Flat(), lengths, Schedule("inflight", 8, 8, generation_gpus=4, slots=4), prompt=2, optimizer_steps=60
    )
    assert free.lag()["max"] > 9 and free.steady_step <= result.steady_step * 1.001


def test_inflight_steady_state_is_the_slower_side():
    """Generation-bound: slots / (mean length x step time) sequences a second; training-bound: the train step."""
    lengths, cost = Lengths(mean=100, cv=0.5, cap=400), Flat(c=0.0)
    schedule = Schedule("inflight", 8, 16, generation_gpus=4, slots=4, logprob_passes=0, start="stationary")
    result = simulate(cost, lengths, schedule, prompt=0, optimizer_steps=200)
    rate = 16 / (100 * (1.0 + 0.1 * 4))
    assert result.steady_step == pytest.approx(16 / rate + 0.5 / 2, rel=0.08)

    class SlowTraining(Flat):
        def train_step_s(self, tokens, length, layout):
            return 5000.0

    result = simulate(SlowTraining(), lengths, schedule, prompt=0, optimizer_steps=10)
    assert result.steady_step == pytest.approx(5000.5, rel=0.01)
    assert result.generation_busy / result.total < 0.3


def test_recomputing_the_cache_costs_a_prefill_of_all_live_context():
    """One replica, four sequences that never end within the run: the swap after the first step, by hand."""

    class OneStep(Flat):
        def train_step_s(self, tokens, length, layout):
            return 10.0

    lengths = Lengths(measured=(5, 5, 100, 100, 100, 100, 100), cap=100)
    runs = {
        kv: simulate(
            OneStep(c=0.0),
            lengths,
            Schedule("inflight", 2, 2, generation_gpus=1, slots=4, logprob_passes=0, kv=kv),
            prompt=10,
            optimizer_steps=1,
        )
        for kv in ("keep", "recompute")
    }
    # the step takes 10 s; decode steps of four take 1.4 s, the two new prompts 0.2 s: 7 more steps end at 9.8 + 0.2
    live = 2 * (10 + 5 + 7) + 2 * (10 + 7)
    gap = runs["recompute"].total - runs["keep"].total
    assert gap == pytest.approx(0.01 * live)


def test_a_stationary_start_is_not_biased_to_short_sequences():
    """From empty slots short sequences finish first; in the middle of a long run the trained mean is the mean."""
    lengths = Lengths(mean=100, cv=0.8, cap=400)

    def trained_mean(start: str) -> float:
        schedule = Schedule("inflight", 128, 128, generation_gpus=64, slots=4, start=start)
        runs = [simulate(Flat(), lengths, schedule, prompt=0, optimizer_steps=2, seed=s) for s in range(4)]
        return sum(r.tokens for r in runs) / sum(r.sequences for r in runs)

    assert trained_mean("stationary") == pytest.approx(100.5, rel=0.08)
    assert trained_mean("cold") < 75


@pytest.mark.parametrize("kind", ["conventional", "concurrent", "inflight"])
def test_seeds_decide_everything(kind):
    schedule = Schedule(kind, 8, 32, generation_gpus=None if kind == "conventional" else 4)
    run = {"prompt": 100, "optimizer_steps": 6}
    cost, lengths = Costs("Qwen3-8B", "H100"), Lengths(mean=500, cv=0.9, cap=4000)
    first, again, other = (simulate(cost, lengths, schedule, seed=s, **run) for s in (1, 1, 2))
    assert first == again
    assert first.total != other.total


@given(st.floats(10, 900), st.floats(0.2, 1.5))
def test_capped_lognormal_has_the_stated_mean(mean, cv):
    x = Lengths(mean=mean, cv=cv, cap=1000).draw(np.random.default_rng(0), 50_000)
    assert x.max() <= 1000 and x.min() >= 1
    assert x.mean() == pytest.approx(mean + 0.5, rel=0.03)  # drawn lengths are rounded up


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match="uses all GPUs in both phases"):
        Schedule("conventional", 8, 8, generation_gpus=4)
    with pytest.raises(ValueError, match="generation_gpus"):
        Schedule("inflight", 8, 8)
    with pytest.raises(ValueError, match="not a multiple of updates_per_rollout"):
        simulate(Flat(), Lengths(mean=20, cap=60), Schedule("conventional", 2, 8, 4), optimizer_steps=6)
    with pytest.raises(ValueError, match="exceeds the KV cache"):
        generate(Flat(capacity=30), Lengths(measured=(40,), cap=40), replicas=1, sequences=1, prompt=0)
    with pytest.raises(ValueError, match="must lie between"):
        Lengths(mean=500, cap=400)


def test_best_split_beats_its_neighbours_and_obeys_the_bound():
    cost, lengths = Costs("Qwen2.5-7B", "H100"), Lengths(mean=1000, cv=0.8, cap=4096)
    schedule = Schedule("inflight", 16, 128, generation_gpus=8, slots=32, start="stationary")
    run = {"optimizer_steps": 12}
    generation, result = best_split(cost, lengths, schedule, **run)
    for other in (generation - 1, generation + 1):
        beside = Schedule("inflight", 16, 128, generation_gpus=other, slots=32, start="stationary")
        assert simulate(cost, lengths, beside, **run).steady_step >= result.steady_step
    with pytest.raises(ValueError, match="no split keeps the lag"):
        best_split(cost, lengths, schedule, max_lag=0, **run)


def test_128_gpus_and_100_optimizer_steps_within_ten_seconds():
    cost, lengths = Costs("Qwen2.5-7B", "H100"), Lengths(mean=3000, cv=0.9, cap=8192)
    schedule = Schedule("inflight", 128, 1024, generation_gpus=64, slots=64)
    started = time.process_time()
    result = simulate(cost, lengths, schedule, optimizer_steps=100)
    assert time.process_time() - started < 10
    assert result.sequences == 100 * 1024


def loop_settings(sync: SyncConfig) -> RunSettings:
    return RunSettings(
        seed=0,
        base_index=0,
        replicate=0,
        lr=1e-4,
        model=ModelConfig(),
        task=TaskConfig(),
        base=BaseConfig(),
        train=TrainConfig(group_size=1, samples_per_update=64, max_tokens=400),
        cost=CostConfig(),
        method=Method(sync=sync),
    )


@pytest.mark.parametrize(
    ("sync", "generation", "schedule"),
    [
        (SyncConfig(schedule="barrier", updates_per_rollout=4), 8, {"kind": "conventional", "updates_per_rollout": 4}),
        (SyncConfig(schedule="concurrent", updates_per_rollout=4), 5, {"kind": "concurrent", "updates_per_rollout": 4}),
        (SyncConfig(schedule="inflight", kv="keep", max_lag=50), 5, {"kind": "inflight", "max_lag": 50}),
        (SyncConfig(schedule="inflight", kv="keep", max_lag=4), 5, {"kind": "inflight", "max_lag": 4}),
        (SyncConfig(schedule="inflight", kv="keep", max_lag=8), 2, {"kind": "inflight", "max_lag": 8}),
    ],
)
def test_the_training_loops_clock_and_the_simulation_agree(sync, generation, schedule):
    """The loop's own schedule, token by token on its clock, against the simulation on the same lengths: within 1 %."""
    from jetrl_bench.schedule import dry_run

    rng, steps = random.Random(0), 40
    lengths = [max(1, min(400, int(rng.lognormvariate(4.3, 0.8)))) for _ in range(5000)]
    settings = loop_settings(sync)
    training = 8 if sync.schedule == "barrier" else 8 - generation
    clock = dry_run(settings, (generation, training), lengths, steps)
    result = simulate(
        UnitCosts(settings.cost, generation, max_num_seqs=192 if sync.schedule == "inflight" else 256),
        Lengths(measured=tuple(lengths), cap=400),
        Schedule(
            gpus=8,
            samples_per_update=64,
            generation_gpus=None if sync.schedule == "barrier" else generation,
            logprob_passes=0,
            balance="ideal",
            **schedule,
        ),
        prompt=0,
        optimizer_steps=steps,
    )
    assert result.completed[-1] == pytest.approx(clock.now["trainer"], rel=0.01)
