"""The compiled kernels: csrc/*.c, built at first use by the machine's C compiler, and the switch to do without them.

Every compiled function is defined by torch code (kernels.py, quantizer.py, sampling.py) that gives the same bits;
without a working compiler that code runs.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from jetrl_bench import cached

_SOURCES = sorted(Path(__file__).with_name("csrc").glob("*.[ch]"))
_FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
_FILES = [str(s) for s in _SOURCES if s.suffix == ".c"]
_forced_eager = False


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, built at first use into $XDG_CACHE_HOME/jetrl-bench; None without a working compiler."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        cpu = next((line for line in open("/proc/cpuinfo") if line.startswith(("flags", "Features"))), "")
    except OSError:
        cpu = platform.processor()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    texts = [*(s.read_text() for s in _SOURCES), version, *_FLAGS, platform.machine(), cpu]
    key = hashlib.sha256("\0".join(texts).encode())
    folder = cached.folder()
    path = folder / f"kernels-{key.hexdigest()[:16]}.so"
    if not path.exists():
        handle, scratch = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(handle)
        done = subprocess.run([compiler, *_FLAGS, *_FILES, "-o", scratch, "-lm"], capture_output=True, text=True)
        if done.returncode:
            os.unlink(scratch)
            return None
        os.chmod(scratch, 0o755)
        os.replace(scratch, path)
    loaded = ctypes.CDLL(str(path))
    p, i, n, f = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    signatures = {
        "quantize": [p, i, n, p, i, n, p, i, i, i, i, n, p],
        "add_rms_norm": [p, p, p, f, p, p, p, i, i],
        "add_rms_norm_backward": [p, p, p, p, p, p, p, i, i],
        "swiglu": [p, p, i, i],
        "swiglu_backward": [p, p, p, i, i],
        "attention": [p, p, i, p, p, p, p, p, p, p, p],
        "attention_backward": [p, p, p, p, p, p, p, i, p, p, p, p, p],
        "split_heads": [p, p, i, i, p, p, p, p, p, p, p],
        "join_heads": [p, p, p, p, i, i, p, p, p, p],
        "append": [p, p, p, i, p, p, p, p, p, p, i],
        "decode": [p, p, p, i, p, p, p, p, p, p, i, p],
        "token_logprobs": [p, n, p, f, p, p, p, p, p, i, i],
        "token_logprobs_backward": [p, p, n, p, f, p, p, p, i, i],
        "sample": [p, n, p, p, p, p, p, p, i, i],
        "pack_rows": [p, i, i, i, p],
        "pack_columns": [p, i, i, i, p],
        "gemm": [p, i, i, i, p, p, p, i, p, p, n, p, i, p, i],
        "gemm_tokens": [p, i, i, p, p, i, i, p, i, p, p],
    }
    for name, types in signatures.items():
        if (function := getattr(loaded, name, None)) is not None:  # tiles exist on some processors only
            function.argtypes, function.restype = types, None
    return loaded


def backend() -> str:
    """'compiled' or 'eager': what runs on this machine's CPU (same bits)."""
    return "eager" if _forced_eager or library() is None else "compiled"


@contextlib.contextmanager
def eager():
    """Run the defining torch code instead of the compiled kernels (tests)."""
    global _forced_eager
    before, _forced_eager = _forced_eager, True
    try:
        yield
    finally:
        _forced_eager = before


def library_for(x: torch.Tensor) -> ctypes.CDLL | None:
    """The compiled kernels if they serve this tensor."""
    return None if _forced_eager or x.device.type != "cpu" else library()


def ptr(x: torch.Tensor | None) -> int | None:
    """Address of a contiguous tensor, NULL for None."""
    if x is None:
        return None
    assert x.is_contiguous()
    return x.data_ptr()
