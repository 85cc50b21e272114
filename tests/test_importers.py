"""Imported logs: what a framework logs arrives, what it lacks is None, and the statistics work on the result."""

import json
from pathlib import Path

import pytest

from jetrl_bench import importers, study
from jetrl_bench.record import Mismatch, StepRow

LOGS = Path(__file__).parent / "data" / "logs"
CASES = [
    ("verl", "verl.log", [1, 2, 3]),
    ("prime-rl", "prime-rl", [0, 1]),
    ("nemo-rl", "nemo_rl.json", [1, 2]),
    ("nemo-rl", "nemo_rl_console.log", [1, 2]),
    ("trl", "trl_trainer_state.json", [10, 20]),
    ("trl", "trl_console.log", [1, 2]),
]


@pytest.mark.parametrize(("framework", "name", "steps"), CASES)
def test_steps_and_rewards_arrive(framework, name, steps, tmp_path):
    importers.import_log(framework, LOGS / name, tmp_path)
    manifest, rows = importers.read_import(tmp_path)
    assert [row.rollout_step for row in rows] == steps
    first, second = {"nemo-rl": (0.0742, 0.0859)}.get(framework, (0.25, 0.3125))
    assert (rows[0].reward, rows[1].reward) == (first, second)
    assert all(row.samples is None and row.clock is None for row in rows)
    assert {"samples", "clock", "kl_by_lag"} <= set(manifest.missing)


def test_rows_have_our_names_and_every_value_is_optional():
    assert set(importers.ImportedRow.model_fields) == set(StepRow.model_fields)
    assert set(importers.ImportedMismatch.model_fields) == set(Mismatch.model_fields)
    assert importers.ImportedRow(rollout_step=3).reward is None


def test_verl_definitions():
    rows = importers.convert("verl", importers.read_log("verl", LOGS / "verl.log"))
    assert rows[0].reward == 0.25  # the score, not critic/rewards/mean (0.24), which may hold a KL penalty
    assert (rows[0].mismatch.k1, rows[0].mismatch.k3) == (0.0011, 0.0009)
    assert rows[1].mismatch.k1 == -2.5e-05
    assert rows[0].mismatch.mean_abs is None
    assert (rows[0].response_tokens_max, rows[0].truncated) == (256, 0.0625)
    assert rows[2].grad_norm is None and rows[2].mismatch is None  # nan and absent stay None


def test_prime_rl_joins_orchestrator_and_trainer_by_step():
    rows = importers.convert("prime-rl", importers.read_log("prime-rl", LOGS / "prime-rl"))
    assert [(r.reward, r.loss, r.mismatch.k3) for r in rows] == [(0.25, -0.0021, 0.0007), (0.3125, 0.0004, 0.0008)]
    assert rows[0].response_tokens_mean is None  # its sequence length counts the prompt too
    assert rows[1].lag_max is None  # its off-policy level is the scheduler's, not the trained batch's


def test_nemo_rl_probability_error_is_no_metric_of_ours():
    rows = importers.convert("nemo-rl", importers.read_log("nemo-rl", LOGS / "nemo_rl.json"))
    assert rows[0].mismatch.model_dump(exclude_none=True) == {"k3": 0.0007}
    assert any("gen_kl_error" in words for words in importers.ASSUMED["nemo-rl"])


def test_trl_counts_optimizer_steps():
    rows = importers.convert("trl", importers.read_log("trl", LOGS / "trl_trainer_state.json"))
    assert [row.optimizer_steps for row in rows] == [10, 20]
    assert rows[0].mismatch.model_dump(exclude_none=True) == {"mean_abs": 0.0114}
    assert rows[0].reward_std_within is None and rows[0].trained_tokens is None
    console = importers.convert("trl", importers.read_log("trl", LOGS / "trl_console.log"))
    assert [row.optimizer_steps for row in console] == [None, None]


def test_trl_maxima_count_only_where_every_step_is_logged():
    sparse = importers.read_log("trl", LOGS / "trl_trainer_state.json")
    assert all(row.response_tokens_max is None for row in importers.convert("trl", sparse))
    dense = {step // 10: metrics | {"step": step // 10} for step, metrics in sparse.items()}
    rows = importers.convert("trl", dense)
    assert [row.response_tokens_max for row in rows] == [256, 250] and rows[0].mismatch.max_abs == 0.143


@pytest.mark.parametrize("framework", sorted(importers.MAPS))
def test_maps_name_fields_that_exist(framework):
    for ours in importers.MAPS[framework].values():
        model = importers.ImportedMismatch if ours.startswith("mismatch.") else importers.ImportedRow
        assert ours.removeprefix("mismatch.") in model.model_fields


@pytest.mark.parametrize("framework", sorted(importers.MAPS))
def test_a_log_without_steps_is_refused_in_one_line(framework, tmp_path):
    log = tmp_path / "empty.log"
    log.write_text("nothing to see\n")
    with pytest.raises(ValueError, match=f"empty.log: no training step of {framework} found; expected") as error:
        importers.read_log(framework, log)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="No such file"):
        importers.read_log(framework, tmp_path / "missing.log")


def test_an_altered_import_is_refused(tmp_path):
    importers.import_log("verl", LOGS / "verl.log", tmp_path)
    text = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(text.replace("0.25", "0.95"))
    with pytest.raises(ValueError, match="altered"):
        importers.read_import(tmp_path)


def test_importing_twice_gives_the_same_bytes(tmp_path):
    one = importers.import_log("trl", LOGS / "trl_console.log", tmp_path / "a", seed=3)
    two = importers.import_log("trl", LOGS / "trl_console.log", tmp_path / "b", seed=3)
    for name in ("train.jsonl", "import.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert json.loads((one / "import.json").read_text())["seed"] == 3


def test_a_study_reads_imports_beside_each_other(tmp_path):
    importers.import_log("verl", LOGS / "verl.log", tmp_path / "one", seed=0)
    importers.import_log("trl", LOGS / "trl_trainer_state.json", tmp_path / "two", seed=0)
    records = next(iter(study.load(tmp_path, None).experiments.values()))
    assert set(records.arms) == {"verl", "trl"}
    run = records.arms["verl"][0]
    assert run.column("reward").tolist() == [0.25, 0.3125, 0.375]
    assert run.column("mismatch", "k3") is None  # the third step has none
    assert run.accuracy("deployment") is None and run.outcome() is None
