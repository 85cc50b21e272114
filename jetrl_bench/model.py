"""A Qwen3-, Qwen2- or Llama-shaped decoder: parameters, Hugging Face checkpoints, and the forward of both sides.

`Decoder` holds fp32 master parameters under Hugging Face names; its own forward is the plain fp32 model (traceable on
meta tensors). What is trained and rolled out runs through a precision flow: `prepare` rounds and quantises the weights
once per version, and `run_layers` is the one definition of the layers, called by training (with gradients), prefill and
decode alike; they differ in the attention they pass in.

Shapes: B sequences, L positions, T packed tokens, D head dim, H query heads, N key/value heads, C hidden, V vocabulary.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from jetrl_bench import fp32, kernels, precision
from jetrl_bench.config import ModelConfig
from jetrl_bench.errors import NotFinite
from jetrl_bench.kernels import Heads
from jetrl_bench.precision import PrecisionFlow, Side, Weight

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def rope_table(cfg: ModelConfig, device=None) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin fp32 [max_position, D / 2], computed in fp64."""
    D = cfg.head_dim
    inverse = cfg.rope_theta ** -(torch.arange(0, D, 2, dtype=torch.float64, device=device) / D)
    angle = torch.arange(cfg.max_position, dtype=torch.float64, device=device)[:, None] * inverse
    return angle.cos().float(), angle.sin().float()


# ------------------------------------------------------------------------------------------------ parameters


class _Linear(nn.Linear):
    """Weights come from init_model or a checkpoint: drawing torch's own first would be thrown away."""

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        C, D, bias = cfg.hidden_size, cfg.head_dim, cfg.arch == "qwen2"
        self.heads = Heads(cfg.num_heads, cfg.num_kv_heads, D)
        self.q_proj = _Linear(C, cfg.num_heads * D, bias=bias)
        self.k_proj = _Linear(C, cfg.num_kv_heads * D, bias=bias)
        self.v_proj = _Linear(C, cfg.num_kv_heads * D, bias=bias)
        self.o_proj = _Linear(cfg.num_heads * D, C, bias=False)
        if cfg.arch == "qwen3":
            self.q_norm, self.k_norm = RMSNorm(D, cfg.norm_eps), RMSNorm(D, cfg.norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.heads.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (kernels.rotate(t, cos[:, None], sin[:, None]) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.heads.num_heads // self.heads.num_kv_heads, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * self.heads.head_dim**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate_proj = _Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = _Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = _Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = h + self.self_attn(self.input_layernorm(h), cos, sin)
        return h + self.mlp(self.post_attention_layernorm(h))


class Trunk(nn.Module):
    def __init__(self, cfg: ModelConfig, vocab_size: int):
        super().__init__()
        self.embed_tokens = _Embedding(vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)


class Decoder(nn.Module):
    """fp32 masters under Hugging Face names; a tied head has no parameter of its own."""

    def __init__(self, cfg: ModelConfig, vocab_size: int):
        super().__init__()
        self.cfg, self.vocab_size = cfg, vocab_size
        self.model = Trunk(cfg, vocab_size)
        if not cfg.tie_embeddings:
            self.lm_head = _Linear(cfg.hidden_size, vocab_size, bias=False)
        self._prepared: dict = {}

    @functools.cached_property
    def rope(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Made when first used: arithmetic on meta tensors would import torch's compiler, 1.4 CPU seconds."""
        return rope_table(self.cfg)

    @property
    def head_weight(self) -> nn.Parameter:
        return self.model.embed_tokens.weight if self.cfg.tie_embeddings else self.lm_head.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [B, L] -> logits fp32 [B, L, V]: the model without any precision flow."""
        L = token_ids.shape[1]
        kernels.check_length(L, self.cfg.max_position)
        cos, sin = (t[:L].to(token_ids.device) for t in self.rope)
        h = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            h = layer(h, cos, sin)
        return F.linear(self.model.norm(h), self.head_weight)

    def prepared(self, flow: PrecisionFlow) -> "ModelWeights":
        """Weights of the flow's training side, quantised again only when a parameter's in-place version has changed.

        torch's fused optimizers do not raise that version: use foreach ones, or autograd.graph.increment_version.
        """
        key = flow.train_side
        version = tuple((p.data_ptr(), p._version) for p in self.parameters())
        if self._prepared.get(key, (None,))[0] != version:
            self._prepared = {key: (version, prepare(self.cfg, dict(self.named_parameters()), key, masters=True))}
        return self._prepared[key][1]


def init_model(cfg: ModelConfig, vocab_size: int, seed: int) -> Decoder:
    """Normal(0, 0.02) weights, those into the residual stream divided by sqrt(2 layers); zero biases, unit norms."""
    model = Decoder(cfg, vocab_size)
    generator = torch.Generator().manual_seed(seed % 2**63)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        with torch.no_grad():
            if name.endswith("bias"):
                p.zero_()
            else:
                p.normal_(0.0, 0.02 / (2 * cfg.num_layers) ** 0.5 if residual else 0.02, generator=generator)
    return model


# ------------------------------------------------------------------------------------------------ prepared weights


class LayerWeights(NamedTuple):
    norm1: "Norm"
    qkv: Weight
    q_norm: "Norm | None"
    k_norm: "Norm | None"
    o: Weight
    norm2: "Norm"
    gate_up: Weight
    down: Weight


class Norm(NamedTuple):
    weight: torch.Tensor
    """fp32 holding bf16(master), or the master itself in an fp32 flow."""
    master: torch.Tensor | None


class ModelWeights(NamedTuple):
    """Everything a forward needs, rounded and quantised for one side."""

    embed: torch.Tensor
    embed_master: torch.Tensor | None
    layers: list[LayerWeights]
    norm: Norm
    head: Weight
    side: Side


def manifest(cfg: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor a weight update must bring, exactly once."""
    with torch.device("meta"):
        model = Decoder(cfg, vocab_size)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def prepare(cfg: ModelConfig, named: dict[str, torch.Tensor], side: Side, *, masters: bool = False) -> ModelWeights:
    """Named tensors (fp32 masters, or their bf16 rounding) -> prepared weights; q, k, v and gate, up are fused."""

    plain = side.dtype == torch.float32

    def weight(*names: str, quantized: bool = side.fp8) -> Weight:
        tensors = [named[f"{n}.weight"] for n in names]
        biases = [named[f"{n}.bias"] for n in names if f"{n}.bias" in named]
        kept = (*tensors, *biases) if masters else ()
        return precision.prepare_weight(tensors, biases, side, quantized=quantized, masters=kept)

    def norm(name: str) -> Norm | None:
        t = named.get(f"{name}.weight")
        if t is None:
            return None
        return Norm(t if plain else t.detach().to(torch.bfloat16).float(), t if masters else None)

    layers = []
    for i in range(cfg.num_layers):
        a, m = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        layers.append(
            LayerWeights(
                norm(f"model.layers.{i}.input_layernorm"),
                weight(a + "q_proj", a + "k_proj", a + "v_proj"),
                norm(a + "q_norm"),
                norm(a + "k_norm"),
                weight(a + "o_proj"),
                norm(f"model.layers.{i}.post_attention_layernorm"),
                weight(m + "gate_proj", m + "up_proj"),
                weight(m + "down_proj"),
            )
        )
    embed = named["model.embed_tokens.weight"]
    head = weight("model.embed_tokens" if cfg.tie_embeddings else "lm_head", quantized=side.lm_head == "fp8")
    table = embed if plain else head.bf16 if cfg.tie_embeddings else embed.detach().to(torch.bfloat16)
    return ModelWeights(table, embed if masters else None, layers, norm("model.norm"), head, side)


# ------------------------------------------------------------------------------------------------ operators


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


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, temperature, full):
        logp, entropy, saved, everything = kernels.token_logprobs(logits, tokens, temperature, full=full)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, tokens, *saved)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy, *(() if everything is None else (everything,)))
        return logp, entropy, everything

    @staticmethod
    def backward(ctx, grad, *_):
        logits, tokens, top, total = ctx.saved_tensors
        return (
            kernels.token_logprobs_backward(grad.contiguous(), logits, tokens, ctx.temperature, (top, total)),
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
    bounds = starts.tolist()
    lengths = starts.diff()
    B, L, T = len(bounds) - 1, int(lengths.max()), qkv.shape[0]
    position = torch.arange(T) - torch.repeat_interleave(starts[:-1], lengths)
    row = torch.repeat_interleave(torch.arange(B), lengths)
    H, N, D = heads
    q, k, v = qkv.unflatten(-1, (-1, D)).split([H, N, N], -2)
    c, s = cos[position][:, None], sin[position][:, None]
    q, k = (kernels.rotate(t.float(), c, s).to(qkv.dtype) for t in (q, k))
    if kv is not None:
        k, v = (
            t + (kernels.quantize_blocks(t.detach().reshape(-1, D), (1, D), kv)[0].view(t.shape) - t).detach()
            for t in (k, v)
        )
    q, k, v = (t.new_zeros(B, L, t.shape[1], D).index_put((row, position), t).transpose(1, 2) for t in (q, k, v))
    out = _FusedAttention.apply(q, k, v)
    return out.transpose(1, 2)[row, position].reshape(T, H * D)


class _FusedAttention(torch.autograd.Function):
    """scaled_dot_product_attention in bf16; its backward in fp32, five times as fast on a CPU as torch's bf16 one."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    @staticmethod
    def backward(ctx, dout):
        with torch.enable_grad():
            inputs = [t.float().requires_grad_() for t in ctx.saved_tensors]
            gqa = inputs[0].shape[1] != inputs[1].shape[1]
            out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=gqa)
        return tuple(g.to(dout.dtype) for g in torch.autograd.grad(out, inputs, dout.float()))


# ------------------------------------------------------------------------------------------------ log-probabilities


class Batch(NamedTuple):
    """Padded sequences; what lies beyond a sequence's total length is never read."""

    token_ids: torch.Tensor
    """int64 [B, L]"""
    prompt_lens: torch.Tensor
    """int64 [B]"""
    total_lens: torch.Tensor
    """int64 [B], prompt and response"""


def pack(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Batch -> ids [T'] without padding and without each sequence's last token (it predicts nothing), starts [B + 1],
    rows [T] whose hidden states predict the response, and the response tokens [T]."""
    inputs = batch.total_lens - 1
    starts = F.pad(inputs.cumsum(0), (1, 0))
    column = torch.arange(batch.token_ids.shape[1])
    ids = batch.token_ids[column < inputs[:, None]]
    position = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1], inputs)
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


# ------------------------------------------------------------------------------------------------ checkpoints


def save_hf(
    model: Decoder, cfg: ModelConfig, folder: Path | str, *, dtype: torch.dtype = torch.float32,
    eos_token_id: int | None = None,
) -> None:  # fmt: skip
    """Write config.json and model.safetensors as transformers reads them (fp32 masters, or bf16(master))."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {n: p.detach().to(dtype).contiguous() for n, p in model.named_parameters()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(cfg, model.vocab_size, dtype=dtype, eos_token_id=eos_token_id)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def hf_config(
    cfg: ModelConfig, vocab_size: int, *, dtype: torch.dtype = torch.float32, eos_token_id: int | None = None
) -> dict:
    """What stands in a Hugging Face config.json."""
    config = {
        "architectures": [ARCHITECTURES[cfg.arch]],
        "model_type": cfg.arch,
        "vocab_size": vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_position,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "tie_word_embeddings": cfg.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if cfg.arch == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    if cfg.arch == "qwen3":
        config |= {"attention_bias": False}
    return config


def load_hf(folder: Path | str) -> tuple[ModelConfig, int, dict[str, torch.Tensor]]:
    """(cfg, vocab_size, fp32 state) of a Hugging Face folder; what this decoder does not compute is refused."""
    from safetensors.torch import load_file

    folder = Path(folder)
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder}: no config.json; expected a Hugging Face checkpoint folder")
    raw = json.loads(path.read_text())
    cfg = config_from_hf(raw, str(path))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no *.safetensors file")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= {n: t.float() for n, t in load_file(file).items() if not n.endswith("rotary_emb.inv_freq")}
    if cfg.tie_embeddings:
        state.pop("lm_head.weight", None)
    expected = manifest(cfg, raw["vocab_size"])
    check_manifest(expected, state, str(folder))
    return cfg, raw["vocab_size"], state


def check_manifest(expected: dict[str, tuple[int, ...]], tensors: dict[str, torch.Tensor], where: str) -> None:
    """ValueError with one line unless `tensors` holds exactly the expected names and shapes."""
    for name in expected:
        if name not in tensors:
            raise ValueError(f"{where}: tensor {name} is missing")
    for name, tensor in tensors.items():
        if name not in expected:
            raise ValueError(f"{where}: tensor {name} is not part of the model")
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{where}: tensor {name} has shape {list(tensor.shape)}, expected {list(expected[name])}")


def config_from_hf(raw: dict, where: str) -> ModelConfig:
    arch = raw.get("model_type")
    if arch not in ARCHITECTURES:
        raise ValueError(f"{where}: model_type {arch!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    refused = {
        f"rope_type {kind!r}": kind != "default",
        "partial_rotary_factor": float(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0,
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")) and arch != "qwen2",
        "mlp_bias": bool(raw.get("mlp_bias")),
        "sliding-window attention": bool(raw.get("use_sliding_window")),
    }
    for what, present in refused.items():
        if present:
            raise ValueError(f"{where}: {what} is not supported")
    heads = raw["num_attention_heads"]
    return ModelConfig(
        arch=arch,
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        intermediate_size=raw["intermediate_size"],
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
        norm_eps=raw["rms_norm_eps"],
        tie_embeddings=raw.get("tie_word_embeddings", False),
        max_position=raw["max_position_embeddings"],
    )
