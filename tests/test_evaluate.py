"""Evaluation: which flows are one, what decides a cached unit, how arms are paired, what is said when data lack."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_bench import evaluate as evaluation
from jetrl_bench import plan, record, study
from jetrl_bench.config import Config, EvaluateConfig, FlowConfig, RunSettings, load
from jetrl_bench.evaluate import Evaluator, Unit, distinct_flows, inference_flow

ROOT = Path(__file__).parent.parent
UNIFIED = FlowConfig(rollout="fp8", train="fp8")
BARE = FlowConfig(rollout="fp8", train="bf16", format="e2m1")


# Flows


@pytest.mark.parametrize(
    ("flow", "names"),
    [
        (FlowConfig(), ["deployment"]),
        (BARE, ["deployment", "training"]),
        (UNIFIED, ["deployment", "bf16"]),
        (FlowConfig(rollout="fp8", train="fp8", train_kernels="other"), ["deployment", "bf16"]),
        (FlowConfig(rollout="fp8", train="fp8", train_rule="other"), ["deployment", "training", "bf16"]),
        (FlowConfig(rollout="bf16", train="fp8"), ["deployment", "training"]),
        (FlowConfig(kv_cache="fp8"), ["deployment", "training"]),
        (FlowConfig(rollout="fp8", train="fp8", kv_cache="fp8"), ["deployment", "bf16"]),
    ],
)
def test_flows_that_coincide_are_evaluated_once(flow, names):
    assert list(distinct_flows(flow)) == names


def test_the_flows_are_what_they_say():
    deployed = inference_flow(BARE, "deployment")
    assert (deployed.rollout, deployed.format) == ("fp8", "e2m1")
    assert inference_flow(BARE, "training") == inference_flow(BARE, "bf16") == FlowConfig()
    assert inference_flow(UNIFIED, "bf16") == FlowConfig()
    assert inference_flow(FlowConfig(kv_cache="fp8", rollout="fp8"), "training").kv_cache == "bf16"
    assert inference_flow(FlowConfig(lm_head="fp32"), "bf16").lm_head == "fp32"


_flows = st.builds(
    FlowConfig,
    rollout=st.sampled_from(["bf16", "fp8"]),
    train=st.sampled_from(["bf16", "fp8"]),
    format=st.sampled_from(["e4m3", "e2m1"]),
    scale=st.sampled_from(["pow2", "fp32"]),
    kv_cache=st.sampled_from(["bf16", "fp8"]),
    rollout_rule=st.sampled_from(["default", "a"]),
    train_rule=st.sampled_from(["default", "a"]),
    train_kernels=st.sampled_from(["same", "other"]),
    grad_format=st.sampled_from(["e4m3", "e5m2"]),
)


@given(_flows)
def test_a_reader_finds_every_flow_that_was_not_written(flow):
    """study.py looks a flow up under the names that it says coincide: no name may stay without rows."""
    written = set(distinct_flows(flow))
    settings = {"method": {"flow": flow.model_dump(mode="json")}}
    for name in record.FLOWS:
        assert written & set(study.coinciding(settings, name)), (name, written)


@given(_flows, st.sampled_from(["e5m2", "bf16", "other"]))
def test_what_only_training_reads_changes_no_unit(flow, value):
    same = flow.model_copy(update={"grad_format": "e5m2", "train_kernels": "other", "wgrad_output": "bf16"})
    assert distinct_flows(same) == distinct_flows(flow)


# Units and their cache


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "aime_2024.json").write_text(
        json.dumps({"name": "aime_2024", "status": "absent", "reason": "no network"})
    )
    (folder / "math_500.json").write_text(json.dumps({"name": "math_500", "status": "present"}))
    (folder / "math_500.jsonl").write_text("{}\n")
    return folder


@pytest.fixture
def sampled(monkeypatch):
    """Stands in for the sampler: counts the units it is asked for."""
    asked = []

    def sample(unit, config, data):
        asked.append(unit)
        name = unit.task if isinstance(unit.task, str) else unit.task.name
        return [
            record.SampleRow(
                task=name,
                problem=f"p{n}",
                sample=0,
                status="correct",
                tokens=3,
                finish_reason="stop",
                flow="deployment",
            )
            for n in range(4)
        ]

    monkeypatch.setattr(evaluation, "sample_task", sample)
    monkeypatch.setattr(evaluation, "sample_benchmark", sample)
    return asked


def checkpoint(folder: Path, weights: str = "w") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(weights)
    (folder / "config.json").write_text("{}")
    return folder


def unit(folder: Path, **changes) -> Unit:
    values = {"weights": folder, "tokenizer": folder, "flow": FlowConfig(), "task": load_runs()[0].task, "seed": 0}
    return Unit(**{**values, "max_tokens": 64, "problems": 8, **changes})


def load_runs(method: str = "bf16") -> list[RunSettings]:
    config = load([ROOT / "config" / "config.yaml"])
    return [run for name, run in config.experiment_runs("precision") if name == method]


def test_a_unit_is_sampled_once_and_again_when_anything_that_decides_it_changes(tmp_path, data, sampled):
    one, two = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two", "other weights")
    same = checkpoint(tmp_path / "same")
    config = EvaluateConfig()

    def rows(settings=config, **changes):
        return Evaluator(settings, data, tmp_path / "cache").rows(unit(**{"folder": one, **changes}))

    first = rows()
    assert rows() == first
    assert rows(folder=same) == first
    assert len(sampled) == 1, "equal weights are one unit, wherever they stand"
    for count, change in enumerate(
        [
            {"folder": two},
            {"flow": inference_flow(BARE, "deployment")},
            {"seed": 1},
            {"max_tokens": 65},
            {"task": load_runs()[0].task.model_copy(update={"max_steps": 21})},
            {"task": "math_500"},
            {"problems": 7},
            {"settings": EvaluateConfig(temperature=0)},
            {"settings": EvaluateConfig(limit=3), "task": "math_500"},
            {"settings": EvaluateConfig(max_tokens=3), "task": "math_500"},
        ],
        start=2,
    ):
        rows(**change)
        assert len(sampled) == count, change
    (data / "math_500.jsonl").write_text('{"other": 1}\n')
    rows(task="math_500")
    assert len(sampled) == count + 1, "other data, other unit"


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """Two runs of one seed on one warm-up checkpoint, as the workflow lays them out."""
    paths = []
    for method in ("fp8_rollout_e2m1", "fp8_rollout_tis_e2m1"):
        settings = load_runs(method)[1]
        folder = tmp_path / "results" / "runs" / method / f"seed1-{settings.digest()}"
        checkpoint(folder / "checkpoint", method)
        checkpoint(tmp_path / "state" / "base" / settings.base_digest(), "base")
        (folder / "settings.json").write_text(record.dumps(settings))
        paths.append(folder / "settings.json")
    return paths


def arguments(tmp_path, data, runs, **changes):
    config = tmp_path / "evaluate.json"
    values = {"evaluate": EvaluateConfig().model_dump(mode="json"), "strict": False}
    config.write_text(json.dumps({**values, **changes}))
    return [
        *map(str, runs),
        *("--config", str(config), "--data", str(data)),
        *("--bases", str(tmp_path / "state" / "base"), "--cache", str(tmp_path / "cache")),
    ]


def test_rows_of_a_run(tmp_path, data, runs, sampled, capsys):
    from jetrl_bench.__main__ import main

    assert main(["evaluate", *arguments(tmp_path, data, runs)]) == 0
    folder = runs[0].parent / "eval"
    rows = record.read_rows(folder / "chain.jsonl", record.SampleRow)
    assert {(row.flow, row.checkpoint) for row in rows} == {
        ("deployment", "base"),
        ("deployment", "final"),
        ("training", "base"),
        ("training", "final"),
    }
    assert len(rows) == 16
    benchmark = record.read_rows(folder / "math_500.jsonl", record.SampleRow)
    assert {(row.flow, row.checkpoint) for row in benchmark} == {("deployment", "base"), ("deployment", "final")}
    assert (folder / "aime_2024.absent").read_text() == "no network\n"
    assert (folder / "aime_2024.jsonl").read_text() == ""
    # base: 2 flows and 1 benchmark, shared by the two methods; final: the same for each of them
    assert len(sampled) == 3 + 2 * 3
    assert {u.seed for u in sampled} == {1}, "arms of a seed are paired"
    assert {u.problems for u in sampled} == {2048}

    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["evaluate", *arguments(tmp_path, data, runs)]) == 0
    assert len(sampled) == 9, "a second run samples nothing"
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_is_evaluated_on_as_many_problems_as_its_experiment_says(tmp_path, data, runs, sampled):
    from jetrl_bench.__main__ import main

    few = {runs[0].parent.name.split("-")[1]: 512}
    assert main(["evaluate", *arguments(tmp_path, data, runs, problems=few)]) == 0
    counts = {(u.weights.parent.parent.name, u.problems) for u in sampled if u.weights.name == "checkpoint"}
    assert counts == {("fp8_rollout_e2m1", 512), ("fp8_rollout_tis_e2m1", 2048)}


def test_problems_of_the_default_experiments():
    config = load([ROOT / "config" / "config.yaml"])
    problems = json.loads(plan.evaluate_text(config))["problems"]
    digests = {name: {run.digest() for _, run in config.experiment_runs(name)} for name in config.selected()}
    assert set(problems) == digests["inflight"] - digests["precision"] and set(problems.values()) == {512}


def test_a_run_of_two_experiments_gets_the_larger_number():
    config = load([ROOT / "config" / "config.yaml"])
    few = {"methods": ["bf16"], "problems": 16}
    more = {"methods": ["bf16", "jetrl"], "problems": 32}
    values = config.model_dump(mode="json") | {"experiments": {"a": few, "b": more}, "select": ["a", "b"]}
    assert set(json.loads(plan.evaluate_text(Config(**values)))["problems"].values()) == {32}


def test_the_base_alone_fills_the_cache_and_writes_no_record(tmp_path, data, runs, sampled):
    from jetrl_bench.__main__ import main

    assert main(["evaluate", *arguments(tmp_path, data, runs), "--checkpoint", "base"]) == 0
    assert len(sampled) == 3
    assert not (runs[0].parent / "eval").exists()


def test_strict_refuses_absent_data(tmp_path, data, runs, sampled, capsys):
    from jetrl_bench.__main__ import main

    assert main(["evaluate", *arguments(tmp_path, data, runs, strict=True)]) == 2
    assert "aime_2024: no network; strict is true" in capsys.readouterr().err
    assert sampled == []


def test_data_supplied_later_replace_the_reason(tmp_path, data, runs, sampled):
    from jetrl_bench.__main__ import main

    assert main(["evaluate", *arguments(tmp_path, data, runs)]) == 0
    (data / "aime_2024.json").write_text(json.dumps({"name": "aime_2024", "status": "present"}))
    (data / "aime_2024.jsonl").write_text("{}\n")
    assert main(["evaluate", *arguments(tmp_path, data, runs)]) == 0
    folder = runs[0].parent / "eval"
    assert not (folder / "aime_2024.absent").exists()
    assert len(record.read_rows(folder / "aime_2024.jsonl", record.SampleRow)) == 8
    assert len(sampled) == 9 + 3


def test_a_missing_checkpoint_or_status_is_named(tmp_path, data, runs, sampled, capsys):
    from jetrl_bench.__main__ import main

    (runs[1].parent / "checkpoint" / "model.safetensors").unlink()
    assert main(["evaluate", *arguments(tmp_path, data, runs)]) == 2
    assert "checkpoint/model.safetensors: No such file" in capsys.readouterr().err
    (data / "math_500.json").unlink()
    assert main(["evaluate", *arguments(tmp_path, data, runs)]) == 2
    assert "math_500.json: No such file" in capsys.readouterr().err
