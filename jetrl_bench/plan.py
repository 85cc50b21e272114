"""From a configuration to the runs that the workflow plans; torch-free, and never asks what this machine can run."""

import argparse
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from jetrl_bench import record
from jetrl_bench.config import Config, RunSettings, load
from jetrl_bench.data import data_set
from jetrl_bench.strict import validate


@dataclass(frozen=True)
class PlannedRun:
    """One (method, seed): where its record and its warm-up checkpoint stand."""

    method: str
    settings: RunSettings
    digest: str
    base: str

    @property
    def folder(self) -> str:
        return f"results/runs/{self.method}/seed{self.settings.seed}-{self.digest}"

    @property
    def base_folder(self) -> str:
        return f"state/base/{self.base}"

    @property
    def work(self) -> int:
        """Tokens trained on, times rollout and training: only for ordering jobs, longest first."""
        train, task = self.settings.train, self.settings.task
        tokens = 3 * (task.min_steps + task.max_steps) // 2 * task.cycles
        quantised = [self.settings.method.flow.rollout, self.settings.method.flow.train].count("fp8")
        return train.optimizer_steps * train.samples_per_update * tokens * (10 + quantised)

    def text(self) -> str:
        """The resolved settings, one canonical JSON line: what `train` reads."""
        return record.dumps(self.settings)


def planned(config: Config) -> list[PlannedRun]:
    """Every selected run, once, in the configuration's order; ValueError where two names are one run."""
    runs = [
        PlannedRun(method, settings, digest, settings.base_digest())
        for (method, _, digest), settings in config.runs().items()
    ]
    names: dict[str, str] = {}
    for run in runs:
        if names.setdefault(run.digest, run.method) != run.method:
            raise ValueError(
                f"methods {names[run.digest]!r} and {run.method!r} are one run, digest {run.digest}: keep one name"
            )
    return runs


def base_text(run: PlannedRun) -> str:
    """What decides a warm-up checkpoint, one canonical JSON line: what `base` reads."""
    return record.dumps(run.settings.model_dump(mode="json", include={"base_index", "base", "model"}))


def evaluate_text(config: Config) -> str:
    """What `evaluate` reads: the settings of all runs, and by digest how many held-out problems where that differs."""
    counts: dict[str, int] = {}
    for name, experiment in config.selected().items():
        for _, settings in config.experiment_runs(name):
            digest, count = settings.digest(), experiment.problems or config.evaluate.problems
            counts[digest] = max(count, counts.get(digest, 0))
    problems = {digest: count for digest, count in counts.items() if count != config.evaluate.problems}
    evaluate = config.evaluate.model_dump(mode="json")
    return record.dumps({"evaluate": evaluate, "strict": config.strict, "problems": problems})


def config_text(config: Config) -> str:
    """The whole configuration, merged and checked, one JSON line: what tables, figures and claims read."""
    return record.dumps(config)


def from_snakemake(config: dict, files: list[str]) -> Config:
    """Validate the mapping that Snakemake merged; end with one line on stderr where it is refused."""
    try:
        names = [os.path.relpath(name) if os.path.isabs(name) else str(name) for name in files]
        checked = validate(Config, config, ", ".join(dict.fromkeys(names)))
        planned(checked)
        return checked
    except ValueError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def found_data(folder: str | None, names: list[str]) -> dict[str, str]:
    """name -> SHA-256 of the file that `folder` holds for it, or "absent"; a parameter of rule data."""
    out = {}
    for name in names:
        path = Path(folder) / f"{data_set(name).name}.jsonl" if folder else None
        out[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path and path.is_file() else "absent"
    return out


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """--config FILES and --set KEY=VALUE, as every verb that reads a configuration takes them."""
    parser.add_argument("--config", nargs="+", default=["config/config.yaml"], metavar="FILE", help="later files win")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides, e.g. lr=1e-6 train.seed=1"
    )


def config_of(args: argparse.Namespace) -> Config:
    return load(args.config, overrides(args.set))


def overrides(pairs: list[str]) -> dict:
    """['lr=1e-6', 'train.group_size=4'] as a nested mapping; values are YAML."""
    import yaml

    out: dict = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {pair!r}: expected KEY=VALUE, e.g. lr=1e-6")
        *parents, last = key.split(".")
        inner = out
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = yaml.safe_load(value)
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--out", type=Path, help="write FOLDER/results/runs/.../settings.json for every run")
    parser.add_argument("--json", action="store_true", help="print one JSON line a run instead of a list")


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    runs = planned(config)
    if args.out:
        for item in runs:
            record.write_text(args.out / item.folder / "settings.json", item.text() + "\n")
    for item in runs:
        if args.json:
            print(
                json.dumps(
                    {
                        "method": item.method,
                        "seed": item.settings.seed,
                        "digest": item.digest,
                        "base": item.base,
                        "folder": item.folder,
                        "settings": item.settings.model_dump(mode="json"),
                    },
                    sort_keys=True,
                )
            )
        else:
            print(f"{item.digest}  base {item.base}  seed {item.settings.seed}  {item.method}")
    if not args.json:
        print(f"{len(runs)} runs on {len({item.base for item in runs})} warm-up checkpoints; select {config.select}")
    return 0
