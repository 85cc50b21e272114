"""The conformance suite: ReferenceEngine passes it, and for every check an engine broken in that one way fails it."""

import dataclasses

import pytest
import torch
from engine_cases import CFG, VOCAB, Policies

from jetrl_bench import conformance
from jetrl_bench.config import FlowConfig
from jetrl_bench.conformance import CHECKS, Nonconformance
from jetrl_bench.precision import make_flow
from jetrl_bench.rollout import ReferenceEngine

BF16_NOISE = 0.15
"""Largest |difference| of a sampled token's log-prob between bf16 and fp32 on these sharpened toys is about 0.07."""


@pytest.fixture(scope="module")
def policies():
    torch.set_num_threads(1)
    return Policies()


def reference():
    return ReferenceEngine(CFG, VOCAB, make_flow(FlowConfig()), max_slots=8, max_len=128)


def subject_of(policies, make):
    return policies.subject(make, dtype=torch.bfloat16, tolerance=BF16_NOISE)


@pytest.mark.parametrize("name", CHECKS)
def test_reference_engine_conforms(policies, name):
    CHECKS[name](subject_of(policies, reference))


class Broken:
    """ReferenceEngine with one fault."""

    def __init__(self):
        self.engine = reference()

    def __getattr__(self, name):
        return getattr(self.engine, name)


class NoResumeKind(Broken):
    resume = "somehow"


class LosesAVersion(Broken):
    def step(self):
        done = self.engine.step()
        for completion in done:
            completion.versions.pop()
        return done


class TwoTokensAStep(Broken):
    def step(self):
        return self.engine.step() + self.engine.step()


class RawLogprobs(Broken):
    """Log-probs at temperature 1, whatever was sampled from."""

    def step(self):
        done = self.engine.step()
        for c in done:
            c.logprobs = POLICIES.logprobs([0] * len(c.token_ids), c.prompt_ids, c.token_ids, 1.0, "keep")
        return done


class RandomGreedy(Broken):
    """Samples at temperature 1 where it should take the likeliest token."""

    def add(self, request):
        self.engine.add(dataclasses.replace(request, temperature=request.temperature or 1.0))


class OnlyLength(Broken):
    def step(self):
        done = self.engine.step()
        for completion in done:
            completion.finish_reason = "length"
        return done


class SeedsByArrival(Broken):
    count = 0

    def add(self, request):
        self.count += 1
        self.engine.add(dataclasses.replace(request, seed=self.count))


class DropsTheQueue(Broken):
    def add(self, request):
        if self.engine.num_unfinished() < 8:
            self.engine.add(request)


class AlwaysRecomputes(Broken):
    def load_weights(self, named, *, version, kv):
        return self.engine.load_weights(named, version=version, kv="recompute")


class NeverRecomputes(Broken):
    def load_weights(self, named, *, version, kv):
        return self.engine.load_weights(named, version=version, kv="keep")


class IgnoresTheSecondUpdate(Broken):
    def load_weights(self, named, *, version, kv):
        stats = None
        if self.engine.policy_version < 0:
            stats = self.engine.load_weights(named, version=version, kv=kv)
        self.engine.policy_version = version
        return stats


class LeavesAResidue(Broken):
    """An update that lets a little of the weights before it live on."""

    def load_weights(self, named, *, version, kv):
        before = dict(self.engine._received)
        named = [
            (n, t if n not in before else (0.99 * t.float() + 0.01 * before[n].float()).bfloat16()) for n, t in named
        ]
        return self.engine.load_weights(named, version=version, kv=kv)


class FillsTheGaps(Broken):
    """A missing tensor keeps its value, an unknown one is dropped."""

    def load_weights(self, named, *, version, kv):
        named = {n: t for n, t in named if n in self.engine._manifest}
        return self.engine.load_weights({**self.engine._received, **named}.items(), version=version, kv=kv)


class LoadsWhatCame(Broken):
    """Applies tensors as they come, and raises only then."""

    def load_weights(self, named, *, version, kv):
        got, failure = dict(self.engine._received), None
        try:
            for name, tensor in named:
                got[name] = tensor
        except OSError as error:
            failure = error
        stats = self.engine.load_weights(got.items(), version=version if failure is None else 0, kv=kv)
        if failure:
            raise failure
        return stats


class TakesAnything(Broken):
    def add(self, request):
        self.engine.add(
            dataclasses.replace(
                request,
                token_ids=[t % VOCAB for t in request.token_ids] or [0],
                max_tokens=min(request.max_tokens, 24),
            )
        )


class ForgetsTheCache(Broken):
    """A state without keys and values."""

    def state_dict(self):
        state = self.engine.state_dict()
        for row in state["running"].values():
            row["keys"] = [torch.zeros_like(k) for k in row["keys"]]
        return state


class GeneratesFromNothing(Broken):
    def step(self):
        return self.engine.step() if self.engine.policy_version >= 0 else []


class ClosesOnce(Broken):
    closed = False

    def close(self):
        assert not self.closed
        self.closed = True
        self.engine.close()


FAULTS = [
    ("starts_empty", NoResumeKind),
    ("starts_empty", GeneratesFromNothing),
    ("completes_requests", LosesAVersion),
    ("one_token_a_step", TwoTokensAStep),
    ("logprobs_are_the_sampling_distributions", RawLogprobs),
    ("greedy_is_the_likeliest_token", RandomGreedy),
    ("stops_for_the_right_reason", OnlyLength),
    ("a_request_depends_on_nothing_else", SeedsByArrival),
    ("queues_what_has_no_slot", DropsTheQueue),
    ("swaps_on_the_kept_cache", AlwaysRecomputes),
    ("swaps_and_recomputes", NeverRecomputes),
    ("new_requests_see_new_weights_only", IgnoresTheSecondUpdate),
    ("warm_equals_cold", LeavesAResidue),
    ("refuses_wrong_tensors", FillsTheGaps),
    ("survives_or_ends_when_the_source_fails", LoadsWhatCame),
    ("refuses_bad_requests", TakesAnything),
    ("saves_and_resumes", ForgetsTheCache),
    ("closes", ClosesOnce),
]


def test_every_check_has_a_fault_that_it_finds():
    assert {name for name, _ in FAULTS} == set(CHECKS)


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[f"{n}-{f.__name__}" for n, f in FAULTS])
def test_a_broken_engine_fails_its_check(policies, name, fault):
    global POLICIES
    POLICIES = policies
    failure = Nonconformance if name != "closes" else AssertionError
    with pytest.raises(failure):
        CHECKS[name](subject_of(policies, fault))


def test_requests_are_reproducible(policies):
    subject = subject_of(policies, reference)
    assert conformance.requests(subject, 5) == conformance.requests(subject, 5)
