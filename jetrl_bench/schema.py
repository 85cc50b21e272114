"""Verb `schema`: the configuration's JSON schema, generated from config.py (workflow/schemas/config.schema.json)."""

import argparse
import json
from pathlib import Path

from jetrl_bench.config import json_schema
from jetrl_bench.record import write_text


def text() -> str:
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="write it there instead of printing it")
    parser.add_argument("--check", type=Path, help="compare it with this file; exit code 1 where they differ")


def run(args: argparse.Namespace) -> int:
    if args.check:
        same = args.check.is_file() and args.check.read_text(encoding="utf-8") == text()
        print(
            f"{args.check}: {'up to date' if same else 'stale; write it again with: schema --out ' + str(args.check)}"
        )
        return 0 if same else 1
    if args.out:
        write_text(args.out, text())
    else:
        print(text(), end="")
    return 0
