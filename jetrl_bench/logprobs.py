"""Token log-probabilities of whole sequences under a precision flow's training side: packed, differentiable, checked.

Shapes: B sequences, L positions, T packed tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from jetrl_bench import kernels, sampling
from jetrl_bench.config import ModelConfig
from jetrl_bench.errors import NotFinite
from jetrl_bench.kernels import Heads
from jetrl_bench.layers import Inference, Training, other_attention, run_layers
from jetrl_bench.model import Decoder, ModelWeights
from jetrl_bench.precision import PrecisionFlow, Side


class Batch(NamedTuple):
    """Padded sequences; what lies beyond a sequence's total length is never read."""

    token_ids: torch.Tensor
    """int64 [B, L]"""
    prompt_lens: torch.Tensor
    """int64 [B]"""
    total_lens: torch.Tensor
    """int64 [B], prompt and response"""

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(tensor.to(device) for tensor in self))


def pack(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Batch -> ids [T'] without padding and without each sequence's last token (it predicts nothing), starts [B + 1],
    rows [T] whose hidden states predict the response, and the response tokens [T]."""
    inputs = batch.total_lens - 1
    starts = F.pad(inputs.cumsum(0), (1, 0))
    column = torch.arange(batch.token_ids.shape[1], device=inputs.device)
    ids = batch.token_ids[column < inputs[:, None]]
    position = torch.arange(int(starts[-1]), device=inputs.device) - torch.repeat_interleave(starts[:-1], inputs)
    rows = (position >= torch.repeat_interleave(batch.prompt_lens - 1, inputs)).nonzero()[:, 0]
    response = (column >= batch.prompt_lens[:, None]) & (column < batch.total_lens[:, None])
    return ids, starts, rows, batch.token_ids[response]


def check_batch(batch: Batch, cfg: ModelConfig, vocab_size: int) -> None:
    if bool((batch.prompt_lens < 1).any()) or bool((batch.total_lens <= batch.prompt_lens).any()):
        raise ValueError("every sequence needs a prompt token and a response token")
    longest = int(batch.total_lens.max())
    if longest > batch.token_ids.shape[1]:
        raise ValueError(f"total_lens {longest} exceeds the batch's width {batch.token_ids.shape[1]}")
    kernels.check_length(longest - 1, cfg.max_position)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, temperature, full):
        logp, entropy, saved, everything = sampling.token_logprobs(logits, tokens, temperature, full=full)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, tokens, *saved)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy, *(() if everything is None else (everything,)))
        return logp, entropy, everything

    @staticmethod
    def backward(ctx, grad, *_):
        logits, tokens, top, total = ctx.saved_tensors
        return (
            sampling.token_logprobs_backward(grad.contiguous(), logits, tokens, ctx.temperature, (top, total)),
            None,
            None,
            None,
        )


def sequence_logprobs(
    model: Decoder, flow: PrecisionFlow, batch: Batch, temperature: float, kernels: str | None = None, *,
    record_full: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Log-probs, entropy (fp32 [T], response tokens, sequence by sequence) and, if asked, log-softmax [T, V].

    Differentiable in the fp32 masters through the flow's training side. A token's values depend on its own sequence
    alone: not on the other sequences, the padding, or how a batch is cut. kernels "other" replaces the attention
    (default: the flow's train_kernels). NaN or inf raises ValueError naming the operator it first appears in.
    """
    check_batch(batch, model.cfg, model.vocab_size)
    ids, starts, rows, tokens = pack(batch)
    weights, side = model.prepared(flow), flow.train_side
    grad = torch.is_grad_enabled()
    ops = Training(flow) if grad and side.dtype != torch.float32 else Inference(side)
    out = _forward(model, weights, ids, starts, rows, ops, kernels or flow.config.train_kernels, side)
    result = _TokenLogprobs.apply(out, tokens, float(temperature), record_full)
    if not bool(torch.isfinite(result[0]).all()):
        with torch.no_grad():
            _forward(model, weights, ids, starts, rows, _Checked(side), "same", side)
        raise NotFinite("NaN or inf in the log-probs")
    return result


def _forward(model: Decoder, weights: ModelWeights, ids, starts, rows, ops, which: str, side: Side) -> torch.Tensor:
    cfg, (cos, sin) = model.cfg, model.rope
    heads = Heads(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)
    attention = other_attention if which == "other" else ops.attention
    h, delta = run_layers(cfg, weights, ids, ops, lambda i, qkv: attention(qkv, starts, heads, cos, sin, side.kv))
    y = ops.norm(ops.rows(h, rows), ops.rows(delta, rows), weights.norm, cfg.norm_eps)[1]
    return ops.head(y, weights.head)


class _Checked(Inference):
    """Operators that stop at the first NaN or inf, naming the operator in order of execution."""

    def __init__(self, side: Side):
        super().__init__(side)
        self.trail: list[str] = []

    def _check(self, name: str, out: torch.Tensor) -> torch.Tensor:
        self.trail.append(name)
        if not bool(torch.isfinite(out).all()):
            layer = max(self.trail.count("qkv or gate_up") - 1, 0) // 2
            raise NotFinite(f"NaN or inf in the forward pass: output of {name}, layer {layer}")
        return out

    def embed(self, ids, weights):
        return self._check("embedding", super().embed(ids, weights))

    def norm(self, h, delta, norm, eps):
        x, y = super().norm(h, delta, norm, eps)
        return x, self._check("norm", y)

    def linear(self, x, weight):
        name = "qkv or gate_up" if len(weight.parts) > 1 else "o_proj or down_proj"
        return self._check(name, super().linear(x, weight))

    def head(self, x, weight):
        return self._check("lm_head", super().head(x, weight))


def nonfinite_gradient(model: Decoder) -> str | None:
    """Name of the parameter nearest to the loss whose gradient holds NaN or inf, or None."""
    names = [n for n, p in model.named_parameters() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
    trunk = [n for n in names if "embed_tokens" not in n and n != "lm_head.weight"]
    return (trunk or names or [None])[-1]
