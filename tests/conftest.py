"""One thread per process, no network, the data sets only where JETRL_DATA_DIR is set."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

REPOSITORY = Path(__file__).parent.parent


def pytest_collection_modifyitems(items):
    if os.environ.get("JETRL_DATA_DIR"):
        return
    for item in items:
        if item.get_closest_marker("data"):
            item.add_marker(pytest.mark.skip(reason="JETRL_DATA_DIR is not set"))


@pytest.fixture
def repository() -> Path:
    return REPOSITORY


@pytest.fixture
def cli():
    """Run `python -m jetrl_bench ...`; returns the completed process with its text."""

    def run(*args, cwd: Path = REPOSITORY, **environment) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "jetrl_bench", *map(str, args)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return run
