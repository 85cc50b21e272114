"""Block quantisation: scales, rounding to a format's grid, and the two together. fp8.py builds the QuantSpec.

The definition is the torch code (any device); csrc/quantize.c computes the same bits on the CPU.
Shapes: R rows, C columns.
"""

import ctypes
import functools
from typing import NamedTuple

import numpy as np
import torch

from jetrl_bench.lanes import pad
from jetrl_bench.native import library_for, ptr


class _CSpec(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in ("mantissa", "emin", "form", "pow2", "apply", "unused")] + [
        (n, ctypes.c_float) for n in ("max", "inv_max", "amax_floor", "scale_floor")
    ]


class QuantSpec(NamedTuple):
    """A number format and a scale rule, resolved to arithmetic (fp8.spec builds it)."""

    mantissa: int
    emin: int
    max: float
    form: int
    """0: scale = amax / max. 1: amax * fp32(1 / max). 2: 1 / (max / amax). 3: as 2 with the division in fp64."""
    pow2: bool
    multiply: bool
    """Codes are x * (1 / scale) instead of x / scale."""
    amax_floor: float
    scale_floor: float


class RowGroups(NamedTuple):
    """Quantise rows before a product: in groups of `width` inside each of `parts`, whose widths add up to the row."""

    spec: QuantSpec
    parts: tuple[int, ...]
    width: int


@functools.cache
def _cspec(spec: QuantSpec) -> _CSpec:
    return _CSpec(
        mantissa=spec.mantissa, emin=spec.emin, form=spec.form, pow2=spec.pow2, apply=spec.multiply, max=spec.max,
        inv_max=float(np.float32(1) / np.float32(spec.max)), amax_floor=spec.amax_floor, scale_floor=spec.scale_floor,
    )  # fmt: skip


def spec_pointer(spec: QuantSpec | None) -> int | None:
    return None if spec is None else ctypes.addressof(_cspec(spec))


def scales_of(amax: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 amax -> (scale, its reciprocal as the rule forms it); amax 0 gives 1."""
    amax = amax.clamp(min=spec.amax_floor) if spec.amax_floor else amax
    zero = amax == 0
    amax = torch.where(zero, spec.max, amax)
    if spec.form <= 1:
        scale = amax / spec.max if spec.form == 0 else amax * float(np.float32(1) / np.float32(spec.max))
        scale = scale.clamp(min=spec.scale_floor) if spec.scale_floor else scale
        if spec.pow2:
            bits = scale.view(torch.int32)
            exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
            scale = (exponent.clamp(1, 254) << 23).view(torch.float32)
        reciprocal = 1.0 / scale
    else:
        if spec.form == 2:
            reciprocal = torch.full_like(amax, spec.max) / amax
        else:
            reciprocal = (spec.max / amax.double()).float()
        reciprocal = reciprocal.clamp(max=torch.finfo(torch.float32).max)
        if spec.pow2:
            reciprocal = (reciprocal.view(torch.int32) & 0x7F800000).view(torch.float32)
        scale = 1.0 / reciprocal
    return torch.where(zero, 1.0, scale), torch.where(zero, 1.0, reciprocal)


def round_to_format(y: torch.Tensor, spec: QuantSpec, noise: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 -> the nearest value of the format, saturating, ties to even; with noise in [0, 1): stochastic rounding."""
    y = torch.where(y > spec.max, spec.max, y)
    y = torch.where(y < -spec.max, -spec.max, y)
    exponent = (y.view(torch.int32) & 0x7F800000).clamp(min=(spec.emin + 127) << 23)
    if noise is None:
        magic = (exponent + ((23 - spec.mantissa) << 23) + 0x400000).view(torch.float32)
        r = (y + magic) - magic
    else:
        quantum = (exponent - (spec.mantissa << 23)).view(torch.float32)
        r = (torch.floor(y / quantum + noise) * quantum).clamp(-spec.max, spec.max)
    return torch.where(torch.isnan(y), y, torch.copysign(r, y))


def quantize_blocks(
    x: torch.Tensor,
    block: tuple[int, int],
    spec: QuantSpec,
    *,
    dequantize: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    noise: torch.Tensor | None = None,
    want_scales: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise [R, C] in blocks of block[0] x block[1], the last ones smaller where the sizes do not divide.

    Returns codes x scale (dequantize) or the codes' own values, in `dtype`, and fp32 scales [ceil R / br, ceil C / bc].
    With power-of-two scales, and for codes, bf16 holds the result exactly. out: a contiguous [R, C] of `dtype` to fill.
    """
    R, C = x.shape
    br, bc = min(block[0], R) or 1, min(block[1], C)
    native = library_for(x)
    if native is not None and noise is None:
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(R, C, dtype=dtype) if out is None else out
        scales = torch.empty(-(-R // br), -(-C // bc), dtype=torch.float32) if want_scales else None
        native.quantize(
            x.data_ptr(), x.stride(0), x.dtype == torch.bfloat16, ptr(out), C, dtype == torch.bfloat16,
            ptr(scales), R, C, br, bc, not dequantize, spec_pointer(spec),
        )  # fmt: skip
        return out, scales
    blocks = pad(pad(x.float(), br, 0), bc, 1).unflatten(1, (-1, bc)).unflatten(0, (-1, br))
    scale, reciprocal = scales_of(blocks.abs().amax((1, 3), keepdim=True), spec)
    y = blocks * reciprocal if spec.multiply else blocks / scale
    if noise is not None:
        noise = pad(pad(noise, br, 0), bc, 1).unflatten(1, (-1, bc)).unflatten(0, (-1, br))
    codes = round_to_format(y, spec, noise)
    values = (codes * scale if dequantize else codes).flatten(2, 3).flatten(0, 1)[:R, :C].to(dtype)
    return values if out is None else out.copy_(values), scale[:, 0, :, 0] if want_scales else None
