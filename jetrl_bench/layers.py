"""The layers of a decoder, once, for training, prefill and decode: `run_layers`, and the operators it is given.

`Inference` and `Training` call the same kernels; `Training` wraps them for autograd. The attention is passed in.

Shapes: T packed tokens, L positions, D head dim, H query heads, N key/value heads, C hidden, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from jetrl_bench import fp32, kernels, precision
from jetrl_bench.config import ModelConfig
from jetrl_bench.kernels import Heads
from jetrl_bench.model import LayerWeights, ModelWeights, Norm
from jetrl_bench.precision import PrecisionFlow, Side, Weight


class Inference:
    """The operators without gradients: what the rollout engine runs. In an fp32 flow torch differentiates them too."""

    def __init__(self, side: Side):
        self.side = side
        self.kernels = fp32 if side.dtype == torch.float32 else kernels

    def embed(self, ids, weights: ModelWeights):
        return weights.embed[ids]

    def norm(self, h, delta, norm: Norm, eps: float):
        return self.kernels.add_rms_norm(h, delta, norm.weight, eps)[:2]

    def linear(self, x, weight: Weight):
        return precision.linear(x, weight, self.side)

    def head(self, x, weight: Weight):
        return precision.head(x, weight, self.side)

    def swiglu(self, x):
        return self.kernels.swiglu(x)

    def attention(self, qkv, starts, heads, cos, sin, kv):
        return self.kernels.attention(qkv, starts, heads, cos, sin, kv, save=False)[0]

    def rows(self, x, rows):
        return x.index_select(0, rows)


class Training:
    """The same operators, differentiable in the fp32 masters: same kernels, same bits."""

    def __init__(self, flow: PrecisionFlow):
        self.flow = flow

    def embed(self, ids, weights: ModelWeights):
        return _Embed.apply(ids, weights.embed, weights.embed_master)

    def norm(self, h, delta, norm: Norm, eps: float):
        return _AddRMSNorm.apply(h, delta, norm.master, norm.weight, eps)

    def linear(self, x, weight: Weight):
        if weight.real:
            return self.flow.real_linear(x, weight)
        return precision.Linear.apply(x, weight, self.flow, False, *weight.masters)

    def head(self, x, weight: Weight):
        if weight.real:
            return self.flow.real_linear(x, weight)
        return precision.Linear.apply(x, weight, self.flow, True, *weight.masters)

    def swiglu(self, x):
        return _SwiGLU.apply(x)

    def attention(self, *args):
        return _Attention.apply(*args)

    def rows(self, x, rows):
        return _Rows.apply(x, rows)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, table, master):
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        return table[ids]

    @staticmethod
    def backward(ctx, dh):
        (ids,) = ctx.saved_tensors
        return None, None, torch.zeros(ctx.shape, dtype=torch.float32, device=dh.device).index_add_(0, ids, dh.float())


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, delta, master, weight, eps):
        x, y, rstd = kernels.add_rms_norm(h, delta, weight, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, rstd, weight)
        ctx.has_delta = delta is not None
        return x, y

    @staticmethod
    def backward(ctx, dx, dy):
        x, rstd, weight = ctx.saved_tensors
        dh, dw = kernels.add_rms_norm_backward(
            dy.contiguous(), None if dx is None else dx.contiguous(), x, rstd, weight
        )
        return dh, dh if ctx.has_delta else None, dw, None, None


class _Rows(torch.autograd.Function):
    """x[rows] for rows that occur once."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, dy):
        return dy.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], dy), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return kernels.swiglu(x)

    @staticmethod
    def backward(ctx, dy):
        return kernels.swiglu_backward(dy.contiguous(), *ctx.saved_tensors)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, starts, heads, cos, sin, kv):
        out, saved = kernels.attention(qkv, starts, heads, cos, sin, kv, save=ctx.needs_input_grad[0])
        ctx.args, ctx.saved = (starts, heads, cos, sin, kv), saved
        ctx.save_for_backward(qkv, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        qkv, out = ctx.saved_tensors
        return (
            kernels.attention_backward(dout.contiguous(), out, qkv, ctx.saved, *ctx.args),
            None,
            None,
            None,
            None,
            None,
        )


def _head_norms(qkv: torch.Tensor, w: LayerWeights, heads: Heads, ops, eps: float) -> torch.Tensor:
    """Qwen3's RMS norm of every query and key head."""
    T, (H, N, D) = qkv.shape[0], heads
    q, k, v = qkv.split([H * D, N * D, N * D], 1)
    q = ops.norm(q.reshape(T * H, D).contiguous(), None, w.q_norm, eps)[1].view(T, H * D)
    k = ops.norm(k.reshape(T * N, D).contiguous(), None, w.k_norm, eps)[1].view(T, N * D)
    return torch.cat([q, k, v], 1)


def run_layers(
    cfg: ModelConfig, weights: ModelWeights, ids: torch.Tensor, ops, attend: Callable[[int, torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T] -> the residual stream [T, C] and what is still to be added to it.
    attend(layer, qkv [T, width]) -> [T, H D]."""
    heads = Heads(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)
    h, delta = ops.embed(ids, weights), None
    for i, w in enumerate(weights.layers):
        h, y = ops.norm(h, delta, w.norm1, cfg.norm_eps)
        qkv = ops.linear(y, w.qkv)
        if w.q_norm is not None:
            qkv = _head_norms(qkv, w, heads, ops, cfg.norm_eps)
        delta = ops.linear(attend(i, qkv), w.o)
        h, y = ops.norm(h, delta, w.norm2, cfg.norm_eps)
        delta = ops.linear(ops.swiglu(ops.linear(y, w.gate_up)), w.down)
    return h, delta


def other_attention(qkv, starts, heads: Heads, cos, sin, kv) -> torch.Tensor:
    """The same attention in the same precision by other kernels: torch's fused scaled_dot_product_attention."""
    return _FusedAttention.apply(qkv, starts, heads, cos, sin, kv)


class _FusedAttention(torch.autograd.Function):
    """scaled_dot_product_attention in qkv's dtype; its backward in fp32, five times as fast on a CPU as in bf16."""

    @staticmethod
    def forward(ctx, qkv, starts, heads, cos, sin, kv):
        lengths = starts.diff()
        S, L, T = lengths.numel(), int(lengths.max()), qkv.shape[0]
        q, k, v = (t.transpose(1, 2) for t in kernels.split_heads(qkv, starts, L, heads, cos, sin, kv))
        out = _fused(q, k, v).transpose(1, 2).reshape(S * L, -1)
        ctx.rows = None  # of the T tokens in the padded S x L
        if S * L > T:
            gaps = L * torch.arange(S, device=starts.device) - starts[:-1]
            ctx.rows = torch.arange(T, device=starts.device) + torch.repeat_interleave(gaps, lengths)
        ctx.args = (starts, heads, cos, sin)
        ctx.save_for_backward(qkv, q, k, v)
        return out if ctx.rows is None else out.index_select(0, ctx.rows)

    @staticmethod
    def backward(ctx, dout):
        qkv, *inputs = ctx.saved_tensors
        S, H, L, D = inputs[0].shape
        if ctx.rows is not None:
            dout = dout.new_zeros(S * L, H * D).index_copy_(0, ctx.rows, dout)
        with torch.enable_grad():
            inputs = [t.float().requires_grad_() for t in inputs]
            out = _fused(*inputs)
        grads = torch.autograd.grad(out, inputs, dout.float().view(S, L, H, D).transpose(1, 2))
        return kernels.join_heads(*(g.transpose(1, 2) for g in grads), *ctx.args, qkv), None, None, None, None, None


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[S, H, L, D]"""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
