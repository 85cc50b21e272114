"""Figures: deterministic bytes, data beside every picture, and the numbers that are drawn."""

import csv

import numpy as np
import pytest
from synthetic import write_study

from jetrl_bench import figures, importers, study


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def _rows(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# Source: ")
    return list(csv.DictReader(lines[1:]))


def test_bytes_are_equal_and_hold_no_time(root, tmp_path):
    loaded = study.load(root / "runs", root / "config.json")
    for out in ("a", "b"):
        for name in ("dose", "lag"):
            figures.render(name, loaded, tmp_path / out)
    for name in ("dose", "lag"):
        for kind in ("pdf", "svg", "png", "csv"):
            one = (tmp_path / "a" / f"{name}.{kind}").read_bytes()
            assert one == (tmp_path / "b" / f"{name}.{kind}").read_bytes()
            assert b"CreationDate" not in one and b"dc:date" not in one and b"tIME" not in one


def test_reward_data_are_the_smoothed_rewards_of_the_records(root, tmp_path):
    loaded = study.load(root / "runs", root / "config.json")
    figures.render("reward", loaded, tmp_path)
    rows = [r for r in _rows(tmp_path / "reward.csv") if (r["panel"], r["arm"]) == ("precision/samples", "bf16")]
    run = next(r for r in loaded.experiments["precision"].arms["bf16"] if r.seed == 1)
    drawn = {float(r["x"]): float(r["y"]) for r in rows if r["seed"] == "1"}
    rewards, samples = run.column("reward"), run.column("samples")
    assert len(drawn) == len(rewards)
    for n, x in enumerate(samples):
        assert drawn[x] == pytest.approx(np.mean(rewards[max(0, n - 4) : n + 1]), abs=1e-8)


def test_dose_puts_unified_runs_at_zero_and_at_their_formats_dose(root, tmp_path):
    loaded = study.load(root / "runs", root / "config.json")
    figures.render("dose", loaded, tmp_path)
    rows = _rows(tmp_path / "dose.csv")
    own = {(r["arm"], r["seed"]): float(r["x"]) for r in rows if r["panel"] == "own"}
    dose = {(r["arm"], r["seed"]): float(r["x"]) for r in rows if r["panel"] == "dose"}
    for seed in "012":
        assert own["jetrl_exact_e2m1", seed] == 0 and own["fp8_rollout_e2m1", seed] > 0.03
        assert dose["jetrl_exact_e2m1", seed] == dose["fp8_rollout_e2m1", seed] == own["fp8_rollout_e2m1", seed]
        assert dose["jetrl_exact", seed] == own["fp8_rollout", seed] < 0.01
    assert not any(arm in ("inflight_keep", "conventional_g4") for arm, _ in own)


def test_exact_arms_are_named_not_drawn_on_a_log_axis(root):
    loaded = study.load(root / "runs", root / "config.json")
    built = figures.mismatch(loaded)
    words = " ".join(text.get_text() for ax in built.figure.axes for text in ax.texts)
    assert "exactly 0: bf16, jetrl_exact, jetrl_exact_e2m1" in words
    drawn = {line.get_label() for line in built.figure.axes[0].lines}
    assert "fp8_rollout" in drawn and "jetrl_exact" not in drawn


def test_one_seed_draws_no_band(tmp_path):
    write_study(tmp_path, {"seeds": [0]})
    built = figures.reward(study.load(tmp_path / "runs", tmp_path / "config.json"))
    assert not any(ax.collections for ax in built.figure.axes)


def test_two_seeds_do_not_blow_up_the_axis(tmp_path):
    write_study(tmp_path, {"seeds": [0, 1]})
    built = figures.reward(study.load(tmp_path / "runs", tmp_path / "config.json"))
    assert all(0 <= ax.get_ylim()[0] and ax.get_ylim()[1] < 1.1 for ax in built.figure.axes)


def test_band_is_the_range_of_few_seeds_and_the_interval_of_many():
    import matplotlib.pyplot as plt

    x = np.arange(4.0)
    for count in (3, 8):
        ys = np.linspace(0.2, 0.8, count)
        figure, ax = plt.subplots()
        figures.band(ax, [(x, np.full(4, y)) for y in ys], "k", "-", "arm")
        heights = ax.collections[0].get_paths()[0].vertices[:, 1]
        half = 0.3 if count == 3 else 2.364624 * ys.std(ddof=1) / np.sqrt(8)
        assert (heights.min(), heights.max()) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
        plt.close(figure)


def test_imported_logs_can_be_drawn(tmp_path):
    from test_importers import LOGS

    importers.import_log("verl", LOGS / "verl.log", tmp_path / "runs" / "verl")
    loaded = study.load(tmp_path / "runs", None)
    for name in figures.BUILDERS:
        figures.render(name, loaded, tmp_path / "out")
    assert any(row["arm"] == "verl" for row in _rows(tmp_path / "out" / "reward.csv"))


def test_palette_is_colour_blind_safe_and_distinct():
    looks = figures.colours([f"arm{i}" for i in range(16)])
    assert len(set(map(str, looks.values()))) == 16


def test_unknown_figure_names_the_nearest(root, tmp_path):
    import argparse

    parser = argparse.ArgumentParser()
    figures.add_arguments(parser)
    args = parser.parse_args(["rewrad", "--runs", str(root / "runs"), "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="did you mean 'reward'"):
        figures.run(args)
