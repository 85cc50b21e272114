"""Work that short processes share."""

import pytest

from jetrl_bench import cached


def test_a_text_is_computed_once_for_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def compute():
        asked.append(1)
        return f"text {len(asked)}"

    assert [cached.once("a", compute), cached.once("a", compute), cached.once("b", compute)] == ["text 1"] * 2 + [
        "text 2"
    ]
    assert sorted(path.name for path in (tmp_path / "jetrl-bench").iterdir()) == ["a", "b"], (
        "nothing half-written stays"
    )


def test_what_fails_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        cached.once("a", lambda: str(1 / 0))
    assert cached.once("a", lambda: "right") == "right"


def test_a_folder_that_cannot_be_made_costs_time_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [cached.once("a", lambda: "text") for _ in range(2)] == ["text", "text"]
