"""tests/reports.csv: every public report that touches this project, with its test or the reason for none."""

import ast
import csv
import re
from pathlib import Path

TESTS = Path(__file__).parent


def _rows():
    with open(TESTS / "reports.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_names_a_report_once_and_a_test_that_exists_or_a_reason():
    functions: dict[str, set[str]] = {}
    seen = set()
    for row in _rows():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+|[\w./ -]+", row["report"]), row
        assert row["report"] not in seen, f"{row['report']} is listed twice"
        seen.add(row["report"])
        assert row["summary"].strip(), row
        if row["test"].startswith("none: "):
            assert len(row["test"]) > len("none: ") + 10, row
            continue
        for reference in row["test"].split(";"):
            file, _, name = reference.strip().partition("::")
            if file not in functions:
                tree = ast.parse((TESTS.parent / file).read_text(encoding="utf-8"))
                functions[file] = {
                    n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
                }
            assert name.split("[")[0] in functions[file], f"{row['report']}: no test {reference}"


def test_most_reports_are_covered_by_a_test():
    rows = _rows()
    covered = [r for r in rows if not r["test"].startswith("none: ")]
    assert len(covered) > 0.6 * len(rows)
