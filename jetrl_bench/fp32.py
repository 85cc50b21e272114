"""The kernels of an fp32 flow: the functions of kernels.py that a forward pass calls, with nothing rounded on the way.

For comparison with engines that compute in fp32 (vLLM, transformers), not for speed. Sums have the fixed shapes of
kernels.py, so that here too a token's bits do not depend on who else is in the batch, and rollout and training agree.
Gradients are torch's own. Shapes as in kernels.py.
"""

import torch
import torch.nn.functional as F

from jetrl_bench import lanes
from jetrl_bench.kernels import Heads, KVCache, check_length, lane_matmul, lane_sum, rotate

ROWS = 64
"""Rows of every GEMM: a library may pick another order of the sum for another number of rows."""


class _Exp(torch.autograd.Function):
    """lanes.exp, which reads bits, with the derivative of e^x."""

    @staticmethod
    def forward(ctx, x):
        y = lanes.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0]


def linear(x: torch.Tensor, weights: tuple[torch.Tensor, ...], biases: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """x [T, K], the parts [N_i, K] of a fused layer -> [T, N]."""
    tiles = F.pad(x, (0, 0, 0, -x.shape[0] % ROWS)).split(ROWS)
    parts = [torch.cat([F.linear(tile, w) for tile in tiles])[: x.shape[0]] for w in weights]
    return torch.cat([part + b for part, b in zip(parts, biases)] if biases else parts, 1)


def add_rms_norm(h, delta, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = h if delta is None else h + delta
    rstd = 1.0 / torch.sqrt((lane_sum(x * x) / x.shape[1] + eps).double()).float()
    return x, x * rstd[:, None] * weight, rstd


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    g, u = gate_up.chunk(2, 1)
    return g / (1.0 + _Exp.apply(-g)) * u


def _qkv(qkv: torch.Tensor, heads: Heads, cos, sin) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, width] -> q [T, H, D], k, v [T, N, D] after RoPE."""
    q, k, v = qkv.unflatten(-1, (-1, heads.head_dim)).split([heads.num_heads, *[heads.num_kv_heads] * 2], -2)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def _attend(scores: torch.Tensor, visible: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(scores [..., M, L]) @ v [..., L, D]; L a multiple of 16."""
    scores = torch.where(visible, scores, -torch.inf)
    e = _Exp.apply(scores - scores.amax(-1, keepdim=True))
    return lane_matmul(e, v) / lane_sum(e)[..., None]


def attention(qkv, starts, heads: Heads, cos, sin, kv_spec: None, *, save: bool = False) -> tuple[torch.Tensor, None]:
    """Causal attention of packed sequences, fp32 [T, width] -> [T, H D]; differentiable."""
    out = []
    bounds = starts.tolist()
    for t, end in zip(bounds, bounds[1:]):
        L = end - t
        check_length(L, cos.shape[0])
        q, k, v = (x.transpose(0, 1) for x in _qkv(qkv[t:end], heads, cos[:L], sin[:L]))
        k, v = (F.pad(x, (0, 0, 0, -L % 16)).repeat_interleave(heads.num_heads // len(k), 0) for x in (k, v))
        visible = torch.ones(L, k.shape[1], dtype=torch.bool, device=qkv.device).tril()
        out.append(_attend(lane_matmul(q, k.transpose(1, 2)) * heads.scale, visible, v).transpose(0, 1).flatten(1))
    return torch.cat(out), None


def append(qkv, slots, positions, heads: Heads, cos, sin, kv_spec: None, cache: KVCache) -> None:
    _, k, v = _qkv(qkv, heads, cos[positions], sin[positions])
    cache.keys[slots, :, :, positions], cache.values[slots, :, positions] = k, v


def decode(qkv, slots, positions, heads: Heads, cos, sin, kv_spec: None, cache: KVCache, out) -> torch.Tensor:
    append(qkv, slots, positions, heads, cos, sin, kv_spec, cache)
    q = _qkv(qkv, heads, cos[positions], sin[positions])[0]
    q = q.unflatten(1, (heads.num_kv_heads, -1))
    L = int(positions.max()) + 1
    L += -L % 16
    visible = torch.arange(L, device=qkv.device) <= positions[:, None, None, None]
    scores = lane_matmul(q, cache.keys[slots, :, :, :L]) * heads.scale
    return out.copy_(_attend(scores, visible, cache.values[slots, :, :L]).flatten(1))
