"""FP8 and narrower formats: values, scale rules, block quantisation, and the GEMM they feed.

A format is sign, exponent and mantissa bits with subnormals; rounding is to nearest even and saturates. A group of
elements shares one scale = amax / largest value, either as an fp32 number or rounded up to a power of two (UE8M0). With
power-of-two scales codes x scale is exactly a bf16 number, so a bf16 GEMM with fp32 accumulation *is* the FP8 GEMM. With
fp32 scales the products of codes are accumulated in fp32 per block of 128 along the reduction, multiplied by both
scales, and added in fp32 (DeepGEMM's and Transformer Engine's split accumulation, idealised: tensor cores keep fewer
bits inside a block).

RULES holds the engines' scale rules as data. With power-of-two scales all of them give the same codes above their
floors; with fp32 scales 0.03 to 0.09 % of codes differ, because one divides and another multiplies by a reciprocal.

Shapes: M rows (tokens), N output features, K reduction. BLOCK = 128.
"""

import functools
import math
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F

from jetrl_bench import kernels
from jetrl_bench.config import nearest
from jetrl_bench.kernels import QuantSpec

BLOCK = 128


class Format(NamedTuple):
    """exponent_bits, mantissa_bits, smallest normal exponent, largest value."""

    exponent_bits: int
    mantissa_bits: int
    emin: int
    max: float


FORMATS = {
    "e4m3": Format(4, 3, -6, 448.0),  # OCP FP8; S.1111.111 is NaN
    "e5m2": Format(5, 2, -14, 57344.0),  # OCP FP8; exponent 31 is inf and NaN
    "e3m2": Format(3, 2, -2, 28.0),  # OCP MX FP6, every code finite
    "e4m1": Format(4, 1, -6, 384.0),  # emulation only: bias 7, every code finite
    "e2m1": Format(2, 1, 0, 6.0),  # OCP MX FP4, every code finite
}


class Rule(NamedTuple):
    """How an engine turns a group's amax into a scale and codes (floors are on amax and on the scale)."""

    scale: str
    formula: str
    """'amax/max'; 'amax*(1/max)'; 'max/amax' keeps the reciprocal; 'max/amax in fp64' rounds it once."""
    apply: str
    """'divide': x / scale; 'multiply': x * reciprocal."""
    amax_floor: float = 0.0
    scale_floor: float = 0.0
    source: str = ""


RULES = {
    "default_pow2": Rule("pow2", "amax/max", "divide", source="textbook: 2^ceil(log2(amax / max))"),
    "default_fp32": Rule("fp32", "amax/max", "divide", source="textbook: amax / max"),
    "vllm_ue8m0": Rule("pow2", "amax/max", "divide", 1e-10, 1e-10, "vLLM per_token_group_quant.cu"),
    "vllm_fp32": Rule("fp32", "amax/max", "divide", 1e-10, source="vLLM per_token_group_quant.cu"),
    "deepgemm_ue8m0": Rule("pow2", "amax/max", "multiply", 1e-4, source="DeepGEMM utils/math.py"),
    "deepgemm_fp32": Rule("fp32", "amax/max", "multiply", 1e-4, source="DeepGEMM utils/math.py"),
    "te_pow2": Rule("pow2", "max/amax", "multiply", source="Transformer Engine recipe_common.cuh"),
    "te_fp32": Rule("fp32", "max/amax", "multiply", source="Transformer Engine recipe_common.cuh"),
    "torchao": Rule("fp32", "max/amax in fp64", "multiply", 1e-12, source="torchao float8_utils.py"),
}
_FORMULAS = ["amax/max", "amax*(1/max)", "max/amax", "max/amax in fp64"]


@functools.cache
def spec(format: str, scale: str = "pow2", rule: str = "default") -> QuantSpec:
    """The arithmetic of a format under a rule; rule 'default' is the textbook rule of `scale`, others bring their own."""
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is unknown; {nearest(format, FORMATS)}")
    name = f"default_{scale}" if rule == "default" else rule
    if name not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; {nearest(rule, ['default', *RULES])}")
    f, r = FORMATS[format], RULES[name]
    return QuantSpec(
        f.mantissa_bits, f.emin, f.max, _FORMULAS.index(r.formula), r.scale == "pow2", r.apply == "multiply",
        r.amax_floor, r.scale_floor,
    )  # fmt: skip


def block_of(groups: str, shape: tuple[int, int], *, weight: bool = False) -> tuple[int, int]:
    """Rows x columns that share a scale: block is 1x128 (weights 128x128), row 1xC, tensor RxC."""
    if groups == "block":
        return (BLOCK, BLOCK) if weight else (1, BLOCK)
    return (1, shape[1]) if groups == "row" else (max(shape[0], 1), shape[1])


def transposed_block_of(groups: str, shape: tuple[int, int]) -> tuple[int, int]:
    """The same for an operand whose reduction runs down the rows (wgrad): 128x1, Rx1, RxC."""
    return {"block": (BLOCK, 1), "row": (max(shape[0], 1), 1), "tensor": (max(shape[0], 1), shape[1])}[groups]


class Quantized(NamedTuple):
    """One byte an element and fp32 scales [ceil R / block[0], ceil C / block[1]]."""

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    format: str

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def values(self) -> torch.Tensor:
        """What the codes stand for, before the scale: bf16 [R, C], exact."""
        return _values(self.format)[self.codes.long()]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (self.values().float() * expand_scales(self.scales, self.block, self.codes.shape)).to(dtype)


def quantize(
    x: torch.Tensor, format: str, block: tuple[int, int], *, scale: str = "pow2", rule: str = "default"
) -> Quantized:
    """Quantise [R, C] to one-byte codes and scales; NaN and inf are refused."""
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"cannot quantise to {format}: the tensor holds NaN or inf")
    values, scales = kernels.quantize_blocks(x, block, spec(format, scale, rule), dequantize=False, want_scales=True)
    return Quantized(encode(values, format), scales, (min(block[0], x.shape[0]), min(block[1], x.shape[1])), format)


def qdq(
    x: torch.Tensor, format: str, block: tuple[int, int], *, scale: str = "pow2", rule: str = "default",
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:  # fmt: skip
    """Quantise and dequantise [R, C]; with fp32 scales only dtype fp32 holds the product unrounded."""
    return kernels.quantize_blocks(x, block, spec(format, scale, rule), dtype=dtype)[0]


def expand_scales(scales: torch.Tensor, block: tuple[int, int], shape) -> torch.Tensor:
    """[ceil R / br, ceil C / bc] -> [R, C]."""
    return scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


@functools.cache
def _values(format: str) -> torch.Tensor:
    """Value of every code, bf16 [2^bits]; codes that are NaN or inf in the format are never produced."""
    f = FORMATS[format]
    code = torch.arange(2 ** (1 + f.exponent_bits + f.mantissa_bits))
    mantissa = code & (2**f.mantissa_bits - 1)
    exponent = (code >> f.mantissa_bits) & (2**f.exponent_bits - 1)
    magnitude = torch.where(
        exponent == 0,
        mantissa * 2.0 ** (f.emin - f.mantissa_bits),
        (mantissa + 2**f.mantissa_bits) * 2.0 ** (exponent.double() - 1 + f.emin - f.mantissa_bits),
    )
    return torch.where(code >> (f.exponent_bits + f.mantissa_bits) == 1, -magnitude, magnitude).to(torch.bfloat16)


def encode(values: torch.Tensor, format: str) -> torch.Tensor:
    """Values on the format's grid -> codes uint8 (sign, exponent, mantissa)."""
    f = FORMATS[format]
    bits = values.float().view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) - 127
    normal = ((exponent - f.emin + 1) << f.mantissa_bits) | (
        (bits >> (23 - f.mantissa_bits)) & (2**f.mantissa_bits - 1)
    )
    subnormal = (values.float().abs() * 2.0 ** (f.mantissa_bits - f.emin)).to(torch.int32)
    magnitude = torch.where(exponent >= f.emin, normal, subnormal)
    return (magnitude | ((bits < 0).int() << (f.exponent_bits + f.mantissa_bits))).to(torch.uint8)


def uniform_noise(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Counter-based uniforms in [0, 1) with 24 bits for stochastic rounding: element i of stream `seed`."""
    n = math.prod(shape)
    u = kernels.uniform(torch.full((n,), seed, dtype=torch.int64), torch.arange(n))
    return (torch.floor(u * 2**24) * 2.0**-24).float().view(shape)


# ------------------------------------------------------------------------------------------------ GEMM

ROWS = 64
"""Rows of a GEMM tile. A library may choose another order of the sum for another number of rows; equal tiles cannot."""
WHOLE_K = 256
"""Longest reduction for which the AMX kernels of oneDNN were seen to keep one order of the sum whatever the rows."""


@functools.cache
def gemm_isa() -> str:
    """'amx', 'avx512_bf16' or 'fp32': how a bf16 GEMM is computed here. fp32: no fast bf16 instructions (or capped by
    ONEDNN_MAX_CPU_ISA), so bf16 operands are multiplied by the fp32 GEMM and the result is rounded; same precision."""
    cap = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL").upper()
    unlimited = cap in ("ALL", "DEFAULT")
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        if torch.cpu._is_amx_tile_supported() and (unlimited or "AMX" in cap):
            return "amx"
        if torch.cpu._is_avx512_bf16_supported() and (unlimited or "BF16" in cap or "AMX" in cap or "FP16" in cap):
            return "avx512_bf16"
    return "fp32"


def _tiles(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ w [N, K]^T in tiles of ROWS rows, the last one padded with zeros."""
    M = x.shape[0]
    if M == ROWS:
        return F.linear(x, w, bias)
    x = F.pad(x, (0, 0, 0, -M % ROWS))
    return torch.cat([F.linear(tile, w, bias) for tile in x.split(ROWS)])[:M]


def bf16_linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """bf16 [M, K] @ [N, K]^T + [N] -> bf16 [M, N]; a row's bits depend neither on the other rows nor on their number."""
    if x.device.type != "cpu":
        return F.linear(x, w, bias)
    isa = gemm_isa()
    if isa == "amx" and x.shape[1] <= WHOLE_K:
        return F.linear(x, w, bias)
    if isa == "fp32":
        bias = None if bias is None else bias.float()
        return _tiles(x.float(), w.float(), bias).to(torch.bfloat16)
    return _tiles(x, w, bias)


def fp32_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same with fp32 output (and operands of bf16 values held in fp32 or bf16)."""
    x, w = x.float(), w.float()
    if x.device.type != "cpu":
        return F.linear(x, w)
    return _tiles(x, w)


class _exact_bf16_products:
    """fp32 GEMMs whose operands are bf16 values may run on bf16 units: the products are exact and the sum is fp32."""

    def __enter__(self):
        self.fast = gemm_isa() != "fp32"
        if self.fast:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"

    def __exit__(self, *_):
        if self.fast:
            torch.backends.mkldnn.matmul.fp32_precision = "none"


def bf16_matmul_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N] of bf16 values, fp32 sum and output; bits may depend on M (used for weight gradients)."""
    with _exact_bf16_products():
        return a.float() @ b.float()


def bf16_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bf16 [M, K] @ [K, N] -> bf16; bits may depend on M (used for input gradients)."""
    if a.device.type == "cpu" and gemm_isa() == "fp32":
        return (a.float() @ b.float()).to(torch.bfloat16)
    return a @ b


def block_gemm(a, a_scales, b, b_scales, *, rows_invariant: bool) -> torch.Tensor:
    """Codes a [M, K], b [N, K] (values), scales [M, ceil K / 128] and [N, ceil K / 128] -> fp32 [M, N]:
    sum over blocks of 128 along K of (a_block @ b_block^T) * (a_scale * b_scale), everything in fp32."""
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for i, (x, w) in enumerate(zip(a.float().split(BLOCK, 1), b.float().split(BLOCK, 1))):
        part = fp32_linear(x, w) if rows_invariant else bf16_matmul_fp32(x, w.t())
        total += part * (a_scales[:, i, None] * b_scales[None, :, i])
    return total
