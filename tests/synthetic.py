"""Synthetic records for the tests of tables, figures, claims and publishing: real shapes, invented numbers."""

import json
import math
import random
from pathlib import Path

import yaml

from jetrl_bench import config as configs
from jetrl_bench import record
from jetrl_bench.strict import merge, validate

CONFIG = {
    "seeds": [0, 1, 2],
    "train": {"group_size": 8, "samples_per_update": 16, "optimizer_steps": 80},
    "evaluate": {"problems": 40, "benchmarks": ["aime_2024", "math_500"]},
    "methods": {
        "bf16": {"kind": "bf16"},
        "fp8_rollout": {"kind": "fp8_rollout"},
        "jetrl": {"kind": "jetrl"},
        "jetrl_exact": {"kind": "jetrl_exact"},
        "fp8_rollout_e2m1": {"kind": "fp8_rollout", "flow": {"format": "e2m1"}},
        "fp8_rollout_tis_e2m1": {"kind": "fp8_rollout_tis", "flow": {"format": "e2m1"}},
        "jetrl_exact_e2m1": {"kind": "jetrl_exact", "flow": {"format": "e2m1"}},
        "conventional_g4": {"kind": "conventional", "sync": {"updates_per_rollout": 4}},
        "concurrent": {"kind": "concurrent"},
        "inflight_keep": {"kind": "pipelinerl"},
    },
    "experiments": {
        "precision": {
            "baseline": "bf16",
            "methods": [
                "bf16",
                "fp8_rollout",
                "jetrl",
                "jetrl_exact",
                "fp8_rollout_e2m1",
                "fp8_rollout_tis_e2m1",
                "jetrl_exact_e2m1",
            ],
        },
        "inflight": {"baseline": "conventional_g4", "methods": ["conventional_g4", "concurrent", "inflight_keep"]},
    },
    "select": ["precision", "inflight"],
}
NOISE = {"e4m3": 9e-4, "e2m1": 4e-2}


def write_study(root: Path, overrides: dict | None = None, source_hash: str = "feed" * 3) -> Path:
    """Records of every selected run under ROOT/runs, ROOT/config.json, ROOT/scripted; returns ROOT."""
    root = Path(root)
    data = merge(CONFIG, overrides or {})
    suite = validate(configs.Config, data, "synthetic")
    record.write_json(root / "config.json", suite.model_dump(mode="json"))
    for (method, seed, digest), settings in suite.runs().items():
        write_run(root / "runs" / method / f"seed{seed}-{digest}", method, settings, suite, source_hash)
    for name, status in (("gold", "correct"), ("empty", "no_answer")):
        for task, count in (("aime_2024", 30), ("math_500", 50)):
            rows = [_sample(task, f"{i:03d}", status, "bf16") for i in range(count)]
            record.write_rows(root / "scripted" / name / f"{task}.jsonl", rows)
    return root


def write_run(folder: Path, method: str, settings, suite, source_hash: str) -> None:
    rng = random.Random(f"{method}{settings.seed}")
    rows = step_rows(settings, rng)
    count, digest = record.write_rows(folder / "train.jsonl", rows)
    record.write_rows(folder / "timing.jsonl", timing_rows(rows, rng))
    accuracy = {"final": rows[-1].reward, "base": 0.36}
    held_out, chance = [], random.Random(settings.seed)
    for checkpoint in ("base", "final"):
        for i in range(suite.evaluate.problems):
            draw = chance.random()
            status = "correct" if draw < accuracy[checkpoint] else "wrong"
            held_out.append(_sample(settings.task.name, f"{i:04d}", status, "deployment", checkpoint))
            if settings.method.flow.rollout == "fp8":
                held_out.append(_sample(settings.task.name, f"{i:04d}", status, "bf16", checkpoint))
    record.write_rows(folder / "eval" / f"{settings.task.name}.jsonl", held_out)
    aime = [_sample("aime_2024", f"{i:02d}", "truncated" if i % 2 else "no_answer", "deployment") for i in range(30)]
    record.write_rows(folder / "eval" / "aime_2024.jsonl", aime)
    record.write_text(folder / "eval" / "math_500.absent", "no data folder and no network\n")
    manifest = record.Manifest(
        method=method,
        seed=settings.seed,
        digest=settings.digest(),
        settings=settings.model_dump(mode="json"),
        outcome="finished",
        train_rows=count,
        train_sha256=digest,
        base={"digest": settings.base_digest(), "pass_at_1": 0.36},
        description={"rollout": settings.method.flow.rollout},
        environment={"torch": "2.13.0", "threads": "1"},
        source={"git_sha": "0123456789abcdef", "dirty": False, "hash": source_hash},
    )
    record.write_json(folder / "manifest.json", manifest)


def step_rows(settings, rng: random.Random) -> list[record.StepRow]:
    flow, sync, train = settings.method.flow, settings.method.sync, settings.train
    updates = 1 if sync.schedule != "barrier" else sync.updates_per_rollout
    batch = updates * train.samples_per_update
    steps = train.optimizer_steps // updates
    bare = flow.rollout != flow.train
    noise = NOISE.get(flow.format, 1e-3) if bare else (4e-4 if flow.train_kernels == "other" else 0.0)
    lagging = sync.schedule != "barrier"
    collapses = bare and flow.format == "e2m1" and settings.method.loss.correction == "none"
    unit = {"barrier": 100.0 * updates / math.sqrt(updates), "concurrent": 45.0, "inflight": 38.0}[sync.schedule]
    rows, level = [], 0.36 + 0.02 * settings.seed
    for n in range(steps):
        done = n / max(1, steps - 1)
        level = 0.36 + 0.02 * settings.seed + 0.42 * (1 - math.exp(-3 * done))
        if collapses and done > 0.25:
            level = 0.1
        k3 = noise * (1 + 0.3 * rng.random())
        rows.append(
            record.StepRow(
                rollout_step=n,
                optimizer_steps=(n + 1) * updates,
                samples=(n + 1) * batch,
                reward=round(min(1.0, max(0.0, level + rng.gauss(0, 0.03))), 6),
                reward_std_within=0.3,
                groups_without_signal=0.1,
                entropy=0.2 * math.exp(-done),
                response_tokens_mean=61.0,
                response_tokens_max=61,
                truncated=0.0,
                generated_tokens=(n + 1) * batch * 61,
                trained_tokens=(n + 1) * batch * 61,
                filtered_tokens=0,
                dropped_tokens=0,
                in_flight_tokens=0,
                loss=0.01,
                grad_norm=0.3 + (300.0 if collapses and n == steps // 2 else 0.0),
                clip_fraction=0.01,
                mismatch=record.Mismatch(
                    mean_abs=math.sqrt(k3), p99_abs=4 * math.sqrt(k3), max_abs=200 * k3, kl=k3, k1=k3, k3=k3,
                    outside=k3 / 2, nonzero=float(k3 > 0),
                ),
                proximal_contains_lag=lagging,
                ess_token_proximal=1 - 2 * k3,
                ess_sequence_proximal=1 / (1 + 50 * k3),
                ess_token_current=0.99,
                ess_sequence_current=0.95,
                ess_token_clamped=0.99,
                ess_sequence_clamped=0.97,
                kl_sequence=61 * k3,
                lag_mean=1.0 if lagging else (updates - 1) / 2,
                lag_p95=2.0 if lagging else updates - 1.0,
                lag_max=3 if lagging else updates - 1,
                lag_first_half=1.6 if sync.schedule == "inflight" else 1.0,
                lag_second_half=0.4 if sync.schedule == "inflight" else 1.0,
                kl_by_lag={str(lag): 1e-4 * (lag + 1) for lag in range(4 if lagging else updates)},
                versions_per_sequence=2.1 if sync.schedule == "inflight" else 1.0,
                clock=unit * (n + 1) * (1 + 0.01 * settings.seed),
                clock_generate=0.7 * unit * (n + 1),
                clock_train=0.3 * unit * (n + 1),
                clock_transfer=0.5 * (n + 1),
                clock_stall=0.0,
            )
        )  # fmt: skip
    return rows


def timing_rows(rows: list[record.StepRow], rng: random.Random) -> list[record.TimingRow]:
    out = []
    for row in rows:
        scale = 1.0 + (4.0 if row.rollout_step == 0 else 0.0)
        seconds = {"rollout_cpu_s": 0.1, "logprob_cpu_s": 0.02, "train_cpu_s": 0.12, "sync_cpu_s": 0.01}
        seconds = {name: value * scale * (1 + 0.02 * rng.random()) for name, value in seconds.items()}
        out.append(
            record.TimingRow(
                rollout_step=row.rollout_step,
                attempt=0,
                wall_s=2 * sum(seconds.values()),
                cpu_s=sum(seconds.values()),
                rollout_tokens=3904,
                train_tokens=3904,
                max_rss_mib=500.0,
                **seconds,
            )
        )
    return out


def _sample(task, problem, status, flow, checkpoint="final", sample=0) -> record.SampleRow:
    return record.SampleRow(
        task=task,
        problem=problem,
        sample=sample,
        status=status,
        tokens=61,
        finish_reason="length" if status == "truncated" else "stop",
        flow=flow,
        checkpoint=checkpoint,
    )


if __name__ == "__main__":
    import sys

    root = write_study(Path(sys.argv[1]), yaml.safe_load(sys.argv[2]) if len(sys.argv) > 2 else None)
    print(json.dumps(str(root)))
