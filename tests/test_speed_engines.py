"""Engines side by side: the record, its table, and what the documentation quotes of the published one."""

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from jetrl_bench import speed_engines

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "results" / "reference" / "speed" / "engines.json"


def arguments(*words):
    parser = ArgumentParser()
    speed_engines.add_arguments(parser)
    return parser.parse_args([*map(str, words)])


def test_every_engine_takes_its_turn_in_every_round(tmp_path, monkeypatch, capsys):
    small = speed_engines.TOY.model_copy(update={"hidden_size": 64, "num_layers": 1, "intermediate_size": 64})
    monkeypatch.setattr(speed_engines, "TOY", small)
    out = tmp_path / "engines.json"
    sizes = ("--sequences", 3, 2, "--tokens", 4, 5)
    words = ("--checkpoint", "random", "--checkpoint", "random", *sizes, "--rounds", 2, "--out", out)
    assert speed_engines.run(arguments(*words)) == 0
    record = json.loads(out.read_text())
    assert {(row["sequences"], row["tokens"]) for row in record["rows"]} == {(3, 4), (2, 5)}
    for row in record["rows"]:
        assert len(row["tokens_per_cpu_s"]) == len(row["load"]) == 2 and min(row["tokens_per_cpu_s"]) > 0
        assert len(row["update_cpu_ms"]) == (0 if row["engine"] == "transformers generate" else 2)
    assert {"reference", "transformers generate"} <= {row["engine"] for row in record["rows"]}
    assert out.with_suffix(".md").read_text() == speed_engines.markdown(record)
    assert "reference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sequences", 4, 2), "--sequences has 2 values for 1 checkpoints"),
        (("--tokens", 0), "--tokens 0 is below 1"),
        (("--rounds", 0), "--rounds 0 is below 1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        speed_engines.run(arguments(*words, "--out", tmp_path / "x.json"))


def test_the_documentation_quotes_the_published_record():
    table = speed_engines.markdown(json.loads(PUBLISHED.read_text()))
    assert PUBLISHED.with_suffix(".md").read_text() == table
    document = (ROOT / "docs" / "engines.md").read_text()
    assert table in document
    assert "tokens per CPU s" not in document.replace(table, "")
