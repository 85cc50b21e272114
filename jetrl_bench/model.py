"""A Qwen3-, Qwen2- or Llama-shaped decoder: parameters, and weights made ready for one side of a precision flow.

`Decoder` holds fp32 master parameters under Hugging Face names; its own forward is the plain fp32 model (traceable on
meta tensors). What is trained and rolled out runs through a precision flow: `prepare` rounds and quantises the weights
once per version, and layers.py multiplies by them.

Shapes: B sequences, L positions, D head dim, H query heads, N key/value heads, C hidden, V vocabulary.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from jetrl_bench import kernels, precision
from jetrl_bench.config import ModelConfig
from jetrl_bench.kernels import Heads
from jetrl_bench.precision import PrecisionFlow, Side, Weight


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
        return rope_table(self.cfg, self.head_weight.device)

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
