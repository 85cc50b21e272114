"""Kernels with one definition: attention, norms, SwiGLU, quantisation, token log-probs and sampling.

Every function here is *defined* by its torch code (the eager path, any device). Where there is a C compiler,
`csrc` (native.py) computes the same bits on the CPU, faster: sums have a fixed shape (16 or 4 lanes, then a tree), exp
and log are fixed polynomials, and fused multiply-adds are used only where both factors are bf16 values, whose product
is exact. So results depend neither on the compiler, nor on the instruction set, nor on who else is in the batch.

Shapes: T packed tokens, R rows, C columns, S sequences, H query heads, N key/value heads, D head dim, F feed-forward,
L positions, V vocabulary. Tensors between kernels are bf16; arithmetic inside is fp32.
"""

import ctypes
import functools
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from jetrl_bench.native import library, library_for, ptr

# ------------------------------------------------------------------------------------------------ tiles of the GEMM


def pack(w: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """bf16 [N, K], or [K, N] if transposed -> the tile unit's layout, zero padded to multiples of 32."""
    w = w if w.stride(1) == 1 else w.contiguous()
    N, K = w.shape[::-1] if transposed else w.shape
    out = torch.empty((N + -N % 32) * (K + -K % 32), dtype=torch.bfloat16)
    (library().pack_columns if transposed else library().pack_rows)(w.data_ptr(), w.stride(0), N, K, ptr(out))
    return out


class RowGroups(NamedTuple):
    """Quantise rows before a product: in groups of `width` inside each of `parts`, whose widths add up to the row."""

    spec: "QuantSpec"
    parts: tuple[int, ...]
    width: int


@functools.cache
def _widths(parts: tuple[int, ...]) -> ctypes.Array:
    return (ctypes.c_int64 * len(parts))(*parts)


def gemm(x, packed, N: int, x_scales, w_scales, bias, dtype: torch.dtype, groups: RowGroups | None) -> torch.Tensor:
    """fp8.gemm on packed tiles."""
    x = x if x.stride(1) == 1 else x.contiguous()
    M, K = x.shape
    out = torch.empty(M, N, dtype=dtype)
    if x_scales is not None:
        x_scales, w_scales = x_scales.contiguous(), w_scales.contiguous()
    rounding = (None, 0, None, 0)
    if groups is not None:
        rounding = (_spec_pointer(groups.spec), groups.width, _widths(groups.parts), len(groups.parts))
    library().gemm(
        x.data_ptr(), x.stride(0), M, K, ptr(x_scales), ptr(packed), ptr(w_scales), N, ptr(bias),
        ptr(out), dtype == torch.bfloat16, *rounding,
    )  # fmt: skip
    return out


def gemm_tokens(a, b, a_scales, b_scales, spec: "QuantSpec | None") -> torch.Tensor:
    """fp8.gemm_tokens on packed tiles."""
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    T, M = a.shape
    N = b.shape[1]
    out = torch.empty(M, N, dtype=torch.float32)
    if a_scales is not None:
        a_scales, b_scales = a_scales.contiguous(), b_scales.contiguous()
    library().gemm_tokens(
        a.data_ptr(), a.stride(0), M, ptr(a_scales), b.data_ptr(), b.stride(0), N, ptr(b_scales), T,
        ptr(out), _spec_pointer(spec),
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------------ fixed-shape sums


def _pad(x: torch.Tensor, multiple: int, dim: int = -1, value: float = 0.0) -> torch.Tensor:
    size = x.shape[dim]
    extra = -size % multiple
    if not extra:
        return x
    shape = list(x.shape)
    shape[dim] = extra
    return torch.cat([x, x.new_full(shape, value)], dim)


def _fold(x: torch.Tensor) -> torch.Tensor:
    """Tree sum of the last dimension (a power of two): i + (i + width / 2), repeatedly."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def lane_sum(x: torch.Tensor, lanes: int = 16) -> torch.Tensor:
    """Sum of the last dimension: `lanes` partial sums (index mod lanes), each in order, then a tree."""
    x = _pad(x, lanes).unflatten(-1, (-1, lanes))
    total = torch.zeros_like(x[..., 0, :])
    for i in range(x.shape[-2]):
        total = total + x[..., i, :]
    return _fold(total)


def lane_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[..., M, K] @ [..., K, N] in fp32 with four lanes over K (k mod 4), each in order, then a tree."""
    a = _pad(a, 4).unflatten(-1, (-1, 4))
    b = _pad(b, 4, -2).unflatten(-2, (-1, 4))
    total = torch.zeros((), dtype=torch.float32, device=a.device)
    for i in range(a.shape[-2]):
        total = total + a[..., :, i, :, None] * b[..., None, i, :, :]
    return _fold(total.transpose(-1, -2))


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x in fp32 (Cephes' polynomial, no fused operations): relative error below 2e-7; 0 below -87."""
    x = torch.where(x > 88.0, 88.0, x)
    zero = x < -87.0
    x = torch.where(zero, -87.0, x)
    n = (x * 1.44269504088896341 + 12582912.0) - 12582912.0
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + c
    y = (p * (r * r) + r) + 1.0
    y = y * ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(zero, 0.0, y)


def log(x: torch.Tensor) -> torch.Tensor:
    """ln x in fp32 for normal positive x (Cephes' polynomial, no fused operations)."""
    bits = x.view(torch.int32)
    e = (bits >> 23) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    small = m < 0.707106781186547524
    e = torch.where(small, e - 1, e).float()
    m = torch.where(small, m + m - 1.0, m - 1.0)
    z = m * m
    p = torch.full_like(m, 7.0376836292e-2)
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1):
        p = p * m + c
    for c in (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):
        p = p * m + c
    p = (p * m) * z
    p = p + e * -2.12194440e-4
    p = p + z * -0.5
    return (m + p) + e * 0.693359375


def _bf(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


# ------------------------------------------------------------------------------------------------ quantisation


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


@functools.cache
def _cspec(spec: QuantSpec) -> _CSpec:
    return _CSpec(
        mantissa=spec.mantissa, emin=spec.emin, form=spec.form, pow2=spec.pow2, apply=spec.multiply, max=spec.max,
        inv_max=float(np.float32(1) / np.float32(spec.max)), amax_floor=spec.amax_floor, scale_floor=spec.scale_floor,
    )  # fmt: skip


def _spec_pointer(spec: QuantSpec | None) -> int | None:
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise [R, C] in blocks of block[0] x block[1], the last ones smaller where the sizes do not divide.

    Returns codes x scale (dequantize) or the codes' own values, in `dtype`, and fp32 scales [ceil R / br, ceil C / bc].
    With power-of-two scales, and for codes, bf16 holds the result exactly.
    """
    R, C = x.shape
    br, bc = min(block[0], R) or 1, min(block[1], C)
    native = library_for(x)
    if native is not None and noise is None:
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(R, C, dtype=dtype)
        scales = torch.empty(-(-R // br), -(-C // bc), dtype=torch.float32) if want_scales else None
        native.quantize(
            x.data_ptr(), x.stride(0), x.dtype == torch.bfloat16, out.data_ptr(), C, dtype == torch.bfloat16,
            ptr(scales), R, C, br, bc, not dequantize, _spec_pointer(spec),
        )  # fmt: skip
        return out, scales
    blocks = _pad(_pad(x.float(), br, 0), bc, 1).unflatten(1, (-1, bc)).unflatten(0, (-1, br))
    scale, reciprocal = scales_of(blocks.abs().amax((1, 3), keepdim=True), spec)
    y = blocks * reciprocal if spec.multiply else blocks / scale
    if noise is not None:
        noise = _pad(_pad(noise, br, 0), bc, 1).unflatten(1, (-1, bc)).unflatten(0, (-1, br))
    codes = round_to_format(y, spec, noise)
    out = codes * scale if dequantize else codes
    return out.flatten(2, 3).flatten(0, 1)[:R, :C].to(dtype), scale[:, 0, :, 0] if want_scales else None


# ------------------------------------------------------------------------------------------------ norms and SwiGLU


def add_rms_norm(
    h: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x = bf16(h + delta); y = bf16(x / rms(x) * weight). Returns x [R, C], y [R, C], 1 / rms [R]; weight fp32 [C]."""
    R, C = h.shape
    native = library_for(h)
    if native is not None:
        x = h if delta is None else torch.empty_like(h)
        y, rstd = torch.empty_like(h), torch.empty(R, dtype=torch.float32)
        native.add_rms_norm(ptr(h), ptr(delta), ptr(weight), eps, ptr(x), ptr(y), ptr(rstd), R, C)
        return x, y, rstd
    x = h if delta is None else (h.float() + delta.float()).to(torch.bfloat16)
    xf = x.float()
    rstd = (
        1.0 / torch.sqrt((lane_sum(xf * xf) / C + eps).double()).float()
    )  # vectorised fp32 square roots may round wrongly
    return x, ((xf * rstd[:, None]) * weight).to(torch.bfloat16), rstd


def add_rms_norm_backward(dy, dx_out, x, rstd, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of add_rms_norm: bf16 d(h) = d(delta) [R, C], fp32 d(weight) [C]; dx_out: what reaches x, or None."""
    R, C = x.shape
    native = library_for(x)
    if native is not None:
        dx, dw = torch.empty_like(x), torch.empty(C, dtype=torch.float32)
        native.add_rms_norm_backward(ptr(dy), ptr(dx_out), ptr(x), ptr(rstd), ptr(weight), ptr(dx), ptr(dw), R, C)
        return dx, dw
    g, xhat = dy.float(), x.float() * rstd[:, None]
    gx = g * xhat
    mean = lane_sum(gx * weight) / C
    d = rstd[:, None] * (g * weight - xhat * mean[:, None])
    if dx_out is not None:
        d = d + dx_out.float()
    return d.to(torch.bfloat16), lane_sum(gx.t(), 64)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[R, 2 F] -> bf16(silu(gate) * up) [R, F]."""
    R, F = gate_up.shape[0], gate_up.shape[1] // 2
    native = library_for(gate_up)
    if native is not None:
        y = torch.empty(R, F, dtype=torch.bfloat16)
        native.swiglu(ptr(gate_up), ptr(y), R, F)
        return y
    g, u = gate_up.float().split(F, 1)
    return ((g / (1.0 + exp(-g))) * u).to(torch.bfloat16)


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    R, F = dy.shape
    native = library_for(dy)
    if native is not None:
        out = torch.empty_like(gate_up)
        native.swiglu_backward(ptr(dy), ptr(gate_up), ptr(out), R, F)
        return out
    d = dy.float()
    g, u = gate_up.float().split(F, 1)
    s = 1.0 / (1.0 + exp(-g))
    gs = g * s
    return torch.cat([(d * u) * (s + gs * (1.0 - s)), d * gs], 1).to(torch.bfloat16)


# ------------------------------------------------------------------------------------------------ attention


class _CHeads(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("Hq", "Hkv", "D", "ld")] + [("scale", ctypes.c_float)]


class Heads(NamedTuple):
    """Layout of a qkv row: H query heads, N key heads, N value heads of dim D. Scores are multiplied by D^-1/2."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))


@functools.cache
def _cheads(heads: Heads) -> _CHeads:
    return _CHeads(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.width, heads.scale)


class KVCache(NamedTuple):
    """Keys [slots, N, D, L] (after RoPE, transposed) and values [slots, N, L, D], bf16; L a multiple of 16."""

    keys: torch.Tensor
    values: torch.Tensor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (halves, as in Hugging Face) of fp32 [..., D] with cos, sin [..., D / 2], unrounded."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _qkv(qkv, heads: Heads, cos, sin, kv_spec):
    """[T, width] -> q [T, H, D], k, v [T, N, D], fp32 holding bf16 values, after RoPE and KV quantisation."""
    q, k, v = qkv.float().unflatten(-1, (-1, heads.head_dim)).split([heads.num_heads, *[heads.num_kv_heads] * 2], -2)
    cos, sin = cos[..., None, :], sin[..., None, :]
    q, k = _bf(rotate(q, cos, sin)), _bf(rotate(k, cos, sin))
    if kv_spec is not None:
        one_group = (1, heads.head_dim)
        k, v = (
            quantize_blocks(t.reshape(-1, heads.head_dim), one_group, kv_spec)[0].float().reshape(t.shape)
            for t in (k, v)
        )
    return q, k, v


def _softmax(scores: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled scores [..., L] -> bf16-rounded exp(s - max) and 1 / sum of the unrounded ones; L a multiple of 16."""
    scores = torch.where(visible, scores, -torch.inf)
    d = scores - scores.amax(-1, keepdim=True)
    e = torch.where(d < -40.0, 0.0, exp(d))
    return _bf(e), 1.0 / lane_sum(e)


class AttentionSaved(NamedTuple):
    """What the backward needs: probabilities (bf16, unnormalised), their offsets per sequence, 1 / row sum [T, H]."""

    probs: torch.Tensor
    offsets: torch.Tensor
    inverse: torch.Tensor


def check_length(length: int, max_position: int) -> None:
    if length > max_position:
        raise ValueError(f"a sequence of {length} tokens exceeds model.max_position {max_position}")


def attention(
    qkv: torch.Tensor, starts: torch.Tensor, heads: Heads, cos, sin, kv_spec: QuantSpec | None, *, save: bool
) -> tuple[torch.Tensor, AttentionSaved | None]:
    """Causal attention of packed sequences. qkv bf16 [T, width], starts int64 [S + 1], cos, sin fp32 [L, D / 2].

    q and k are rotated and rounded to bf16; scores are fp32; probabilities are rounded to bf16 before the product with
    the values and divided by the sum of the unrounded ones after it. Returns bf16 [T, H D].
    """
    T, (H, _, D) = qkv.shape[0], heads
    bounds = starts.tolist()
    sizes = [b - a for a, b in zip(bounds, bounds[1:])]
    check_length(max(sizes), cos.shape[0])
    saved = None
    if save:
        areas = np.cumsum([0] + [H * L * (L + -L % 16) for L in sizes])
        saved = AttentionSaved(
            torch.empty(int(areas[-1]), dtype=torch.bfloat16, device=qkv.device),
            torch.from_numpy(areas[:-1].astype(np.int64)), torch.empty(T, H, dtype=torch.float32, device=qkv.device),
        )  # fmt: skip
    out = torch.empty(T, H * D, dtype=torch.bfloat16, device=qkv.device)
    native = library_for(qkv)
    if native is not None:
        assert qkv.is_contiguous()
        kept = (ptr(saved.probs), ptr(saved.offsets), ptr(saved.inverse)) if save else (None, None, None)
        native.attention(
            ptr(qkv), ptr(starts), len(sizes), ctypes.addressof(_cheads(heads)), ptr(cos), ptr(sin),
            _spec_pointer(kv_spec), ptr(out), *kept,
        )  # fmt: skip
        return out, saved
    for s, (t, L) in enumerate(zip(bounds, sizes)):
        q, k, v = (x.transpose(0, 1) for x in _qkv(qkv[t : t + L], heads, cos[:L], sin[:L], kv_spec))
        k, v = (x.repeat_interleave(H // heads.num_kv_heads, 0) for x in (k, v))
        scores = _pad(lane_matmul(q, k.transpose(1, 2)) * heads.scale, 16)
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=qkv.device).tril()
        probs, inverse = _softmax(scores, visible)
        o = lane_matmul(probs[..., :L], v) * inverse[..., None]
        out[t : t + L] = o.transpose(0, 1).reshape(L, H * D).to(torch.bfloat16)
        if save:
            area = probs.numel()
            saved.probs[saved.offsets[s] : saved.offsets[s] + area] = probs.to(torch.bfloat16).flatten()
            saved.inverse[t : t + L] = inverse.t()
    return out, saved


def attention_backward(dout, out, qkv, saved: AttentionSaved, starts, heads: Heads, cos, sin, kv_spec) -> torch.Tensor:
    """Gradient of attention with respect to qkv, bf16 [T, width]; KV quantisation passes gradients straight through."""
    dqkv = torch.empty_like(qkv)
    native = library_for(qkv)
    if native is not None:
        native.attention_backward(
            ptr(dout), ptr(out), ptr(qkv), ptr(saved.probs), ptr(saved.offsets), ptr(saved.inverse), ptr(starts),
            starts.numel() - 1, ctypes.addressof(_cheads(heads)), ptr(cos), ptr(sin), _spec_pointer(kv_spec), ptr(dqkv),
        )  # fmt: skip
        return dqkv
    H, N, D = heads
    bounds = starts.tolist()
    for s, (t, end) in enumerate(zip(bounds, bounds[1:])):
        L = end - t
        q, k, v = (x.transpose(0, 1) for x in _qkv(qkv[t:end], heads, cos[:L], sin[:L], kv_spec))
        k, v = (x.repeat_interleave(H // N, 0) for x in (k, v))
        Lp = L + -L % 16
        probs = saved.probs[saved.offsets[s] : saved.offsets[s] + H * L * Lp].view(H, L, Lp)[..., :L].float()
        o = out[t:end].float().view(L, H, D).transpose(0, 1)
        inverse = saved.inverse[t:end].t()[..., None]
        g = _bf(dout[t:end].float().view(L, H, D).transpose(0, 1) * inverse)
        delta = lane_sum(g * o)
        ds = _bf((probs * (lane_matmul(g, v.transpose(1, 2)) - delta[..., None])) * heads.scale)
        dq = lane_matmul(ds, k)
        dk, dv = lane_matmul(ds.transpose(1, 2), q), lane_matmul(probs.transpose(1, 2), g)
        dk, dv = (x.view(N, H // N, L, D) for x in (dk, dv))
        dk, dv = (functools.reduce(torch.add, x.unbind(1), torch.zeros_like(x[:, 0])) for x in (dk, dv))
        c, n = cos[:L], sin[:L]
        dq, dk = (torch.cat([a * c + b * n, b * c - a * n], -1) for a, b in (x.chunk(2, -1) for x in (dq, dk)))
        dqkv[t:end] = torch.cat([dq, dk, dv]).transpose(0, 1).reshape(L, -1).to(torch.bfloat16)
    return dqkv


def append(qkv, slots, positions, heads: Heads, cos, sin, kv_spec, cache: KVCache) -> None:
    """Write keys and values of rows [R, width] at (slots [R], positions [R]) int64."""
    native = library_for(qkv)
    if native is not None:
        native.append(
            ptr(qkv), ptr(slots), ptr(positions), qkv.shape[0], ctypes.addressof(_cheads(heads)), ptr(cos), ptr(sin),
            _spec_pointer(kv_spec), ptr(cache.keys), ptr(cache.values), cache.values.shape[2],
        )  # fmt: skip
        return
    _, k, v = _qkv(qkv, heads, cos[positions], sin[positions], kv_spec)
    cache.keys[slots, :, :, positions] = k.to(torch.bfloat16)
    cache.values[slots, :, positions] = v.to(torch.bfloat16)


def decode(qkv, slots, positions, heads: Heads, cos, sin, kv_spec, cache: KVCache, out: torch.Tensor) -> torch.Tensor:
    """Append one token to each of R slots and attend to everything cached there. Fills out bf16 [R, H D]."""
    native = library_for(qkv)
    if native is not None:
        native.decode(
            ptr(qkv), ptr(slots), ptr(positions), qkv.shape[0], ctypes.addressof(_cheads(heads)), ptr(cos), ptr(sin),
            _spec_pointer(kv_spec), ptr(cache.keys), ptr(cache.values), cache.values.shape[2], ptr(out),
        )  # fmt: skip
        return out
    append(qkv, slots, positions, heads, cos, sin, kv_spec, cache)
    R, (H, N, D) = qkv.shape[0], heads
    q = _qkv(qkv, heads, cos[positions], sin[positions], None)[0].view(R, N, H // N, D)
    L = int(positions.max()) + 1
    L += -L % 16
    scores = lane_matmul(q, cache.keys[slots, :, :, :L].float()) * heads.scale
    visible = torch.arange(L, device=qkv.device) <= positions[:, None, None, None]
    probs, inverse = _softmax(scores, visible)
    o = lane_matmul(probs, cache.values[slots, :, :L].float()) * inverse[..., None]
    out.copy_(o.reshape(R, H * D).to(torch.bfloat16))
    return out


# ------------------------------------------------------------------------------------------------ head and sampling


def _head(logits: torch.Tensor, temperature) -> tuple[torch.Tensor, ...]:
    """[R, V] -> z - max, exp(z - max) padded to 16, max [R], sum [R]; z = logits / temperature."""
    z = _pad(logits.float() / temperature, 16, value=-torch.inf)
    top = z.amax(-1)
    d = z - top[:, None]
    e = exp(d)
    return d, e, top, lane_sum(e)


def token_logprobs(logits, tokens, temperature: float, *, full: bool):
    """Log-probs of `tokens` [R] under softmax(logits [R, V] / temperature), entropy [R], saved (max, sum) and, if
    asked, the whole log-softmax [R, V]. logits bf16 or fp32; everything out is fp32."""
    R, V = logits.shape
    native = library_for(logits)
    if native is not None:
        logp, entropy, top, total = torch.empty(4, R, dtype=torch.float32).unbind()
        everything = torch.empty(R, V, dtype=torch.float32) if full else None
        native.token_logprobs(
            ptr(logits), logits.dtype == torch.bfloat16, ptr(tokens), temperature, ptr(logp), ptr(entropy), ptr(top),
            ptr(total), ptr(everything), R, V,
        )  # fmt: skip
        return logp, entropy, (top, total), everything
    d, e, top, total = _head(logits, temperature)
    ln = log(total)
    logp = d.gather(1, tokens[:, None])[:, 0] - ln
    entropy = ln - lane_sum(e * torch.where(e > 0, d, 0.0)) / total
    return logp, entropy, (top, total), (d[:, :V] - ln[:, None] if full else None)


def token_logprobs_backward(grad, logits, tokens, temperature: float, saved) -> torch.Tensor:
    """d(logits) in the logits' dtype for fp32 grad [R]."""
    R, V = logits.shape
    top, total = saved
    out = torch.empty_like(logits)
    native = library_for(logits)
    if native is not None:
        native.token_logprobs_backward(
            ptr(grad),
            ptr(logits),
            logits.dtype == torch.bfloat16,
            ptr(tokens),
            temperature,
            ptr(top),
            ptr(total),
            ptr(out),
            R,
            V,
        )
        return out
    p = exp(logits.float() / temperature - top[:, None]) / total[:, None]
    one = torch.arange(V, device=logits.device) == tokens[:, None]
    out.copy_((grad / temperature)[:, None] * (one.float() - p))
    return out


def uniform(seeds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Uniforms in [0, 1) with 53 bits from (request seed, token index): splitmix64, a counter-based generator."""
    with np.errstate(over="ignore"):
        x = seeds.numpy().astype(np.uint64) + (counts.numpy().astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sample(logits, temperatures, seeds, counts, tokens, logprobs, full: torch.Tensor | None) -> None:
    """Draw one token a row by inverse CDF at uniform(seed, count); temperature 0 takes the first maximum, its log-prob
    at temperature 1. Fills tokens int64 [R], logprobs fp32 [R] and, if given, the log-softmax [R, V]."""
    R, V = logits.shape
    native = library_for(logits)
    if native is not None:
        native.sample(
            ptr(logits), logits.dtype == torch.bfloat16, ptr(temperatures), ptr(seeds), ptr(counts), ptr(tokens),
            ptr(logprobs), ptr(full), R, V,
        )  # fmt: skip
        return
    greedy = temperatures <= 0
    d, e, _, total = _head(logits, torch.where(greedy, 1.0, temperatures)[:, None])
    blocks = e.unflatten(1, (-1, 16))
    ends = F.pad(_fold(blocks).double().cumsum(1), (1, 0))
    goal = uniform(seeds.cpu(), counts.cpu()).to(logits.device)[:, None] * ends[:, -1:]
    block = (ends[:, 1:-1] <= goal).sum(1)
    row = torch.arange(R, device=logits.device)
    inside = torch.cat([ends[row, block, None], blocks[row, block].double()], 1).cumsum(1)[:, 1:]
    drawn = 16 * block + (inside[:, :15] <= goal).sum(1)
    nonzero = torch.where(e > 0, torch.arange(e.shape[1], device=logits.device), 0).cummax(1).values
    drawn = nonzero.gather(1, drawn[:, None])[:, 0]  # a draw is never a token of probability 0
    tokens.copy_(torch.where(greedy, (d[:, :V] == 0).int().argmax(1), drawn))
    ln = log(total)
    logprobs.copy_(d.gather(1, tokens[:, None])[:, 0] - ln)
    if full is not None:
        full.copy_(d[:, :V] - ln[:, None])
