"""The decoder against transformers, its checkpoints, and log-probs against a plain fp32 computation."""

import json

import pytest
import torch

from jetrl_bench.checkpoint import load_hf, save_hf
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.errors import NotFinite
from jetrl_bench.logprobs import Batch, nonfinite_gradient, sequence_logprobs
from jetrl_bench.model import Decoder, init_model, manifest
from jetrl_bench.precision import make_flow

V = 96
SHAPES = {
    "llama": ModelConfig(arch="llama", hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, intermediate_size=96),
    "qwen2": ModelConfig(
        arch="qwen2", hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, rope_theta=1e6
    ),
    "qwen3": ModelConfig(
        arch="qwen3", hidden_size=64, num_heads=4, num_kv_heads=1, head_dim=24, intermediate_size=96,
        tie_embeddings=False,
    ),
}  # fmt: skip


def random_model(cfg: ModelConfig, seed: int = 0) -> Decoder:
    model = init_model(cfg, V, seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.15 + (1.0 if name.endswith("norm.weight") else 0.0))
    return model


def random_batch(seed: int = 0, size: int = 5) -> Batch:
    g = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 9, (size,), generator=g)
    totals = prompts + torch.randint(1, 12, (size,), generator=g)
    return Batch(torch.randint(0, V, (size, 24), generator=g), prompts, totals)


@pytest.mark.parametrize("arch", SHAPES)
def test_logits_equal_transformers_both_ways(arch, tmp_path):
    from transformers import AutoModelForCausalLM

    model = random_model(SHAPES[arch])
    save_hf(model, SHAPES[arch], tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    ids = torch.randint(0, V, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (model(ids) - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)
        theirs.save_pretrained(tmp_path / "theirs")
        cfg, vocab_size, state = load_hf(tmp_path / "theirs")
        again = Decoder(cfg, vocab_size)
        again.load_state_dict(state)
        assert torch.equal(again(ids), model(ids))
    assert cfg.model_dump() == SHAPES[arch].model_dump()


def test_saved_files_are_the_same_bytes(tmp_path):
    for name in "ab":
        save_hf(random_model(SHAPES["qwen3"]), SHAPES["qwen3"], tmp_path / name)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type 'llama3'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"intermediate_size": 100}, "has shape"),
        ({"num_hidden_layers": 3}, "is missing"),
        ({"num_hidden_layers": 1}, "not part of the model"),
    ],
)
def test_what_is_not_computed_is_refused(change, message, tmp_path):
    save_hf(random_model(SHAPES["llama"]), SHAPES["llama"], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message) as error:
        load_hf(tmp_path)
    assert "\n" not in str(error.value)


def test_traces_on_meta_and_names_every_tensor():
    with torch.device("meta"):
        model = Decoder(SHAPES["qwen3"], V)
        assert model(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 7, V)
    names = manifest(SHAPES["qwen3"], V)
    assert names["model.layers.1.self_attn.k_norm.weight"] == (24,) and "lm_head.weight" in names
    assert "lm_head.weight" not in manifest(SHAPES["llama"], V)


@pytest.mark.parametrize("arch", SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_gradients_are_those_of_the_model(arch, temperature):
    """bf16 flow against the fp32 model and autograd; temperature divides logits before the softmax."""
    model, batch = random_model(SHAPES[arch]), random_batch()
    logprobs, entropy, full = sequence_logprobs(model, make_flow(FlowConfig()), batch, temperature, record_full=True)
    weight = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad((logprobs * weight).sum(), list(model.parameters()))
    distribution = (model(batch.token_ids) / temperature).log_softmax(-1)
    rows = [
        distribution[b, p - 1 : t - 1]
        for b, (p, t) in enumerate(zip(batch.prompt_lens.tolist(), batch.total_lens.tolist()))
    ]
    tokens = [
        batch.token_ids[b, p:t] for b, (p, t) in enumerate(zip(batch.prompt_lens.tolist(), batch.total_lens.tolist()))
    ]
    reference, chosen = torch.cat(rows), torch.cat(tokens)
    expected = reference.gather(1, chosen[:, None])[:, 0]
    assert (logprobs - expected).abs().mean() < 0.05 / temperature
    assert torch.equal(full.gather(1, chosen[:, None])[:, 0], logprobs.detach())
    assert (full.exp().sum(1) - 1).abs().max() < 1e-5
    assert (entropy + (full.exp() * full).sum(1)).abs().max() < 1e-5 and not entropy.requires_grad
    exact = torch.autograd.grad((expected * weight).sum(), list(model.parameters()))
    for (name, _), got, want in zip(model.named_parameters(), grads, exact):
        assert got.dtype == torch.float32 and (got - want).norm() < 0.06 * want.norm(), name


def test_values_depend_on_the_sequence_alone():
    model, batch, flow = (
        random_model(SHAPES["qwen2"]),
        random_batch(),
        make_flow(FlowConfig(rollout="fp8", train="fp8")),
    )
    whole = sequence_logprobs(model, flow, batch, 1.0)[0]
    alone = [sequence_logprobs(model, flow, Batch(*(t[i : i + 1] for t in batch)), 1.0)[0] for i in range(5)]
    assert torch.equal(torch.cat(alone), whole)
    garbage = batch.token_ids.clone()
    garbage[torch.arange(24) >= batch.total_lens[:, None]] = V - 1
    wider = torch.nn.functional.pad(garbage, (0, 9), value=1)
    assert torch.equal(sequence_logprobs(model, flow, Batch(wider, *batch[1:]), 1.0)[0], whole)
    with torch.no_grad():
        assert torch.equal(sequence_logprobs(model, flow, batch, 1.0)[0], whole)


def test_gradients_do_not_depend_on_cuts_in_bf16():
    model, batch, flow = random_model(SHAPES["llama"]), random_batch(), make_flow(FlowConfig())
    sequence_logprobs(model, flow, batch, 1.0)[0].sum().backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for i in range(0, 5, 2):
        sequence_logprobs(model, flow, Batch(*(t[i : i + 2] for t in batch)), 1.0)[0].sum().backward()
    for a, p in zip(whole, model.parameters()):
        assert (a - p.grad).norm() < 1e-5 * a.norm()


def test_weights_are_prepared_again_after_every_step():
    model, batch, flow = (
        random_model(SHAPES["llama"]),
        random_batch(),
        make_flow(FlowConfig(rollout="fp8", train="fp8")),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = -sequence_logprobs(model, flow, batch, 1.0)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1
    assert model.prepared(flow) is model.prepared(flow)


def test_other_kernels_are_the_same_model():
    model = random_model(SHAPES["qwen2"])
    ids = torch.randint(0, V, (4, 90), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.tensor([3, 5, 40, 60]), torch.tensor([90, 80, 85, 77]))
    for kind in ("bf16", "fp8"):
        flow = make_flow(FlowConfig(rollout=kind, train=kind))
        same, other = (sequence_logprobs(model, flow, batch, 1.0, kernels)[0] for kernels in ("same", "other"))
        assert 0 < (same - other).abs().max() and (same - other).abs().mean() < 0.05
        grads = (torch.autograd.grad(x.sum(), list(model.parameters())) for x in (same, other))
        a, b = (torch.cat([g.flatten() for g in gs]) for gs in grads)
        assert 0 < (a - b).norm() < 0.1 * a.norm()


def test_nan_names_operator_and_layer():
    model, batch, flow = (
        random_model(SHAPES["llama"]),
        random_batch(),
        make_flow(FlowConfig(rollout="fp8", train="fp8")),
    )
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.nan
    with pytest.raises(NotFinite, match="gate_up, layer 1"):
        sequence_logprobs(model, flow, batch, 1.0)
    fine = random_model(SHAPES["llama"])
    sequence_logprobs(fine, flow, batch, 1.0)[0].sum().backward()
    assert nonfinite_gradient(fine) is None
    fine.model.layers[0].self_attn.o_proj.weight.grad[0, 0] = torch.inf
    assert nonfinite_gradient(fine) == "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    "prompts,totals,message",
    [([0, 2], [3, 4], "prompt token"), ([2, 2], [2, 4], "response token"), ([1, 2], [3, 99], "99")],
)
def test_impossible_batches_are_refused(prompts, totals, message):
    batch = Batch(torch.zeros(2, 8, dtype=torch.int64), torch.tensor(prompts), torch.tensor(totals))
    with pytest.raises(ValueError, match=message):
        sequence_logprobs(random_model(SHAPES["llama"]), make_flow(FlowConfig()), batch, 1.0)


def test_an_end_token_equal_to_padding_is_trained_on():
    """Masks come from lengths: with pad id 0 and a response that ends in token 0, its log-prob has a gradient."""
    ids = torch.tensor([[5, 6, 7, 0, 0, 0]])
    model = random_model(SHAPES["llama"])
    logprobs = sequence_logprobs(model, make_flow(FlowConfig()), Batch(ids, torch.tensor([2]), torch.tensor([4])), 1.0)[
        0
    ]
    assert len(logprobs) == 2
    logprobs[1].backward()
    assert model.model.layers[0].mlp.down_proj.weight.grad.abs().sum() > 0
