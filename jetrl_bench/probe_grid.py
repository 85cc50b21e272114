"""A checkpoint under every pair of flows worth knowing: formats, scale kinds, groups, KV cache, rules, kernels.

Pairs that share a rollout flow share its samples, so that their trainers are compared on the same tokens.
"""

from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from jetrl_bench import probe_report
from jetrl_bench.probe_checkpoint import Checkpoint, Sampling, describe, parse_flow, probe, sample
from jetrl_bench.probe_report import ProbeRecord, fixed, to_csv
from jetrl_bench.record import write_json, write_text


class Pair(NamedTuple):
    name: str
    question: str
    rollout: str
    train: str


ROW, TENSOR = (f"activation_groups={kind},weight_groups={kind}" for kind in ("row", "tensor"))
GRID = {
    "What do other kernels do without any quantisation?": [
        ("bf16_other", "bf16", "bf16,train_kernels=other"),
    ],
    "What does each format cost, FP8 rollout and BF16 training?": [
        ("e4m3_rollout", "fp8_rollout", "bf16"),
        *((f"{name}_rollout", f"fp8_rollout,format={name}", "bf16") for name in ("e5m2", "e3m2", "e4m1", "e2m1")),
    ],
    "Which scales and groups?": [
        ("e4m3_rollout_fp32", "fp8_rollout,scale=fp32", "bf16"),
        ("e4m3_rollout_fp32_row", f"fp8_rollout,scale=fp32,{ROW}", "bf16"),
        ("e4m3_rollout_fp32_tensor", f"fp8_rollout,scale=fp32,{TENSOR}", "bf16"),
        ("e2m1_rollout_fp32", "fp8_rollout,format=e2m1,scale=fp32", "bf16"),
    ],
    "What does quantising the KV cache or the head add?": [
        ("kv_rollout", "bf16,kv_cache=fp8", "bf16"),
        ("e4m3_kv_rollout", "fp8_rollout,kv_cache=fp8", "bf16"),
        ("e4m3_head_rollout", "fp8_rollout,lm_head=fp8", "bf16"),
    ],
    "Is one precision on both sides enough, when kernels differ?": [
        ("e4m3_rollout_other", "fp8_rollout", "bf16,train_kernels=other"),
        ("e4m3_other", "jetrl", "jetrl"),
        ("e4m3_kv_other", "jetrl,kv_cache=fp8", "jetrl,kv_cache=fp8"),
        ("e4m3_fp32_other", "jetrl,scale=fp32", "jetrl,scale=fp32"),
        ("e5m2_other", "jetrl,format=e5m2", "jetrl,format=e5m2"),
        ("e2m1_other", "jetrl,format=e2m1", "jetrl,format=e2m1"),
    ],
    "And when the kernels are the same?": [
        ("bf16", "bf16", "bf16"),
        ("e4m3_exact", "jetrl_exact", "jetrl_exact"),
        ("e4m3_fp32_exact", "jetrl_exact,scale=fp32", "jetrl_exact,scale=fp32"),
        ("e4m3_kv_exact", "jetrl_exact,kv_cache=fp8", "jetrl_exact,kv_cache=fp8"),
        ("e2m1_exact", "jetrl_exact,format=e2m1", "jetrl_exact,format=e2m1"),
        ("e4m3_tensor_exact", f"jetrl_exact,{TENSOR}", f"jetrl_exact,{TENSOR}"),
    ],
    "Does it matter whose scale rule each side follows?": [
        ("vllm_ue8m0_te_pow2", "jetrl_exact,rollout_rule=vllm_ue8m0", "jetrl_exact,train_rule=te_pow2"),
        ("vllm_ue8m0_deepgemm", "jetrl_exact,rollout_rule=vllm_ue8m0", "jetrl_exact,train_rule=deepgemm_ue8m0"),
        ("vllm_fp32_te_fp32", "jetrl_exact,rollout_rule=vllm_fp32", "jetrl_exact,train_rule=te_fp32"),
        ("vllm_fp32_deepgemm", "jetrl_exact,rollout_rule=vllm_fp32", "jetrl_exact,train_rule=deepgemm_fp32"),
        ("vllm_fp32_torchao", "jetrl_exact,rollout_rule=vllm_fp32", "jetrl_exact,train_rule=torchao"),
        ("vllm_ue8m0_te_fp32", "jetrl_exact,rollout_rule=vllm_ue8m0", "jetrl_exact,train_rule=te_fp32"),
    ],
}  # fmt: skip


def pairs() -> list[Pair]:
    return [Pair(question=question, name=n, rollout=r, train=t) for question, rows in GRID.items() for n, r, t in rows]


def run(checkpoint: Checkpoint, prompts: list[list[int]], sampling: Sampling, source: dict, out: Path) -> None:
    """One record and table a pair, and grid.md, .csv and a figure over all of them."""
    records, samples = {}, {}
    for pair in pairs():
        rollout = parse_flow(pair.rollout)
        key = describe(rollout, "rollout")
        if key not in samples:
            samples[key] = sample(checkpoint, rollout, prompts, sampling)
        record = probe(checkpoint, pair.rollout, pair.train, prompts, sampling, source, samples[key])
        write_json(out / pair.name / "probe.json", record)
        write_text(out / pair.name / "probe.md", probe_report.markdown(record))
        records[pair.name] = record
        print(f"{pair.name}: KL {fixed(record.comparisons[0].numbers.kl)}", flush=True)
    write(records, out)


def read(out: Path) -> dict[str, ProbeRecord]:
    """The records of a finished grid."""
    found = {}
    for pair in pairs():
        path = out / pair.name / "probe.json"
        try:
            found[pair.name] = ProbeRecord.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        except ValidationError as error:
            raise ValueError(f"{path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from None
    return found


COLUMNS = [
    "mean_abs",
    "p99_abs",
    "max_abs",
    "kl",
    "kl_se",
    "kl_quantisation",
    "kl_kernel",
    "k3",
    "ess_sequence",
    "flips",
]
HEAD = {
    "mean_abs": "mean abs(d)",
    "p99_abs": "p99",
    "max_abs": "largest",
    "kl": "KL, exact",
    "kl_se": "its error",
    "kl_quantisation": "KL of the quantisation term",
    "kl_kernel": "KL of the kernel term",
    "k3": "k3",
    "ess_sequence": "ESS / n, sequences",
    "flips": "argmax flips",
}


def values(record: ProbeRecord) -> dict[str, float]:
    total, quantisation, kernel = record.comparisons
    row = {key: probe_report.value_of(total, key) for key in COLUMNS if key not in ("kl_quantisation", "kl_kernel")}
    return row | {"kl_quantisation": quantisation.numbers.kl, "kl_kernel": kernel.numbers.kl}


def markdown(records: dict[str, ProbeRecord]) -> str:
    first = next(iter(records.values()))
    total = first.comparisons[0]
    lines = ["# Mismatch of pairs of flows", ""]
    keys = ("checkpoint", "prompts_from", "chat_template", "prompts", "max_tokens", "temperature", "seed")
    lines += [f"- {key}: {first.source[key]}" for key in keys if key in first.source]
    lines += [f"- {total.sequences} responses, about {total.numbers.tokens} tokens a row; nats per token"]
    for question in dict.fromkeys(pair.question for pair in pairs()):
        lines += ["", f"## {question}", ""]
        lines.append("| rollout | training | " + " | ".join(HEAD.values()) + " |")
        lines.append("|---" * (2 + len(HEAD)) + "|")
        for pair in pairs():
            if pair.question == question:
                record = records[pair.name]
                row = values(record)
                cells = [
                    record.comparisons[0].mu,
                    record.comparisons[0].pi,
                    *(fixed(row[key], "one sequence") for key in COLUMNS),
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(records: dict[str, ProbeRecord], out: Path) -> None:
    from jetrl_bench import probe_figure

    write_text(out / "grid.md", markdown(records))
    rows = [["pair", "rollout", "train", "tokens", *COLUMNS]]
    for pair in pairs():
        record = records[pair.name]
        row = values(record)
        tokens = record.comparisons[0].numbers.tokens
        rows.append(
            [pair.name, pair.rollout, pair.train, tokens, *(fixed(row[key], "one sequence") for key in COLUMNS)]
        )
    write_text(out / "grid.csv", to_csv(rows))
    probe_figure.draw_grid([(p.question, p.name, values(records[p.name])) for p in pairs()], out / "grid_figure")
