"""The layers' operators with one definition: matrix products on tiles, norms, SwiGLU, attention.

Every function here is *defined* by its torch code (the eager path, any device). Where there is a C compiler,
`csrc` (native.py) computes the same bits on the CPU, faster: sums have a fixed shape (16 or 4 lanes, then a tree), exp
and log are fixed polynomials, and fused multiply-adds are used only where both factors are bf16 values, whose product
is exact. So results depend neither on the compiler, nor on the instruction set, nor on who else is in the batch.

Shapes: T packed tokens, R rows, C columns, S sequences, H query heads, N key/value heads, D head dim, F feed-forward,
L positions. Tensors between kernels are bf16; arithmetic inside is fp32.
"""

import ctypes
import functools
from typing import NamedTuple

import numpy as np
import torch

from jetrl_bench.lanes import bf, exp, lane_matmul, lane_sum, pad
from jetrl_bench.native import library, library_for, ptr
from jetrl_bench.quantizer import QuantSpec, RowGroups, quantize_blocks, spec_pointer

# ------------------------------------------------------------------------------------------------ tiles of the GEMM


def pack(w: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """bf16 [N, K], or [K, N] if transposed -> the tile unit's layout, zero padded to multiples of 32."""
    w = w if w.stride(1) == 1 else w.contiguous()
    N, K = w.shape[::-1] if transposed else w.shape
    out = torch.empty((N + -N % 32) * (K + -K % 32), dtype=torch.bfloat16)
    (library().pack_columns if transposed else library().pack_rows)(w.data_ptr(), w.stride(0), N, K, ptr(out))
    return out


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
        rounding = (spec_pointer(groups.spec), groups.width, _widths(groups.parts), len(groups.parts))
    library().gemm(
        x.data_ptr(), x.stride(0), M, K, ptr(x_scales), ptr(packed), ptr(w_scales), N, ptr(bias),
        ptr(out), dtype == torch.bfloat16, *rounding,
    )  # fmt: skip
    return out


def gemm_tokens(a, b, a_scales, b_scales, spec: QuantSpec | None) -> torch.Tensor:
    """fp8.gemm_tokens on packed tiles."""
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    T, M = a.shape
    N = b.shape[1]
    out = torch.empty(M, N, dtype=torch.float32)
    if a_scales is not None:
        a_scales, b_scales = a_scales.contiguous(), b_scales.contiguous()
    library().gemm_tokens(
        a.data_ptr(), a.stride(0), M, ptr(a_scales), b.data_ptr(), b.stride(0), N, ptr(b_scales), T,
        ptr(out), spec_pointer(spec),
    )  # fmt: skip
    return out


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
    q, k = bf(rotate(q, cos, sin)), bf(rotate(k, cos, sin))
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
    return bf(e), 1.0 / lane_sum(e)


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
            spec_pointer(kv_spec), ptr(out), *kept,
        )  # fmt: skip
        return out, saved
    for s, (t, L) in enumerate(zip(bounds, sizes)):
        q, k, v = (x.transpose(0, 1) for x in _qkv(qkv[t : t + L], heads, cos[:L], sin[:L], kv_spec))
        k, v = (x.repeat_interleave(H // heads.num_kv_heads, 0) for x in (k, v))
        scores = pad(lane_matmul(q, k.transpose(1, 2)) * heads.scale, 16)
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
            starts.numel() - 1, ctypes.addressof(_cheads(heads)), ptr(cos), ptr(sin), spec_pointer(kv_spec), ptr(dqkv),
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
        g = bf(dout[t:end].float().view(L, H, D).transpose(0, 1) * inverse)
        delta = lane_sum(g * o)
        ds = bf((probs * (lane_matmul(g, v.transpose(1, 2)) - delta[..., None])) * heads.scale)
        dq = lane_matmul(ds, k)
        dk, dv = lane_matmul(ds.transpose(1, 2), q), lane_matmul(probs.transpose(1, 2), g)
        dk, dv = (x.view(N, H // N, L, D) for x in (dk, dv))
        dk, dv = (functools.reduce(torch.add, x.unbind(1), torch.zeros_like(x[:, 0])) for x in (dk, dv))
        c, n = cos[:L], sin[:L]
        dq, dk = (torch.cat([a * c + b * n, b * c - a * n], -1) for a, b in (x.chunk(2, -1) for x in (dq, dk)))
        dqkv[t:end] = torch.cat([dq, dk, dv]).transpose(0, 1).reshape(L, -1).to(torch.bfloat16)
    return dqkv


def split_heads(qkv, starts, length: int, heads: Heads, cos, sin, kv_spec) -> tuple[torch.Tensor, ...]:
    """qkv [T, width] -> q [S, length, H, D], k, v [S, length, N, D] after RoPE and KV quantisation, in qkv's dtype;
    zero beyond a sequence's end. What another attention starts from."""
    S, (H, N, D) = starts.numel() - 1, heads
    q, k, v = (torch.empty(S, length, n, D, dtype=qkv.dtype, device=qkv.device) for n in (H, N, N))
    native = library_for(qkv)
    if native is not None and qkv.dtype == torch.bfloat16:
        native.split_heads(
            ptr(qkv), ptr(starts), S, length, ctypes.addressof(_cheads(heads)), ptr(cos), ptr(sin),
            spec_pointer(kv_spec), ptr(q), ptr(k), ptr(v),
        )  # fmt: skip
        return q, k, v
    bounds = starts.tolist()
    for s, (t, end) in enumerate(zip(bounds, bounds[1:])):
        c, n = cos[: end - t, None], sin[: end - t, None]
        parts = qkv[t:end].unflatten(-1, (-1, D)).split([H, N, N], -2)
        rows = [*(rotate(x.float(), c, n).to(qkv.dtype) for x in parts[:2]), parts[2]]
        if kv_spec is not None:
            rows[1:] = (quantize_blocks(x.reshape(-1, D), (1, D), kv_spec)[0].view(x.shape) for x in rows[1:])
        for out, x in zip((q, k, v), rows):
            out[s, : end - t] = x
            out[s, end - t :] = 0
    return q, k, v


def join_heads(dq, dk, dv, starts, heads: Heads, cos, sin, like: torch.Tensor) -> torch.Tensor:
    """Gradient of split_heads, [T, width] as `like`; fp32 gradients are rounded to its dtype first."""
    S, length = dq.shape[:2]
    out = torch.empty_like(like)
    dq, dk, dv = (x.contiguous() for x in (dq, dk, dv))
    native = library_for(dq)
    if native is not None and like.dtype == torch.bfloat16:
        native.join_heads(
            ptr(dq), ptr(dk), ptr(dv), ptr(starts), S, length, ctypes.addressof(_cheads(heads)), ptr(cos), ptr(sin),
            ptr(out),
        )  # fmt: skip
        return out
    bounds = starts.tolist()
    for s, (t, end) in enumerate(zip(bounds, bounds[1:])):
        c, n = cos[: end - t, None], sin[: end - t, None]
        q, k, v = (x[s, : end - t].to(like.dtype).float() for x in (dq, dk, dv))
        q, k = (torch.cat([a * c + b * n, b * c - a * n], -1) for a, b in (x.chunk(2, -1) for x in (q, k)))
        out[t:end] = torch.cat([q, k, v], 1).flatten(1).to(like.dtype)
    return out


def append(qkv, slots, positions, heads: Heads, cos, sin, kv_spec, cache: KVCache) -> None:
    """Write keys and values of rows [R, width] at (slots [R], positions [R]) int64."""
    native = library_for(qkv)
    if native is not None:
        native.append(
            ptr(qkv), ptr(slots), ptr(positions), qkv.shape[0], ctypes.addressof(_cheads(heads)), ptr(cos), ptr(sin),
            spec_pointer(kv_spec), ptr(cache.keys), ptr(cache.values), cache.values.shape[2],
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
            spec_pointer(kv_spec), ptr(cache.keys), ptr(cache.values), cache.values.shape[2], ptr(out),
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
