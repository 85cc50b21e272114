"""FP8 and narrower formats: values, scale rules, block quantisation, and the GEMM they feed.

A format is sign, exponent and mantissa bits with subnormals; rounding is to nearest even and saturates. A group of
elements shares one scale = amax / largest value, either as an fp32 number or rounded up to a power of two (UE8M0).
With power-of-two scales codes x scale is exactly a bf16 number, so a bf16 GEMM with fp32 accumulation *is* the FP8
GEMM. With fp32 scales the products of codes are accumulated in fp32 per block of 128 along the reduction, multiplied
by both scales, and added in fp32 (DeepGEMM's and Transformer Engine's split accumulation, idealised: tensor cores keep
fewer bits inside a block).

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

from jetrl_bench import kernels, native, quantizer, sampling
from jetrl_bench.quantizer import QuantSpec, RowGroups
from jetrl_bench.strict import nearest

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
    """The arithmetic of a format under a rule: 'default' is the textbook rule of `scale`, others bring their own."""
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
    values, scales = quantizer.quantize_blocks(x, block, spec(format, scale, rule), dequantize=False, want_scales=True)
    return Quantized(encode(values, format), scales, (min(block[0], x.shape[0]), min(block[1], x.shape[1])), format)


def qdq(
    x: torch.Tensor, format: str, block: tuple[int, int], *, scale: str = "pow2", rule: str = "default",
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:  # fmt: skip
    """Quantise and dequantise [R, C]; with fp32 scales only dtype fp32 holds the product unrounded."""
    return quantizer.quantize_blocks(x, block, spec(format, scale, rule), dtype=dtype)[0]


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
    u = sampling.uniform(torch.full((n,), seed, dtype=torch.int64), torch.arange(n))
    return (torch.floor(u * 2**24) * 2.0**-24).float().view(shape)


# ------------------------------------------------------------------------------------------------ GEMM

ROWS = 64
"""Rows of a tile of the fp32 GEMM: a library may pick another order of the sum for another number of rows."""


@functools.cache
def gemm_isa() -> str:
    """How the products inside a block of 128 are computed on this CPU. 'amx': bf16 tiles (oneDNN's or csrc's, the
    same bits). 'fp32': no bf16 tiles, or capped by ONEDNN_MAX_CPU_ISA or ATEN_CPU_CAPABILITY: the fp32 GEMM on the same
    operands. Products are exact and sums are fp32 in both; the order of the sum, and so the last bits, differ."""
    cap = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT").upper()
    allowed = cap in ("ALL", "DEFAULT") or "AMX" in cap
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "amx" if allowed and wide and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx() else "fp32"


def _on_tiles(x: torch.Tensor) -> bool:
    """csrc multiplies on AMX tiles: the processor has them and the compiler knew them."""
    return gemm_isa() == "amx" and hasattr(native.library_for(x), "gemm")


class Factor:
    """The right-hand factor of a GEMM, [N rows, K reduction] of bf16 values, made ready once.

    transposed: `values` is stored [K, N]. scales: fp32 [N, ceil K / 128], where values are codes.
    """

    def __init__(self, values: torch.Tensor, scales: torch.Tensor | None = None, *, transposed: bool = False):
        self.values, self.scales, self.transposed = values, scales, transposed
        self.rows, self.reduction = values.shape[::-1] if transposed else values.shape
        self._packed: torch.Tensor | None = None

    def packed(self) -> torch.Tensor:
        """The values in the tile unit's layout (csrc/gemm.c)."""
        if self._packed is None:
            self._packed = kernels.pack(self.values, transposed=self.transposed)
        return self._packed


def gemm(
    x: torch.Tensor,
    w: Factor,
    *,
    x_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    groups: RowGroups | None = None,
) -> torch.Tensor:
    """x [M, K] @ w^T + bias -> [M, N]: fp32 sums over blocks of 128 along K, added in order, rounded once to `dtype`.

    With scales (x_scales [M, ceil K / 128] and w.scales) every block's sum is multiplied by the product of its two
    scales. A row's bits depend neither on the other rows nor on their number: blocks are the same for every M.
    With groups (power-of-two scales) x is quantised and dequantised first; compiled, tile by tile, without a copy of x.
    """
    assert (x_scales is None) == (w.scales is None)
    if _on_tiles(x):
        return kernels.gemm(x, w.packed(), w.rows, x_scales, w.scales, bias, dtype, groups)
    if groups is not None:
        parts = [quantizer.quantize_blocks(p, (1, groups.width), groups.spec)[0] for p in x.split(groups.parts, 1)]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    values = w.values.t() if w.transposed else w.values
    total = None
    for i, (a, b) in enumerate(zip(x.float().split(BLOCK, 1), values.float().split(BLOCK, 1))):
        part = _block_product(a, b)
        if x_scales is not None:
            part = part * (x_scales[:, i, None] * w.scales[None, :, i])
        total = part if total is None else total + part
    if bias is not None:
        total = total + bias.float()
    return total.to(dtype)


def gemm_tokens(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor | None = None,
    b_scales: torch.Tensor | None = None,
    *,
    spec: QuantSpec | None = None,
) -> torch.Tensor:
    """a [T, M], b [T, N] -> a^T b, fp32 [M, N], the same sum running over blocks of 128 tokens (weight gradients).
    Scales [M, ceil T / 128], [N, ceil T / 128]. With spec (power-of-two scales) both are quantised first, 128 x 1."""
    if _on_tiles(a):
        return kernels.gemm_tokens(a, b, a_scales, b_scales, spec)
    if spec is not None:
        a, b = (quantizer.quantize_blocks(t, (BLOCK, 1), spec)[0] for t in (a, b))
    return gemm(a.t(), Factor(b, b_scales, transposed=True), x_scales=a_scales, dtype=torch.float32)


def _block_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp32 [M, K <= 128] @ [N, K]^T of bf16 values."""
    if a.device.type != "cpu":
        return a @ b.t()
    if gemm_isa() == "amx":  # exact products, fp32 sums: the library may use its bf16 tiles
        before = torch.backends.mkldnn.matmul.fp32_precision
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            return F.linear(F.pad(a, (0, 0, 0, max(16 - a.shape[0], 0))), b)[: a.shape[0]]  # one row: another kernel
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = before
    M = a.shape[0]
    tiles = F.pad(a, (0, 0, 0, -M % ROWS)).split(ROWS)
    return torch.cat([F.linear(tile, b) for tile in tiles])[:M]
