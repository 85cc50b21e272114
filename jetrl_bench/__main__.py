"""The command line: `python -m jetrl_bench VERB ...`, also installed as `jetrl-bench`.

A verb is a pair `add_arguments(parser)` and `run(args) -> int` of the module that does the work; this file only
dispatches, and imports that module alone, so that a verb which needs no torch never pays for it.

Exit codes: 0 ok, 1 a check failed, 2 bad input, 3 dead worker.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from jetrl_bench import __version__
from jetrl_bench.errors import WorkerDied

VERBS = {
    "resolve": ("plan", "list every run that a configuration selects, or write its resolved settings"),
    "schema": ("schema", "print the configuration's JSON schema, or its reference"),
    "unlock": ("locks", "clear the lock that a dead snakemake left behind, never a live one's"),
    "doctor": ("devices", "what this machine can run, and what is missing for the rest"),
    "check": ("check", "are the exactness invariants true on this machine?"),
    "data": ("data", "find, check and copy the evaluation data sets"),
    "base": ("base", "train the warm-up checkpoint that a seed's methods start from"),
    "train": ("loop", "train one method on one seed"),
    "evaluate": ("evaluate", "sample held-out problems and benchmarks from checkpoints"),
    "verify": ("verify", "grade answers against gold answers"),
    "probe": ("probe", "measure the mismatch between a rollout and a trainer"),
    "speed": ("speed", "measure RL steps by phase, what they cost as they grow, one linear layer"),
    "speed-engines": ("speed_engines", "tokens per CPU second of the engines, update latency, interleaved"),
    "simulate": ("scenario", "model a cluster nobody has at hand"),
    "table": ("tables", "render tables from records"),
    "figure": ("figures", "render figures from records"),
    "claims": ("claims", "decide the claims of config/claims.yaml from records"),
    "published": ("published", "render the published numbers and check their arithmetic"),
    "compare": ("compare", "compare records, imported logs and published numbers"),
    "import": ("importers", "read another trainer's logs into our records"),
    "paper": ("paper", "compile the paper from tables and figures"),
    "diff": ("diff", "are two records equal where they must be?"),
    "publish": ("publish", "copy complete, clean records to results/reference"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="jetrl-bench", description=__doc__.split("\n\n")[0], epilog=_epilog())
    parser.add_argument("--version", action="version", version=f"jetrl-bench {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, (_, text) in VERBS.items():
        verbs.add_parser(verb, help=text, add_help=False)
    if not argv or argv[0] not in VERBS:
        if argv and not argv[0].startswith("-"):
            from jetrl_bench.strict import nearest

            return _fail(f"unknown verb {argv[0]!r}; {nearest(argv[0], VERBS)}")
        parser.parse_args(argv)
        return 0
    name, text = VERBS[argv[0]]
    module = importlib.import_module(f"jetrl_bench.{name}")
    parser = argparse.ArgumentParser(prog=f"jetrl-bench {argv[0]}", description=text)
    module.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    args.verb = argv[0]
    try:
        return module.run(args) or 0
    except ValueError as error:
        return _fail(str(error))
    except WorkerDied as error:
        return _fail(str(error), 3)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _epilog() -> str:
    return "exit codes: 0 ok, 1 a check failed, 2 bad input, 3 dead worker"


def _fail(message: str, code: int = 2) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
