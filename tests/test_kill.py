"""SIGKILL of the whole process group, Snakemake included: the next run ends in the same bytes.

A reference run of two methods is made once; every moment starts from a copy of it in which one method is still to be
done, is killed there, is unlocked as `make run` does it, and runs again.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
METHODS = ("bf16", "inflight_keep")
SETTINGS = {
    "experiments": {"kill": {"methods": list(METHODS), "settings": {"task": {"min_steps": 1, "max_steps": 2}}}},
    "select": ["kill"],
    "base": {"max_updates": 40},
    "train": {"optimizer_steps": 12, "state_every": 4},
    "evaluate": {"problems": 48, "benchmarks": []},
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the moments through /proc"),
]


def start(folder: Path, cores: int, targets: list[str], **environment) -> subprocess.Popen:
    files = [ROOT / "config" / "smoke.yaml", folder / "kill.yaml"]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", folder),
            *(
                "--workflow-profile",
                ROOT / "profiles" / "default",
                "--cores",
                str(cores),
                *targets,
                "--configfile",
                *files,
            ),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "kill"), "KILLED": str(folder / "killed"), **environment},
        stdout=open(folder / "snakemake.log", "w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(folder: Path, cores: int = 2, targets: list[str] | None = None) -> None:
    code = start(folder, cores, targets or [f"evaluate_{method}" for method in METHODS]).wait(timeout=600)
    assert code == 0, (folder / "snakemake.log").read_text()


def products(folder: Path) -> dict[str, bytes]:
    """What must be equal: every deterministic file of the records."""
    names = ("train.jsonl", "model.safetensors", "chain.jsonl")
    paths = [path for path in sorted((folder / "results" / "runs").rglob("*")) if path.name in names]
    assert len(paths) == 3 * len(METHODS)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "kill.yaml").write_text(yaml.safe_dump(SETTINGS))
    finish(folder)
    return folder


def unfinished(reference: Path, folder: Path, method: str, *parts: str) -> None:
    """A copy of the reference in which these parts of a method's record are still to be made."""
    shutil.copytree(reference, folder, dirs_exist_ok=True)
    for part in parts:
        for path in (folder / "results" / "runs" / method).glob(f"seed*/{part}"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if "manifest.json" not in parts:
        shutil.rmtree(folder / "state" / "evaluate")


TRAINING = ("manifest.json", "train.jsonl", "timing.jsonl", "checkpoint", "eval")
MOMENTS = [
    pytest.param("bf16", TRAINING, r"fsync /\.step-\d+\.\d+/ 2", id="in the first state write"),
    pytest.param("inflight_keep", TRAINING, r"fsync /\.step-\d+\.\d+/ 5", id="in a later state write"),
    pytest.param("inflight_keep", TRAINING, r"replace manifest\.json$ 1", id="between data and manifest"),
    pytest.param("bf16", ("eval",), r"replace state/evaluate/ 2", id="in evaluation"),
]


@pytest.mark.parametrize(("method", "parts", "moment"), MOMENTS)
def test_killed_at_a_chosen_moment(reference, tmp_path, method, parts, moment):
    unfinished(reference, tmp_path, method, *parts)
    code = start(tmp_path, 2, [f"evaluate_{method}"], KILL_AT=moment).wait(timeout=600)
    assert code == -signal.SIGKILL, (tmp_path / "snakemake.log").read_text()
    assert (tmp_path / "killed").exists()
    again(tmp_path, reference)


@pytest.mark.parametrize("number", range(4))
def test_killed_at_a_random_moment(reference, tmp_path, number):
    """Between the start of training and its end; the moments differ from run to run of the tests, and are printed."""
    method = METHODS[number % 2]
    unfinished(reference, tmp_path, method, *TRAINING)
    process = start(tmp_path, 2, [f"evaluate_{method}"])
    while process.poll() is None and not list((tmp_path / "state").glob("[0-9a-f]*/attempts")):
        time.sleep(0.01)
    delay = random.uniform(0.0, 1.5)
    print(f"killed {delay:.3f} s after the start of training")
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again(tmp_path, reference)


def again(folder: Path, reference: Path) -> None:
    locked = any((folder / ".snakemake" / "locks").glob("*.lock"))
    done = subprocess.run(
        [sys.executable, "-m", "jetrl_bench", "unlock", "--folder", folder],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ("which is dead" in done.stdout) is locked
    finish(folder)
    assert products(folder) == products(reference)


def test_one_job_at_a_time_gives_the_same_bytes(reference, tmp_path):
    (tmp_path / "kill.yaml").write_text(yaml.safe_dump(SETTINGS))
    finish(tmp_path, cores=1)
    assert products(tmp_path) == products(reference)


def test_an_edited_setting_starts_fresh(reference, tmp_path):
    """Half a run of other settings, left behind in state/, is not resumed from."""
    unfinished(reference, tmp_path, "bf16", *TRAINING)
    code = start(tmp_path, 2, ["evaluate_bf16"], KILL_AT=r"fsync /\.step-\d+\.\d+/ 5").wait(timeout=600)
    assert code == -signal.SIGKILL
    states = {path.name for path in (tmp_path / "state").iterdir()}
    shutil.rmtree(tmp_path / ".snakemake" / "locks")
    (tmp_path / "kill.yaml").write_text(yaml.safe_dump({**SETTINGS, "lr": 4e-4}))
    finish(tmp_path, targets=["evaluate_bf16"])
    one, two = sorted((tmp_path / "results" / "runs" / "bf16").glob("seed0-*/train.jsonl")), products(reference)
    assert len(one) == 1, "the other digest has its own folder"
    assert one[0].read_bytes() not in two.values()
    assert {path.name for path in (tmp_path / "state").iterdir()} >= states - {"evaluate", "base"}
