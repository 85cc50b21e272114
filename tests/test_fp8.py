"""Formats, rounding, scales and the GEMM against independent references: ml_dtypes, gfloat, torch's casts, float64."""

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import RoundMode, round_float
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e3m2, format_info_ocp_e4m3, format_info_ocp_e5m2
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_bench import fp8, native, quantizer

MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e3m2": 28.0, "e4m1": 384.0, "e2m1": 6.0}
TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
GFLOAT = {
    "e4m3": format_info_ocp_e4m3,
    "e5m2": format_info_ocp_e5m2,
    "e3m2": format_info_ocp_e3m2,
    "e2m1": format_info_ocp_e2m1,
}


def every_bf16() -> torch.Tensor:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    return x[torch.isfinite(x)]


def rounded(x: torch.Tensor, format: str) -> torch.Tensor:
    return quantizer.round_to_format(x, fp8.spec(format))


@pytest.mark.parametrize("format", TYPES)
def test_every_bf16_rounds_as_ml_dtypes(format):
    x = every_bf16()
    clamped = x.clamp(-MAX[format], MAX[format]).numpy()
    expected = clamped.astype(TYPES[format]).astype(np.float32)
    got = rounded(x, format).numpy()
    assert np.array_equal(got, expected) and np.array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("format,dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_every_bf16_rounds_and_encodes_as_torch_casts(format, dtype):
    x = every_bf16().clamp(-MAX[format], MAX[format])
    cast = x.to(dtype)
    assert torch.equal(rounded(x, format), cast.float())
    assert torch.equal(fp8.encode(rounded(x, format), format), cast.view(torch.uint8))


@pytest.mark.parametrize("format", GFLOAT)
def test_a_sample_rounds_as_gfloat(format):
    x = every_bf16()[::157]
    expected = [round_float(GFLOAT[format], float(v), RoundMode.TiesToEven, sat=True) for v in x]
    assert rounded(x, format).tolist() == expected


@pytest.mark.parametrize("format", fp8.FORMATS)
def test_codes_stand_for_their_values_and_back(format):
    f = fp8.FORMATS[format]
    codes = torch.arange(2 ** (1 + f.exponent_bits + f.mantissa_bits), dtype=torch.int32).to(torch.uint8)
    values = fp8._values(format)[codes.long()].float()
    finite = values.abs() <= f.max
    assert torch.equal(fp8.encode(values[finite], format), codes[finite])
    assert values[finite].max() == f.max == MAX[format]
    assert torch.equal(rounded(values[finite], format), values[finite])


def test_e4m1_has_one_mantissa_bit():
    positive = sorted({v for v in fp8._values("e4m1").tolist() if v > 0})
    assert (
        positive[:4] == [2**-7, 2**-6, 1.5 * 2**-6, 2**-5] and positive[-2:] == [256.0, 384.0] and len(positive) == 31
    )


VALUES = st.floats(-(2.0**99), 2.0**99, width=32).map(lambda v: v if abs(v) > 1e-25 else 0.0)


@given(st.lists(VALUES, min_size=1, max_size=300), st.sampled_from(list(fp8.FORMATS)))
@settings(max_examples=60)
def test_compiled_and_eager_quantisation_agree_and_pow2_is_exact_in_bf16(values, format):
    x = torch.tensor([values]).to(torch.bfloat16)
    for scale in ("pow2", "fp32"):
        s = fp8.spec(format, scale)
        got = quantizer.quantize_blocks(x, (1, 128), s, want_scales=True)
        with native.eager():
            eager = quantizer.quantize_blocks(x, (1, 128), s, want_scales=True)
        assert torch.equal(got[0], eager[0]) and torch.equal(got[1], eager[1])
    q = fp8.quantize(x, format, (1, 128))
    exact = q.values().double() * fp8.expand_scales(q.scales, q.block, x.shape).double()
    assert torch.equal(exact, q.dequantize().double())
    assert torch.equal(q.dequantize(), fp8.qdq(x, format, (1, 128)))


@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize("rule", ["default", "te_pow2", "vllm_ue8m0", "deepgemm_ue8m0"])
def test_rounding_on_words_is_the_definition(format, rule):
    """Vectors of bf16 of every exponent, wide and narrow groups, zeros, infinities: bit for bit the torch code."""
    g = torch.Generator().manual_seed(len(format) + len(rule))
    s = fp8.spec(format, rule=rule)
    for lowest, width in ((0, 255), (0, 12), (100, 40), (120, 3), (230, 24), (253, 2)):
        words = torch.randint(0, 65536, (150, 224), generator=g)
        exponent = lowest + torch.randint(0, width, words.shape, generator=g)
        words = (words & 0x807F) | (exponent << 7)
        words[torch.rand(words.shape, generator=g) < 0.1] &= 0x8000
        words[70:, 190] = 0x7F80 if width == 3 else 0
        x = torch.where(words > 32767, words - 65536, words).to(torch.int16).view(torch.bfloat16)
        for block in ((1, 128), (128, 1), (1, 224)):
            got = quantizer.quantize_blocks(x, block, s, want_scales=True)
            with native.eager():
                eager = quantizer.quantize_blocks(x, block, s, want_scales=True)
            finite = torch.isfinite(eager[0])
            assert torch.equal(torch.isfinite(got[0]), finite)
            assert torch.equal(got[0][finite].view(torch.int16), eager[0][finite].view(torch.int16))
            torch.testing.assert_close(got[1], eager[1], rtol=0, atol=0, equal_nan=True)


def test_power_of_two_scale_is_the_smallest_that_fits():
    for exponent in range(-60, 60):
        for mantissa in (1.0, 1.25, 1.75, 1.7578125, 1.9921875):
            amax = mantissa * 2.0**exponent
            s = fp8.quantize(torch.tensor([[amax]]), "e4m3", (1, 128)).scales.item()
            assert amax / s <= 448 < 2 * amax / s and np.log2(s) == int(np.log2(s))


def test_zero_subnormal_and_tiny_groups():
    x = torch.zeros(3, 256)
    x[1, 5] = 1e-40
    x[2, 200] = 2.0**-126
    for scale in ("pow2", "fp32"):
        y = fp8.qdq(x, "e4m3", (1, 128), scale=scale, dtype=torch.float32)
        assert torch.isfinite(y).all() and (y[0] == 0).all() and (y[2, :128] == 0).all()
        assert abs(y[2, 200].item() / 2.0**-126 - 1) < 0.07


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_and_never_hidden(bad):
    x = torch.ones(2, 128)
    x[1, 3] = bad
    with pytest.raises(ValueError, match="NaN or inf"):
        fp8.quantize(x, "e4m3", (1, 128))
    assert not torch.isfinite(fp8.qdq(x, "e4m3", (1, 128))).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 128), (3, 130), (130, 257), (128, 128)])
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (128, 1)])
def test_blocks_are_ceil_blocks(shape, block):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got = fp8.qdq(x, "e4m3", block)
    for r in range(0, shape[0], block[0]):
        for c in range(0, shape[1], block[1]):
            tile = x[r : r + block[0], c : c + block[1]].float()
            s = 2.0 ** np.ceil(np.log2(tile.abs().max().item() / 448))
            expected = (tile / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s
            assert torch.equal(got[r : r + block[0], c : c + block[1]].float(), expected)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'e4m3'"):
        fp8.spec("e4m3fn")
    with pytest.raises(ValueError, match="did you mean 'vllm_fp32'"):
        fp8.spec("e4m3", rule="vllm_fp3")


def test_stochastic_rounding_is_unbiased_and_repeatable():
    x = torch.full((64, 128), 1.03)
    x[:, 0] = 448
    noise = fp8.uniform_noise((64, 128), seed=3)
    y = quantizer.quantize_blocks(x, (1, 128), fp8.spec("e4m3"), dtype=torch.float32, noise=noise)[0][:, 1:]
    assert set(y.flatten().tolist()) == {1.0, 1.125} and abs(y.mean().item() - 1.03) < 0.002
    assert torch.equal(noise, fp8.uniform_noise((64, 128), seed=3))


@pytest.mark.parametrize("M,N,K", [(1, 48, 256), (7, 40, 72), (64, 128, 128), (33, 100, 300), (96, 64, 576)])
@pytest.mark.parametrize("scaled", [False, True])
def test_gemm_against_float64_and_the_eager_definition(M, N, K, scaled):
    g = torch.Generator().manual_seed(M)
    x, w = torch.randn(M, K, generator=g).to(torch.bfloat16), torch.randn(N, K, generator=g).to(torch.bfloat16)
    nb = -(-K // 128)
    xs, ws = (torch.rand(M, nb, generator=g), torch.rand(N, nb, generator=g)) if scaled else (None, None)
    bias = torch.randn(N, generator=g).to(torch.bfloat16)
    exact = bias.double() + sum(
        (a.double() @ b.double().t()) * (xs[:, i, None] * ws[None, :, i] if scaled else 1)
        for i, (a, b) in enumerate(zip(x.split(128, 1), w.split(128, 1)))
    )
    got = fp8.gemm(x, fp8.Factor(w, ws), x_scales=xs, bias=bias, dtype=torch.float32)
    assert (got - exact).abs().max() < 2e-5 * K**0.5
    flipped = fp8.Factor(w.t().contiguous(), ws, transposed=True)
    assert torch.equal(got, fp8.gemm(x, flipped, x_scales=xs, bias=bias, dtype=torch.float32))
    with native.eager():
        eager = fp8.gemm(x, fp8.Factor(w, ws), x_scales=xs, bias=bias, dtype=torch.float32)
    assert torch.equal(got, eager)
    assert torch.equal(got.to(torch.bfloat16), fp8.gemm(x, fp8.Factor(w, ws), x_scales=xs, bias=bias))


@pytest.mark.parametrize("K", [72, 128, 256, 512, 576])
def test_gemm_rows_do_not_depend_on_each_other(K):
    g = torch.Generator().manual_seed(K)
    x, w = torch.randn(700, K, generator=g).to(torch.bfloat16), torch.randn(96, K, generator=g).to(torch.bfloat16)
    factor = fp8.Factor(w)
    whole = fp8.gemm(x, factor)
    for m in (1, 2, 3, 4, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 200, 333, 690):
        assert torch.equal(fp8.gemm(x[5 : 5 + m], factor), whole[5 : 5 + m])


@pytest.mark.parametrize("M,parts", [(1, (128,)), (40, (128, 64, 64)), (300, (576,)), (33, (96, 40))])
@pytest.mark.parametrize("width", [128, 1024])
def test_gemm_quantises_its_rows_as_a_pass_before_it_would(M, parts, width):
    g = torch.Generator().manual_seed(M)
    K, s = sum(parts), fp8.spec("e4m3")
    x, w = torch.randn(M, K, generator=g).to(torch.bfloat16), torch.randn(40, K, generator=g).to(torch.bfloat16)
    passed = torch.cat([fp8.qdq(p, "e4m3", (1, width)) for p in x.split(parts, 1)], 1)
    assert not torch.equal(passed, x)
    groups = quantizer.RowGroups(s, parts, width)
    expected = fp8.gemm(passed, fp8.Factor(w))
    assert torch.equal(fp8.gemm(x, fp8.Factor(w), groups=groups), expected)
    with native.eager():
        assert torch.equal(fp8.gemm(x, fp8.Factor(w), groups=groups), expected)


@pytest.mark.parametrize("T", [1, 100, 128, 300, 700])
def test_token_gemm_quantises_its_columns_as_a_pass_before_it_would(T):
    g = torch.Generator().manual_seed(T)
    a, b = (torch.randn(T, n, generator=g).to(torch.bfloat16) for n in (72, 256))
    expected = fp8.gemm_tokens(*(fp8.qdq(t, "e4m3", (128, 1)) for t in (a, b)))
    assert torch.equal(fp8.gemm_tokens(a, b, spec=fp8.spec("e4m3")), expected)
    with native.eager():
        assert torch.equal(fp8.gemm_tokens(a, b, spec=fp8.spec("e4m3")), expected)


def test_token_gemm_sums_over_tokens():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(333, 40, generator=g).to(torch.bfloat16), torch.randn(333, 72, generator=g).to(torch.bfloat16)
    got = fp8.gemm_tokens(a, b)
    assert (got - a.double().t() @ b.double()).abs().max() < 1e-3
    with native.eager():
        assert torch.equal(got, fp8.gemm_tokens(a, b))
    zeros = torch.zeros(51, 40, dtype=torch.bfloat16), torch.zeros(51, 72, dtype=torch.bfloat16)
    assert torch.equal(got, fp8.gemm_tokens(torch.cat([a, zeros[0]]), torch.cat([b, zeros[1]])))
