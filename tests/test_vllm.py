"""The real vLLM: conformance, parity, weight updates that fail, and the suite's flow inside it.

Skipped where vLLM is not installed; `make vllm` runs this file in an environment that has it.
"""

import importlib.util
import os
import time
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from engine_cases import CFG, VOCAB, Policies, policy  # noqa: E402
from vllm_cases import FP32, FRESH, Pool, start, subject_of, third_bucket  # noqa: E402

from jetrl_bench import fp8, precision, quantizer, sampling  # noqa: E402
from jetrl_bench.config import FlowConfig, ModelConfig  # noqa: E402
from jetrl_bench.conformance import CHECKS, requests, run  # noqa: E402
from jetrl_bench.errors import WorkerDied  # noqa: E402
from jetrl_bench.logprobs import Batch, sequence_logprobs  # noqa: E402
from jetrl_bench.precision import make_flow  # noqa: E402
from jetrl_bench.rollout import ReferenceEngine, Request  # noqa: E402
from jetrl_bench.rollout_vllm import VLLMEngine  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def policies():
    torch.set_num_threads(1)
    return Policies()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    pool = Pool(lambda: start(VLLMEngine, tmp_path_factory.mktemp("engine")))
    yield pool
    pool.close(0)


@pytest.fixture
def engine_of(tmp_path, shared):
    """Engines that are closed at the end of the test; with the first of them the process groups of all others end."""
    opened = []

    def make(**options):
        shared.close(0)
        opened.append(start(VLLMEngine, tmp_path, **options))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


# ------------------------------------------------------------------------------------------------ one process


@pytest.mark.parametrize("name", FRESH)
def test_a_new_vllm_conforms(policies, engine_of, name):
    CHECKS[name](subject_of(policies, engine_of))


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in FRESH])
def test_vllm_conforms(policies, shared, name):
    """In fp32, head size 32, tied head: every sampled token within 1e-4 of transformers, updates exact to the token."""
    CHECKS[name](subject_of(policies, shared))


@pytest.mark.parametrize(
    "cfg",
    [
        ModelConfig(arch="qwen3", head_dim=64, num_kv_heads=2, tie_embeddings=False, max_position=256),
        ModelConfig(arch="qwen2", head_dim=32, num_kv_heads=2, max_position=256),
    ],
    ids=lambda cfg: cfg.arch,
)
def test_fp32_equals_the_reference_engine_for_every_architecture(engine_of, monkeypatch, cfg):
    """Every token that vLLM sampled, put into ReferenceEngine's decoding, has its log-prob within 1e-4; also after an
    update, with the new tied or untied head: fused q, k, v (and biases), head norms, grouped heads."""
    engine = engine_of(cfg=cfg)
    reference = ReferenceEngine(cfg, VOCAB, engine.flow, max_slots=8, max_len=128)
    script = {}

    def take(logits, temperatures, seeds, counts, tokens, logprobs, full):
        wanted = [script[seed][count] for seed, count in zip(seeds.tolist(), counts.tolist())]
        tokens.copy_(torch.tensor(wanted))
        (temperature,) = set(temperatures.tolist())
        logprobs.copy_(sampling.token_logprobs(logits, tokens, temperature, full=False)[0])

    monkeypatch.setattr(sampling, "sample", take)
    todo = requests(SimpleNamespace(vocab_size=VOCAB))
    for version, seed in enumerate((0, 1)):
        model = policy(seed, cfg)
        if cfg.arch == "qwen2":
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
        for each in (engine, reference):
            each.load_weights(each.flow.export(model.named_parameters()), version=version, kv="keep")
        theirs = run(engine, todo)
        script |= {request.seed: theirs[request.request_id].token_ids for request in todo}
        for i, c in run(reference, todo).items():
            assert c.token_ids == theirs[i].token_ids
            gap = (torch.tensor(c.logprobs) - torch.tensor(theirs[i].logprobs)).abs().max()
            assert gap < FP32, (cfg.arch, version, gap)


def packed(completions):
    """Completions as the trainer's batch, and the engine's log-probs in its order."""
    rows = [c.prompt_ids + c.token_ids for c in completions]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, tokens in zip(ids, rows):
        row[: len(tokens)] = torch.tensor(tokens)
    prompts, totals = (torch.tensor([len(x) for x in xs]) for xs in ([c.prompt_ids for c in completions], rows))
    return Batch(ids, prompts, totals), torch.tensor([x for c in completions for x in c.logprobs])


def gaps(policies, engine, flow, index=0):
    """Mean |difference| of sampled log-probs: vLLM to the suite's kernels; those to the suite's other attention; the
    flow to fp32."""
    done = list(run(engine, requests(SimpleNamespace(vocab_size=VOCAB), 16, max_tokens=48)).values())
    batch, mine = packed(done)
    with torch.no_grad():
        ours, _, _ = sequence_logprobs(policies.models[index], flow, batch, 0.7, kernels="same")
        other, _, _ = sequence_logprobs(policies.models[index], flow, batch, 0.7, kernels="other")
    exact = [policies.logprobs([index] * len(c.token_ids), c.prompt_ids, c.token_ids, 0.7, "keep") for c in done]
    exact = torch.tensor([x for row in exact for x in row])
    return [(a - b).abs().mean().item() for a, b in ((mine, ours), (ours, other), (ours, exact))]


def test_bf16_differs_by_bf16s_own_noise(policies, engine_of):
    """Two correct bf16 implementations differ by about what one of them differs from fp32 (0.01 nats on these toys)."""
    flow = make_flow(FlowConfig())
    engine = engine_of(flow=flow)
    engine.load_weights(flow.export(policies.named(0)), version=0, kv="keep")
    vllm, _, noise = gaps(policies, engine, flow)
    print(f"bf16: vLLM to ours {vllm:.2e}, ours to fp32 {noise:.2e}")
    assert 0 < vllm < 2 * noise


def test_prompts_beyond_one_steps_budget_keep_their_draws(policies, engine_of, monkeypatch):
    """vLLM cuts a prompt that no longer fits a step and takes its draw back, which fails on a CPU; here none is cut."""
    monkeypatch.setattr("jetrl_bench.rollout_vllm.PREFILL_TOKENS", 128)
    engine = engine_of()
    engine.load_weights(policies.named(0), version=0, kv="keep")
    todo = [Request(i, i, 0, [(i + j) % VOCAB for j in range(50)], 10, 1.0, i, ()) for i in range(8)]
    together = run(engine, todo)
    for request in todo[::3]:
        assert together[request.request_id].token_ids == run(engine, [request])[request.request_id].token_ids


def test_this_process_is_left_as_it_was(policies, engine_of):
    """vLLM seeds every generator and disables torch.set_num_threads; the engine gives both back."""
    torch.manual_seed(7)
    threads, function = torch.get_num_threads(), torch.set_num_threads
    before = torch.get_rng_state()
    engine_of()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.set_num_threads is function and torch.get_num_threads() == threads
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ


# ------------------------------------------------------------------------------------------- updates that fail


def test_bucket_size_and_mixed_dtypes_change_nothing(policies, engine_of):
    """A bucket of one byte carries one tensor at a time; norms in fp32 beside bf16 matrices load as they are."""
    mixed = [(n, t if t.ndim == 1 else t.bfloat16()) for n, t in policies.named(0)]
    tokens, engine = [], engine_of()
    for version, size in enumerate((1, 50_000, 64 << 20)):
        engine.bucket_bytes = size
        stats = engine.load_weights(mixed, version=version, kv="keep")
        assert (stats.num_tensors, stats.recomputed_tokens) == (len(mixed), 0)
        assert stats.num_bytes == sum(t.nbytes for _, t in mixed)
        tokens.append([c.logprobs for c in run(engine, requests(SimpleNamespace(vocab_size=VOCAB))).values()])
    assert tokens[0] == tokens[1] == tokens[2]


def raises(original, kwargs):
    raise ConnectionError("the link went down")


def loses(original, kwargs):
    return [None]


def corrupts(original, kwargs):
    from jetrl_bench import vllm_transfer

    (buffer_B,) = vllm_transfer._HANDED_OVER.values()
    buffer_B[17] ^= 1
    return original()


def swaps_names(original, kwargs):
    info = kwargs["update_info"]
    entries = [{**entry, "name": entry["name"] + ".else"} for entry in info["entries"]]
    return original(update_info={**info, "entries": entries})


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (raises, "the link went down"),
        (loses, "announced tensors never came"),
        (corrupts, "arrived with other bits"),
        (swaps_names, "not the one that was announced"),
    ],
)
def test_a_failed_update_poisons_the_engine(policies, engine_of, fault, cause):
    """It says why, keeps its version, and never generates, loads or saves again."""
    engine = engine_of(bucket_bytes=100_000)
    engine.load_weights(policies.named(0), version=4, kv="keep")
    for request in requests(SimpleNamespace(vocab_size=VOCAB)):
        engine.add(request)
    engine.step()
    third_bucket(engine, fault)
    with pytest.raises(WorkerDied, match=f"weight update to version 5 failed half-way: .*{cause}"):
        engine.load_weights(policies.named(1), version=5, kv="keep")
    assert engine.policy_version == 4
    for act in (
        engine.step,
        engine.state_dict,
        engine.health,
        lambda: engine.load_weights(policies.named(1), version=6, kv="keep"),
        lambda: engine.add(requests(SimpleNamespace(vocab_size=VOCAB), 1, first=99)[0]),
    ):
        with pytest.raises(WorkerDied, match=cause):
            act()


def test_weights_that_vllm_skips_are_a_failed_update(policies, engine_of, monkeypatch):
    """vLLM's loader ignores names it does not want: an update counts what was loaded, not what was sent."""
    engine = engine_of()
    engine.load_weights(policies.named(0), version=0, kv="keep")
    model = engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    load = type(model).load_weights
    monkeypatch.setattr(
        type(model),
        "load_weights",
        lambda self, named: load(self, ((n, t) for n, t in named if "layers.1.mlp" not in n)),
    )
    with pytest.raises(WorkerDied, match="parameters were not loaded, first 'model.layers.1.mlp"):
        engine.load_weights(policies.named(1), version=1, kv="keep")


def test_no_token_within_the_deadline_ends_the_run(policies, engine_of, monkeypatch):
    engine = engine_of(deadline_s=0.5)
    engine.load_weights(policies.named(0), version=0, kv="keep")
    engine.add(requests(SimpleNamespace(vocab_size=VOCAB), 1)[0])
    monkeypatch.setattr(engine._engine, "step", list)
    end = time.monotonic() + 5
    with pytest.raises(WorkerDied, match="no token for 0.5 s with 1 unfinished"):
        while time.monotonic() < end:
            engine.step()


# ---------------------------------------------------------------------------------------- the flow inside vLLM

FLOWS = {
    "pow2": FlowConfig(rollout="fp8"),
    "fp32 scales": FlowConfig(rollout="fp8", scale="fp32"),
    "e2m1, head": FlowConfig(rollout="fp8", format="e2m1", lm_head="fp8"),
    "row": FlowConfig(rollout="fp8", scale="fp32", activation_groups="row", weight_groups="row"),
}


def model_of(engine):
    return engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


@pytest.mark.parametrize("config", FLOWS.values(), ids=FLOWS)
def test_the_plugin_is_the_flow_layer_by_layer(policies, engine_of, config):
    """Same input, same bits: vLLM's fused layers under the plugin and the suite's, also after an update."""
    flow = make_flow(config)
    cfg = ModelConfig(arch="qwen2", num_kv_heads=2, intermediate_size=200, max_position=256)
    engine = engine_of(cfg=cfg, flow=flow)
    x_TK = {n: torch.randn(9, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (128, 200)}
    for version, seed in enumerate((0, 1)):
        named = dict(flow.export(policy(seed, cfg).named_parameters()))
        engine.load_weights(named.items(), version=version, kv="keep")
        layers = dict(model_of(engine).named_modules())
        fused = {
            "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "self_attn.o_proj": ["self_attn.o_proj"],
            "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp.down_proj": ["mlp.down_proj"],
        }
        for i in range(cfg.num_layers):
            for theirs, ours in fused.items():
                prefix = f"model.layers.{i}."
                weights = [named[f"{prefix}{part}.weight"] for part in ours]
                biases = [named[f"{prefix}{part}.bias"] for part in ours if f"{prefix}{part}.bias" in named]
                weight = precision.prepare_weight(weights, biases, flow.rollout_side, quantized=True)
                x = x_TK[weights[0].shape[1]]
                expected = precision.linear(x, weight, flow.rollout_side)
                assert torch.equal(layers[prefix + theirs](x)[0], expected), (i, theirs)
                plain = precision.prepare_weight(weights, biases, flow.rollout_side, quantized=False)
                assert not torch.equal(expected, precision.linear(x, plain, flow.rollout_side))
        head = layers["lm_head"]
        logits = head.quant_method.apply(head, x_TK[128])[:, :VOCAB]
        weight = named["model.embed_tokens.weight"]
        if config.lm_head == "fp8":
            prepared = precision.prepare_weight([weight], [], flow.rollout_side, quantized=True)
            assert torch.equal(logits, precision.head(x_TK[128], prepared, flow.rollout_side))
        else:
            torch.testing.assert_close(logits, x_TK[128] @ weight.t(), rtol=2e-2, atol=2e-2)


def test_the_plugin_quantises_keys_and_values_per_token_and_head(policies, engine_of):
    flow = make_flow(FlowConfig(rollout="fp8", train="fp8", kv_cache="fp8"))
    engine = engine_of(flow=flow)
    engine.load_weights(flow.export(policies.named(0)), version=0, kv="keep")
    attention = dict(model_of(engine).named_modules())["model.layers.0.self_attn.attn"]
    (hook,) = attention._forward_pre_hooks.values()
    q, k, v = torch.randn(3, 5, CFG.num_heads * CFG.head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = hook(attention, (q, k, v))
    spec = flow.rollout_side.kv
    for before, after in zip((k, v), got[1:]):
        for t in range(5):
            for h in range(CFG.num_heads):
                part = before[t : t + 1, h * CFG.head_dim : (h + 1) * CFG.head_dim]
                expected = quantizer.quantize_blocks(part.contiguous(), (1, CFG.head_dim), spec)[0]
                assert torch.equal(after[t : t + 1, h * CFG.head_dim : (h + 1) * CFG.head_dim], expected)
    assert torch.equal(got[0], q) and not torch.equal(got[1], k)
    vllm, other, effect = gaps(policies, engine, flow)
    print(f"fp8 kv: vLLM to ours {vllm:.2e}, ours to our other attention {other:.2e}, fp8 to fp32 {effect:.2e}")
    assert vllm < 2 * effect


def test_a_whole_fp8_model_differs_by_kernel_noise(policies, engine_of):
    """Two correct implementations of one FP8 flow differ through flipped roundings: as our two attentions do."""
    flow = make_flow(FlowConfig(rollout="fp8", train="fp8"))
    engine = engine_of(flow=flow)
    engine.load_weights(flow.export(policies.named(0)), version=0, kv="keep")
    vllm, other, effect = gaps(policies, engine, flow)
    print(f"fp8: vLLM to ours {vllm:.2e}, ours to our other attention {other:.2e}, fp8 to fp32 {effect:.2e}")
    assert vllm < 3 * other and vllm < effect


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's block FP8 on a CPU needs AMX")
def test_vllms_own_block_fp8_loads_our_codes_and_is_refused_for_its_activations(policies, engine_of, monkeypatch):
    """vLLM's CPU kernel multiplies the right weights, and leaves activations in bf16, which the trainer does not."""
    config = FlowConfig(rollout="fp8", train="fp8", backend="torch")
    emulated = make_flow(config.model_copy(update={"backend": "emulated"}))
    flow = SimpleNamespace(config=config, export=emulated.export)
    cfg = ModelConfig(num_kv_heads=4, intermediate_size=384, max_position=256)
    engine = engine_of(cfg=cfg, flow=flow)
    refused = pytest.raises(ValueError, match="CPUFp8BlockScaledMMKernel leaves activations in bf16")
    named = dict(flow.export(policy(1, cfg).named_parameters()))
    with refused:
        engine.load_weights(named.items(), version=0, kv="keep")
    with pytest.raises(WorkerDied, match="leaves activations in bf16"):
        engine.load_weights(named.items(), version=0, kv="keep")
    monkeypatch.setattr("jetrl_bench.rollout_vllm.read_back", lambda *_: None)
    engine = engine_of(cfg=cfg, flow=flow)
    engine.load_weights(flow.export(policy(0, cfg).named_parameters()), version=0, kv="keep")
    engine.load_weights(named.items(), version=1, kv="keep")
    layers = dict(model_of(engine).named_modules())
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for theirs, ours in {
        "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    }.items():
        weights = [named[f"model.layers.1.{part}.weight"] for part in ours]
        expected = torch.cat([x.float() @ fp8.qdq(w, "e4m3", (128, 128)).float().t() for w in weights], 1)
        torch.testing.assert_close(layers[f"model.layers.1.{theirs}"](x)[0].float(), expected, rtol=1e-2, atol=2e-2)


# ------------------------------------------------------------------------------------------------- the loop


def test_an_in_flight_run_through_vllm_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    """The loop drains the engine, saves, is killed, and a new engine goes on as if nothing had been."""
    from jetrl_bench import base, loop, record
    from jetrl_bench.config import RunSettings
    from jetrl_bench.methods import pipelinerl

    task = {"min_steps": 1, "max_steps": 4, "num_labels": 4}
    model = ModelConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_position=128
    )
    settings = RunSettings.model_validate(
        {
            "seed": 0, "base_index": 0, "replicate": 0, "lr": 1e-3, "model": model, "task": task, "cost": {},
            "base": {"task": task, "stop_steps": 2, "check_problems": 16, "max_updates": 2, "check_every": 1},
            "train": {
                "group_size": 2, "samples_per_update": 4, "optimizer_steps": 6, "max_tokens": 16, "state_every": 2,
                "max_prompt_tokens": 48, "engine": "vllm",
            },
            "method": pipelinerl.METHOD,
        }
    )  # fmt: skip
    base.warm_up(settings, tmp_path / "base")

    def train(name: str) -> bytes:
        loop.train(settings, method="m", base=tmp_path / "base", out=tmp_path / name, state=tmp_path / f"{name}-state")
        return (tmp_path / name / "train.jsonl").read_bytes()

    whole = train("whole")
    save = loop.saved.save

    def save_and_die(*args, **kwargs):
        save(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.saved, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train("killed")
    monkeypatch.setattr(loop.saved, "save", save)
    assert train("killed") == whole
    weights = [(tmp_path / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
    result = record.read_run(tmp_path / "whole")
    assert result.manifest.resume == "drained" and result.steps[-1].optimizer_steps == 6
    assert max(row.lag_max for row in result.steps) > 0 and result.steps[0].mismatch.kl is None
