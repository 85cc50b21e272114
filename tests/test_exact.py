"""Bit equality: rollout against training, compiled against eager, this instruction set against a capped one."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from jetrl_bench import check, fp8, kernels, native
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.kernels import Heads, KVCache
from jetrl_bench.layers import other_attention
from jetrl_bench.model import rope_table

FP8 = {"rollout": "fp8", "train": "fp8"}


@pytest.mark.parametrize("format", check.FORMATS)
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("groups", ["block", "row"])
def test_every_per_group_format_is_exact(format, scale, groups):
    flow = FlowConfig(**FP8, format=format, scale=scale, activation_groups=groups)
    gap, tokens, cuts = check.exactness(flow, ModelConfig(), batch_size=7, max_tokens=16, seed=0)
    assert gap == 0 and cuts and tokens > 50


@pytest.mark.parametrize("batch_size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_batch_sizes_and_cuts(batch_size, kind):
    flow = FlowConfig(rollout=kind, train=kind)
    gap, _, cuts = check.exactness(flow, ModelConfig(), batch_size=batch_size, max_tokens=12, seed=batch_size)
    assert gap == 0 and cuts


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_every_kv_length_to_512(kind):
    flow = FlowConfig(rollout=kind, train=kind)
    gap, tokens, _ = check.exactness(flow, ModelConfig(), batch_size=1, max_tokens=511, seed=0, prompt=1)
    assert gap == 0 and tokens == 511


@pytest.mark.parametrize(
    "extra", [{"kv_cache": "fp8"}, {"kv_cache": "fp8", "scale": "fp32"}, {"lm_head": "fp8"}, {"lm_head": "fp32"}]
)
def test_kv_cache_and_head_settings_are_exact(extra):
    gap, _, cuts = check.exactness(FlowConfig(**FP8, **extra), ModelConfig(), batch_size=5, max_tokens=16, seed=1)
    assert gap == 0 and cuts


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_architectures_and_odd_widths_are_exact(arch):
    cfg = ModelConfig(
        arch=arch,
        hidden_size=160,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        intermediate_size=520,
        tie_embeddings=False,
    )
    gap, _, cuts = check.exactness(FlowConfig(**FP8), cfg, batch_size=4, max_tokens=16, seed=1)
    assert gap == 0 and cuts


def test_what_breaks_exactness_is_seen():
    common = {"batch_size": 7, "max_tokens": 24, "seed": 0}
    tensor = FlowConfig(**FP8, activation_groups="tensor", format="e2m1")
    assert check.exactness(tensor, ModelConfig(), **common)[0] > 0
    assert check.exactness(FlowConfig(**FP8, train_kernels="other"), ModelConfig(), **common)[0] > 0
    assert check.exactness(FlowConfig(rollout="fp8"), ModelConfig(), **common)[0] > 0


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("swap_at", [1, 9])
def test_in_flight_swap(kv, swap_at):
    name, passed, detail = check.inflight(FlowConfig(**FP8), kv, swap_at=swap_at)
    assert passed, f"{name}: {detail}"


@pytest.mark.parametrize("flow", [FlowConfig(), FlowConfig(**FP8), FlowConfig(**FP8, scale="fp32", kv_cache="fp8")])
def test_training_has_the_same_bits_without_a_compiler(flow):
    """Two optimizer steps, compiled and eager: every weight equal."""
    from jetrl_bench.precision import make_flow

    cfg = ModelConfig(num_layers=1, num_kv_heads=2, hidden_size=64, head_dim=24, intermediate_size=136)
    compiled = dict(check.trained(cfg, make_flow(flow), seed=0).named_parameters())
    with native.eager():
        eager = dict(check.trained(cfg, make_flow(flow), seed=0).named_parameters())
    assert all(torch.equal(compiled[n], eager[n]) for n in compiled)


def test_rollout_has_the_same_bits_without_a_compiler():
    flow = FlowConfig(**FP8)
    a = check.inflight(flow, "keep", swap_at=5)
    with native.eager():
        b = check.inflight(flow, "keep", swap_at=5)
    assert a == b and a[1]


def test_attention_against_float64():
    """The exact attention is attention: within bf16 rounding of the textbook formula, gradients too."""
    heads, (cos, sin) = Heads(4, 2, 32), rope_table(ModelConfig())
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(37, heads.width, generator=g).to(torch.bfloat16)
    dout = torch.randn(37, 128, generator=g).to(torch.bfloat16)
    out, saved = kernels.attention(qkv, torch.tensor([0, 37]), heads, cos, sin, None, save=True)
    x = qkv.double().requires_grad_()
    q, k, v = x.view(37, 8, 32).split([4, 2, 2], 1)
    q, k = (kernels.rotate(t, cos[:37, None].double(), sin[:37, None].double()) for t in (q, k))
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / 32**0.5
    p = scores.masked_fill(torch.ones(37, 37).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("hij,jhd->ihd", p, v).reshape(37, 128)
    expected.backward(dout.double())
    assert (out - expected).abs().max() < 0.03
    grad = kernels.attention_backward(dout, out, qkv, saved, torch.tensor([0, 37]), heads, cos, sin, None)
    assert (grad - x.grad).norm() / x.grad.norm() < 0.01


@pytest.mark.parametrize("kv", [None, fp8.spec("e4m3"), fp8.spec("e2m1", "fp32")])
@pytest.mark.parametrize("heads", [Heads(4, 4, 32), Heads(4, 2, 24)])
def test_the_other_attention_has_the_same_bits_without_a_compiler(heads, kv):
    cfg = ModelConfig(num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim)
    g, (cos, sin) = torch.Generator().manual_seed(0), rope_table(cfg)
    qkv = torch.randn(70, heads.width, generator=g).to(torch.bfloat16)
    dout = torch.randn(70, heads.num_heads * heads.head_dim, generator=g).to(torch.bfloat16)
    found = []
    for switch in (contextlib.nullcontext(), native.eager()):
        with switch:
            x = qkv.clone().requires_grad_()
            out = other_attention(x, torch.tensor([0, 3, 40, 70]), heads, cos, sin, kv)
            out.backward(dout)
            found.append((out.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    exact = kernels.attention(qkv, torch.tensor([0, 3, 40, 70]), heads, cos, sin, kv, save=False)[0]
    assert (found[0][0].float() - exact.float()).abs().max() < 0.05


def test_cache_rows_beyond_a_sequence_never_matter():
    heads, (cos, sin) = Heads(2, 2, 32), rope_table(ModelConfig())
    qkv = torch.randn(1, heads.width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    outs = []
    for fill in (0.0, 1e4):
        cache = KVCache(
            torch.full((1, 2, 32, 32), fill, dtype=torch.bfloat16),
            torch.full((1, 2, 32, 32), fill, dtype=torch.bfloat16),
        )
        args = torch.tensor([0]), torch.tensor([0]), heads, cos, sin, None, cache
        outs.append(kernels.decode(qkv, *args, torch.empty(1, 64, dtype=torch.bfloat16)))
    assert torch.equal(*outs)


def test_check_holds_under_an_avx2_cap():
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from jetrl_bench import check, fp8; from jetrl_bench.config import *\n"
        "assert fp8.gemm_isa() == 'fp32'\n"
        "for f in (FlowConfig(), FlowConfig(rollout='fp8', train='fp8', scale='fp32')):\n"
        "    gap, n, cuts = check.exactness(f, ModelConfig(num_layers=1), batch_size=7, max_tokens=9, seed=0)\n"
        "    assert gap == 0 and cuts, f\n"
        "assert check.inflight(FlowConfig(rollout='fp8', train='fp8'), 'keep', swap_at=7)[1]\n"
    )
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
