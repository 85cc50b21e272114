"""The flow's settings: what is quantised where, what is saved, and what a description says."""

import pytest
import torch

from jetrl_bench import fp8, precision, quantizer
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.model import init_model
from jetrl_bench.precision import make_flow, prepare_weight

UNIFIED = {"rollout": "fp8", "train": "fp8"}


def data(seed: int = 0, T: int = 150, N: int = 96, K: int = 200):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(T, K, generator=g).to(torch.bfloat16),
        torch.randn(N, K, generator=g),
        torch.randn(T, N, generator=g).to(torch.bfloat16),
    )


def run(config: FlowConfig, x, w, dy):
    flow = make_flow(config)
    x, master = x.clone().requires_grad_(), w.clone().requires_grad_()
    weight = prepare_weight([master], [], flow.train_side, quantized=flow.train_side.fp8, masters=(master,))
    y = precision.Linear.apply(x, weight, flow, False, master)
    y.backward(dy)
    return y.detach(), x.grad, master.grad


def test_the_bf16_master_is_what_is_quantised():
    _, w, _ = data()
    side = make_flow(FlowConfig(**UNIFIED)).train_side
    from_master = prepare_weight([w], [], side, quantized=True)
    from_bf16 = prepare_weight([w.to(torch.bfloat16)], [], side, quantized=True)
    assert torch.equal(from_master.forward.values, from_bf16.forward.values)
    direct = quantizer.quantize_blocks(w, (128, 128), side.forward)[0]
    assert (direct != from_master.forward.values).float().mean() > 0.005  # quantising fp32 masters is another flow


def test_fused_parts_have_their_own_scales():
    _, w, _ = data()
    side = make_flow(FlowConfig(**UNIFIED)).train_side
    small = w[:32] * 2.0**-12
    fused = prepare_weight([w, small], [], side, quantized=True)
    assert torch.equal(fused.forward.values[96:], fp8.qdq(small.to(torch.bfloat16), "e4m3", (128, 128)))


def test_forward_only_leaves_the_backward_in_bf16():
    x, w, dy = data()
    y, dx, dw = run(FlowConfig(**UNIFIED, forward_only=True), x, w, dy)
    y_full, dx_full, dw_full = run(FlowConfig(**UNIFIED), x, w, dy)
    _, dx_bf, dw_bf = run(FlowConfig(), x, w, dy)
    assert torch.equal(y, y_full) and torch.equal(dx, dx_bf) and torch.equal(dw, dw_bf)
    assert not torch.equal(dx, dx_full) and not torch.equal(dw, dw_full)


def test_saved_fp8_activation_is_half_the_memory_and_free_with_power_of_two_scales():
    x, w, dy = data(K=256)
    saved = []

    def pack(t):
        saved.append(t.nbytes)
        return t

    grads, sizes = [], []
    for source in ("from_bf16", "from_saved_fp8"):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            grads.append(run(FlowConfig(**UNIFIED, wgrad_input=source), x, w, dy)[2])
        sizes.append(sum(saved))
    assert sizes[0] == 2 * x.numel() and sizes[1] == x.numel() + 4 * x.shape[0] * 2
    assert (grads[0] - grads[1]).norm() < 0.02 * grads[0].norm()


def test_weight_gradient_output_and_gradient_transport():
    x, w, dy = data()
    _, _, dw = run(FlowConfig(**UNIFIED, wgrad_output="bf16"), x, w, dy)
    assert torch.equal(dw, dw.to(torch.bfloat16).float())
    _, dx, _ = run(FlowConfig(**UNIFIED, grad_transport="fp8"), x, w, dy)
    assert torch.equal(dx, fp8.qdq(dx, "e4m3", (1, 128)))


def test_stochastic_gradient_rounding_is_repeatable_and_resumable():
    x, w, dy = data()
    config = FlowConfig(**UNIFIED, rounding="stochastic")
    assert torch.equal(run(config, x, w, dy)[2], run(config, x, w, dy)[2])
    assert not torch.equal(run(config, x, w, dy)[2], run(FlowConfig(**UNIFIED), x, w, dy)[2])
    flow = make_flow(config)
    a = flow.quantize_grad(dy, (1, 128))
    b = flow.quantize_grad(dy, (1, 128))
    assert not torch.equal(a, b)
    flow.noise_count = 0
    assert torch.equal(flow.quantize_grad(dy, (1, 128)), a)


def test_zero_rows_pad_a_weight_gradient_for_nothing():
    """Groups along tokens: the short last group equals one padded with zero rows (canonical packing)."""
    x, w, dy = data(T=150)
    _, _, dw = run(FlowConfig(**UNIFIED), x, w, dy)
    pad = torch.nn.functional.pad
    _, _, padded = run(FlowConfig(**UNIFIED), pad(x, (0, 0, 0, 106)), w, pad(dy, (0, 0, 0, 106)))
    assert torch.equal(dw, padded)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(run(FlowConfig(**UNIFIED, scale="fp32"), x[order], w, dy[order])[2], dw)


def test_a_rule_for_each_side():
    flow = make_flow(FlowConfig(**UNIFIED, scale="fp32", rollout_rule="vllm_fp32", train_rule="te_fp32"))
    assert flow.rollout_side.forward != flow.train_side.forward and not flow.is_exact()
    assert make_flow(FlowConfig(**UNIFIED, rollout_rule="te_pow2", train_rule="te_pow2")).is_exact()
    with pytest.raises(ValueError, match="did you mean 'te_pow2'"):
        make_flow(FlowConfig(train_rule="te_pow"))


def test_flows_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="weight_groups 'row'"):
        make_flow(FlowConfig(**UNIFIED, weight_groups="row", scale="fp32"))


def test_descriptions():
    bare = make_flow(FlowConfig(rollout="fp8", kv_cache="fp8")).describe()
    assert bare["rollout X"] == "e4m3 1x128 along K pow2 scales" and bare["forward X"] == "bf16"
    assert bare["kv cache, rollout"].startswith("e4m3") and bare["kv, training attention"] == "bf16"
    assert bare["exact"] == "no"
    unified = make_flow(FlowConfig(**UNIFIED, format="e2m1")).describe()
    assert unified["rollout W"].startswith("e2m1 128x128") and unified["dgrad dY"].startswith("e4m3 1x128 along N")
    assert unified["exact"] == "yes, by construction"
    report = make_flow(FlowConfig(**UNIFIED)).convert_(init_model(ModelConfig(num_layers=1), 32, 0))
    assert len(report.converted) == 7 and "model.norm.weight" in report.left


def test_export_yields_the_bf16_master():
    model = init_model(ModelConfig(num_layers=1), 32, 0)
    exported = dict(make_flow(FlowConfig(rollout="fp8")).export(model.named_parameters()))
    assert exported.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(t, model.get_parameter(n).detach().to(torch.bfloat16)) for n, t in exported.items())
