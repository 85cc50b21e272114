"""Schedules on an engine without a model: versions, lag, the hard bound, conservation, modelled time by hand."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_bench import schedule
from jetrl_bench.clock import Clock, Units
from jetrl_bench.config import CostConfig, Method, ModelConfig, RunSettings, SyncConfig, TaskConfig, TrainConfig
from jetrl_bench.errors import WorkerDied
from jetrl_bench.rollout import Request
from jetrl_bench.schedule import Ledger, LengthEngine, batches, best_split, dry_run
from jetrl_bench.seeds import seed_of
from jetrl_bench.tasks import make_task
from jetrl_bench.weight_sync import make_sync

COST = CostConfig(decode_base=1.0, decode_per_sequence=0.5, train_per_token=0.25, transfer=2.0, accelerators=8)
BARRIER = SyncConfig(schedule="barrier", updates_per_rollout=2)
CONCURRENT = SyncConfig(schedule="concurrent", updates_per_rollout=1)


def in_flight(max_lag=8, slots=3.0, kv="keep"):
    return SyncConfig(schedule="inflight", updates_per_rollout=1, kv=kv, max_lag=max_lag, slots_per_batch=slots)


class World:
    """A schedule, an engine without a model, a trainer that counts, and a log of what happened."""

    def __init__(self, sync_config, lengths, group_size=2, samples_per_update=4, split=(4, 4), cost=COST):
        """lengths[n][s]: response tokens of sample s of problem n."""
        train = TrainConfig(group_size=group_size, samples_per_update=samples_per_update)
        self.clock, self.ledger, self.group_size, self.lengths = Clock(), Ledger(group_size), group_size, lengths
        self.sync = make_sync(sync_config, train, Units(cost), self.clock, split)
        self.engine, self.trainer = LengthEngine(self.sync.max_slots), SimpleNamespace(version=0, named_weights=tuple)
        self.submitted, self.trained, self.lags = 0, [], []
        self.loads = []
        load = self.engine.load_weights

        def record(named, *, version, kv):
            self.loads.append((version, kv, self.engine.num_running(), self.clock.now["engine"]))
            load(named, version=version, kv=kv)

        self.engine.load_weights = record

    def submit(self):
        problem = self.submitted
        self.ledger.submit(problem, self.engine.policy_version)
        for sample in range(self.group_size):
            length = self.lengths(problem, sample)
            request = problem * self.group_size + sample
            self.engine.add(Request(request, problem, sample, [], length, 1.0, 0, ()))
        self.submitted += 1

    def run(self, optimizer_steps):
        for groups in batches(self.sync, self.engine, self.trainer, self.ledger, self.submit):
            for start in range(0, len(groups), self.sync.step_groups):
                step = groups[start : start + self.sync.step_groups]
                completions = [c for g in step for c in g.completions.values()]
                assert all(len(g.completions) == self.group_size for g in step)
                self.lags.append([[self.trainer.version - v for v in c.versions] for c in completions])
                self.trained.append([g.problem_id for g in step])
                tokens = sum(len(c.token_ids) for c in completions)
                self.ledger.trained_tokens += tokens
                self.trainer.version += 1
                self.sync.after_optim_step(self.trainer, self.engine, self.trainer.version, tokens)
            self.check_conservation()
            if self.trainer.version >= optimizer_steps:
                return self
        raise AssertionError

    def check_conservation(self):
        running = sum(len(self.engine.history) - (end - r.max_tokens) for r, end in self.engine.running)
        assert self.ledger.in_flight_tokens() == self.ledger.waiting_tokens() + running


def lengths_of(seed, low=1, high=40):
    return lambda problem, sample: low + seed_of(seed, "lengths", problem, sample) % (high - low)


def test_barrier_by_hand():
    """Two steps per batch: 8 sequences of 3 tokens on 8 accelerators decode in 3 * 1.5; a step trains 12 tokens."""
    world = World(BARRIER, lambda p, s: 3, split=(8, 8)).run(4)
    assert world.clock.now["trainer"] == 2 * (3 * 1.5 + 2 * (0.25 * 12 / 8) + 2.0)
    assert world.trained == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [sorted({lag for c in step for lag in c}) for step in world.lags] == [[0], [1], [0], [1]]
    assert [(v, running) for v, _, running, _ in world.loads] == [(2, 0), (4, 0)]
    assert world.ledger.in_flight_tokens() == 0


def test_concurrent_by_hand():
    """Batch k + 1 is generated while batch k is trained on; the slower side decides, and lag is one batch."""
    world = World(CONCURRENT, lambda p, s: 3, split=(4, 4)).run(3)
    generate, train = 3 * 1.5, 0.25 * 12 / 4
    assert [sorted({lag for c in step for lag in c}) for step in world.lags] == [[0], [1], [1]]
    assert world.clock.now["trainer"] == generate + max(generate, train) + 2.0 + max(generate, train) + 2.0 + train
    assert [(version, at) for version, _, _, at in world.loads] == [(1, 2 * generate + 2.0), (2, 3 * generate + 4.0)]


def test_in_flight_by_hand():
    """4 slots, groups of 2, two groups a batch; lengths 4 and 8: the swap falls inside running responses."""
    world = World(in_flight(slots=1.0), lambda p, s: 4 if p % 2 == 0 else 8, split=(4, 4))
    world.run(3)
    # Problems 0 (4 tokens) and 1 (8) start together, 2 (4) takes 0's slots: 0 completes at step 4, 1 and 2 at step 8.
    assert world.trained[0] == [0, 1]
    version, kv, running, at = world.loads[0]
    # 8 decode steps of 1.5; training of 24 tokens on 4 takes 1.5: the swap comes after decode step 9, work running.
    assert (version, kv, at) == (1, "keep", 8 * 1.5 + 1.5 + 2.0)
    assert running > 0


def test_in_flight_completions_carry_the_versions_that_wrote_them():
    world = World(in_flight(), lengths_of(1, 20, 40)).run(12)
    sequences = [c for step in world.lags for c in step]
    assert any(len(set(c)) > 1 for c in sequences)
    assert all(a >= b for c in sequences for a, b in itertools.pairwise(c))  # older tokens come first


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_lag_never_exceeds_the_bound_and_nothing_is_lost(data):
    """Any lengths, stragglers included, any bound, slots, split and prices."""
    max_lag = data.draw(st.integers(1, 6))
    slots = data.draw(st.sampled_from([0.5, 1.0, 3.0, 6.0]))
    straggler = data.draw(st.integers(0, 9))
    base = lengths_of(data.draw(st.integers(0, 99)), 1, data.draw(st.sampled_from([3, 20])))
    cost = CostConfig(
        decode_base=1.0, decode_per_sequence=0.1, transfer=data.draw(st.sampled_from([0.0, 3.0])), accelerators=8,
        train_per_token=data.draw(st.sampled_from([0.01, 1.0])),
    )  # fmt: skip
    world = World(
        in_flight(max_lag, slots), lambda p, s: 300 if (p, s) == (straggler, 0) else base(p, s), cost=cost,
        split=(data.draw(st.integers(1, 7)), 1),
    ).run(30)  # fmt: skip
    assert max(lag for step in world.lags for c in step for lag in c) <= max_lag
    trained = [p for step in world.trained for p in step]
    assert len(trained) == len(set(trained)) == 60
    assert set(range(60)) - set(trained) <= set(range(world.submitted))


def test_slow_problems_are_trained_on():
    """4 slow and 12 fast problems, bound 1: the bound is kept by admission, so all 16 are trained on within 8 steps."""
    world = World(in_flight(max_lag=1), lambda p, s: 200 if p % 4 == 0 else 5).run(10)
    assert set(range(16)) <= {p for step in world.trained for p in step}
    assert max(lag for step in world.lags for c in step for lag in c) <= 1


def test_stall_is_counted_where_a_straggler_closes_admission():
    quiet = World(in_flight(max_lag=8), lambda p, s: 10).run(20)
    held = World(in_flight(max_lag=2), lambda p, s: 400 if p == 3 else 10).run(20)
    assert quiet.clock.stall == 0 and held.clock.stall > 100


def test_order_of_submission_is_the_same_for_every_schedule():
    for config in (BARRIER, CONCURRENT, in_flight()):
        world = World(config, lengths_of(4)).run(6)
        assert sorted(p for step in world.trained for p in step)[:3] == [0, 1, 2]
        assert world.submitted >= 12


def test_trainer_slower_than_engine_paces_admission():
    """While a whole batch waits, nothing is submitted, so tokens do not age in a queue."""
    slow = CostConfig(decode_base=1.0, decode_per_sequence=0.0, train_per_token=5.0, transfer=0.0, accelerators=8)
    world = World(in_flight(max_lag=50), lambda p, s: 10, cost=slow).run(20)
    assert len(world.ledger.finished) <= 2 * world.sync.batch_groups + 6
    assert max(lag for step in world.lags for c in step for lag in c) <= 5
    assert world.clock.stall == 0


def test_draining_empties_the_engine_and_admission_reopens():
    world = World(in_flight(), lengths_of(2, 5, 30)).run(5)
    world.sync.draining = True
    empty = 0
    for groups in batches(world.sync, world.engine, world.trainer, world.ledger, world.submit):
        if not groups:
            empty += 1
            assert world.engine.num_unfinished() == 0 and not world.sync.draining
        else:
            world.trainer.version += 1
            world.sync.after_optim_step(world.trainer, world.engine, world.trainer.version, 10)
        if world.trainer.version == 15:
            break
    assert empty == 1


def test_state_goes_on_where_it_stopped():
    for config in (BARRIER, CONCURRENT, in_flight(), in_flight(max_lag=2)):
        whole = World(config, lengths_of(7)).run(12)
        first = World(config, lengths_of(7)).run(6)
        second = World(config, lengths_of(7))
        for name in ("clock", "ledger", "sync"):
            getattr(second, name).load_state_dict(getattr(first, name).state_dict())
        for name in ("waiting", "running", "history", "policy_version"):
            setattr(second.engine, name, getattr(first.engine, name))
        second.trainer.version, second.submitted = first.trainer.version, first.submitted
        second.run(12)
        assert second.trained == whole.trained[6:] and second.lags == whole.lags[6:]
        assert second.clock.state_dict() == whole.clock.state_dict()


def test_dead_engine_ends_the_run_with_its_message():
    world = World(BARRIER, lambda p, s: 3)
    steps = iter([[], RuntimeError("worker 2 lost its device")])

    def step():
        outcome = next(steps)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    world.engine.step = step
    with pytest.raises(WorkerDied, match="version 0: worker 2 lost its device"):
        world.run(2)


def run_settings(sync: SyncConfig, **cost) -> RunSettings:
    task = TaskConfig(min_steps=6, max_steps=22)
    return RunSettings(
        seed=0, base_index=0, replicate=0, lr=2e-4, model=ModelConfig(), task=task, base={"task": task},
        train=TrainConfig(samples_per_update=32, max_tokens=80), cost=CostConfig(**cost), method=Method(sync=sync),
    )  # fmt: skip


def test_best_split_is_the_fastest_and_deterministic():
    settings = run_settings(in_flight())
    lengths = schedule.expected_lengths(make_task(settings.task), 80)
    split = best_split(settings, lengths)
    assert split == best_split(settings, lengths) and sum(split) == 8
    times = {n: dry_run(settings, (n, 8 - n), lengths, 32).now["trainer"] for n in range(1, 8)}
    assert times[split[0]] == min(times.values()) and times[1] > 1.5 * times[split[0]]


def test_conventional_runs_use_every_accelerator_in_both_phases():
    settings = run_settings(BARRIER)
    assert best_split(settings, [40]) == (8, 8)


def test_a_given_split_is_obeyed_or_refused():
    settings = run_settings(in_flight(), generation_accelerators=3)
    assert best_split(settings, [40]) == (3, 5)
    with pytest.raises(ValueError, match="leaves none of 8"):
        settings = run_settings(in_flight(), generation_accelerators=8)
        best_split(settings, [40])


def test_dearer_training_moves_accelerators_to_the_trainer():
    cheap, dear = (run_settings(in_flight(), train_per_token=x) for x in (0.01, 0.2))
    lengths = schedule.expected_lengths(make_task(cheap.task), 80)
    assert best_split(cheap, lengths)[1] < best_split(dear, lengths)[1]
