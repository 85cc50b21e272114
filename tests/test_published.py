"""The published numbers: strict file, true arithmetic, true flags; and comparison only between equal protocols."""

import argparse
import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from synthetic import write_study

from jetrl_bench import compare, config, published, render, stats
from jetrl_bench.strict import validate

FILE = Path(__file__).parent.parent / "results" / "published.yaml"


@pytest.fixture(scope="module")
def raw():
    return yaml.safe_load(FILE.read_text())


@pytest.fixture(scope="module")
def data(raw):
    loaded = validate(published.Published, raw, "published.yaml")
    assert published.audit(loaded) == []
    return loaded


def _cell(data, table, column, **fields):
    found = [
        e
        for e in published.entries(data)
        if e.table.id == table and e.fields[e.table.by] == column and all(e.fields[k] == v for k, v in fields.items())
    ]
    assert len(found) == 1, (table, column, fields, len(found))
    return found[0]


def test_every_number_has_source_location_and_how_it_is_known(data):
    entries = published.entries(data)
    assert len(entries) > 650
    for entry in entries:
        assert entry.source.ref and entry.table.where and entry.table.unit
        assert (entry.value is not None) + (entry.low is not None) + (entry.word is not None) == 1
    assert {e.table.known for e in entries} == {"seen", "second_hand", "read_off_plot"}


def test_spot_values(data):
    assert _cell(data, "jetrl_table2", "MATH-500", model="Qwen3-8B-Base", method="Jet-RL").value == 81.3
    assert _cell(data, "jetrl_table2", "GSM8K", model="Qwen2.5-7B", method="BF16-train-FP8-rollout").word
    assert _cell(data, "pipelinerl_table1", "AIME 2024", method="PipelineRL, B = 4096").value == 19.8
    orz = _cell(data, "pipelinerl_table1", "MATH-500", method="Open-Reasoner-Zero")
    assert (orz.value, orz.qualifier, orz.printed) == (82.0, "about", "~82.0")
    kl = _cell(data, "lumen_kl", "FP8 rollout only")
    assert (kl.low, kl.high) == (0.003, 0.004)
    assert _cell(data, "jetrl_headline", "end-to-end speed-up").table.known == "seen"


def test_row_means_are_right_but_for_the_two_flagged_rows(data):
    wrong = []
    for table in data.tables:
        if not table.id.startswith("jetrl_table"):
            continue
        for row in table.rows:
            values = dict(zip(table.columns, row.values))
            if isinstance(values["average"], float):
                mean = sum(values[name] for name in table.mean_of) / len(table.mean_of)
                if abs(mean - values["average"]) > 0.1:
                    wrong.append((table.id, row.model, row.method))
                    assert row.slip
    assert wrong == [("jetrl_table2", "Qwen3-8B-Base", "initial"), ("jetrl_table2", "Qwen3-8B-Base", "Jet-RL")]


def test_scores_of_one_pass_over_500_problems_are_multiples_of_a_fifth(data):
    assert published.reachable(84.6, 500, 1) and not published.reachable(3.3, 500, 1)
    assert (
        published.reachable(3.3, 30, 1) and not published.reachable(17.5, 30, 1) and published.reachable(17.5, 30, 16)
    )
    note = _cell(data, "jetrl_table2", "MATH-500", model="Llama3.1-8B", method="initial").note
    assert "cannot be one sample of each of 500 problems" in note


@given(st.integers(1, 60), st.integers(1, 8), st.data())
def test_reachable_is_true_of_every_real_score(problems, k, draw):
    correct = draw.draw(st.integers(0, problems * k))
    assert published.reachable(round(100 * correct / (problems * k), 1), problems, k)


def test_the_known_slips_are_flagged(data):
    slips = [row.slip for t in data.tables for row in t.rows if row.slip] + [c.slip for c in data.checks if c.slip]
    text = " ".join(slips)
    assert "interchanged" in text and "3.35" in text and "52.8" in text and len(slips) == 6


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["tables"][0].update(unti="percent"), "unknown key 'unti'"),
        (lambda d: d["tables"][0].update(source="jetlr"), "did you mean 'jetrl'"),
        (lambda d: _table(d, "jetrl_table2")["rows"][0]["values"].__setitem__(4, 9.5), "the mean is 8.45; flag it"),
        (lambda d: _table(d, "jetrl_table2")["rows"][8]["values"].__setitem__(4, 52.8), "its arithmetic is right"),
        (lambda d: _table(d, "jetrl_table2")["rows"][2].update(delta=-9.0), "delta is printed as -9.0"),
        (lambda d: _table(d, "torchtitan_8b")["rows"][0]["values"].__setitem__(1, 8600), "8532 does not stand in"),
        (lambda d: d["checks"][0].update(printed=1.29, tolerance=0.001), "ratio of 8532, 6667 is 1.28, printed 1.29"),
        (lambda d: _table(d, "pipelinerl_table1")["rows"][0]["values"].__setitem__(1, 3.27), "cannot be a mean"),
        (lambda d: _table(d, "race_ratio")["rows"][0]["values"].append(1.0), "3 values for 2 columns"),
        (lambda d: _table(d, "race_ratio")["rows"][0]["values"].__setitem__(0, "fast"), "'fast' is neither"),
        (lambda d: d["tables"].append(d["tables"][0]), "stands twice"),
        (lambda d: d["tables"][0].update(known="heard"), "known"),
    ],
)
def test_edits_that_break_the_file_are_refused(raw, edit, words):
    edited = copy.deepcopy(raw)
    edit(edited)
    with pytest.raises(ValueError, match=words):
        problems = published.audit(validate(published.Published, edited, "published.yaml"))
        if problems:
            raise ValueError("; ".join(problems))


def test_the_first_problem_stands_in_the_error(tmp_path):
    path = tmp_path / "published.yaml"
    table = {"id": "x", "source": "y", "where": "w", "known": "seen", "unit": "u", "by": "metric", "columns": ["a"]}
    path.write_text(yaml.safe_dump({"sources": {}, "tables": [table | {"rows": [{"values": [1, 2]}]}]}))
    with pytest.raises(ValueError, match=r"published.yaml: table x: source 'y' is unknown.*\(and 1 more\)"):
        published.load(path)


def _table(raw, name):
    return next(table for table in raw["tables"] if table["id"] == name)


def test_rows_not_seen_are_grey_in_all_three_files(data):
    table = published.table(data)
    for index, row in enumerate(table.rows):
        assert (index in table.grey) == (row[3] != "seen")
    assert render.latex(table).count(r"\textcolor{gray}") > 100
    assert "*second hand*" in render.markdown(table)


def _ours(**changes):
    protocol = {"k": 1, "temperature": 1.0, "max_tokens": 8192, "prompt": "p", "grader": "g"}
    base = {"model": "M", "method": "bf16", "data": "MATH-500", "training": "t", "protocol": protocol}
    return compare.Ours(**(base | {"score": stats.Interval(0.80, 0.78, 0.82, 3)} | changes))


def _entry(value, protocol=None, **fields):
    raw = {
        "id": "x",
        "source": "s",
        "where": "table 1",
        "known": "seen",
        "unit": "percent",
        "by": "data",
        "columns": ["MATH-500"],
        "rows": [{"values": [value], "model": "M", "condition": "t"} | fields],
        "protocol": {"k": 1, "temperature": 1.0, "max_tokens": 8192, "prompt": "p", "grader": "g"} | (protocol or {}),
    }
    source = {"title": "T", "ref": "r", "url": ""}
    return published.entries(published.Published.model_validate({"sources": {"s": source}, "tables": [raw]}))[0]


def test_inside_outside_not_comparable():
    assert compare.verdict(_ours(), _entry(81.0)) == ("inside the interval", None)
    assert compare.verdict(_ours(), _entry(84.6)) == ("outside it", None)
    assert compare.verdict(_ours(), _entry(81.0, {"max_tokens": None})) == ("not comparable", "max_tokens (unknown)")
    assert compare.verdict(_ours(), _entry(81.0, {"k": 16}, model="N")) == ("not comparable", "model (N), k (16)")
    assert compare.verdict(_ours(), _entry("~81")) == ("not comparable", "value (~81)")
    assert compare.verdict(_ours(), _entry(81.0, {"grader": "other"}))[1] == "grader (other)"
    one = _ours(score=stats.Interval(0.8, None, None, 1))
    assert compare.verdict(one, _entry(80.0)) == ("not comparable", "no interval")


def test_compare_lists_the_differing_fields_of_toy_runs(tmp_path, data):
    root = write_study(tmp_path, {"select": ["inflight"]})
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    options = [str(root / "runs"), "--config", str(root / "config.json"), "--published", str(FILE)]
    assert compare.run(parser.parse_args([*options, "--out", str(tmp_path / "t")])) == 0
    text = (tmp_path / "t" / "comparison.md").read_text()
    assert "3 methods" in text and "not comparable" in text and "model (Qwen2.5-7B)" in text
    assert "inside the interval |" not in text
    with pytest.raises(ValueError, match="no records"):
        compare.run(parser.parse_args([str(tmp_path / "t"), "--out", str(tmp_path)]))


def test_one_seed_has_an_interval_over_problems(tmp_path):
    root = write_study(tmp_path, {"seeds": [0], "select": ["inflight"]})
    runs = [compare.read(folder) for folder in compare.find(root / "runs")]
    ours = compare.collect(runs, config.load([root / "config.json"]))
    assert {item.data for item in ours} == {"AIME 2024"}
    assert all(item.score.n == 30 and item.protocol["temperature"] == 1.0 for item in ours)
