"""Engines' scale rules, rewritten here in numpy from their sources' formulas and cast by ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch

from jetrl_bench import scale_rules
from jetrl_bench.fp8 import RULES, quantize, spec
from jetrl_bench.quantizer import quantize_blocks

F = np.float32
MAX = F(448)


def ceil_pow2(scale):
    """DeepGEMM's bit trick: add one to the exponent if any mantissa bit is set."""
    bits = scale.view(np.int32)
    return (((bits >> 23) + ((bits & 0x7FFFFF) != 0)) << 23).astype(np.int32).view(np.float32)


def vllm(x, amax, pow2):
    """scale = max(amax, 1e-10) / 448, or exp2(ceil(log2(max(scale, 1e-10)))); clamp(x / scale)."""
    scale = np.maximum(amax, F(1e-10)) / MAX
    if pow2:
        scale = np.exp2(np.ceil(np.log2(np.maximum(scale, F(1e-10)).astype(np.float64)))).astype(F)
    return x / scale, scale


def deepgemm(x, amax, pow2):
    """scale = max(amax, 1e-4) / 448, rounded up to a power of two by its bits; x * (1 / scale)."""
    scale = np.maximum(amax, F(1e-4)) / MAX
    scale = ceil_pow2(scale) if pow2 else scale
    return x * (F(1) / scale), scale


def te(x, amax, pow2):
    """Keeps 448 / amax (mantissa masked for powers of two) and multiplies by it; amax 0: 1."""
    zero = amax == 0
    reciprocal = np.where(zero, F(1), MAX / np.where(zero, F(1), amax))
    reciprocal = (reciprocal.view(np.int32) & np.int32(0x7F800000)).view(np.float32) if pow2 else reciprocal
    return x * reciprocal, F(1) / reciprocal


def torchao(x, amax, pow2):
    """fp32(448 / max(amax, 1e-12)), the division in fp64; x * that."""
    reciprocal = (448.0 / np.maximum(amax.astype(np.float64), 1e-12)).astype(F)
    return x * reciprocal, F(1) / reciprocal


ENGINES = {
    "vllm_ue8m0": (vllm, True),
    "vllm_fp32": (vllm, False),
    "deepgemm_ue8m0": (deepgemm, True),
    "deepgemm_fp32": (deepgemm, False),
    "te_pow2": (te, True),
    "te_fp32": (te, False),
    "torchao": (torchao, False),
}


def reference(x, rule):
    """(codes' values, scales) of bf16 [groups, 128]."""
    engine, pow2 = ENGINES[rule]
    x = x.float().numpy()
    y, scale = engine(x, np.abs(x).max(1, keepdims=True), pow2)
    assert y.dtype == np.float32 and scale.dtype == np.float32
    return np.clip(y, -MAX, MAX).astype(ml_dtypes.float8_e4m3fn).astype(F), scale


def ours(x, rule):
    codes, scales = quantize_blocks(x, (1, 128), spec("e4m3", rule=rule), dequantize=False, want_scales=True)
    return codes.float().numpy(), scales.numpy()


def test_every_engine_is_covered():
    assert set(ENGINES) == {name for name in RULES if not name.startswith("default")}


@pytest.mark.parametrize("rule", list(ENGINES))
def test_codes_and_scales_are_the_engines(rule):
    x = scale_rules.activations(1024, seed=3)
    # magnitudes down to the smallest normal numbers, across every floor, and an all-zero group
    x = torch.cat([x, *(scale_rules.with_amax(x[:64], e) for e in range(-110, 16, 3)), torch.zeros(1, 128).bfloat16()])
    codes, scales = ours(x, rule)
    expected_codes, expected_scales = reference(x, rule)
    assert np.array_equal(codes, expected_codes)
    nonzero = np.abs(x.float().numpy()).max(1) > 0
    assert np.array_equal(scales[nonzero], expected_scales[nonzero])


@pytest.mark.parametrize("rule", list(ENGINES))
def test_scales_of_every_bf16_amax(rule):
    """All positive finite bf16 values down to 2^-110, each the amax of a group of its own."""
    bits = torch.arange((127 - 110) << 7, 0x7F80, dtype=torch.int32)
    amax = (bits << 16).view(torch.float32)
    amax = amax[amax < 1e35]
    x = torch.zeros(len(amax), 128)
    x[:, 0], x[:, 1] = amax, -amax / 3
    codes, scales = ours(x.bfloat16(), rule)
    expected_codes, expected_scales = reference(x.bfloat16(), rule)
    assert np.array_equal(scales, expected_scales)
    assert np.array_equal(codes, expected_codes)
    assert np.abs(codes).max() <= 448


def test_fp32_scale_rules_differ_at_known_rates():
    """About 5e-4 (DeepGEMM: two roundings of the reciprocal) and 3e-4 (one) of codes differ from vLLM's division."""
    x = scale_rules.activations(8192)
    share = {rule: scale_rules.differing(x, rule, "vllm_fp32")[0] for rule in scale_rules.FP32}
    assert share["vllm_fp32"] == 0
    assert 3.5e-4 < share["deepgemm_fp32"] < 6.5e-4
    assert 2.0e-4 < share["te_fp32"] < 4.0e-4
    # te divides in fp32, torchao in fp64 and rounds: the same reciprocal but for double rounding
    assert share["torchao"] == pytest.approx(share["te_fp32"], rel=0.02)
    # a differing code is a neighbour: the tie went the other way
    a, b = (scale_rules.codes(x, rule)[0].float() for rule in ("deepgemm_fp32", "vllm_fp32"))
    other = a != b
    assert ((a[other] - b[other]).abs() <= a[other].abs().clamp(min=2**-6) / 8 + 2**-9).all()


@pytest.mark.parametrize("exponent", [12, 0, -8, -13])
def test_power_of_two_rules_agree_above_the_floors(exponent):
    """Above 1e-4 all engines agree to the last code; 2^-13 is the last octave above DeepGEMM's floor."""
    x = scale_rules.with_amax(scale_rules.activations(1024, seed=1), exponent)
    for rule in scale_rules.POW2:
        assert scale_rules.differing(x, rule, "default_pow2") == (0, 0), rule


def test_floors_start_where_they_are_said_to():
    small = scale_rules.activations(256, seed=2)

    def shares(exponent, rule):
        return scale_rules.differing(scale_rules.with_amax(small, exponent), rule, "te_pow2")

    # DeepGEMM: amax 1e-4. Codes move by whole octaves first (same values), then lose bits
    assert shares(-14, "deepgemm_ue8m0") == (0, 0) and shares(-16, "deepgemm_ue8m0")[0] > 0.9
    assert shares(-16, "deepgemm_ue8m0")[1] < 0.01 and shares(-30, "deepgemm_ue8m0")[1] > 0.5
    # vLLM: scale 1e-10, amax 4.5e-8
    assert shares(-25, "vllm_ue8m0") == (0, 0) and shares(-27, "vllm_ue8m0")[0] > 0.9
    assert shares(-27, "vllm_ue8m0")[1] < 0.01 and shares(-40, "vllm_ue8m0")[1] > 0.4
    errors = {rule: scale_rules.relative_error(scale_rules.with_amax(small, -32), rule) for rule in scale_rules.POW2}
    assert errors["te_pow2"] < 0.03 and errors["vllm_ue8m0"] < 0.03 and errors["deepgemm_ue8m0"] > 0.5


def test_the_table_covers_both_kinds():
    text = scale_rules.table(groups=64)
    for rule in ENGINES:
        assert f"`{rule}`" in text


def test_tensor_cores_keep_fewer_bits_inside_a_block():
    """mmaemu's emulation of an H100's FP8 products, block by block: 14 times below the rounding of the bf16 result."""
    mmaemu = pytest.importorskip("mmaemu", reason="optional: pip install mmaemu")
    generator = torch.Generator().manual_seed(0)
    x = quantize(torch.randn(32, 512, generator=generator).bfloat16(), "e4m3", (1, 128))
    w = quantize((torch.randn(32, 512, generator=generator) * 0.02).bfloat16(), "e4m3", (128, 128))
    hardware, exact = torch.zeros(32, 32), torch.zeros(32, 32, dtype=torch.float64)
    for i in range(4):
        a, b = (q.values()[:, 128 * i : 128 * i + 128].contiguous() for q in (x, w))
        scale = x.scales[:, i, None] * w.scales[:, i].expand(32)
        codes = (t.to(torch.float8_e4m3fn) for t in (a, b))
        hardware += mmaemu.accumulate(*codes, use_fast_accum=False, splitk=1) * scale
        exact += (a.double() @ b.double().t()) * scale.double()
    error = float((hardware.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert 5e-5 < error < 2e-4
    assert 0.02 < float((hardware.bfloat16() != exact.bfloat16()).double().mean()) < 0.12
