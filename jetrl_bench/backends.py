"""Real FP8 matrix products behind the precision flow: `torch` (cuBLASLt, scaled_mm) and `te` (Transformer Engine).

The emulated flow (fp8.py) says what is computed; this file says in which memory layout a Hopper GPU wants it.

    GEMM     A [rows, reduction]            B [columns, reduction]          scales of A and B
    FProp    X [T, K]                       W [N, K]                        1x128 along K; 128x128
    DGrad    dY [T, N]                      W^T [K, N], the same codes      1x128 along N; the same 128x128, transposed
    WGrad    dY^T [N, T], quantised again   X^T [K, T], quantised again     1x128 along T, both

torch: on Hopper an FP8 product has no layout but reduction-innermost for both operands, hence the copies. 1x128
scales are M-major, [R, C / 128] with strides (1, R); 128x128 scales are [C / 128 rounded up to 4, R / 128], with the
reduction innermost too (aten/src/ATen/native/cuda/ScaledBlas.cpp). Sizes are padded with zero codes: reductions and
128x128 rows to 128, other rows to 16.

te: te.Linear under Float8BlockScaling, token counts padded to 128. The scale kind is set on the recipe object, because
fp8_quant_* are class attributes and no constructor arguments, and a module keeps the quantisers of its first forward,
so every scale kind has modules of its own (transformer-engine 2.20.2).

A machine that cannot run a back end is refused with what is missing; nothing falls back.
"""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from jetrl_bench.config import FlowConfig
from jetrl_bench.fp8 import BLOCK, spec
from jetrl_bench.quantizer import QuantSpec, quantize_blocks

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [T, K] bf16, weight [N, K] and bias [N] or None, fp32 masters or bf16) -> y [T, N] bf16, differentiable in all."""


def require(flow: FlowConfig, device: str = "cuda") -> None:
    """ValueError with everything that the back end of the flow lacks; the emulated one runs anywhere."""
    missing = [] if flow.backend == "emulated" else [*_settings(flow), *_machine(flow.backend, device)]
    if missing:
        raise ValueError(f"flow.backend {flow.backend!r} cannot run here: {'; '.join(missing)}")


def make_linear(flow: FlowConfig, side: str = "train") -> Linear:
    """The linear layer of one side of the flow; `require` must have passed. What is quantised is bf16(weight)."""
    if flow.backend == "te":
        return te_linear(flow.scale)
    assert flow.backend == "torch", flow.backend
    rule = flow.train_rule if side == "train" else flow.rollout_rule
    forward = spec(flow.format, flow.scale, rule)
    backward = None if flow.forward_only else spec(flow.grad_format, flow.scale, rule)
    wgrad_dtype = torch.float32 if flow.wgrad_output == "fp32" else torch.bfloat16
    return lambda x_TK, weight_NK, bias_N=None: BlockLinear.apply(
        x_TK, weight_NK, bias_N, forward, backward, wgrad_dtype
    )


def ready(weight_NK: Tensor, bias_N: Tensor | None, backend: str, rule: QuantSpec) -> Callable[[Tensor], Tensor]:
    """x [T, K] -> y [T, N] without gradients, the bf16 weight quantised once: what a rollout calls at every step."""
    if backend == "te":
        linear = te_linear("pow2" if rule.pow2 else "fp32")
        return lambda x_TK: linear(x_TK, weight_NK, bias_N)
    weight = block_weight(weight_NK, rule).operand()
    return lambda x_TK: _forward(x_TK, weight, bias_N, rule, weight_NK.shape[0])


def _forward(x_TK: Tensor, weight: "Operand", bias_N: Tensor | None, rule: QuantSpec, rows: int) -> Tensor:
    """bf16(X W^T + bias), rounded once."""
    y = product(row_operand(x_TK, rule), weight, torch.bfloat16 if bias_N is None else torch.float32)
    y = y.narrow(0, 0, x_TK.shape[0]).narrow(1, 0, rows)
    return y if bias_N is None else (y + bias_N.to(torch.bfloat16).float()).to(torch.bfloat16)


def _settings(flow: FlowConfig) -> list[str]:
    """Settings that only the emulated back end knows."""
    wanted = {
        "format": ["e4m3"],
        "grad_format": ["e4m3"],
        "activation_groups": ["block"],
        "weight_groups": ["block"],
        "rounding": ["nearest"],
        "wgrad_input": ["from_bf16"],
        "grad_transport": ["bf16"],
    }
    if flow.backend == "te":
        # te has its own scale rule (which with power-of-two scales is the textbook's) and returns bf16 gradients
        own = ["te_pow2", "default"] if flow.scale == "pow2" else ["te_fp32"]
        wanted |= {side + "_rule": own for side in ("rollout", "train") if getattr(flow, side) == "fp8"}
        wanted |= {"wgrad_output": ["bf16"], "forward_only": [False]}
    return [
        f"{key} must be {' or '.join(map(repr, values))}, not {getattr(flow, key)!r}"
        for key, values in wanted.items()
        if getattr(flow, key) not in values
    ]


def _machine(backend: str, device: str) -> list[str]:
    missing = []
    if not device.startswith("cuda"):
        missing.append(f"device {device!r} is not a CUDA device")
    if not torch.cuda.is_available():
        missing.append("this torch sees no CUDA device")
    else:
        capability = torch.cuda.get_device_capability(device if device.startswith("cuda") else None)
        if capability[0] != 9:
            missing.append(f"compute capability {capability[0]}.{capability[1]}: block-scaled FP8 needs 9.0 (Hopper)")
        if tuple(map(int, torch.version.cuda.split("."))) < (12, 9):
            missing.append(f"CUDA {torch.version.cuda}: block-scaled FP8 needs 12.9")
    if backend == "te" and importlib.util.find_spec("transformer_engine") is None:
        missing.append("package transformer-engine is not installed: pip install 'transformer-engine[pytorch]'")
    return missing


# The torch back end


class Operand(NamedTuple):
    """codes [R, C] float8_e4m3fn, row-major, the reduction last; scales in cuBLASLt's layout."""

    codes: Tensor
    scales: Tensor
    recipe: ScalingType


def row_operand(x_RC: Tensor, rule: QuantSpec) -> Operand:
    """Quantise 1x128 along the last dimension; rows padded to 16, columns to 128."""
    codes, scales = quantize_blocks(
        pad(x_RC, (0, -x_RC.shape[1] % BLOCK, 0, -x_RC.shape[0] % 16)),
        (1, BLOCK), rule, dequantize=False, want_scales=True,
    )  # fmt: skip
    return Operand(codes.to(torch.float8_e4m3fn), m_major(scales), ScalingType.BlockWise1x128)


class BlockWeight(NamedTuple):
    """A weight in 128x128 blocks, padded: codes [N, K], scales [N / 128, K / 128]; one set serves two GEMMs."""

    codes: Tensor
    scales: Tensor

    def operand(self) -> Operand:
        return Operand(self.codes, block_scales(self.scales), ScalingType.BlockWise128x128)

    def transposed(self) -> "BlockWeight":
        """The same codes and scales of W^T, copied so that N is innermost."""
        return BlockWeight(*(torch.clone(part.t(), memory_format=torch.contiguous_format) for part in self))


def block_weight(weight_NK: Tensor, rule: QuantSpec) -> BlockWeight:
    rows, columns = weight_NK.shape
    codes, scales = quantize_blocks(
        pad(weight_NK, (0, -columns % BLOCK, 0, -rows % BLOCK)),
        (BLOCK, BLOCK), rule, dequantize=False, want_scales=True,
    )  # fmt: skip
    return BlockWeight(codes.to(torch.float8_e4m3fn), scales)


def m_major(scales_RG: Tensor) -> Tensor:
    """The same values with strides (1, R)."""
    return torch.clone(scales_RG.t(), memory_format=torch.contiguous_format).t()


def block_scales(scales_NK: Tensor) -> Tensor:
    """[N / 128, K / 128] -> [K / 128 rounded up to 4, N / 128] with strides (1, rounded K / 128)."""
    return pad(scales_NK, (0, -scales_NK.shape[1] % 4), value=1.0).t()


def product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """A B^T, accumulated per 128-wide block in fp32, in `dtype`."""
    return scaled_mm(a.codes, b.codes.t(), a.scales, a.recipe, b.scales, b.recipe, output_dtype=dtype)


class BlockLinear(torch.autograd.Function):
    """Y = X W^T + b with its gradients, each a block-scaled FP8 product; bf16 gradients where `backward` is None."""

    @staticmethod
    def forward(ctx, x_TK, weight_NK, bias_N, forward_rule, backward_rule, wgrad_dtype):
        weight_bf16 = weight_NK.to(torch.bfloat16)
        weight = block_weight(weight_bf16, forward_rule)
        ctx.save_for_backward(x_TK, weight_bf16 if backward_rule is None else None, *weight)
        ctx.rule, ctx.wgrad_dtype, ctx.weight_shape = backward_rule, wgrad_dtype, weight_NK.shape
        ctx.has_bias = bias_N is not None
        return _forward(x_TK, weight.operand(), bias_N, forward_rule, weight_NK.shape[0])

    @staticmethod
    def backward(ctx, dy_TN):
        x_TK, weight_NK, *weight = ctx.saved_tensors
        (N, K), T, rule = ctx.weight_shape, x_TK.shape[0], ctx.rule
        db = dy_TN.float().sum(0) if ctx.has_bias else None
        if rule is None:
            return dy_TN @ weight_NK, (dy_TN.t() @ x_TK).to(ctx.wgrad_dtype), db, None, None, None
        dx = product(row_operand(dy_TN, rule), BlockWeight(*weight).transposed().operand(), torch.bfloat16)
        dw = product(row_operand(dy_TN.t(), rule), row_operand(x_TK.t(), rule), ctx.wgrad_dtype)
        return dx.narrow(0, 0, T).narrow(1, 0, K), dw.narrow(0, 0, N).narrow(1, 0, K), db, None, None, None


# The te back end


def te_recipe(scale: str):
    """Float8BlockScaling with the flow's scale kind, whatever NVTE_FP8_BLOCK_SCALING_FP32_SCALES said at import."""
    from transformer_engine.common.recipe import Float8BlockScaling, QParams

    recipe = Float8BlockScaling()
    for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, operand, QParams(power_2_scale=scale == "pow2", amax_epsilon=0.0))
    return recipe


def te_linear(scale: str) -> Linear:
    """One te.Linear per weight shape, called with the weight it is given."""
    import transformer_engine.pytorch as te

    recipe, modules = te_recipe(scale), {}

    def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        (N, K), T = weight_NK.shape, x_TK.shape[0]
        if N % 16 or K % 16:
            raise ValueError(f"flow.backend 'te': a weight of {N} x {K} is refused, both must be multiples of 16")
        if (N, K) not in modules:
            modules[N, K] = te.Linear(K, N, bias=False, params_dtype=torch.bfloat16, device=x_TK.device)
        with te.autocast(enabled=True, recipe=recipe):
            padded = pad(x_TK, (0, 0, 0, -T % BLOCK))
            y = torch.func.functional_call(modules[N, K], {"weight": weight_NK.to(torch.bfloat16)}, (padded,))
        y = y.narrow(0, 0, T)
        return y if bias_N is None else y + bias_N.to(torch.bfloat16)

    return linear
