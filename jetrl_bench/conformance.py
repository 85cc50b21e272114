"""What every rollout engine must do, as checks that run against any of them (docs/engines.md says it in words).

A `Subject` tells the suite how to make an engine and what the right numbers are; the numbers come from somewhere else
than the engine (the tests take them from transformers). `CHECKS` maps a name to a check; a check raises
`Nonconformance` with one line that says what was found, and returns nothing otherwise. From a test of your own:

    @pytest.mark.parametrize("name", conformance.CHECKS)
    def test_my_engine(name):
        conformance.CHECKS[name](my_subject)
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from jetrl_bench.errors import WorkerDied
from jetrl_bench.rollout import Completion, Request

Named = list[tuple[str, Tensor]]
CHECKS: dict[str, Callable[["Subject"], None]] = {}
STEPWISE_ONLY = {"one_token_a_step": "an engine that generates by itself hands over whatever has come meanwhile"}
"""Checks that an engine with `stepwise=False` cannot pass, and why."""


class Nonconformance(AssertionError):
    """The engine does not do what engines must do."""


@dataclass(frozen=True)
class Subject:
    make: Callable[[], object]
    """A fresh engine without weights: at least 8 slots, at most 16, and max_len of at least 96."""
    weights: Callable[[int], Named]
    """weights(n): what load_weights takes, for n = 0, 1, 2 three different policies of one shape."""
    logprobs: Callable[[list[int], list[int], list[int], float, str], list[float]]
    """(policy of each response token, prompt, response, temperature, kv) -> log-prob of each response token, where a
    change of policy inside the response keeps or recomputes the KV cache. Independent of the engine."""
    vocab_size: int
    tolerance: float
    """Largest |difference| to `logprobs` of a single token."""
    stepwise: bool = True
    """Nothing moves between two steps, and equal requests give equal bits. False for an engine that generates while
    nobody asks: a token's company is then a matter of time, and its log-probs are compared within `tolerance`."""


def check(function):
    CHECKS[function.__name__] = function
    return function


def expect(condition: bool, text: str) -> None:
    if not condition:
        raise Nonconformance(text)


def requests(subject: Subject, count: int = 8, *, max_tokens: int = 24, first: int = 0, stop=(), temperature=0.7):
    """Prompts of different lengths; the same arguments give the same requests."""
    out = []
    for i in range(first, first + count):
        length = 3 + 5 * (i % 4)
        ids = [(7 * i + 13 * j + 1) % subject.vocab_size for j in range(length)]
        out.append(Request(i, i // 2, i % 2, ids, max_tokens, temperature, 1_000_003 * (i + 1) + 2**62, tuple(stop)))
    return out


def run(engine, todo: Iterable[Request] = (), *, limit: int = 2000) -> dict[int, Completion]:
    """Step until nothing is unfinished; completions by request id."""
    done: dict[int, Completion] = {}
    for request in todo:
        engine.add(request)
    for _ in range(limit):
        if not engine.num_unfinished():
            return done
        for completion in engine.step():
            expect(completion.request_id not in done, f"request {completion.request_id} was returned twice")
            done[completion.request_id] = completion
    raise Nonconformance(f"{engine.num_unfinished()} requests are unfinished after {limit} steps")


def begin(engine, todo: Iterable[Request], steps: int) -> dict[int, Completion]:
    """Add all, take some steps; completions by request id."""
    for request in todo:
        engine.add(request)
    return {c.request_id: c for _ in range(steps) for c in engine.step()}


class opened:
    """An engine that holds policy `policy` as version `version`, closed at the end."""

    def __init__(self, subject: Subject, policy: int | None = 0, version: int = 0):
        self.subject, self.policy, self.version = subject, policy, version

    def __enter__(self):
        self.engine = self.subject.make()
        if self.policy is not None:
            self.engine.load_weights(self.subject.weights(self.policy), version=self.version, kv="keep")
        return self.engine

    def __exit__(self, *_):
        self.engine.close()


def _close(subject: Subject, completion: Completion, policies: list[int], temperature: float, kv: str) -> float:
    right = subject.logprobs(policies, completion.prompt_ids, completion.token_ids, temperature, kv)
    return max(abs(a - b) for a, b in zip(completion.logprobs, right, strict=True))


def _same(subject: Subject, a: dict[int, Completion], b: dict[int, Completion]) -> bool:
    bound = 0.0 if subject.stepwise else subject.tolerance
    return a.keys() == b.keys() and all(
        (a[i].token_ids, a[i].finish_reason) == (b[i].token_ids, b[i].finish_reason)
        and max(abs(x - y) for x, y in zip(a[i].logprobs, b[i].logprobs, strict=True)) <= bound
        for i in a
    )


def _midway(subject: Subject) -> int:
    """max_tokens of requests that are still running after a dozen steps, also where nobody waits for the steps."""
    return 30 if subject.stepwise else 70


@check
def starts_empty(subject: Subject) -> None:
    """A fresh engine runs nothing, says how it is saved, and needs weights before it generates."""
    with opened(subject, None) as engine:
        expect(engine.num_unfinished() == 0 and engine.num_running() == 0, "a fresh engine has unfinished requests")
        expect(engine.resume in ("exact", "drained"), f"resume is {engine.resume!r}, not 'exact' or 'drained'")
        try:
            engine.add(requests(subject, 1)[0])
            engine.step()
        except ValueError:
            return
        raise Nonconformance("the engine generated before it was given weights")


@check
def completes_requests(subject: Subject) -> None:
    """Every request comes back once, as what it was, with a log-prob and a version for every token."""
    with opened(subject, 0, version=5) as engine:
        todo = requests(subject)
        done = run(engine, todo)
        expect(done.keys() == {r.request_id for r in todo}, "not every request came back")
        for request in todo:
            c = done[request.request_id]
            expect((c.problem_id, c.sample) == (request.problem_id, request.sample), "problem or sample id changed")
            expect(list(c.prompt_ids) == request.token_ids, f"request {request.request_id}: the prompt changed")
            counts = len(c.token_ids), len(c.logprobs), len(c.versions)
            expect(0 < min(counts) == max(counts), f"{counts} tokens, log-probs and versions")
            expect(all(0 <= t < subject.vocab_size for t in c.token_ids), "a token is outside the vocabulary")
            expect(all(math.isfinite(x) and x <= 1e-6 for x in c.logprobs), "a log-prob is not a log-probability")
            expect(set(c.versions) == {5}, f"versions are {sorted(set(c.versions))}, the only weights are version 5")


@check
def one_token_a_step(subject: Subject) -> None:
    """A step gives a sequence one token at most, so that weights can be swapped at any token."""
    with opened(subject) as engine:
        begin(engine, requests(subject, 1, max_tokens=12), 0)
        steps = 0
        while engine.num_unfinished():
            engine.step()
            steps += 1
            expect(steps < 100, "one short request is unfinished after 100 steps")
        expect(steps >= 12, f"12 tokens took {steps} steps")


@check
def logprobs_are_the_sampling_distributions(subject: Subject) -> None:
    """log softmax(logits / temperature) at the sampled token, over the whole vocabulary."""
    with opened(subject) as engine:
        for temperature in (1.0, 0.6):
            for c in run(engine, requests(subject, temperature=temperature)).values():
                gap = _close(subject, c, [0] * len(c.token_ids), temperature, "keep")
                expect(gap <= subject.tolerance, f"temperature {temperature}: off by {gap:.2e}")


@check
def greedy_is_the_likeliest_token(subject: Subject) -> None:
    """Temperature 0 takes the most likely token and reports its log-prob at temperature 1."""
    with opened(subject) as engine:
        for c in run(engine, requests(subject, 4, max_tokens=8, temperature=0.0)).values():
            gap = _close(subject, c, [0] * len(c.token_ids), 1.0, "keep")
            expect(gap <= subject.tolerance, f"off by {gap:.2e} from the log-prob at temperature 1")
            other = [(t + 1) % subject.vocab_size for t in c.token_ids]
            for i in range(len(other)):
                tokens = [*c.token_ids[:i], other[i]]
                less = subject.logprobs([0] * len(tokens), c.prompt_ids, tokens, 1.0, "keep")[-1]
                bound = c.logprobs[i] + 2 * subject.tolerance
                expect(less <= bound, f"token {other[i]} is likelier than the greedy one")


@check
def stops_for_the_right_reason(subject: Subject) -> None:
    """A stop id ends a response and belongs to it; otherwise it has exactly max_tokens tokens."""
    with opened(subject) as engine:
        stop = tuple(range(0, subject.vocab_size, 12))
        done = run(engine, requests(subject, 8, stop=stop, temperature=1.0))
        reasons = {c.finish_reason for c in done.values()}
        for c in done.values():
            expect(not set(c.token_ids[:-1]) & set(stop), "tokens follow a stop token")
            if c.token_ids[-1] in stop:
                expect(c.finish_reason == "stop", f"ended on a stop token, reason {c.finish_reason!r}")
            else:
                expect(c.finish_reason == "length", f"ended without a stop token, reason {c.finish_reason!r}")
                expect(len(c.token_ids) == 24, f"{len(c.token_ids)} tokens, max_tokens is 24")
        expect("stop" in reasons, "no response ended on any of the stop ids")


@check
def a_request_depends_on_nothing_else(subject: Subject) -> None:
    """Same request, same tokens: alone, in company, in another order. Other seed, other tokens."""
    with opened(subject) as engine:
        todo = requests(subject)
        together = run(engine, todo)
        backwards = run(engine, reversed(todo))
        alone = run(engine, todo[3:4])
        ids = {i: c.token_ids for i, c in together.items()}
        expect(ids == {i: c.token_ids for i, c in backwards.items()}, "tokens depend on the order of requests")
        expect(ids[3] == alone[3].token_ids, "tokens depend on the company a request runs in")
        reseeded = run(engine, [replace(r, seed=r.seed + 1) for r in todo])
        expect(all(reseeded[i].token_ids != ids[i] for i in ids), "another seed gave the same tokens")


@check
def queues_what_has_no_slot(subject: Subject) -> None:
    """More requests than slots all complete, with the same tokens as in a small batch."""
    with opened(subject) as engine:
        many = requests(subject, 40, max_tokens=6)
        done = run(engine, many)
        expect(len(done) == 40, f"{len(done)} of 40 requests came back")
        few = run(engine, many[:4])
        expect(all(done[i].token_ids == few[i].token_ids for i in few), "tokens depend on waiting for a slot")


def _swap(subject: Subject, kv: str, wrong: str) -> None:
    with opened(subject, 0, version=3) as engine:
        done = begin(engine, requests(subject, 6, max_tokens=_midway(subject)), 11)
        stats = engine.load_weights(subject.weights(1), version=7, kv=kv)
        expect(stats.version == engine.policy_version == 7, "policy_version is not the loaded version")
        done |= run(engine)
        expect(len(done) == 6, "a running request was lost in the update")
        shown = 0.0
        for c in done.values():
            expect(sorted(c.versions) == c.versions and set(c.versions) <= {3, 7}, f"versions are {c.versions}")
            before = c.versions.count(3)
            if subject.stepwise:
                expect(before == 11, f"{before} tokens carry the version before the swap, 11 steps were taken")
            policies = [0] * before + [1] * (len(c.versions) - before)
            gap = _close(subject, c, policies, 0.7, kv)
            expect(gap <= subject.tolerance, f"kv {kv}: off by {gap:.2e} after the swap, bound {subject.tolerance:.0e}")
            shown = max(shown, _close(subject, c, policies, 0.7, wrong))
        expect(shown > 10 * subject.tolerance, f"kv {kv} and {wrong} differ by {shown:.1e} only: nothing was shown")


@check
def swaps_on_the_kept_cache(subject: Subject) -> None:
    """Old weights up to the swap, new weights after it, reading the keys and values that the old ones wrote."""
    _swap(subject, "keep", "recompute")


@check
def swaps_and_recomputes(subject: Subject) -> None:
    """Old weights up to the swap, then what the new weights say of the whole sequence."""
    _swap(subject, "recompute", "keep")


@check
def new_requests_see_new_weights_only(subject: Subject) -> None:
    """A prompt that ran before an update is not served from what the old weights left behind."""
    with opened(subject, 0) as engine:
        todo = requests(subject, 4)
        run(engine, todo)
        engine.load_weights(subject.weights(1), version=1, kv="keep")
        for c in run(engine, todo).values():
            gap = _close(subject, c, [1] * len(c.token_ids), 0.7, "keep")
            expect(gap <= subject.tolerance, f"off by {gap:.2e} from the new weights: some of the others is left")


@check
def warm_equals_cold(subject: Subject) -> None:
    """After three updates in a row the engine is, bit for bit, one that was started with the last weights."""
    todo = requests(subject)
    with opened(subject, 2) as engine:
        cold = run(engine, todo)
    with opened(subject, 0) as engine:
        run(engine, todo[:2])
        for version, policy in ((1, 1), (2, 0), (3, 2)):
            engine.load_weights(subject.weights(policy), version=version, kv="keep")
        expect(_same(subject, run(engine, todo), cold), "log-probs differ between a warm and a cold engine")


@check
def refuses_wrong_tensors(subject: Subject) -> None:
    """Missing, extra, misshapen, doubled: one line, the version stays, the old weights go on as if nothing had been."""
    todo = requests(subject)
    with opened(subject, 0) as engine:
        right = run(engine, todo)
        good = subject.weights(1)
        name, tensor = good[2]
        wrong = {
            "missing": good[:2] + good[3:],
            "extra": [*good, ("model.layers.99.mlp.up_proj.weight", tensor)],
            "misshapen": [*good[:2], (name, tensor.reshape(-1)[: tensor.numel() // 2]), *good[3:]],
            "doubled": [*good, good[2]],
            "non-finite": [*good[:2], (name, tensor * float("nan")), *good[3:]],
        }
        for what, named in wrong.items():
            try:
                engine.load_weights(named, version=9, kv="keep")
            except ValueError as error:
                expect("\n" not in str(error).strip(), f"{what}: the refusal is not one line")
            else:
                raise Nonconformance(f"an update with a {what} tensor was accepted")
            expect(engine.policy_version == 0, f"{what}: the version was raised by a refused update")
        expect(_same(subject, run(engine, todo), right), "a refused update changed what the engine generates")


@check
def survives_or_ends_when_the_source_fails(subject: Subject) -> None:
    """Weights that stop coming half-way are never generated with."""
    todo = requests(subject)

    def half():
        named = subject.weights(1)
        yield from named[: len(named) // 2]
        raise OSError("the trainer went away")

    with opened(subject, 0) as engine:
        right = run(engine, todo)
        try:
            engine.load_weights(half(), version=9, kv="keep")
        except (OSError, WorkerDied):
            pass
        else:
            raise Nonconformance("half an update was accepted")
        try:
            expect(engine.policy_version == 0, "the version was raised by half an update")
            expect(_same(subject, run(engine, todo), right), "the engine generates with a mixture of two policies")
        except WorkerDied:
            pass


@check
def refuses_bad_requests(subject: Subject) -> None:
    """ValueError for what cannot run, and nothing else is disturbed."""
    with opened(subject) as engine:
        todo = requests(subject, 4)
        right = run(engine, todo)
        begin(engine, todo, 1)
        bad = {
            "an empty prompt": replace(todo[0], request_id=51, token_ids=[]),
            "a token outside the vocabulary": replace(todo[0], request_id=52, token_ids=[subject.vocab_size]),
            "a sequence over max_len": replace(todo[0], request_id=50, max_tokens=100_000),
        }
        for what, request in bad.items():
            try:
                engine.add(request)
            except ValueError:
                continue
            raise Nonconformance(f"{what} was accepted")
        expect(_same(subject, run(engine), right), "a refused request changed the others")


@check
def saves_and_resumes(subject: Subject) -> None:
    """exact: a state taken in the middle continues bit for bit. drained: taken when empty, refused otherwise."""
    with opened(subject, 0) as engine:
        done = begin(engine, requests(subject, max_tokens=_midway(subject)), 9)
        if engine.resume == "drained":
            try:
                engine.state_dict()
            except ValueError:
                pass
            else:
                raise Nonconformance("a drained engine gave its state with unfinished requests")
            done |= run(engine)
        state = engine.state_dict()
        uninterrupted = done | run(engine)
        more = run(engine, requests(subject, 4, first=100))
    with opened(subject, 0) as other:
        other.load_state_dict(state)
        expect(other.policy_version == 0, "the resumed engine has another version")
        resumed = done | run(other)
        expect(_same(subject, resumed, uninterrupted), "a resumed engine goes on differently")
        lost = [i for i, c in resumed.items() if c.versions != uninterrupted[i].versions]
        expect(not lost, "a resumed engine lost the versions of earlier tokens")
        later = run(other, requests(subject, 4, first=100))
        expect(_same(subject, later, more), "later requests differ after a resume")


@check
def closes(subject: Subject) -> None:
    """close() may be called twice."""
    engine = subject.make()
    engine.load_weights(subject.weights(0), version=0, kv="keep")
    engine.close()
    engine.close()
