"""The probe on a checkpoint: sample with one precision flow, score with another, split the difference in two.

    mu      the rollout: ReferenceEngine in the rollout flow's precision; its tokens are scored
    pi_q    the trainer's precision with the rollout's kernels          mu -> pi_q   quantisation term
    pi      the trainer as its flow says (train_kernels)                pi_q -> pi   kernel term

The log-ratios of the two terms add up to the total token by token; their KLs do not. Exact KL and argmax flips compare
whole distributions at every sampled position.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_bench import native
from jetrl_bench.checkpoint import load_hf
from jetrl_bench.config import FlowConfig, TaskConfig, registry
from jetrl_bench.diagnostics import exact_kl
from jetrl_bench.fp8 import gemm_isa, spec
from jetrl_bench.logprobs import Batch, sequence_logprobs
from jetrl_bench.model import Decoder
from jetrl_bench.precision import make_flow
from jetrl_bench.probe_report import Comparison, ProbeRecord, Tokens, compare
from jetrl_bench.provenance import source_hash
from jetrl_bench.rollout import ReferenceEngine, Request
from jetrl_bench.seeds import seed_of
from jetrl_bench.strict import nearest, validate
from jetrl_bench.trainer import collate


class Checkpoint(NamedTuple):
    folder: Path
    model: Decoder
    cfg: object
    vocab_size: int
    stop_ids: tuple[int, ...]


class Sampling(NamedTuple):
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0


def parse_flow(spec: str) -> FlowConfig:
    """`jetrl_exact`, `fp8_rollout,kv_cache=fp8`, or `format=e2m1` alone, which starts from jetrl_exact."""
    presets = {name: method.flow for name, method in registry().items()}
    first, *rest = [part.strip() for part in spec.split(",")]
    if "=" in first:
        first, rest = "jetrl_exact", [first, *rest]
    if first not in presets:
        raise ValueError(f"flow {first!r} is unknown; {nearest(first, presets)}")
    overrides = {}
    for part in rest:
        key, sign, value = part.partition("=")
        if not sign or not value:
            raise ValueError(f"flow {spec!r}: expected key=value, not {part!r}")
        overrides[key.strip()] = {"true": True, "false": False}.get(value.strip(), value.strip())
    return validate(FlowConfig, presets[first].model_dump() | overrides, f"flow {spec!r}")


def load(folder: Path) -> Checkpoint:
    folder = Path(folder)
    cfg, vocab_size, state = load_hf(folder)
    model = Decoder(cfg, vocab_size)
    model.load_state_dict(state)
    eos = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    stop_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    return Checkpoint(folder, model, cfg, vocab_size, stop_ids)


def read_prompts(spec: str, checkpoint: Checkpoint, limit: int, chat: bool) -> list[list[int]]:
    """Token ids from .txt (a prompt a line), .jsonl (token_ids, prompt, question or problem), or `chain`."""
    if spec == "chain":
        from jetrl_bench.tasks import make_task

        task = make_task(TaskConfig())
        return [task.prompt(problem) for problem in task.problems("heldout", limit, 0)]
    path = Path(spec)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    encode = _tokenizer(checkpoint, chat)
    prompts = []
    for number, line in enumerate(lines[:limit], 1):
        text = line
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error.msg}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: expected an object")
            if "token_ids" in row:
                prompts.append(row["token_ids"])
                continue
            keys = [key for key in ("prompt", "question", "problem") if isinstance(row.get(key), str)]
            if not keys:
                raise ValueError(f"{path}:{number}: no token_ids, prompt, question or problem")
            text = row[keys[0]]
        prompts.append(encode(text))
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    for number, prompt in enumerate(prompts, 1):
        if not prompt or not all(type(t) is int and 0 <= t < checkpoint.vocab_size for t in prompt):
            raise ValueError(f"{path}:{number}: token ids must be integers from 0 to {checkpoint.vocab_size - 1}")
    return prompts


def _tokenizer(checkpoint: Checkpoint, chat: bool):
    """text -> token ids with the checkpoint's own tokenizer; bytes where it has none (our models)."""
    if not (checkpoint.folder / "tokenizer.json").is_file():
        from jetrl_bench.tasks import encode

        if chat:
            raise ValueError(f"{checkpoint.folder}: no tokenizer.json, so there is no chat template")
        return encode
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    if not chat:
        return lambda text: tokenizer.encode(text)
    return lambda text: tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
    )["input_ids"]


def sample(checkpoint: Checkpoint, flow_config: FlowConfig, prompts: list[list[int]], sampling: Sampling) -> list:
    """Completions of the prompts, in order, by ReferenceEngine in the flow's rollout precision."""
    flow = make_flow(flow_config)
    longest = max(map(len, prompts)) + sampling.max_tokens
    # a scale per tensor depends on the whole batch: only the engine knows what it sampled from
    record_full = flow_config.rollout == "fp8" and flow_config.activation_groups == "tensor"
    engine = ReferenceEngine(
        checkpoint.cfg, checkpoint.vocab_size, flow, max_slots=len(prompts), max_len=longest, record_full=record_full
    )
    try:
        engine.load_weights(flow.export(checkpoint.model.named_parameters()), version=0, kv="keep")
        for index, prompt in enumerate(prompts):
            engine.add(
                Request(
                    request_id=index,
                    problem_id=index,
                    sample=0,
                    token_ids=prompt,
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    seed=seed_of(sampling.seed, "rollout", 0, index, 0),
                    stop_ids=checkpoint.stop_ids,
                )
            )
        done = []
        while engine.num_unfinished():
            done += engine.step()
    finally:
        engine.close()
    return sorted(done, key=lambda completion: completion.request_id)


def measure(
    checkpoint: Checkpoint, rollout: FlowConfig, train: FlowConfig, completions: list, temperature: float
) -> tuple[list[Comparison], float]:
    """(total, quantisation term, kernel term) of completions sampled in the rollout's precision, and the largest
    difference between the engine's log-probs and its own flow recomputed in one pass."""
    engine, trainer = make_flow(rollout), make_flow(train)
    engine.train_side = engine.rollout_side  # the rollout's operators in a training pass
    fields = {key: [] for key in ("mu", "recomputed", "q", "pi", "ids", "positions", "sequences")}
    pairs = {name: [] for name in ("total", "quantisation", "kernel")}
    for first, part in _parts(completions, checkpoint.vocab_size):
        batch = collate(part, torch.zeros(len(part))).inputs
        with torch.no_grad():
            recomputed_TV = _full(checkpoint, engine, batch, temperature, "same")
            recorded = part[0].log_softmax is not None
            mu_TV = torch.cat([c.log_softmax for c in part]) if recorded else recomputed_TV
            equal = engine.train_side == trainer.train_side
            q_TV = recomputed_TV if equal else _full(checkpoint, trainer, batch, temperature, "same")
            other = train.train_kernels == "other"
            pi_TV = _full(checkpoint, trainer, batch, temperature, "other") if other else q_TV
        ids_T = torch.tensor([t for c in part for t in c.token_ids])
        lengths = [len(c.token_ids) for c in part]
        fields["mu"].append(torch.tensor([x for c in part for x in c.logprobs]))
        for key, full in (("recomputed", recomputed_TV), ("q", q_TV), ("pi", pi_TV)):
            fields[key].append(full.gather(1, ids_T[:, None])[:, 0])
        fields["ids"].append(ids_T)
        fields["positions"].append(torch.tensor([p for length in lengths for p in range(length)]))
        fields["sequences"].append(torch.tensor([first + i for i, length in enumerate(lengths) for _ in range(length)]))
        pairs["quantisation"].append(_distance(mu_TV, q_TV))
        pairs["kernel"].append(_distance(q_TV, pi_TV))
        pairs["total"].append(pairs["quantisation"][-1] if pi_TV is q_TV else _distance(mu_TV, pi_TV))
    f = {key: torch.cat(value) for key, value in fields.items()}
    f |= {key: f[key].double() for key in ("mu", "q", "pi", "recomputed")}

    def tokens(a: str, b: str, name: str) -> Tokens:
        kl, flips = map(torch.cat, zip(*pairs[name]))
        return Tokens(f[a], f[b], f["sequences"], f["positions"], f["ids"], kl, flips)

    side, other = describe(rollout, "rollout"), describe(train, "train")
    same = describe(train.model_copy(update={"train_kernels": "same"}), "train")
    comparisons = [
        compare("total", "total", side, other, tokens("mu", "pi", "total")),
        compare("quantisation", "quantisation", side, same, tokens("mu", "q", "quantisation")),
        compare("kernel", "kernel", same, other, tokens("q", "pi", "kernel")),
    ]
    return comparisons, float((f["mu"] - f["recomputed"]).abs().max())


def _distance(mu_TV: Tensor, pi_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Exact KL(mu || pi) [T] in fp64 and whether the most likely token differs [T]."""
    if mu_TV is pi_TV:
        return torch.zeros(len(mu_TV), dtype=torch.float64), torch.zeros(len(mu_TV), dtype=torch.bool)
    rows = list(zip(mu_TV.split(64), pi_TV.split(64)))
    kl = torch.cat([exact_kl(mu.double(), pi.double()) for mu, pi in rows])
    return kl, mu_TV.argmax(-1) != pi_TV.argmax(-1)


def describe(flow: FlowConfig, side: str) -> str:
    """One side of a flow in a few words: equal words, equal numerics."""
    quantised = (flow.rollout if side == "rollout" else flow.train) == "fp8"
    rule = flow.rollout_rule if side == "rollout" else flow.train_rule
    words = ["fp32" if flow.rollout == "fp32" else "bf16"]
    if quantised:
        words = [flow.format, "pow2 scales" if spec(flow.format, flow.scale, rule).pow2 else "fp32 scales"]
        groups = (flow.activation_groups, flow.weight_groups)
        words += [] if groups == ("block", "block") else [f"activations by {groups[0]}, weights by {groups[1]}"]
        words += [] if rule == "default" else [f"rule {rule}"]
    # in training the cache is quantised where the linear layers are
    words += ["fp8 KV cache"] if flow.kv_cache == "fp8" and (quantised or side == "rollout") else []
    words += [f"lm_head {flow.lm_head}"] if flow.lm_head != "bf16" else []
    words += ["other kernels"] if side == "train" and flow.train_kernels == "other" else []
    return ", ".join(words)


def probe(
    checkpoint: Checkpoint, rollout: str, train: str, prompts: list[list[int]], sampling: Sampling, source: dict,
    completions: list | None = None,
) -> ProbeRecord:  # fmt: skip
    """The record of two flows given as text; `completions` are the rollout flow's, where they were sampled before."""
    flows = parse_flow(rollout), parse_flow(train)
    if completions is None:
        completions = sample(checkpoint, flows[0], prompts, sampling)
    comparisons, exact = measure(checkpoint, *flows, completions, sampling.temperature)
    notes = [
        "The engine's log-probs equal its own flow recomputed in one pass, bit for bit."
        if exact == 0
        else f"The engine differs from its own flow recomputed in one pass by up to {exact:.6f} nats."
    ]
    return ProbeRecord(
        mode="checkpoint",
        source=source
        | {
            "checkpoint": checkpoint.folder.name,
            "rollout": rollout,
            "train": train,
            "prompts": len(prompts),
            "max_tokens": sampling.max_tokens,
            "temperature": str(sampling.temperature),
            "seed": sampling.seed,
        },
        comparisons=comparisons,
        notes=notes,
        environment={
            "torch": torch.__version__,
            "kernels": native.backend(),
            "products": gemm_isa(),
            "threads": str(torch.get_num_threads()),
            "numerical_source": source_hash(),
        },
    )


def _parts(completions: list, vocab_size: int):
    """(index of the first, completions) in parts whose distributions need at most 256 MiB each."""
    part, tokens, first = [], 0, 0
    for index, completion in enumerate(completions):
        length = len(completion.token_ids)
        if part and (tokens + length) * vocab_size * 4 > 2**28:
            yield first, part
            part, tokens, first = [], 0, index
        part.append(completion)
        tokens += length
    yield first, part


def _full(checkpoint: Checkpoint, flow, batch: Batch, temperature: float, kernel_set: str) -> Tensor:
    """Log-softmax [T, V] of the training pass in this flow."""
    out = sequence_logprobs(checkpoint.model, flow, batch, temperature, kernels=kernel_set, record_full=True)
    return out[2]
