"""Claims: a strict schema, each verdict on records made for it, and formats that may not speak for another."""

import argparse
from pathlib import Path

import pytest
import yaml
from synthetic import write_study

from jetrl_bench import claims, config, study

FILE = Path(__file__).parent.parent / "config" / "claims.yaml"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    root = write_study(tmp_path_factory.mktemp("study"))
    return study.load(root / "runs", root / "config.json")


def _claim(test, experiment="precision", format="e2m1", horizon=1280, seeds=3):
    return claims.Claim(
        id="x",
        statement="s",
        published="p",
        experiment=experiment,
        format=format,
        horizon=horizon,
        seeds=seeds,
        test=test,
    )


def _verdict(loaded, test, **kwargs):
    return claims.decide(_claim(test, **kwargs), loaded).verdict


COLLAPSE = {"kind": "collapse", "arm": "fp8_rollout_e2m1", "control": "bf16"}


def test_the_shipped_claims_cover_what_was_promised():
    found = {claim.id: claim for claim in claims.read(FILE)}
    assert len(found) >= 10
    for name in (
        "unified_exact_is_zero",
        "bare_e2m1_collapses",
        "tis_prevents_e2m1_collapse",
        "tis_does_not_restore_quality",
        "bare_e4m3_harmless_at_61_tokens",
        "inflight_faster_than_g4",
        "inflight_learns_as_well_as_g8",
        "stale_cache_near_harmless",
    ):
        assert name in found


def test_the_shipped_claims_name_arms_and_horizons_of_the_shipped_config():
    default = config.load([FILE.parent / "config.yaml"])
    pretrained = config.load([FILE.parent / "config.yaml", FILE.parent / "smollm2.yaml"])
    for claim in claims.read(FILE):
        if claim.test.kind == "untestable":
            continue
        suite = pretrained if claim.experiment == "smollm2" else default
        runs = dict(suite.experiment_runs(claim.experiment))
        for arm in {claim.test.arm, getattr(claim.test, "control", claim.test.arm)}:
            assert arm in runs, (claim.id, arm)
            settings = runs[arm]
            assert settings.train.optimizer_steps * settings.train.samples_per_update == claim.horizon, claim.id
            quantised = "fp8" in (settings.method.flow.rollout, settings.method.flow.train)
            assert claim.format is None or not quantised or settings.method.flow.format == claim.format, claim.id


def test_zero(loaded):
    assert (
        _verdict(loaded, {"kind": "zero", "arm": "jetrl_exact", "metric": "max_abs"}, format="e4m3") == "analogue seen"
    )
    assert _verdict(loaded, {"kind": "zero", "arm": "jetrl", "metric": "max_abs"}, format="e4m3") == "not seen"


def test_collapse(loaded):
    assert _verdict(loaded, COLLAPSE) == "analogue seen"
    swapped = {"kind": "collapse", "arm": "jetrl_exact_e2m1", "control": "fp8_rollout_e2m1"}
    assert _verdict(loaded, swapped) == "not seen"


def test_one_collapse_of_three_is_not_separable(loaded, monkeypatch):
    outcomes = {"fp8_rollout_e2m1": iter(["collapse", "learned", "learned"]), "bf16": iter(["learned"] * 3)}
    monkeypatch.setattr(study.RunRecord, "outcome", lambda run: next(outcomes[run.method]))
    assert _verdict(loaded, COLLAPSE) == "not separable"


@pytest.mark.parametrize(
    ("differences", "kind", "verdict"),
    [
        ([0.30, 0.31, 0.29], "above", "analogue seen"),
        ([-0.30, -0.31, -0.29], "above", "not seen"),
        ([0.30, -0.31, 0.10], "above", "not separable"),
        ([0.010, 0.001, -0.005], "equal", "analogue seen"),
        ([0.30, 0.31, 0.29], "equal", "not seen"),
        ([0.04, 0.08, -0.05], "equal", "not separable"),
        ([0.30, 0.31, 0.29], "not_worse", "analogue seen"),
        ([-0.30, -0.31, -0.29], "not_worse", "not seen"),
        ([0.05, -0.15, 0.02], "not_worse", "not separable"),
    ],
)
def test_paired_verdicts(loaded, monkeypatch, differences, kind, verdict):
    values = {("jetrl_exact_e2m1", s): 0.5 + d for s, d in enumerate(differences)}
    monkeypatch.setattr(claims, "metric", lambda run, name: values.get((run.method, run.seed), 0.5))
    test = {"kind": kind, "arm": "jetrl_exact_e2m1", "control": "fp8_rollout_tis_e2m1", "metric": "final_reward"}
    if kind != "above":
        test["margin"] = 0.05
    assert _verdict(loaded, test) == verdict


def test_ratio_below(loaded):
    test = {
        "kind": "ratio_below",
        "arm": "inflight_keep",
        "control": "conventional_g4",
        "metric": "clock",
        "bound": 1.0,
    }
    assert _verdict(loaded, test, experiment="inflight", format=None) == "analogue seen"
    test |= {"arm": "conventional_g4", "control": "inflight_keep"}
    assert _verdict(loaded, test, experiment="inflight", format=None) == "not seen"


def test_only_its_own_format_may_speak(loaded):
    decision = claims.decide(_claim(COLLAPSE, format="e4m3"), loaded)
    assert decision.verdict == "untestable here"
    assert "runs in e2m1, the claim is about e4m3" in decision.evidence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seeds": 5}, "3 of 5 seeds of fp8_rollout_e2m1"),
        ({"horizon": 4480}, "trained on 1280 samples, the claim says 4480"),
        ({"experiment": "dose"}, "experiment dose was not run"),
    ],
)
def test_too_little_evidence_is_untestable(loaded, change, words):
    decision = claims.decide(_claim(COLLAPSE, **change), loaded)
    assert decision.verdict == "untestable here" and words in decision.evidence


def test_a_run_without_the_metric_is_not_left_out(loaded, monkeypatch):
    monkeypatch.setattr(claims, "metric", lambda run, name: None if run.seed == 0 else 0.5)
    test = {"kind": "above", "arm": "jetrl_exact_e2m1", "control": "bf16", "metric": "heldout_bf16"}
    decision = claims.decide(_claim(test), loaded)
    assert decision.verdict == "untestable here" and "not left out" in decision.evidence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"statment": "x"}, "claim x: statment: Extra inputs"),
        ({"test": {"kind": "proves"}}, "claim x: test: .*proves"),
        ({"seeds": 1}, "claim x: seeds"),
        ({"test": {"kind": "equal", "arm": "a", "control": "b", "metric": "k3", "margin": 0}}, "margin"),
        ({"format": "fp8"}, "claim x: format"),
    ],
)
def test_bad_claims_are_refused_by_name(tmp_path, change, words):
    good = _claim(COLLAPSE).model_dump(mode="json")
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([good | change]))
    with pytest.raises(ValueError, match=words):
        claims.read(path)
    path.write_text(yaml.safe_dump([good, good]))
    with pytest.raises(ValueError, match="claim x stands twice"):
        claims.read(path)


def test_one_seed_is_enough_for_an_exact_zero_only():
    assert _claim({"kind": "zero", "arm": "bf16", "metric": "max_abs"}, seeds=1).seeds == 1
    with pytest.raises(ValueError, match="1 seed has no interval"):
        _claim({"kind": "ratio_below", "arm": "a", "control": "b", "metric": "k3", "bound": 1.0}, seeds=1)


def test_a_table_shows_the_claims_about_what_was_selected(loaded):
    every = claims.read(FILE)
    shown = claims.concerning(every, loaded)
    assert {claim.experiment for claim in shown} == {"precision", "inflight"} < {claim.experiment for claim in every}
    alone = [claim for claim in every if claim.experiment == "smollm2"]
    assert claims.concerning(alone, loaded) == alone, "where none is about them, all are shown as not run"


def test_the_verb_writes_a_table(tmp_path):
    root = write_study(tmp_path, {"seeds": [0]})
    parser = argparse.ArgumentParser()
    claims.add_arguments(parser)
    options = ["--runs", str(root / "runs"), "--config", str(root / "config.json"), "--claims", str(FILE)]
    assert claims.run(parser.parse_args([*options, "--out", str(tmp_path / "t")])) == 0
    text = (tmp_path / "t" / "claims.md").read_text()
    concerned = [claim for claim in claims.read(FILE) if claim.experiment in ("precision", "inflight")]
    assert "1 of 3 seeds of jetrl_exact" in text and text.count("| untestable here |") == len(concerned)
