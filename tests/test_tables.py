"""Tables against numbers computed here from the records' own rows."""

import csv
import io
import json
import re

import numpy as np
import pytest
from scipy import stats as sp
from synthetic import write_study

from jetrl_bench import importers, render, stats, study, tables, tables_benchmarks
from jetrl_bench.quantities import time_to_target
from jetrl_bench.record import SampleRow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def loaded(root):
    return study.load(root / "runs", root / "config.json")


def _row(table, experiment, method):
    found = [row for row in table.rows if row[:2] == [experiment, method]]
    assert len(found) == 1
    return dict(zip(table.columns, found[0]))


def _reference_accuracy(root, method, flow, checkpoint):
    values = []
    for folder in sorted((root / "runs" / method).iterdir()):
        rows = [json.loads(line) for line in (folder / "eval" / "chain.jsonl").read_text().splitlines()]
        rows = [r for r in rows if (r["flow"], r["checkpoint"]) == (flow, checkpoint)]
        values.append(sum(r["status"] == "correct" for r in rows) / len(rows))
    return values


def test_accuracy_is_the_mean_with_its_t_interval(root, loaded):
    row = _row(tables.accuracy(loaded), "precision", "fp8_rollout_e2m1")
    values = _reference_accuracy(root, "fp8_rollout_e2m1", "deployment", "final")
    low, high = sp.t.interval(0.95, 2, np.mean(values), sp.sem(values))
    assert row["deployment"][:4] == (pytest.approx(np.mean(values)), pytest.approx(low), pytest.approx(high), 3)
    base = _reference_accuracy(root, "bf16", "deployment", "final")
    assert row["deployment - baseline"].estimate == pytest.approx(np.mean(values) - np.mean(base))
    assert row["verdict"] == "worse"


def test_step_0_stands_in_a_row_of_its_own_and_is_equal_for_equal_weights(loaded):
    table = tables.accuracy(loaded)
    start = _row(table, "precision", "warm-up (step 0)")
    assert start["bf16"].estimate == _row(table, "precision", "jetrl_exact")["step 0, deployment"].estimate
    assert not any("WARNING" in note for note in table.notes)


def test_unequal_step_0_scores_are_shouted(tmp_path):
    root = write_study(tmp_path, {"seeds": [0]})
    path = next((root / "runs" / "jetrl").glob("*/eval/chain.jsonl"))
    text = path.read_text().replace('"flow":"bf16","problem":"0000"', '"flow":"bf16","problem":"0000"')
    lines = [json.loads(line) for line in text.splitlines()]
    for row in lines:
        if row["checkpoint"] == "base" and row["problem"] == "0000":
            row["status"] = "wrong" if row["status"] == "correct" else "correct"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    table = tables.accuracy(study.load(root / "runs", root / "config.json"))
    assert any("WARNING: precision: arms of one seed differ at step 0" in note for note in table.notes)


def test_flows_that_coincide_are_found_once_evaluated(loaded):
    run = loaded.experiments["precision"].arms["bf16"][0]
    assert run.accuracy("deployment") == run.accuracy("training") == run.accuracy("bf16")
    settings = loaded.experiments["precision"].arms["fp8_rollout"][0].manifest.settings
    assert study.coinciding(settings, "training") == ["training", "bf16"]
    assert study.coinciding(settings, "deployment") == ["deployment"]


def test_unified_flows_coincide_and_mixed_rules_do_not():
    from jetrl_bench.config import FlowConfig

    def same(flow, name):
        return study.coinciding({"method": {"flow": FlowConfig(**flow).model_dump()}}, name)

    assert same({"rollout": "fp8", "train": "fp8", "train_kernels": "other"}, "training") == ["training", "deployment"]
    assert same({"rollout": "fp8", "train": "fp8", "train_rule": "te"}, "training") == ["training"]
    assert same({}, "bf16") == ["bf16", "deployment", "training"]
    assert study.coinciding({}, "training") == ["training"]


def test_mismatch_means_and_maximum(loaded):
    table = tables.mismatch(loaded)
    runs = loaded.experiments["precision"].arms["fp8_rollout"]
    row = _row(table, "precision", "fp8_rollout")
    means = [np.mean([step.mismatch.k3 for step in run.steps]) for run in runs]
    assert row["k3"].estimate == pytest.approx(np.mean(means))
    assert row["max |Δlogp|"] == max(step.mismatch.max_abs for run in runs for step in run.steps)
    exact = _row(table, "precision", "jetrl_exact")
    assert exact["max |Δlogp|"] == 0 and render.text(exact["k3"]) == "0 ± 0"
    assert _row(table, "inflight", "inflight_keep")["contains"] == "precision, lag"


def test_collapse_counts_and_rate(loaded):
    row = _row(tables.collapse(loaded), "precision", "fp8_rollout_e2m1")
    assert (row["learned"], row["collapsed"]) == (0, 3)
    assert row["collapse or NaN rate"].low == pytest.approx(0.025 ** (1 / 3))
    row = _row(tables.collapse(loaded), "precision", "bf16")
    assert (row["learned"], row["collapsed"]) == (3, 0)
    assert render.text(row["collapse or NaN rate"]) == "0 [0, 0.708]"
    short = _row(tables.collapse(loaded), "inflight", "conventional_g4")
    assert short["learned"] in (3, "too few steps")


def test_measured_seconds_leave_out_the_warm_up(root, loaded):
    row = _row(tables.speed_measured(loaded), "precision", "bf16")
    values = []
    for run in loaded.experiments["precision"].arms["bf16"]:
        values.append(np.mean([t.cpu_s for t in run.timing[1:]]))
    assert row["all s"].estimate == pytest.approx(np.mean(values)) and row["all s"].estimate < 0.3
    note = " ".join(tables.speed_measured(loaded).notes)
    assert "emulated FP8 is slower" in note and "slow-down" in note


def test_a_slow_down_is_printed_as_one(loaded):
    row = _row(tables.speed_measured(loaded), "inflight", "inflight_keep")
    assert row["s per sample / baseline"].estimate > 3


def test_modelled_ratio_is_paired_by_seed(loaded):
    row = _row(tables.inflight(loaded), "inflight", "inflight_keep")
    arms = loaded.experiments["inflight"].arms
    logs = [
        np.log(a.steps[-1].clock / b.steps[-1].clock) for a, b in zip(arms["inflight_keep"], arms["conventional_g4"])
    ]
    assert row["modelled units / baseline"].estimate == pytest.approx(np.exp(np.mean(logs)))


def test_time_to_target_by_brute_force(loaded):
    run = loaded.experiments["inflight"].arms["inflight_keep"][0]
    rewards = np.repeat([step.reward for step in run.steps], 16)  # one entry per sample
    clock = [step.clock for step in run.steps]
    expected = None
    for n in range(len(run.steps)):
        seen = rewards[: (n + 1) * 16]
        if len(seen) >= 256 and seen[-256:].mean() >= 0.7:
            expected = clock[n]
            break
    assert expected is not None and time_to_target(run) == expected
    assert time_to_target(run, target=1.1) is None


def test_a_run_that_ended_in_nan_is_counted_and_flatters_nobody(tmp_path):
    root = write_study(tmp_path, {"seeds": [0, 1], "select": ["inflight"]})
    path = next((root / "runs" / "inflight_keep").glob("seed1-*/manifest.json"))
    path.write_text(path.read_text().replace('"outcome": "finished"', '"outcome": "nan"'))
    loaded = study.load(root / "runs", root / "config.json")
    row = _row(tables.collapse(loaded), "inflight", "inflight_keep")
    assert (row["NaN"], row["final reward"]) == (1, None)
    row = _row(tables.inflight(loaded), "inflight", "inflight_keep")
    assert row["modelled units to finish"] is None and row["modelled units / baseline"] is None
    assert _row(tables.headline(loaded), "inflight", "inflight_keep")["collapsed"] == "1 of 2"


def test_tables_of_one_schedule_are_not_called_in_flight(loaded):
    assert {row[0] for row in tables.inflight(loaded).rows} == {"inflight"}


def test_plumbing_shows_scripted_models_and_reasons(root, loaded):
    table = tables.plumbing(loaded, root / "scripted")
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    assert rows["scripted: gold answers"]["AIME 2024 avg@1"] == 1.0
    assert rows["scripted: empty answers"]["MATH-500 avg@1"] == 0.0
    assert rows["bf16"]["MATH-500 avg@1"] == "not evaluated: no data folder and no network"
    assert rows["bf16"]["AIME 2024 truncated"].estimate == 0.5
    assert "checks the pipeline" in table.title


def test_paired_by_problem_against_brute_force(loaded):
    table = tables.BUILDERS["paired"](loaded)
    row = next(r for r in table.rows if r[1:3] == ["fp8_rollout_e2m1", "deployment"])
    row = dict(zip(table.columns, row))
    arms = loaded.experiments["precision"].arms
    only_ours = only_base = 0
    for ours, base in zip(arms["fp8_rollout_e2m1"], arms["bf16"]):
        solved = [
            {
                r.problem
                for r in run.samples
                if (r.task, r.flow, r.checkpoint, r.status) == ("chain", "deployment", "final", "correct")
            }
            for run in (ours, base)
        ]
        only_ours += len(solved[0] - solved[1])
        only_base += len(solved[1] - solved[0])
    assert (row["only this arm"], row["only the baseline"]) == (only_ours, only_base)
    assert row["difference, by problem"].estimate == pytest.approx((only_ours - only_base) / (3 * 40))
    assert row["difference, by seed"].estimate == pytest.approx(row["difference, by problem"].estimate)
    assert row["verdict"] == "worse" and row["McNemar p of each seed"].count(",") == 2


def test_benchmarks_of_a_pretrained_model_with_repeats(tmp_path):
    root = write_study(
        tmp_path,
        {
            "seeds": [0, 1],
            "select": ["inflight"],
            "base": {"checkpoint": "models/Tiny-135M"},
            "evaluate": {"samples": 2, "benchmarks": ["aime_2024"]},
        },
    )
    for path in (root / "runs").rglob("aime_2024.jsonl"):
        row = json.loads(path.read_text().splitlines()[0])
        rows = []
        for checkpoint, rights in (("base", 3), ("final", 9)):
            for i in range(30):
                for k in range(2):
                    status = "correct" if i < rights and k == 0 else "truncated"
                    rows.append(row | {"problem": f"{i:02d}", "sample": k, "status": status, "checkpoint": checkpoint})
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    loaded = study.load(root / "runs", root / "config.json")
    table = tables.BUILDERS["benchmarks"](loaded)
    row = dict(zip(table.columns, table.rows[0]))
    assert (row["k"], row["seeds"], row["benchmark"]) == (2, 2, "AIME 2024, 30 problems")
    assert row["avg@k, final"].estimate == pytest.approx(0.15) and row["avg@k, step 0"].estimate == pytest.approx(0.05)
    assert row["final - step 0"].estimate == pytest.approx(0.10) and row["final - step 0"].low > 0
    assert row["pass@(k x seeds)"] == pytest.approx(0.3)
    assert row["truncated"] == pytest.approx(0.85) and row["score on finished answers"] == 1.0
    first = next((root / "runs").rglob("aime_2024.jsonl"))
    first.write_text("".join(line + "\n" for line in first.read_text().splitlines() if '"sample": 1' not in line))
    with pytest.raises(ValueError, match="1 samples a problem, 2 asked"):
        tables.BUILDERS["benchmarks"](study.load(root / "runs", root / "config.json"))


def test_majority_votes_are_taken_within_a_run():
    def rows(*answers):
        return [
            SampleRow(
                task="aime_2024", problem="p", sample=i, status="correct" if right else "wrong", tokens=1,
                finish_reason="stop", flow="deployment", answer=answer,
            )
            for i, (answer, right) in enumerate(answers)
        ]  # fmt: skip

    right_spelled_twice = rows(("1/2", True), ("0.5", True), ("3", False))
    wrong_majority = rows(("3", False), ("3", False), ("1/2", True))
    tie_of_three = rows(("1/2", True), ("4", False), ("3", False))
    silent = rows((None, False), (None, False), ("1/2", True))
    vote = tables_benchmarks._majority
    assert vote([[right_spelled_twice, wrong_majority]]) == 0.5
    assert vote([[tie_of_three, silent]]) == pytest.approx((1 / 3 + 1) / 2)
    assert vote([[right_spelled_twice], [wrong_majority]]) == 0.5
    assert vote([[rows(("1/2", True))]]) is None


def test_toy_models_have_no_benchmark_table(loaded):
    assert tables.BUILDERS["benchmarks"](loaded).rows == []


def test_a_gold_model_below_one_stops_the_table(tmp_path):
    root = write_study(tmp_path, {"seeds": [0]})
    path = root / "scripted" / "gold" / "aime_2024.jsonl"
    path.write_text(path.read_text().replace('"correct"', '"wrong"', 1))
    with pytest.raises(ValueError, match="scripted model gold: aime_2024 scores"):
        tables.plumbing(study.load(root / "runs", root / "config.json"), root / "scripted")


def test_one_seed_has_no_interval_and_says_so(tmp_path):
    write_study(tmp_path, {"seeds": [0]})
    table = tables.accuracy(study.load(tmp_path / "runs", tmp_path / "config.json"))
    row = _row(table, "precision", "fp8_rollout_e2m1")
    assert (
        render.text(row["deployment"]).endswith("(n = 1)")
        and "no interval" in " ".join(table.glossary)
        and row["verdict"] == "not separable"
    )


def test_every_table_has_kind_glossary_command_and_commit(root, loaded):
    for name, build in tables.BUILDERS.items():
        table = build(loaded, root / "scripted") if name == "plumbing" else build(loaded)
        assert any(kind in table.kind for kind in render.KINDS)
        text = render.markdown(table)
        assert "Glossary: " in text and f"`python -m jetrl_bench table {name}`" in text and "0123456789ab" in text
        for row in table.rows:
            for cell in row:
                assert cell is None or isinstance(cell, (str, int, float, stats.Interval))


def test_mixed_sources_are_refused(tmp_path):
    root = write_study(tmp_path, {"seeds": [0]})
    path = next((root / "runs" / "jetrl").glob("*/manifest.json"))
    path.write_text(path.read_text().replace("feedfeedfeed", "beefbeefbeef"))
    with pytest.raises(ValueError, match="experiment precision mixes source hashes"):
        study.load(root / "runs", root / "config.json")


def test_a_missing_run_is_an_error_unless_partial(tmp_path):
    root = write_study(tmp_path, {"seeds": [0]})
    next((root / "runs" / "jetrl").glob("*/manifest.json")).unlink()
    with pytest.raises(ValueError, match="no record of experiment precision, method jetrl, seed 0"):
        study.load(root / "runs", root / "config.json")
    partial = study.load(root / "runs", root / "config.json", partial=True)
    assert "jetrl" not in partial.experiments["precision"].arms


def test_missing_samples_are_refused(tmp_path):
    root = write_study(tmp_path, {"seeds": [0], "select": ["inflight"]})
    path = next((root / "runs" / "concurrent").glob("*/eval/aime_2024.jsonl"))
    lines = path.read_text().splitlines()
    second = [line.replace('"sample":0', '"sample":1') for line in lines]
    path.write_text("\n".join(lines + second[:-1]) + "\n")
    run = study.load(root / "runs", root / "config.json").experiments["inflight"].arms["concurrent"][0]
    with pytest.raises(ValueError, match="1 samples, 2 asked"):
        run.scores("aime_2024", "deployment")
    path.write_text("\n".join(lines + lines[:1]) + "\n")
    run = study.load(root / "runs", root / "config.json").experiments["inflight"].arms["concurrent"][0]
    with pytest.raises(ValueError, match="stands twice"):
        run.scores("aime_2024", "deployment")


def test_imported_logs_fill_what_they_know(tmp_path):
    from test_importers import LOGS

    importers.import_log("verl", LOGS / "verl.log", tmp_path / "runs" / "a", seed=0)
    importers.import_log("prime-rl", LOGS / "prime-rl", tmp_path / "runs" / "b", seed=0)
    loaded = study.load(tmp_path / "runs", None)
    row = _row(tables.mismatch(loaded), "runs", "prime_rl")
    assert row["k3"].estimate == pytest.approx(0.00075) and row["mean |Δlogp|"] is None
    for name, build in tables.BUILDERS.items():
        assert "imported:" in render.markdown(build(loaded)), name


def test_without_a_config_different_settings_are_different_arms(tmp_path):
    write_study(tmp_path, {"seeds": [0, 1], "select": ["inflight"]})
    write_study(tmp_path, {"seeds": [0], "select": ["inflight"], "lr": 1e-4})
    arms = study.load(tmp_path / "runs", None).experiments["runs"].arms
    names = [name for name in arms if name.startswith("concurrent@")]
    assert sorted(len(arms[name]) for name in names) == [1, 2] and "concurrent" not in arms


def test_runs_of_unknown_seed_are_never_paired(tmp_path):
    from test_importers import LOGS

    importers.import_log("verl", LOGS / "verl.log", tmp_path / "runs" / "a")
    importers.import_log("trl", LOGS / "trl_console.log", tmp_path / "runs" / "b")
    records = study.load(tmp_path / "runs", None).experiments["runs"]
    assert records.paired("verl", "trl", lambda run: 1.0) == ([], [])


def test_csv_spreads_intervals(loaded):
    rows = list(csv.DictReader(io.StringIO(render.to_csv(tables.accuracy(loaded)))))
    row = next(r for r in rows if (r["experiment"], r["method"]) == ("precision", "bf16"))
    assert float(row["deployment_low"]) < float(row["deployment"]) < float(row["deployment_high"])
    assert row["deployment_n"] == "3" and row["deployment - baseline"] == ""


def test_latex_is_escaped_and_balanced(loaded):
    text = render.latex(tables.accuracy(loaded))
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0]
    assert r"fp8\_rollout\_e2m1" in body and not re.search(r"(?<!\\)[_%#]", body)
    assert text.count("{") == text.count("}")
    assert render.escape(r"50% of a_b & {x} ~ ^ \ $") == (
        r"50\% of a\_b \& \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} \$"
    )


def test_latex_is_plain_ascii(root, loaded):
    for name, build in tables.BUILDERS.items():
        table = build(loaded, root / "scripted") if name == "plumbing" else build(loaded)
        assert render.latex(table).isascii(), name


def test_a_column_never_mixes_kinds_of_numbers():
    with pytest.raises(AssertionError, match="mixes kinds"):
        render.Table("x", "x", "measured", ["measured and modelled s"], [], [], "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (0.7421, "0.742"), (1234.5, "1234"), (12.34, "12.3"), (4e-5, "4.00e-05"), (3, "3")],
)
def test_numbers(value, text):
    assert render.number(value) == text


def test_headline_replaces_the_text_between_markers(tmp_path, root):
    import argparse

    readme = tmp_path / "README.md"
    readme.write_text("# x\n<!-- headline:start -->\nstale\n<!-- headline:end -->\ntail\n")
    parser = argparse.ArgumentParser()
    tables.add_arguments(parser)
    options = ["--runs", str(root / "runs"), "--config", str(root / "config.json"), "--out", str(tmp_path / "t")]
    assert tables.run(parser.parse_args(["headline", *options, "--readme", str(readme)])) == 0
    text = readme.read_text()
    assert "stale" not in text and "| precision | bf16 |" in text and text.endswith("<!-- headline:end -->\ntail\n")
    readme.write_text("# no markers\n")
    with pytest.raises(ValueError, match="needs <!-- headline:start -->"):
        tables.run(parser.parse_args(["headline", *options, "--readme", str(readme)]))
    with pytest.raises(ValueError, match="did you mean 'collapse'"):
        tables.run(parser.parse_args(["colapse", *options]))
