"""`python -m jetrl_bench check [--full]`: the two invariants everything else rests on, tried on this machine.

1. Exactness: with one kernel set on both sides, the engine's log-probs and the trainer's are equal to the last bit on
   unchanged weights, after real optimizer steps, for bf16 and for every per-group FP8 format.
2. In-flight updates: every token's log-prob is that of the weights and the KV cache that sampled it, across a swap.

Prints one line for each; exit code 1 if any fails. A scale per activation tensor must break the first, and a swap moved
by one token the second: both are tried as well, so that the checks are known to be able to fail.
"""

import argparse
import time
from collections.abc import Iterator

import torch

from jetrl_bench import fp8, kernels, native, sampling
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.kernels import Heads
from jetrl_bench.layers import Inference, run_layers
from jetrl_bench.logprobs import Batch, sequence_logprobs
from jetrl_bench.model import Decoder, init_model, prepare
from jetrl_bench.optimizer import AdamW
from jetrl_bench.precision import make_flow
from jetrl_bench.rollout import Completion, ReferenceEngine, Request

VOCAB = 320
FORMATS = ("e4m3", "e5m2", "e3m2", "e4m1", "e2m1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="the whole grid (many minutes), not the two-minute one")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    print(f"GEMM {fp8.gemm_isa()}, kernels {native.backend()}, torch {torch.__version__}")
    failed = 0
    for name, passed, detail in checks(args.full):
        failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {detail}", flush=True)
    print("all invariants hold" if not failed else f"{failed} failed")
    return int(failed > 0)


def checks(full: bool) -> Iterator[tuple[str, bool, str]]:
    """(name, passed, detail) for every invariant."""
    seeds = range(3) if full else range(1)
    batches = (1, 2, 3, 7, 16, 33, 64) if full else (3, 33)
    flows = {"bf16": FlowConfig()}
    for format in FORMATS:
        for scale in ("pow2", "fp32"):
            for groups in ("block", "row"):
                flows[f"{format} {scale} {groups}"] = FlowConfig(
                    rollout="fp8", train="fp8", format=format, scale=scale, activation_groups=groups
                )
    flows["e4m3, fp8 KV cache and lm_head"] = FlowConfig(rollout="fp8", train="fp8", kv_cache="fp8", lm_head="fp8")
    flows["bf16, fp32 lm_head"] = FlowConfig(lm_head="fp32")
    for name, flow in flows.items():
        for size in batches:
            worst, tokens, cuts = 0.0, 0, True
            for seed in seeds:
                gap, n, same = exactness(flow, ModelConfig(), batch_size=size, max_tokens=24, seed=seed)
                worst, tokens, cuts = max(worst, gap), tokens + n, cuts and same
            detail = f"max |dlogp| {worst:.4g} over {tokens} tokens, cuts {'equal' if cuts else 'DIFFER'}"
            yield f"exact, {name}, batch {size}", worst == 0 and cuts, detail
    shapes = {
        "qwen3, GQA, untied, widths off 128": ModelConfig(
            arch="qwen3", hidden_size=96, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_size=200,
            tie_embeddings=False,
        ),
        "qwen2, 512 wide": ModelConfig(arch="qwen2", num_layers=3, num_kv_heads=2, intermediate_size=512),
    }  # fmt: skip
    for name, cfg in shapes.items():
        for kind in ("bf16", "fp8"):
            gap, n, same = exactness(FlowConfig(rollout=kind, train=kind), cfg, batch_size=5, max_tokens=24, seed=1)
            yield f"exact, {name}, {kind}", gap == 0 and same, f"max |dlogp| {gap:.4g} over {n} tokens"
    for format in ("bf16", *(FORMATS if full else FORMATS[:1])):
        flow = FlowConfig() if format == "bf16" else FlowConfig(rollout="fp8", train="fp8", format=format)
        gap, n, _ = exactness(flow, ModelConfig(), batch_size=2, max_tokens=511, seed=2, prompt=1)
        yield f"exact, {format}, every KV length to 512", gap == 0, f"max |dlogp| {gap:.4g} over {n} tokens"
    gap, n, _ = exactness(
        FlowConfig(rollout="fp8", train="fp8", activation_groups="tensor"), ModelConfig(), batch_size=7, max_tokens=24,
        seed=0,
    )  # fmt: skip
    yield "a scale per activation tensor is seen to break it", gap > 0, f"max |dlogp| {gap:.4g} over {n} tokens"
    for kind in ("bf16", "fp8"):
        for kv in ("keep", "recompute"):
            for swap in (1, 2, 9, 15, 16) if full else (9,):
                yield inflight(FlowConfig(rollout=kind, train=kind), kv, swap_at=swap)


# ------------------------------------------------------------------------------------------------ pieces


def trained(cfg: ModelConfig, flow, *, seed: int, updates: int = 2) -> Decoder:
    """A model away from its initialisation: weights enlarged, then real optimizer steps of `flow`."""
    model = init_model(cfg, VOCAB, seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(4)
            elif p.abs().sum() == 0:
                p.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        ids = torch.randint(0, VOCAB, (4, 20), generator=generator)
        logprobs = sequence_logprobs(model, flow, Batch(ids, torch.full((4,), 5), torch.full((4,), 20)), 1.0)[0]
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
    return model


def to_batch(completions: list[Completion]) -> Batch:
    rows = [c.prompt_ids + c.token_ids for c in completions]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return Batch(ids, torch.tensor([len(c.prompt_ids) for c in completions]), torch.tensor([len(r) for r in rows]))


def exactness(
    config: FlowConfig, cfg: ModelConfig, *, batch_size: int, max_tokens: int, seed: int, prompt: int | None = None,
    temperature: float = 0.8,
) -> tuple[float, int, bool]:  # fmt: skip
    """Sample with the engine, recompute with the trainer: (max |dlogp|, tokens, equal under micro-batch cuts)."""
    flow = make_flow(config)
    model = trained(cfg, flow, seed=seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    engine = ReferenceEngine(cfg, VOCAB, flow, max_slots=max(1, batch_size * 2 // 3), max_len=40 + max_tokens)
    engine.load_weights(flow.export(model.named_parameters()), version=0, kv="keep")
    for i in range(batch_size):
        length = prompt or int(torch.randint(1, 40, (1,), generator=generator))
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        limit = max_tokens if prompt else max(1, max_tokens - i % 5)
        engine.add(Request(i, i, 0, ids, limit, temperature, seed * 7919 + i, () if prompt else (3, 4, 5)))
    done: list[Completion] = []
    while engine.num_unfinished():
        done += engine.step()
    done.sort(key=lambda c: c.request_id)
    batch = to_batch(done)
    rollout = torch.tensor([x for c in done for x in c.logprobs])
    logprobs = sequence_logprobs(model, flow, batch, temperature)[0].detach()
    equal = True
    for cut in (1, 3):
        parts = [Batch(*(t[i : i + cut] for t in batch)) for i in range(0, batch_size, cut)]
        with torch.no_grad():
            pieces = torch.cat([sequence_logprobs(model, flow, p, temperature)[0] for p in parts])
        equal = equal and torch.equal(pieces, logprobs)
    return (logprobs - rollout).abs().max().item(), len(rollout), equal


def mixed_cache_logprobs(models, flow, token_ids: list[int], prompt_len: int, boundary: int, temperature: float):
    """Log-probs of the response under models[1] where keys and values of positions below `boundary` are models[0]'s:
    one full forward each, no engine and no cache."""
    cfg, side = models[0].cfg, flow.rollout_side
    heads = Heads(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)
    ids, starts = torch.tensor(token_ids[:-1]), torch.tensor([0, len(token_ids) - 1])
    first: list[torch.Tensor] = []

    def plain(layer, qkv):
        first.append(qkv.clone())
        return kernels.attention(qkv, starts, heads, *models[0].rope, side.kv, save=False)[0]

    def mixed(layer, qkv):
        qkv = qkv.clone()
        qkv[:boundary, heads.num_heads * heads.head_dim :] = first[layer][:boundary, heads.num_heads * heads.head_dim :]
        return kernels.attention(qkv, starts, heads, *models[0].rope, side.kv, save=False)[0]

    ops = Inference(side)
    for model, attend in zip(models, (plain, mixed)):
        weights = prepare(cfg, dict(flow.export(model.named_parameters())), side)
        h, delta = run_layers(cfg, weights, ids, ops, attend)
    y = ops.norm(h[prompt_len - 1 :], delta[prompt_len - 1 :], weights.norm, cfg.norm_eps)[1]
    tokens = torch.tensor(token_ids[prompt_len:])
    return sampling.token_logprobs(ops.head(y, weights.head), tokens, temperature, full=False)[0]


def inflight(config: FlowConfig, kv: str, *, swap_at: int) -> tuple[str, bool, str]:
    """Swap weights after `swap_at` tokens of running completions and account for every log-prob and version."""
    flow, cfg, length = make_flow(config), ModelConfig(), 24
    models = [trained(cfg, flow, seed=3, updates=n) for n in (1, 3)]
    engine = ReferenceEngine(cfg, VOCAB, flow, max_slots=3, max_len=80)
    engine.load_weights(flow.export(models[0].named_parameters()), version=0, kv="keep")
    generator = torch.Generator().manual_seed(5)
    for i in range(3):
        ids = torch.randint(0, VOCAB, (4 + 9 * i,), generator=generator).tolist()
        engine.add(Request(i, i, 0, ids, length, 1.0, 11 + i))
    for _ in range(swap_at):
        engine.step()
    engine.load_weights(flow.export(models[1].named_parameters()), version=1, kv=kv)
    done: list[Completion] = []
    while engine.num_unfinished():
        done += engine.step()
    good, moved_detected = True, True
    for c in done:
        ids, n = c.prompt_ids + c.token_ids, len(c.prompt_ids)
        sampled = torch.tensor(c.logprobs)

        def replay(swap: int, ids=ids, n=n) -> torch.Tensor:
            before = mixed_cache_logprobs((models[0], models[0]), flow, ids, n, 0, 1.0)
            boundary = n + swap - 1 if kv == "keep" else 0
            after = mixed_cache_logprobs(models, flow, ids, n, boundary, 1.0)
            return torch.cat([before[:swap], after[swap:]])

        good = good and torch.equal(sampled, replay(swap_at)) and c.versions == [0] * swap_at + [1] * (length - swap_at)
        for other in (swap_at - 1, swap_at + 1):
            moved_detected = moved_detected and not torch.equal(sampled, replay(other))
    detail = (
        f"{'bit-equal' if good else 'DIFFERENT'}; a swap moved by one token is {'' if moved_detected else 'NOT '}seen"
    )
    return f"in flight, {config.rollout}, kv {kv}, swap after {swap_at}", good and moved_detected, detail


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    began = time.process_time()
    code = run(parser.parse_args())
    print(f"{time.process_time() - began:.0f} CPU s")
    raise SystemExit(code)
