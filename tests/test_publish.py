"""Publishing and comparing records: nothing unclean or incomplete goes out, and everything renders from what does."""

import argparse
import gzip
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import write_study

from jetrl_bench import claims, diff, figures, publish, study, tables
from jetrl_bench.record import SampleRow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = write_study(tmp_path_factory.mktemp("study"), {"seeds": [0, 1], "select": ["inflight"]})
    _render(root / "runs", root / "config.json", root, root / "scripted")
    for name in figures.BUILDERS:  # drawing them all is tested elsewhere
        for kind in ("pdf", "svg", "png", "csv"):
            if name != "lag":
                shutil.copyfile(root / "figures" / f"lag.{kind}", root / "figures" / f"{name}.{kind}")
    return root


def _render(runs, config, out, scripted):
    for module, folder in ((tables, "tables"), (figures, "figures")):
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        options = ["--runs", str(runs), "--config", str(config), "--out", str(out / folder)]
        options += ["--scripted", str(scripted)] if module is tables else ["--", "lag"]
        assert module.run(parser.parse_args(options)) == 0


def _publish(root, out, **changes):
    options = {"scripted": root / "scripted", "allow_absent": True} | changes
    return publish.publish(root / "runs", root / "config.json", root / "tables", root / "figures", out, **options)


def test_everything_renders_from_the_reference_with_equal_bytes(root, tmp_path):
    reference = tmp_path / "reference"
    size = _publish(root, reference)
    assert size == sum(p.stat().st_size for p in reference.rglob("*") if p.is_file()) < publish.LIMIT_BYTES
    _render(reference / "runs", reference / "config.json", tmp_path / "again", reference / "scripted")
    names = sorted(p.relative_to(root) for f in ("tables", "figures") for p in (root / f).iterdir())
    assert len(names) == len(tables.BUILDERS) * 3 + len(figures.BUILDERS) * 4
    for name in names:
        if name.parent.name == "tables" or name.stem == "lag":
            assert (root / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
        assert (root / name).read_bytes() == (reference / name).read_bytes(), name
    loaded = study.load(reference / "runs", reference / "config.json")
    assert claims.metric(loaded.runs[0], "heldout_deployment") is not None


def test_what_stands_beside_the_runs_goes_along(root, tmp_path):
    copied = _copy(root, tmp_path)
    (copied / "speed.json").write_text("{}")
    (copied / "paper").mkdir()
    (copied / "paper" / "paper.pdf").write_bytes(b"%PDF-")
    (tmp_path / "out" / "linear").mkdir(parents=True)  # another measurement, published by hand
    _publish(copied, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"runs", "config.json", "tables", "figures", "scripted", "speed.json", "paper.pdf", "linear"}
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        _publish(copied, tmp_path / "out", scripted=tmp_path / "nowhere")
    assert (tmp_path / "out" / "speed.json").exists()


def test_published_records_equal_the_originals(root, tmp_path, capsys):
    reference = tmp_path / "reference"
    _publish(root, reference)
    parser = argparse.ArgumentParser()
    diff.add_arguments(parser)
    assert diff.run(parser.parse_args([str(root / "runs"), str(reference / "runs")])) == 0
    assert "6 records compared, 0 differences" in capsys.readouterr().out


def test_publishing_twice_gives_the_same_bytes(root, tmp_path):
    for name in ("a", "b"):
        _publish(root, tmp_path / name)
    _publish(root, tmp_path / "b")
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(tmp_path / "b") for p in (tmp_path / "b").rglob("*") if p.is_file())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def _copy(root, tmp_path):
    copied = tmp_path / "copy"
    shutil.copytree(root, copied)
    return copied


def _edit_manifest(root, method, **source):
    path = next((root / "runs" / method).glob("*/manifest.json"))
    data = json.loads(path.read_text())
    data["source"] |= source
    path.write_text(json.dumps(data))


def test_absent_benchmarks_are_refused_unless_told(root, tmp_path):
    with pytest.raises(ValueError, match=r"MATH-500 is absent \(no data folder and no network\)"):
        _publish(root, tmp_path / "out", allow_absent=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: _edit_manifest(r, "concurrent", dirty=True), "uncommitted changes"),
        (lambda r: _edit_manifest(r, "concurrent", git_sha=None), "commit it was trained at is unknown"),
        (lambda r: next((r / "runs" / "concurrent").glob("*/manifest.json")).unlink(), "no record of experiment"),
        (lambda r: next((r / "runs" / "concurrent").glob("*/eval/chain.jsonl")).unlink(), "was not evaluated"),
        (lambda r: (r / "figures" / "dose.svg").unlink(), "figures/dose.svg: missing"),
        (lambda r: (r / "tables" / "lag.tex").unlink(), "tables/lag.tex: missing"),
    ],
)
def test_unclean_or_incomplete_records_are_refused(root, tmp_path, change, words):
    copied = _copy(root, tmp_path)
    change(copied)
    with pytest.raises(ValueError, match=words):
        _publish(copied, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_large_is_refused_and_keeps_what_was_there(root, tmp_path, monkeypatch):
    _publish(root, tmp_path / "out")
    monkeypatch.setattr(publish, "LIMIT_BYTES", 1000)
    with pytest.raises(ValueError, match="the limit is 0 MB"):
        _publish(root, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists() and not (tmp_path / ".out.new").exists()


STATUS = ["correct", "wrong", "no_answer", "truncated", "timeout", "error"]


@given(
    st.dictionaries(
        st.tuples(
            st.sampled_from(["chain", "aime_2024"]),
            st.text("abc019-", min_size=1, max_size=4),
            st.integers(0, 3),
            st.sampled_from(["deployment", "training", "bf16"]),
            st.sampled_from(["base", "final"]),
        ),
        st.tuples(
            st.sampled_from(STATUS), st.integers(0, 99), st.sampled_from(["stop", "length"]), st.none() | st.text()
        ),
        max_size=30,
    )
)
def test_packing_gives_back_every_row(cells):
    rows = [
        SampleRow(
            task=task, problem=problem, sample=sample, flow=flow, checkpoint=checkpoint, status=status, tokens=tokens,
            finish_reason=end, answer=answer,
        )
        for (task, problem, sample, flow, checkpoint), (status, tokens, end, answer) in cells.items()
    ]  # fmt: skip
    packed = study.pack_samples(rows)
    assert sorted(map(repr, study.unpack_samples(packed))) == sorted(map(repr, rows))
    assert packed == study.pack_samples(rows[::-1])
    assert packed[4:8] == b"\0\0\0\0"  # no time in the gzip header


def test_packed_rows_that_are_damaged_are_refused():
    with pytest.raises(ValueError, match="x.gz: not packed evaluation rows"):
        study.unpack_samples(b"junk", "x.gz")
    with pytest.raises(ValueError, match="not packed"):
        study.unpack_samples(gzip.compress(b'{"task":"chain"}\n'))


def test_packing_is_compact():
    rows = [
        SampleRow(
            task="chain", problem=f"{i:05d}", sample=0, status="correct", tokens=61, finish_reason="stop", flow=flow
        )
        for flow in ("deployment", "training", "bf16")
        for i in range(2048)
    ]
    assert len(study.pack_samples(rows)) < 20_000


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("eval/chain.jsonl", lambda t: t.replace('"correct"', '"wrong"', 1), "evaluation: first difference"),
        ("eval/chain.jsonl", lambda t: "\n".join(t.splitlines()[:-1]) + "\n", "evaluation: "),
        (
            "manifest.json",
            lambda t: t.replace('"pass_at_1": 0.36', '"pass_at_1": 0.37'),
            "manifest.base.pass_at_1: 0.36",
        ),
        (
            "manifest.json",
            lambda t: t.replace('"temperature": 1.0', '"temperature": 0.9'),
            "settings.train.temperature",
        ),
    ],
)
def test_diff_names_what_differs_and_exits_1(root, tmp_path, capsys, name, edit, words):
    copied = _copy(root, tmp_path)
    path = next((copied / "runs" / "concurrent").glob(f"*/{name}"))
    path.write_text(edit(path.read_text()))
    parser = argparse.ArgumentParser()
    diff.add_arguments(parser)
    assert diff.run(parser.parse_args([str(root / "runs"), str(copied / "runs")])) == 1
    assert words in capsys.readouterr().out


def test_diff_of_rows_and_of_environments(root, tmp_path):
    import hashlib

    copied = _copy(root, tmp_path)
    manifest = next((copied / "runs" / "concurrent").glob("*/manifest.json"))
    train = manifest.parent / "train.jsonl"
    train.write_text(train.read_text().replace('"loss":0.01', '"loss":0.02', 1))
    data = json.loads(manifest.read_text())
    data["train_sha256"] = hashlib.sha256(train.read_bytes()).hexdigest()
    data["environment"]["torch"] = "9.9"
    manifest.write_text(json.dumps(data))
    original = root / manifest.parent.relative_to(copied)
    found, allowed = diff.differences(original, manifest.parent)
    assert any("train.jsonl: first difference in row 1 of" in line for line in found)
    assert any("train_sha256" in line for line in found)
    assert len(allowed) == 1 and "environment.torch: '2.13.0' against '9.9'" in allowed[0]


def test_diff_of_trees_lists_what_stands_alone(root, tmp_path):
    copied = _copy(root, tmp_path)
    shutil.rmtree(copied / "runs" / "concurrent")
    matched, alone = diff.pairs(root / "runs", copied / "runs")
    assert len(matched) == 4 and len(alone) == 2 and "only in" in alone[0]
    with pytest.raises(ValueError, match="no records"):
        diff.pairs(root / "tables", copied / "runs")
