"""The reference engine: sampling, independence of batching, weight transactions, state."""

import copy

import pytest
import torch

from jetrl_bench import sampling
from jetrl_bench.check import VOCAB, to_batch, trained
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.logprobs import sequence_logprobs
from jetrl_bench.precision import make_flow
from jetrl_bench.rollout import ReferenceEngine, Request

CFG = ModelConfig(num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=96)
FLOW = make_flow(FlowConfig(rollout="fp8", train="fp8"))
MODELS = [trained(CFG, FLOW, seed=s) for s in range(2)]


def engine(model: int = 0, **options) -> ReferenceEngine:
    e = ReferenceEngine(CFG, VOCAB, FLOW, **{"max_slots": 4, "max_len": 48} | options)
    e.load_weights(FLOW.export(MODELS[model].named_parameters()), version=0, kv="keep")
    return e


def requests(n: int = 9, temperature: float = 1.0, max_tokens: int = 12) -> list[Request]:
    g = torch.Generator().manual_seed(0)
    out = []
    for i in range(n):
        ids = torch.randint(0, VOCAB, (1 + int(torch.randint(0, 20, (1,), generator=g)),), generator=g).tolist()
        out.append(Request(i, i // 3, i % 3, ids, max_tokens - i % 4, temperature, 10**17 + i, (7, 8)))
    return out


def drain(e: ReferenceEngine) -> dict[int, tuple]:
    done = []
    while e.num_unfinished():
        done += e.step()
    return {c.request_id: (c.token_ids, c.logprobs, c.versions, c.finish_reason) for c in done}


def run(items, **options) -> dict[int, tuple]:
    e = engine(**options)
    for r in items:
        e.add(r)
    return drain(e)


def test_completions_do_not_depend_on_slots_order_or_company():
    base = run(requests())
    assert run(requests(), max_slots=1) == base
    assert run(requests()[::-1], max_slots=9) == base
    assert run(requests()[4:5]) == {4: base[4]}


def test_a_shared_prompt_is_the_same_as_a_prompt_alone():
    prompt = list(range(20))
    group = [Request(i, 0, i, prompt, 10, 1.0, 50 + i) for i in range(4)]
    together = run(group)
    assert together == {k: v for r in group for k, v in run([r]).items()}
    assert len({tuple(v[0]) for v in together.values()}) == 4  # samples of a group differ


def test_order_of_admission_and_one_token_a_step():
    e = engine(max_slots=2)
    for r in requests(3, max_tokens=8):
        e.add(r)
    assert (e.num_unfinished(), e.num_running()) == (3, 0)
    e.step()
    assert e.num_running() == 2 and [r.request.request_id for r in e._running.values()] == [0, 1]
    assert [len(r["token_ids"]) for r in e.state_dict()["running"].values()] == [1, 1]


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, 0.5]]).expand(40000, 5).contiguous()
    tokens, logprobs = torch.empty(40000, dtype=torch.int64), torch.empty(40000)
    seeds, zeros = torch.arange(40000) * 7919, torch.zeros(40000, dtype=torch.int64)
    sampling.sample(logits, torch.full((40000,), 0.7), seeds, zeros, tokens, logprobs, None)
    p = (logits[0] / 0.7).softmax(-1)
    share = torch.bincount(tokens, minlength=5) / 40000
    assert (share - p).abs().max() < 0.01 and share[2] == 0
    assert (logprobs - p.log()[tokens]).abs().max() < 1e-6


def test_uniforms_are_uniform_in_seed_and_index():
    for seeds, counts in ((torch.arange(20000), torch.zeros(20000)), (torch.zeros(20000), torch.arange(20000))):
        u = sampling.uniform(seeds.long(), counts.long())
        assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.002 and 0 <= u.min() and u.max() < 1


def test_greedy_takes_the_maximum_and_reports_temperature_one():
    done = run(requests(4, temperature=0.0))
    e = engine()
    for r in requests(4, temperature=0.0):
        e.add(r)
    completions = []
    while e.num_unfinished():
        completions += e.step()
    batch = to_batch(completions)
    logprobs, _, full = sequence_logprobs(MODELS[0], FLOW, batch, 1.0, record_full=True)
    assert logprobs.tolist() == [x for c in completions for x in c.logprobs]
    assert [t for c in completions for t in c.token_ids] == full.argmax(1).tolist()
    assert done[0][0] == next(c.token_ids for c in completions if c.request_id == 0)


def test_full_distribution_is_recorded_on_request():
    e = engine(record_full=True)
    for r in requests(5):
        e.add(r)
    completions = []
    while e.num_unfinished():
        completions += e.step()
    full = sequence_logprobs(MODELS[0], FLOW, to_batch(completions), 1.0, record_full=True)[2]
    assert torch.equal(torch.cat([c.log_softmax for c in completions]), full)


def test_stop_tokens_and_length():
    for token_ids, _, _, reason in run(requests(9)).values():
        assert all(t not in (7, 8) for t in token_ids[:-1])
        assert (reason == "stop") == (token_ids[-1] in (7, 8))


@pytest.mark.parametrize(
    "request_,message",
    [
        (Request(5, 0, 0, [], 4, 1.0, 0), "prompt is empty"),
        (Request(5, 0, 0, [1] * 45, 4, 1.0, 0), "exceed the engine's 48"),
        (Request(5, 0, 0, [VOCAB], 4, 1.0, 0), "token id lies outside"),
        (Request(5, 0, 0, [1], 0, 1.0, 0), "max_tokens 0"),
    ],
)
def test_impossible_requests_are_refused(request_, message):
    with pytest.raises(ValueError, match=f"request 5.*{message}"):
        engine().add(request_)


def test_no_weights_no_tokens():
    e = ReferenceEngine(CFG, VOCAB, FLOW, max_slots=2, max_len=16)
    e.add(requests(1, max_tokens=2)[0].__class__(0, 0, 0, [1], 2, 1.0, 0))
    with pytest.raises(ValueError, match="no weights"):
        e.step()


def broken_updates():
    def fresh():
        return list(FLOW.export(MODELS[1].named_parameters()))

    def raising():
        yield from fresh()[:3]
        raise RuntimeError("sender died")

    nan = fresh()
    nan[2] = (nan[2][0], torch.full_like(nan[2][1], torch.nan))
    yield "missing", fresh()[:-1]
    yield "not part", [*fresh(), ("lm_head.weight", fresh()[0][1])]
    yield "shape", [(n, t[:1] if i == 2 else t) for i, (n, t) in enumerate(fresh())]
    yield "twice", [*fresh(), fresh()[0]]
    yield "float32", [(n, t.float()) for n, t in fresh()]
    yield "NaN", nan
    yield "sender died", raising()


def test_a_failed_update_changes_nothing():
    base = run(requests())
    for message, update in broken_updates():
        e = engine()
        for r in requests():
            e.add(r)
        e.step()
        with pytest.raises((ValueError, RuntimeError), match=message):
            e.load_weights(update, version=1, kv="keep")
        assert e.policy_version == 0 and drain(e) == base


def test_warm_equals_cold_and_a_tied_head_follows_its_embedding():
    e = engine(0)
    first = run(requests())
    for model, version in ((1, 1), (0, 2)):
        e.load_weights(FLOW.export(MODELS[model].named_parameters()), version=version, kv="keep")
        for r in requests():
            e.add(r)
        done = drain(e)
        cold = run(requests(), model=model)
        assert {k: v[:2] for k, v in done.items()} == {k: v[:2] for k, v in cold.items()}
        assert all(set(v[2]) == {version} for v in done.values())
    assert {k: v[:2] for k, v in done.items()} == {k: v[:2] for k, v in first.items()}


def test_recomputed_cache_equals_a_new_request():
    """After recompute, what follows is what the new weights alone would give on the same tokens."""
    e = engine(0)
    r = Request(0, 0, 0, [1, 2, 3], 12, 1.0, 4)
    e.add(r)
    for _ in range(5):
        e.step()
    stats = e.load_weights(FLOW.export(MODELS[1].named_parameters()), version=1, kv="recompute")
    assert stats.recomputed_tokens == 3 + 5 - 1 and stats.num_tensors == len(list(MODELS[1].parameters()))
    done = []
    while e.num_unfinished():
        done += e.step()
    assert done[0].versions == [0] * 5 + [1] * 7
    fresh = sequence_logprobs(MODELS[1], FLOW, to_batch(done), 1.0)[0]
    assert done[0].logprobs[5:] == fresh[5:].tolist()


@pytest.mark.parametrize("at", [0, 1, 4, 7])
def test_state_continues_to_the_same_bytes(at, tmp_path):
    a = engine(record_full=True)
    for r in requests():
        a.add(r)
    early = {}
    for step in range(at):
        for c in a.step():
            early[c.request_id] = (c.token_ids, c.logprobs, c.versions, c.finish_reason)
        if step == 2:
            a.load_weights(FLOW.export(MODELS[1].named_parameters()), version=1, kv="keep")
    torch.save(a.state_dict(), tmp_path / "state.pt")
    expected = drain(a)
    b = ReferenceEngine(CFG, VOCAB, FLOW, max_slots=4, max_len=48, record_full=True)
    b.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert b.policy_version == a.policy_version and drain(b) == expected and not early.keys() & expected.keys()


def test_state_is_a_copy():
    e = engine()
    for r in requests():
        e.add(r)
    e.step()
    state = e.state_dict()
    frozen = copy.deepcopy(state)
    drain(e)
    assert state["waiting"] == frozen["waiting"]
    for slot, run_ in state["running"].items():
        assert run_["token_ids"] == frozen["running"][slot]["token_ids"]
        assert all(torch.equal(x, y) for x, y in zip(run_["keys"], frozen["running"][slot]["keys"]))


def test_state_of_another_shape_is_refused():
    e = engine()
    e.add(requests(1)[0])
    e.step()
    with pytest.raises(ValueError, match="max_slots or max_len"):
        engine(max_len=80).load_state_dict(e.state_dict())
