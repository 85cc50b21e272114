"""config/smollm2.yaml from a pretrained checkpoint to scored rows, on a tiny random model with its own tokenizer."""

import json
from pathlib import Path

import pytest
from test_lm_eval import tiny_tokenizer

from jetrl_bench import base, loop, record, study, tasks
from jetrl_bench.checkpoint import save_hf
from jetrl_bench.config import EvaluateConfig, ModelConfig, RunSettings, load
from jetrl_bench.evaluate import Evaluated, Evaluator, evaluate
from jetrl_bench.model import init_model
from jetrl_bench.strict import merge

CONFIG = Path(__file__).parent.parent / "config"
SHAPE = ModelConfig(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, max_position=512
)


def settings() -> dict[str, RunSettings]:
    return {
        method: run for (method, _, _), run in load([CONFIG / "config.yaml", CONFIG / "smollm2.yaml"]).runs().items()
    }


def test_it_is_the_protocol_that_was_written_down():
    config = load([CONFIG / "config.yaml", CONFIG / "smollm2.yaml"])
    runs = settings()
    assert list(runs) == ["bf16", "fp8_rollout", "jetrl"] and config.num_bases == 1
    for run in runs.values():
        groups, rest = divmod(run.train.samples_per_update, run.train.group_size)
        assert (groups, rest, run.train.group_size) == (16, 0, 8)
        assert (run.train.optimizer_steps, run.train.max_tokens) == (20, 8)
        assert run.method.sync.updates_per_rollout == 1
    shown = {name: config.evaluate.limit_of(name) for name in config.evaluate.benchmarks}
    assert shown == {"gsm8k": 200, "math_500": None, "aime_2024": None}
    assert (config.evaluate.max_tokens, config.evaluate.samples, config.evaluate.temperature) == (256, 1, 0.0)


def test_a_limit_is_one_number_or_one_for_each_benchmark():
    assert EvaluateConfig(limit=8).limit_of("gsm8k") == EvaluateConfig(limit={"gsm8k": 8}).limit_of("gsm8k") == 8
    assert EvaluateConfig(limit={"gsm8k": 8}).limit_of("math_500") is None
    for bad in ({"gsm8k": 0}, {"gsm": 8}, 0):
        with pytest.raises(ValueError, match="limit"):
            EvaluateConfig(limit=bad)


def test_the_prompt_is_four_shots_and_the_last_number_of_the_line_counts():
    task = tasks.make_task(settings()["bf16"].task)
    problem = tasks.Problem(0, "x", (58, "-", 21), 37)
    shots = [
        "3 + 4?\nAnswer: 7",
        "6 * 7?\nAnswer: 42",
        "58 - 21?\nAnswer: 37",
        "9 + 5?\nAnswer: 14",
        "58 - 21?\nAnswer:",
    ]
    assert tasks.decode(task.prompt(problem)) == "\n\n".join(f"Question: What is {shot}" for shot in shots)
    for reply, number in (
        (" 37\n", 37),
        (" 58 - 21 = 37\n", 37),
        ("\n 3, no: -7", -7),
        (" 37\nQuestion: 9", 37),
        (" ?", None),
    ):
        assert task.extract(tasks.encode(reply)) == number, reply


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    tokenizer = tiny_tokenizer()
    save_hf(init_model(SHAPE, len(tokenizer), 0), SHAPE, folder, eos_token_id=1)
    tokenizer.save_pretrained(folder)
    return folder


def tiny(pretrained: Path, method: str) -> RunSettings:
    changes = {
        "model": SHAPE.model_dump(),
        "base": {"checkpoint": str(pretrained)},
        "train": {"group_size": 2, "samples_per_update": 4, "optimizer_steps": 2, "micro_batch_sequences": 2},
    }
    return RunSettings.model_validate(merge(settings()[method].model_dump(mode="json"), changes))


@pytest.mark.parametrize("method", ["bf16", "fp8_rollout", "jetrl"])
def test_from_a_checkpoint_to_rows_with_a_step_0_row(pretrained, tmp_path, method, monkeypatch):
    parity = lambda task, problem, completion: tasks.Verdict("correct", float(sum(completion.token_ids) % 2))  # noqa: E731
    monkeypatch.setattr(tasks.ArithmeticTask, "verify", parity)  # random weights never hit a number
    run = tiny(pretrained, method)
    facts = base.warm_up(run, tmp_path / "bases" / run.base_digest())
    assert facts["updates"] == 0 and base.read_base(tmp_path / "bases" / run.base_digest(), run) == facts
    written = []
    for name in ("one", "two"):
        loop.train(
            run, method=method, base=tmp_path / "bases" / run.base_digest(), out=tmp_path / name, state=tmp_path / "s"
        )
        manifest = record.read_run(tmp_path / name).manifest
        assert manifest.base["sha256"] == facts["sha256"] and manifest.data["task"] == "arithmetic-1"
        written.append(
            [(tmp_path / name / part).read_bytes() for part in ("train.jsonl", "checkpoint/model.safetensors")]
        )
    assert written[0] == written[1], "same seed, same bytes"
    assert written[0][1] != (pretrained / "model.safetensors").read_bytes()

    (tmp_path / "data").mkdir()
    evaluator = Evaluator(EvaluateConfig(benchmarks=[], temperature=0), tmp_path / "data", tmp_path / "cache")
    evaluated = Evaluated(tmp_path / "one", run, tmp_path / "bases" / run.base_digest(), problems=8)
    rows = evaluate(evaluated, evaluator)["arithmetic"]
    flows = {"bf16": ["deployment"], "fp8_rollout": ["deployment", "training"], "jetrl": ["deployment", "bf16"]}[method]
    assert {(row.flow, row.checkpoint) for row in rows} == {(f, c) for f in flows for c in ("base", "final")}
    assert len(rows) == 8 * 2 * len(flows) and all(row.tokens <= 8 for row in rows)


def test_another_model_than_the_checkpoints_is_refused(pretrained, tmp_path):
    run = tiny(pretrained, "bf16")
    other = run.model_copy(update={"model": SHAPE.model_copy(update={"num_layers": 2})})
    with pytest.raises(ValueError, match="config.json is not the model of the settings"):
        base.warm_up(other, tmp_path / "base")
    assert not (tmp_path / "base").exists() and json.loads((pretrained / "config.json").read_text())


def test_the_published_records_are_complete_and_of_the_protocol():
    folder = CONFIG.parent / "results" / "reference" / "smollm2"
    published = study.load(folder / "runs", folder / "config.json")
    records = published.experiments["smollm2"]
    assert {arm: [run.seed for run in runs] for arm, runs in records.arms.items()} == dict.fromkeys(settings(), [0])
    for run in published.runs:
        assert run.manifest.settings == settings()[run.method].model_dump(mode="json")
        assert run.manifest.source["dirty"] is False and run.steps[-1].samples == 2560
        for task, count in {"gsm8k": 200, "math_500": 500, "aime_2024": 30, "arithmetic": 256}.items():
            assert [run.scores(task, "deployment", at).shape for at in ("base", "final")] == [(count, 1)] * 2
    assert {step.mismatch.max_abs for step in records.arms["bf16"][0].steps} == {0.0}
