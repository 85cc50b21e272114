"""The paper compiles from rendered tables and figures alone, to equal bytes, and says what it misses."""

import argparse
import shutil
from pathlib import Path

import pytest

from jetrl_bench import paper, render, stats

SOURCE = Path(__file__).parent.parent / "paper"
PIXEL = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="10"><rect width="40" height="10"/></svg>'


@pytest.fixture
def rendered(tmp_path):
    for name in paper.TABLES:
        columns = ["claim", "verdict", "evidence", "a_b | c"]
        rows = [["x | y", "*grey*", stats.Interval(0.5, 0.4, 0.6, 3), None]]
        table = render.Table(name, f"Title of {name}", "measured", columns, rows, ["a: b."], "Source: `x`.", ["Note."])
        render.write(table, tmp_path / "tables")
    (tmp_path / "figures").mkdir()
    for name in paper.FIGURES:
        (tmp_path / "figures" / f"{name}.svg").write_text(PIXEL)
    return tmp_path


def test_two_compilations_are_equal_and_hold_no_date(rendered):
    for out in ("a.pdf", "b.pdf"):
        paper.build(rendered / "tables", rendered / "figures", rendered / out, SOURCE)
    one = (rendered / "a.pdf").read_bytes()
    assert one[:5] == b"%PDF-" and one == (rendered / "b.pdf").read_bytes()
    assert b"CreationDate" not in one


def test_tables_come_back_from_markdown(rendered):
    data = paper.read_markdown(rendered / "tables" / "claims.md")
    assert data["title"] == "Title of claims" and data["kind"] == "measured"
    assert data["columns"][3] == "a_b | c"
    assert data["rows"] == [["x | y", "*grey*", "0.500 ± 0.100", "–"]]
    assert data["notes"] == ["Note.", "Glossary: a: b.", "Source: `x`."]
    empty = render.Table("e", "E", "measured", ["a"], [], [], "Source.")
    render.write(empty, rendered / "tables")
    assert paper.read_markdown(rendered / "tables" / "e.md")["rows"] == []


def test_missing_inputs_are_named(rendered):
    (rendered / "tables" / "lag.md").unlink()
    with pytest.raises(ValueError, match="lag.md: No such file or directory; render tables"):
        paper.build(rendered / "tables", rendered / "figures", rendered / "x.pdf", SOURCE)
    shutil.copyfile(rendered / "tables" / "ess.md", rendered / "tables" / "lag.md")
    (rendered / "figures" / "dose.svg").unlink()
    with pytest.raises(ValueError, match="dose.svg: missing"):
        paper.build(rendered / "tables", rendered / "figures", rendered / "x.pdf", SOURCE)
    assert not (rendered / "x.pdf").exists()


def test_a_source_that_does_not_compile_is_one_line(rendered):
    (rendered / "bad").mkdir()
    (rendered / "bad" / "main.typ").write_text("#nonsense()")
    with pytest.raises(ValueError, match="main.typ: .*nonsense") as error:
        paper.build(rendered / "tables", rendered / "figures", rendered / "x.pdf", rendered / "bad")
    assert "\n" not in str(error.value)


def test_the_verb(rendered, capsys):
    parser = argparse.ArgumentParser()
    paper.add_arguments(parser)
    options = ["--tables", str(rendered / "tables"), "--figures", str(rendered / "figures")]
    assert paper.run(parser.parse_args([*options, "--out", str(rendered / "out" / "paper.pdf")])) == 0
    assert "paper.pdf: " in capsys.readouterr().out
