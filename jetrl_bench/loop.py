"""The training loop: generate, train, hand weights over, write a row; the same lines for every method.

OUT gets train.jsonl, timing.jsonl, checkpoint/ and, last, manifest.json. STATE holds what a killed run needs to go on
to the same bytes; it is removed once the manifest stands. SIGTERM saves and exits 143.
"""

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from jetrl_bench import devices, provenance, record
from jetrl_bench import state as saved
from jetrl_bench.base import read_base
from jetrl_bench.checkpoint import save_hf
from jetrl_bench.config import RunSettings
from jetrl_bench.errors import NotFinite
from jetrl_bench.loss import formula
from jetrl_bench.progress import Progress, Stopwatch
from jetrl_bench.run import Run
from jetrl_bench.schedule import batches
from jetrl_bench.strict import read_yaml, validate


def train(settings: RunSettings, *, method: str, base: Path, out: Path, state: Path) -> None:
    """Train one method on one seed from `base` to a complete record in `out`, going on from `state` where it stands."""
    devices.require(settings)
    set_threads()
    facts = read_base(base, settings)
    source = provenance.source()
    identity = {"digest": settings.digest(), "base": facts["sha256"], "source": source["hash"]}
    parts = saved.load(state, identity)
    run = Run(settings, base, scratch=state)
    if parts:
        run.load_state_dict(parts)
    watch = Stopwatch(saved.next_attempt(state))
    run.sync.timed = lambda: watch.inside("sync")
    outcome = "finished"
    with Progress(method, settings.train.optimizer_steps) as progress, StopOnSignal() as stop:
        stream = batches(run.sync, run.engine, run.trainer, run.ledger, run.submitter.submit)
        try:
            while run.trainer.version < settings.train.optimizer_steps:
                groups = next(stream)
                if groups:
                    watch.lap("rollout")
                    row = run.learner.learn(len(run.rows), groups, watch)
                    run.rows.append(row)
                    run.timing.append(watch.row(row.rollout_step))
                    progress(row)
                    watch.restart()
                finished = run.trainer.version >= settings.train.optimizer_steps
                if (finished or stop.asked or run.save_is_due()) and run.can_save():
                    saved.save(state, run.trainer.version, run.state_dict(), identity)
                    watch.restart()
                    if stop.asked:
                        sys.exit(128 + signal.SIGTERM)
        except NotFinite as error:
            outcome = "nan"
            print(f"{method}: {error}; the run ends here, its rows are kept", file=sys.stderr, flush=True)
    run.engine.close()
    write_record(run, settings, method, outcome, facts, source, out)
    shutil.rmtree(state, ignore_errors=True)


def write_record(
    run: Run, settings: RunSettings, method: str, outcome: str, base: dict, source: dict, out: Path
) -> None:
    """Everything under a temporary name first; the manifest last, so that a record is complete or not one."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    count, digest = record.write_rows(out / "train.jsonl", run.rows)
    record.write_rows(out / "timing.jsonl", run.timing)
    written = out / f".checkpoint.{os.getpid()}"
    save_hf(run.trainer.model, settings.model, written)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    os.replace(written, out / "checkpoint")
    generators, trainers = run.split
    manifest = record.Manifest(
        method=method,
        seed=settings.seed,
        digest=settings.digest(),
        settings=settings.model_dump(mode="json"),
        outcome=outcome,
        train_rows=count,
        train_sha256=digest,
        base=base,
        description={
            **run.trainer.flow.describe(),
            "loss": formula(settings.method.loss),
            "accelerators": f"{generators} generate, {trainers} train, of {settings.cost.accelerators}",
        },
        environment=devices.environment(),
        source=source,
        resume=run.engine.resume,
        data={"task": run.task.revision},
        dropped_prompts=run.submitter.dropped,
    )
    record.write_json(out / "manifest.json", manifest)


def set_threads() -> None:
    """One torch thread per process, or JETRL_THREADS of them."""
    torch.set_num_threads(int(os.environ.get("JETRL_THREADS", "1")))


class StopOnSignal:
    """SIGTERM sets `asked`; the loop saves after the batch in hand and leaves."""

    asked = False

    def __enter__(self) -> "StopOnSignal":
        self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def _ask(self, number, frame) -> None:
        self.asked = True

    def __exit__(self, *error) -> None:
        signal.signal(signal.SIGTERM, self._before)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", type=Path, required=True, help="resolved settings of one run (JSON)")
    parser.add_argument("--method", required=True, help="the name under which the record stands")
    parser.add_argument("--base", type=Path, required=True, help="folder of the warm-up checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--state", type=Path, required=True, help="folder of the resumable state")


def run(args: argparse.Namespace) -> int:
    settings = validate(RunSettings, read_yaml(args.settings), str(args.settings))
    train(settings, method=args.method, base=args.base, out=args.out, state=args.state)
    return 0
