"""The three GEMMs of a quantised linear layer against autograd of the dequantised operands, in float64."""

import pytest
import torch

from jetrl_bench import precision
from jetrl_bench.config import FlowConfig
from jetrl_bench.fp8 import expand_scales, quantize

PARTS = [(96,), (128, 64, 200)]
BLOCK = 128


def groups(x, kind, *, weight=False):
    """Rows x columns that share a scale; the columns are the reduction."""
    return {"block": (BLOCK, BLOCK) if weight else (1, BLOCK), "row": (1, x.shape[1]), "tensor": tuple(x.shape)}[kind]


def dequantised(x, config, block, format=None):
    """codes x scale in float64, unrounded."""
    q = quantize(x.contiguous(), format or config.format, block, scale=config.scale, rule=config.train_rule)
    return q.values().double() * expand_scales(q.scales, q.block, x.shape).double()


def run(config, T, K, parts, seed=0, bias=False):
    """(what the layer computed, its inputs)."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(T, K, generator=g) * 2).bfloat16().requires_grad_()
    weights = [torch.nn.Parameter(torch.randn(n, K, generator=g) * 0.05) for n in parts]
    biases = [torch.nn.Parameter(torch.randn(n, generator=g)) for n in parts] if bias else []
    dy = torch.randn(T, sum(parts), generator=g).bfloat16()
    flow = precision.make_flow(config)
    weight = precision.prepare_weight(
        weights, biases, flow.train_side, quantized=flow.train_side.fp8, masters=(*weights, *biases)
    )
    y = precision.Linear.apply(x, weight, flow, False, *weight.masters)
    y.backward(dy)
    return y, x, weights, biases, dy


def expected(config, x, weights, dy):
    """y, dx, [dw] from autograd of float64 products of the dequantised operands."""
    kind, gradient = config.activation_groups, config.grad_format
    x, ys, dx, dws, start = x.detach(), [], 0, [], 0
    x_hat = dequantised(x, config, groups(x, kind)).requires_grad_()
    x_tokens = dequantised(x.t(), config, groups(x.t(), kind), gradient).t()
    for w in weights:
        part = dy[:, start : start + w.shape[0]].contiguous()
        start += w.shape[0]
        w_bf16 = w.detach().bfloat16()
        w_hat = dequantised(w_bf16, config, groups(w_bf16, config.weight_groups, weight=True)).requires_grad_()
        y = x_hat @ w_hat.t()
        ys.append(y.detach())
        part_hat = dequantised(part, config, groups(part, kind), gradient)
        dx = dx + torch.autograd.grad(y, x_hat, part_hat)[0]
        part_tokens = dequantised(part.t(), config, groups(part.t(), kind), gradient).t()
        dws.append(torch.autograd.grad(x_tokens @ w_hat.t(), w_hat, part_tokens)[0])
    return torch.cat(ys, 1), dx, dws


def close(actual, wanted, dtype):
    """Within the output's own rounding, and that of fp32 sums: absolute part scaled by the result's size."""
    step = {torch.bfloat16: 2**-8, torch.float32: 2**-18}[dtype]
    scale = wanted.square().mean().sqrt()
    return bool(((actual.double() - wanted).abs() <= step * wanted.abs() + 2e-6 * scale).all())


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("T, K", [(1, 128), (30, 200), (257, 384)])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("kinds", [("block", "block"), ("row", "block"), ("row", "row"), ("tensor", "tensor")])
def test_forward_dgrad_and_wgrad(scale, kinds, T, K, parts):
    config = FlowConfig(rollout="fp8", train="fp8", scale=scale, activation_groups=kinds[0], weight_groups=kinds[1])
    if kinds[1] == "row" and scale == "fp32":
        with pytest.raises(ValueError, match="cannot run dgrad in FP8"):
            precision.make_flow(config)
        return
    y, x, weights, _, dy = run(config, T, K, parts)
    y_ref, dx_ref, dw_refs = expected(config, x, weights, dy)
    assert close(y, y_ref, torch.bfloat16)
    assert close(x.grad, dx_ref, torch.bfloat16)
    for w, dw_ref in zip(weights, dw_refs):
        assert close(w.grad, dw_ref, torch.float32)


@pytest.mark.parametrize("grad_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e3m2", "e4m1", "e2m1"])
def test_formats_of_forward_and_gradients_are_their_own(format, grad_format):
    config = FlowConfig(rollout="fp8", train="fp8", format=format, grad_format=grad_format)
    y, x, weights, _, dy = run(config, 65, 256, (128, 32))
    y_ref, dx_ref, dw_refs = expected(config, x, weights, dy)
    assert close(y, y_ref, torch.bfloat16) and close(x.grad, dx_ref, torch.bfloat16)
    assert all(close(w.grad, ref, torch.float32) for w, ref in zip(weights, dw_refs))


@pytest.mark.parametrize("rule", ["vllm_fp32", "deepgemm_fp32", "te_fp32", "torchao"])
def test_rules_reach_the_three_products(rule):
    config = FlowConfig(rollout="fp8", train="fp8", scale="fp32", train_rule=rule)
    y, x, weights, _, dy = run(config, 40, 384, (128,))
    y_ref, dx_ref, dw_refs = expected(config, x, weights, dy)
    assert close(y, y_ref, torch.bfloat16) and close(x.grad, dx_ref, torch.bfloat16)
    assert close(weights[0].grad, dw_refs[0], torch.float32)


def test_the_groupings_matter():
    """The reference is not blind: quantising dY along N instead of along T is far outside the tolerance."""
    config = FlowConfig(rollout="fp8", train="fp8")
    _, x, weights, _, dy = run(config, 257, 384, (128,))
    wrong = dequantised(dy, config, (1, BLOCK)).t() @ dequantised(x.detach(), config, (1, BLOCK))
    assert not close(weights[0].grad, wrong, torch.float32)


def test_biases_and_forward_only():
    config = FlowConfig(rollout="fp8", train="fp8", forward_only=True)
    y, x, weights, biases, dy = run(config, 30, 200, (64, 32), bias=True)
    y_ref, _, _ = expected(config, x, weights, dy)
    assert close(y, y_ref + torch.cat(biases).detach().bfloat16().double(), torch.bfloat16)
    dx_ref = dy.double() @ torch.cat(weights).detach().bfloat16().double()
    assert close(x.grad, dx_ref, torch.bfloat16)
    assert close(torch.cat([w.grad for w in weights]), dy.double().t() @ x.detach().double(), torch.float32)
    assert close(torch.cat([b.grad for b in biases]), dy.double().sum(0), torch.float32)


def test_settings_of_the_backward_do_what_they_say():
    base = FlowConfig(rollout="fp8", train="fp8")
    rounded = run(base.model_copy(update={"wgrad_output": "bf16"}), 64, 256, (64,))[2][0].grad
    exact = run(base, 64, 256, (64,))[2][0].grad
    assert torch.equal(rounded, exact.bfloat16().float()) and not torch.equal(rounded, exact)
    transported = run(base.model_copy(update={"grad_transport": "fp8"}), 64, 256, (64,))[1].grad
    dx = run(base, 64, 256, (64,))[1].grad
    assert torch.equal(transported.double(), dequantised(dx, base, (1, BLOCK)))
    # a saved FP8 activation is what wgrad quantises again along the tokens
    saved = base.model_copy(update={"wgrad_input": "from_saved_fp8"})
    _, x, weights, _, dy = run(saved, 64, 256, (64,))
    stored = dequantised(x.detach(), saved, (1, BLOCK)).bfloat16()
    wanted = dequantised(dy.t(), saved, (1, BLOCK)) @ dequantised(stored.t(), saved, (1, BLOCK)).t()
    assert close(weights[0].grad, wanted, torch.float32)


@pytest.mark.parametrize("K", [200, 640])
def test_row_scales_in_fp32_serve_a_rollout(K):
    """Scales by output channel have no dgrad, but a rollout needs none."""
    config = FlowConfig(rollout="fp8", scale="fp32", activation_groups="row", weight_groups="row")
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(30, K, generator=g).bfloat16(), torch.randn(640, K, generator=g)
    side = precision.make_flow(config).rollout_side
    y = precision.linear(x, precision.prepare_weight([w], [], side, quantized=True), side)
    wanted = dequantised(x, config, (1, K)) @ dequantised(w.bfloat16(), config, (1, K)).t()
    assert close(y, wanted, torch.bfloat16)
