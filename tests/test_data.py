"""Data: hashes decide, bad copies are refused by name, no network is an answer and not a crash."""

import argparse
import json
import shutil
import sys
import types
from pathlib import Path

import pytest

from jetrl_bench import data
from jetrl_bench.data import MANIFEST, Absent, check, content_sha256, leaks, load, overlap, row_name


@pytest.fixture
def data_dir():
    import os

    return Path(os.environ["JETRL_DATA_DIR"])


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.delenv("JETRL_DATA_DIR", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def rows_of(data_dir, name):
    return [json.loads(line) for line in (data_dir / f"{name}.jsonl").read_text().splitlines()]


def run(*arguments):
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args(list(map(str, arguments))))


def test_manifest_is_complete():
    assert {kind.name: kind.rows for kind in MANIFEST.values()} == {
        "aime_2024": 30,
        "math_500": 500,
        "gsm8k_test": 1319,
        "gsm8k_train": 7473,
        "math_train": 11968,
    }
    for kind in MANIFEST.values():
        assert len(kind.content_sha256) == len(kind.file_sha256) == 64
        assert kind.hub_id is None or len(kind.hub_revision) == 40 and kind.hub_split in ("train", "test")
    with pytest.raises(ValueError, match="aime24.*use one of aime_2024"):
        data.data_set("aime24")


@pytest.mark.data
@pytest.mark.parametrize("name", list(MANIFEST))
def test_files_are_the_data_sets(data_dir, name):
    loaded = load(name, data_dir)
    assert len(loaded.rows) == MANIFEST[name].rows and loaded.file_sha256 == MANIFEST[name].file_sha256
    assert all(set(MANIFEST[name].columns) <= set(row) for row in loaded.rows)
    assert len({row_name(name, row, index) for index, row in enumerate(loaded.rows)}) == len(loaded.rows)


@pytest.mark.data
def test_the_content_hash_ignores_order_padding_and_white_space_only(data_dir):
    rows = rows_of(data_dir, "aime_2024")
    padded = [row | {"answer": f"{int(row['answer']):03d}", "problem": row["problem"] + "\n"} for row in rows[::-1]]
    check("aime_2024", padded, "copy")
    for key in ("answer", "problem"):
        changed = [dict(row) for row in rows]
        changed[7][key] = changed[7][key] + "1"
        with pytest.raises(ValueError, match="copy: refused"):
            check("aime_2024", changed, "copy")


@pytest.mark.data
@pytest.mark.parametrize(
    ("problem", "change", "message"),
    [
        ("2024-I-8", {"answer": "480"}, "Open-Reasoner-Zero"),
        ("2024-I-12", {"answer": "384"}, "NeMo-Skills.*385 is right"),
        (
            "2024-I-1",
            {"problem": "Aya walks. Find the minutes. The answer is 204."},
            "answers in the problem.*2024-I-1",
        ),
        ("2024-I-5", {"problem": "Rectangles [asy] draw(); [/asy] Find CE."}, "rllm or sail-sg"),
        ("2024-I-2", {"answer": "26"}, "not those of aime_2024"),
    ],
)
def test_known_bad_copies_of_aime_are_named(data_dir, problem, change, message):
    rows = [row | (change if row["problem_id"] == problem else {}) for row in rows_of(data_dir, "aime_2024")]
    with pytest.raises(ValueError, match=f"here: refused: .*{message}"):
        check("aime_2024", rows, "here")


@pytest.mark.data
def test_the_corrected_text_is_another_data_set(data_dir):
    rows = rows_of(data_dir, "aime_2024")
    assert [row["problem_id"] for row in rows if row["problem"] != row["problem_fixed"]] == ["2024-II-8"]
    with pytest.raises(ValueError, match="2024-II-8 corrected"):
        check("aime_2024", [row | {"problem": row["problem_fixed"]} for row in rows], "here")


@pytest.mark.data
def test_row_counts_and_other_copies_are_refused(data_dir):
    with pytest.raises(ValueError, match="29 rows, aime_2024 has 30"):
        check("aime_2024", rows_of(data_dir, "aime_2024")[:-1], "here")
    with pytest.raises(ValueError, match="15 rows"):
        check("aime_2024", rows_of(data_dir, "aime_2024")[:15], "here")
    math = rows_of(data_dir, "math_500")
    dropped = [row | {"answer": "52" if row["answer"] == "52_8" else row["answer"].replace(" ", "")} for row in math]
    with pytest.raises(ValueError, match="PRIME"):
        check("math_500", dropped, "here")
    with pytest.raises(ValueError, match="499 rows"):
        check("math_500", math[1:], "here")
    with pytest.raises(ValueError, match="all of MATH test"):
        check("math_500", math * 10, "here")
    with pytest.raises(ValueError, match="7473 rows: the other split"):
        check("gsm8k_test", rows_of(data_dir, "gsm8k_train"), "here")
    with pytest.raises(ValueError, match="rllm copy"):
        check("gsm8k_test", [row | {"answer": None} for row in rows_of(data_dir, "gsm8k_test")], "here")


def test_columns_and_lines_are_named(tmp_path):
    with pytest.raises(ValueError, match="row 1: no column 'answer'.*has problem"):
        check("aime_2024", [{"problem": "p", "solution": "s"}], "math-ai/aime24")
    (tmp_path / "aime_2024.jsonl").write_text('{"problem": "p", "answer": "1"}\n[]\n')
    with pytest.raises(ValueError, match="aime_2024.jsonl:2: not a JSON object"):
        load("aime_2024", tmp_path)
    (tmp_path / "aime_2024.jsonl").write_text('{"problem": "p", "answer": "1"}\n')
    with pytest.raises(ValueError, match="1 rows, aime_2024 has 30"):
        load("aime_2024", tmp_path)


def test_leaking_endings():
    """QwenLM/Qwen3#1183: a copy whose questions end with their answers."""
    assert leaks({"problem": "Find $m+n = 204$."}, "204")
    assert leaks({"problem": r"Find the sum. \boxed{025}"}, "25")
    assert not leaks({"problem": "A walk of 204 km. Find the time."}, "204")
    assert not leaks({"problem": "Find $x$ where $y = 1204$."}, "204")


def test_without_files_and_network_it_is_absent(offline, tmp_path, capsys):
    with pytest.raises(Absent, match="set JETRL_DATA_DIR"):
        load("math_train")
    assert run("aime_2024", "math_train", "--out", tmp_path / "out") == 0
    assert "aime_2024: absent: HuggingFaceH4/aime_2024" in capsys.readouterr().out
    status = data.read_status(tmp_path / "out", "aime_2024")
    assert status["status"] == "absent" and "Couldn't reach" in status["reason"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["aime_2024.json", "math_train.json"]
    with pytest.raises(ValueError, match="jetrl_bench data math_500"):
        data.read_status(tmp_path / "out", "math_500")
    with pytest.raises(ValueError, match="use one of"):
        run("aime24", "--out", tmp_path / "out")


@pytest.mark.data
def test_the_hub_is_asked_at_a_pinned_revision(data_dir, offline, monkeypatch, tmp_path):
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return [row | {"answer": row["answer"].zfill(3)} for row in rows_of(data_dir, "aime_2024")]

    fake = types.SimpleNamespace(load_dataset=load_dataset, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert run("aime_2024", "--out", tmp_path) == 0
    revision = "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"
    assert calls == [(("HuggingFaceH4/aime_2024", "default"), {"revision": revision, "split": "train"})]
    assert data.read_status(tmp_path, "aime_2024")["source"] == "hub"
    assert len(load("aime_2024", tmp_path).rows) == 30


@pytest.mark.data
def test_what_is_written_can_be_loaded_and_a_lost_source_removes_it(data_dir, offline, monkeypatch, tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("gsm8k_test", "aime_2024"):
        shutil.copy(data_dir / f"{name}.jsonl", source)
    monkeypatch.setenv("JETRL_DATA_DIR", str(source))
    assert run("gsm8k", "aime_2024", "--out", tmp_path / "out") == 0
    status = data.read_status(tmp_path / "out", "gsm8k")
    assert (status["status"], status["rows"], status["data_set"]) == ("present", 1319, "gsm8k_test")
    assert content_sha256("gsm8k", load("gsm8k", tmp_path / "out").rows) == MANIFEST["gsm8k_test"].content_sha256
    before = (tmp_path / "out" / "aime_2024.json").read_bytes()
    assert str(tmp_path).encode() not in before
    assert run("aime_2024", "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / "aime_2024.json").read_bytes() == before
    (source / "aime_2024.jsonl").unlink()
    run("aime_2024", "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "aime_2024.jsonl").exists()


def test_overlap_lists_planted_problems():
    question = "A train leaves the station at nine and travels forty miles each hour until noon, how far does it go?"
    other = "Two friends share twelve apples and eat three of them before lunch on a sunny day in the park."
    evaluation = {"planted": question, "fresh": other, "short": "What is 2+2?"}
    report = overlap([question.upper().replace(",", ""), "What is 2 + 2"], evaluation)
    assert report["exact"] == ["planted", "short"] and report["near"] == {} and report["problems"] == 3
    near = overlap([question.replace("how far does it go", "find the distance")], evaluation)
    assert near["exact"] == [] and list(near["near"]) == ["planted"] and near["with_any_shared_8gram"] == 1
    words = question.replace(",", "").replace("?", "").lower().split()
    shared = sum(" ".join(words[at : at + 8]) in " ".join(words[:15]) for at in range(len(words) - 7))
    assert near["near"]["planted"] == pytest.approx(shared / (len(words) - 7), abs=1e-3)


@pytest.mark.data
def test_planted_eval_question_is_reported_by_the_command(data_dir, offline, monkeypatch, tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(data_dir / "aime_2024.jsonl", source)
    monkeypatch.setenv("JETRL_DATA_DIR", str(source))
    planted = rows_of(data_dir, "aime_2024")[4]
    (tmp_path / "rl.jsonl").write_text(json.dumps({"problem": planted["problem"], "answer": "1"}) + "\n")
    assert run("aime_2024", "--out", tmp_path / "out", "--train", tmp_path / "rl.jsonl") == 0
    assert data.read_status(tmp_path / "out", "aime_2024")["overlap"]["rl"]["exact"] == [planted["problem_id"]]
    assert "in rl: 1 problems exactly" in capsys.readouterr().out


@pytest.mark.data
def test_no_evaluation_problem_is_in_the_training_sets(data_dir):
    training = [row["problem"] for row in rows_of(data_dir, "math_train")]
    for name in ("aime_2024", "math_500"):
        rows = rows_of(data_dir, name)
        assert overlap(training, {str(i): row["problem"] for i, row in enumerate(rows)})["exact"] == []
