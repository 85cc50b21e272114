# The validated configuration, the runs it selects, and every function that the other rule files use.
import os
import re
import shlex
import sys
from pathlib import Path

from jetrl_bench import locks, plan
from snakemake.settings.types import DeploymentMethod

CONFIG = plan.from_snakemake(
    config, [*workflow.configfiles, *(["--config"] if workflow.config_settings.config else [])]
)
RUNS = {(run.method, str(run.settings.seed), run.digest): run for run in plan.planned(CONFIG)}
METHODS = list(dict.fromkeys(run.method for run in RUNS.values()))
BASES = list(dict.fromkeys(run.base for run in RUNS.values()))
BENCHMARKS = list(CONFIG.evaluate.benchmarks)
GPUS = CONFIG.train.gpus
TABLES = ["accuracy", "mismatch", "ess", "collapse", "speed_measured", "time_modelled", "inflight", "lag", "paired"]
TABLES += ["sensitivity", "benchmarks", "plumbing", "headline"]
FIGURES = ["reward", "mismatch", "dose", "lag"]
MODELLED = ["phases", "speedup", "timeline", "utilisation", "lag", "break_even"]
RECORDS = [run.folder for run in RUNS.values()]
RUN = "results/runs/{method}/seed{seed}-{digest}"

# `jetrl_bench VERB` in a rule is this checkout's package, by the interpreter that runs Snakemake (no activated shell is
# needed) or the conda environment's, with as many torch threads as the rule has.
python = sys.executable
if DeploymentMethod.CONDA in workflow.deployment_settings.deployment_method:
    python = "python"
command = (
    'set -euo pipefail; export JETRL_THREADS="$OMP_NUM_THREADS";'
    f" export PYTHONPATH={shlex.quote(str(workflow.basedir))}:${{PYTHONPATH:-}};"
    f' jetrl_bench() {{ {shlex.quote(python)} -m jetrl_bench "$@"; }}; '
)
shell.prefix(command.replace("{", "{{").replace("}", "}}"))

# Whoever may take Snakemake's lock is on record before taking it, so that a dead owner can be told from a live one.
if workflow.is_main_process:
    locks.register(Path())


def shipped(*parts):
    """A file of the checkout, as seen from the working folder: moving the checkout re-runs nothing."""
    return os.path.relpath(Path(workflow.basedir, *parts))


def run_of(wildcards):
    return RUNS[wildcards.method, wildcards.seed, wildcards.digest]


def settings_text(wildcards):
    return run_of(wildcards).text()


def base_text(wildcards):
    return plan.base_text(next(run for run in RUNS.values() if run.base == wildcards.base))


def pretrained():
    """Weights of the folder that replaces the warm-up."""
    folder = CONFIG.base.checkpoint
    return [] if folder is None else [f"{folder}/model.safetensors"]


def base_of(wildcards):
    return f"state/base/{run_of(wildcards).base}/base.json"


def runs_of(method):
    return [run for run in RUNS.values() if run.method == method]


def bases_of(method):
    return list(dict.fromkeys(run.base for run in runs_of(method)))


def settings_on_base(wildcards):
    return [f"{run.folder}/settings.json" for run in RUNS.values() if run.base == wildcards.base]


def records(*names):
    """These files of every run."""
    return [f"{run.folder}/{name}" for run in RUNS.values() for name in names]


def evaluations(runs):
    return [f"{run.folder}/eval/{task}.jsonl" for run in runs for task in [run.settings.task.name, *BENCHMARKS]]
