"""docs/numerics.md and the published probe records say the same, and their data give the records again."""

import re
from pathlib import Path

import pytest

from jetrl_bench import probe, probe_grid, probe_report, scale_rules

ROOT = Path(__file__).parent.parent
PROBE = ROOT / "results" / "reference" / "probe"
DOC = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")


def numbers(line):
    """Decimal numbers of a table row."""
    return [float(cell) for cell in re.findall(r"(?<![\w^.])\d+\.\d+(?![\w.])", line)]


def test_rule_tables_are_what_the_code_prints():
    for line in scale_rules.table().splitlines():
        if not numbers(line):
            continue
        name = line.split("|")[1].strip()
        written = [numbers(other) for other in DOC.splitlines() if other.startswith(f"| {name} |")]
        assert any(numbers(line) == pytest.approx(w, rel=0.05, abs=2e-4) for w in written), name


def test_published_grid_is_rendered_from_its_records():
    records = probe_grid.read(PROBE / "smollm2")
    assert probe_grid.markdown(records) == (PROBE / "smollm2" / "grid.md").read_text(encoding="utf-8")
    for pair in probe_grid.pairs():
        record = records[pair.name]
        assert (record.source["rollout"], record.source["train"]) == (pair.rollout, pair.train)
        total = record.comparisons[0]
        row = f"| {total.mu} | {total.pi} | {probe_report.fixed(total.numbers.kl)} "
        assert row in DOC, pair.name
        if pair.question == "And when the kernels are the same?" and "tensor" not in pair.name:
            assert total.numbers.max_abs == total.numbers.kl == 0, pair.name


def test_published_dump_gives_its_record_again():
    folder = PROBE / "transformers_bf16"
    published = probe_report.ProbeRecord.model_validate_json((folder / "probe.json").read_text(encoding="utf-8"))
    again = probe.from_logprobs(folder / "logprobs.jsonl")
    assert again.source["sha256"] == published.source["sha256"] and again.source["lines"] == published.source["lines"]
    for mine, theirs in zip(again.comparisons, published.comparisons, strict=True):
        mine, theirs = ({k: v for k, v in c.numbers.model_dump().items() if v is not None} for c in (mine, theirs))
        assert mine == pytest.approx(theirs, rel=1e-9)
    assert f"k3 {probe_report.fixed(published.comparisons[0].numbers.k3)}" in DOC


def test_every_test_that_the_document_names_exists():
    for name in re.findall(r"`(test_\w+\.py)`", DOC):
        assert (ROOT / "tests" / name).is_file(), name
