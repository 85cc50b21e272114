"""What is priced: decoder shapes, precision flows and training layouts; and the table of constants they come from."""

import difflib
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

DATA = Path(__file__).parent / "costs_data"
LinearFormat = Literal["bf16", "fp8_block", "fp8_tensor", "fp8_row"]


@functools.cache
def constants() -> dict:
    return yaml.safe_load((DATA / "costs.yaml").read_text())


def lookup(table: dict, key: str, what: str):
    """table[key], or one clear line with the nearest valid name."""
    if key in table:
        return table[key]
    near = difflib.get_close_matches(str(key), list(table), n=1, cutoff=0.0)
    raise ValueError(f"{what} {key!r} is unknown; nearest: {near[0]!r} (have: {', '.join(table)})")


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder. Counts are elements; `linear_params` are the matrices a precision flow may quantise."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False

    @classmethod
    def named(cls, name: str) -> "ModelShape":
        """A shape of costs.yaml, or a folder or file with a Hugging Face config.json."""
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        if path.suffix == ".json":
            return cls.from_hf(path)
        return cls(name=name, **lookup(constants()["models"], name, "model"))

    @classmethod
    def from_hf(cls, path: str | Path) -> "ModelShape":
        """Shape of a Hugging Face config.json; mixture-of-experts models are refused."""
        config = json.loads(Path(path).read_text())
        if any("expert" in key for key in config):
            raise ValueError(f"{path}: mixture-of-experts models are not modelled")
        keys = {"num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"}
        if missing := sorted(keys - config.keys()):
            raise ValueError(f"{path}: key {missing[0]!r} is missing")
        heads = config["num_attention_heads"]
        return cls(
            name=Path(path).parent.name or str(path),
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(n, k) of one layer's fused matrices: qkv, o, gate and up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (q + 2 * kv, self.hidden),
            (self.hidden, q),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    @property
    def linear_params(self) -> int:
        return self.layers * sum(n * k for n, k in self.linears)

    @property
    def num_params(self) -> int:
        return self.linear_params + (1 if self.tied else 2) * self.vocab * self.hidden

    def kv_bytes(self, kv: str) -> int:
        """Bytes of KV cache a token needs."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (1 if kv == "fp8" else 2)


@dataclass(frozen=True)
class Precision:
    """What is quantised. lm_head, attention arithmetic, norms and gradients' transport stay BF16."""

    rollout: LinearFormat = "bf16"
    train: LinearFormat = "bf16"
    kv: Literal["bf16", "fp8"] = "bf16"


BF16 = Precision()


@dataclass(frozen=True)
class TrainLayout:
    """How training is spread: `split` = tensor x pipeline x sequence GPUs form a rank, which owns whole sequences.

    fsdp gathers weights for every micro-batch, over groups of `shard` GPUs (None: all); megatron keeps them and pays a
    pipeline bubble. `micro_tokens` per GPU of a sequence-parallel rank, per rank otherwise.
    """

    gpus: int
    kind: Literal["fsdp", "megatron"] = "fsdp"
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    shard: int | None = None
    micro_tokens: int = 8192
    recompute: Literal["none", "selective", "full"] = "full"

    def __post_init__(self):
        if self.gpus % self.split:
            raise ValueError(f"tensor x pipeline x sequence = {self.split} does not divide {self.gpus} training GPUs")
        if self.pipeline > 1 and self.kind != "megatron":
            raise ValueError("pipeline > 1 needs kind megatron")

    @property
    def split(self) -> int:
        return self.tensor * self.pipeline * self.sequence

    @property
    def ranks(self) -> int:
        return self.gpus // self.split
