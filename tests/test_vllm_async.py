"""vLLM in processes of its own: conformance, in-flight updates over shared memory and gloo, processes that die.

Skipped where vLLM is not installed. The engines are shared: run it on one worker of pytest-xdist (--dist loadfile).
"""

import importlib.util
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from engine_cases import VOCAB, Policies  # noqa: E402
from vllm_cases import FRESH, Borrowed, Pool, start, subject_of, third_bucket  # noqa: E402

from jetrl_bench.conformance import CHECKS, STEPWISE_ONLY, Nonconformance, requests  # noqa: E402
from jetrl_bench.errors import WorkerDied  # noqa: E402
from jetrl_bench.rollout_vllm_async import AsyncVLLMEngine  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def policies():
    torch.set_num_threads(1)
    return Policies()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Two engines of vLLM's own processes, one for each way that weights travel on a CPU."""

    def of(transport):
        folder = tmp_path_factory.mktemp(transport)
        return lambda: start(AsyncVLLMEngine, folder, transport=transport, bucket_bytes=100_000)

    pool = Pool(of("shm"), of("gloo"))
    yield pool
    for i in range(2):
        pool.close(i)


@pytest.mark.parametrize("name", sorted(CHECKS.keys() - STEPWISE_ONLY - {"closes"}, key=lambda n: (n not in FRESH, n)))
def test_async_engine_conforms(policies, processes, name):
    """What must see a fresh engine comes first. Requests go on running between two calls, so a swap lands anywhere."""
    CHECKS[name](subject_of(policies, processes, stepwise=False))


@pytest.mark.parametrize("name", STEPWISE_ONLY)
def test_what_the_async_engine_cannot_promise_is_up_to_date(policies, processes, name):
    """The check fails on it as soon as the caller is slower than the engine."""

    class Late(Borrowed):
        def step(self):
            end = time.monotonic() + 20
            while self.engine._outputs.qsize() < 12 and self.num_unfinished() and time.monotonic() < end:
                time.sleep(0.01)
            return self.engine.step()

    with pytest.raises(Nonconformance):
        CHECKS[name](subject_of(policies, lambda: Late(processes().engine), stepwise=False))


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_a_dead_process_ends_the_run_within_ten_seconds(policies, processes, victim):
    """The worker is killed while it generates, the engine's process in the middle of an update."""
    engine = processes().engine
    engine.load_weights(policies.named(0), version=0, kv="keep")
    (worker,) = engine.health()["workers"]
    with open(f"/proc/{worker['pid']}/stat") as file:
        parent = int(file.read().rsplit(")", 1)[1].split()[1])
    for request in requests(SimpleNamespace(vocab_size=VOCAB), max_tokens=100):
        engine.add(request)
    engine.step()
    started = time.monotonic()
    if victim == "worker":
        os.kill(worker["pid"], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="vLLM engine: a step failed"):
            for _ in range(1000):
                engine.step()
    else:

        def kill(original, kwargs):
            os.kill(parent, signal.SIGKILL)
            return original()

        third_bucket(engine, kill)
        with pytest.raises(WorkerDied, match="weight update to version 1 failed half-way"):
            engine.load_weights(policies.named(1), version=1, kv="keep")
    assert time.monotonic() - started < 10
    assert engine.policy_version == 0
    with pytest.raises(WorkerDied):
        engine.step()
    engine.close()
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}/cmdline") and _running(pid) for pid in (worker["pid"], parent)):
        assert time.monotonic() < end, "a process of the dead engine lives on"
        time.sleep(0.1)


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_async_engine_closes(policies, processes):
    CHECKS["closes"](subject_of(policies, lambda: processes().engine, stepwise=False))
