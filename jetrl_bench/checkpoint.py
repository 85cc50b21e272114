"""Hugging Face checkpoints in and out: config.json and model.safetensors, as transformers reads and writes them."""

import json
from pathlib import Path

import torch

from jetrl_bench.config import ModelConfig
from jetrl_bench.model import Decoder, check_manifest, manifest

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


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
