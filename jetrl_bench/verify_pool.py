"""Killable worker processes for math-verify.

A worker is a plain subprocess speaking one JSON line per pair on its pipes: no pickling, no fork of a threaded parent,
no re-import of __main__. The limit is CPU time, set by the kernel (ITIMER_PROF with the default action: the process
ends, whatever code it is in), so that a verdict does not depend on the machine's load; memory is limited by RLIMIT_AS,
and a wall-clock backstop ends a worker that sleeps. No signal handler exists anywhere, so any thread, asyncio executor
or process with alarms of its own may call the pool. A lost worker is replaced; the pool keeps its size.
"""

import atexit
import contextlib
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

from jetrl_bench import verify_math
from jetrl_bench.verify_text import brace_arguments

MATH_VERIFY = "0.9.0"
"""The pinned grader: 0.8 and 0.9 disagree on percentages (Math-Verify#61), so a score names its grader's version."""
CPU_LIMIT_S = 3.0
WALL_LIMIT_S = 60.0
START_LIMIT_S = 120.0
MEMORY_LIMIT = 2 << 30


def math_verify_equal(gold: str, answer: str) -> bool:
    """math-verify on two `$`-wrapped answers, without its fallbacks, its unit stripping, and its rounding of numbers.

    (Its unit stripping reads "a + b + c" as "a" and drops the t of "\\sin^2 t".) A letter i is the imaginary unit.
    """
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(normalization_config=NormalizationConfig(nits=True, boxed="none"))]
    parsed = []
    for text in (gold, answer):
        if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text):
            text = re.sub(r"([0-9.]+)\s*\^\s*\\circ(?![A-Za-z])", r"{\\frac{\1\\pi}{180}}", text)
        values = parse(f"${brace_arguments(text)}$", config, "no_fallback", parsing_timeout=None)
        if not values:
            return False
        value = values[0]
        if isinstance(value, sympy.Basic) and not re.search(r"\\(?:sum|prod)|_\{?i", text):
            value = value.subs({symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"})
        parsed.append(value)
    if not verify(*parsed, float_rounding=12, timeout_seconds=None, raise_on_error=True):
        return False
    if all(isinstance(value, sympy.Expr) and value.is_number for value in parsed):
        rational = [v.replace(lambda e: e.is_Float, lambda e: sympy.Rational(str(e))).doit() for v in parsed]
        first, second = (sympy.N(value, 60) for value in rational)
        if first.is_finite and second.is_finite:
            return bool(abs(first - second) <= abs(first) * sympy.Float(10) ** -40)
    return True


def _worker() -> None:
    import resource

    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    math_verify_equal(r"\sqrt{2}", r"\frac{2}{\sqrt{2}}")  # imports and caches, outside every limit
    cpu_limit, memory_limit = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies.write(json.dumps({"ready": version("math-verify")}) + "\n")
    replies.flush()
    for line in requests:
        pair = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit)
        try:
            if pair["answer"] is None:
                problem = verify_math.gold_problem(pair["gold"], math_verify_equal)
                reply = {"status": "wrong" if problem else "correct", "detail": problem}
            else:
                equal = verify_math.compare(pair["gold"], pair["answer"], math_verify_equal)
                reply = {"status": "correct" if equal else "wrong", "detail": "math-verify"}
        except Exception as error:
            reply = {"status": "error", "detail": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class _Worker:
    def __init__(self, cpu_limit_s: float, memory_limit: int):
        root = str(Path(__file__).resolve().parent.parent)
        code = f"import sys; sys.path.insert(0, {root!r}); from jetrl_bench.verify_pool import _worker; _worker()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(cpu_limit_s), str(memory_limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.buffer = b""
        self.ready = False

    def start(self) -> None:
        reply = self.read(START_LIMIT_S)
        if reply is None:
            self.stop()
            error = self.process.stderr.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"an answer-checking process did not start: {error[-1] if error else 'no message'}")
        if reply["ready"] != MATH_VERIFY:
            self.stop()
            raise ValueError(f"math-verify {reply['ready']} is installed, scores are defined with {MATH_VERIFY}")
        self.ready = True

    def read(self, limit_s: float) -> dict | None:
        """One reply; None where the process ended or the wall limit passed."""
        while b"\n" not in self.buffer:
            if not select.select([self.process.stdout], [], [], limit_s)[0]:
                return None
            block = os.read(self.process.stdout.fileno(), 1 << 16)
            if not block:
                return None
            self.buffer += block
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def ask(self, gold: str, answer: str | None) -> dict:
        try:
            self.process.stdin.write(json.dumps({"gold": gold, "answer": answer}).encode() + b"\n")
            self.process.stdin.flush()
            reply = self.read(WALL_LIMIT_S)
        except BrokenPipeError:
            reply = None
        if reply is not None:
            return reply
        killed = self.stop()
        if killed or self.process.returncode == -signal.SIGPROF:
            return {"status": "timeout", "detail": "wall-clock limit" if killed else "CPU time limit"}
        return {"status": "error", "detail": f"the checking process ended with code {self.process.returncode}"}

    def stop(self, grace_s: float = 0.2) -> bool:
        """End the process; True where it had to be killed."""
        try:
            self.process.wait(grace_s)
            killed = False
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            killed = True
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return killed

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class Pool:
    """`size` worker processes, started on first use. `check` blocks; call it from as many threads as you like."""

    def __init__(self, size: int | None = None, *, cpu_limit_s: float = CPU_LIMIT_S, memory_limit: int = MEMORY_LIMIT):
        self.size = size or len(os.sched_getaffinity(0))
        self.cpu_limit_s, self.memory_limit = cpu_limit_s, memory_limit
        self.process_id = os.getpid()
        self.slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.size):
            self.slots.put(None)
        atexit.register(self.close)

    def check(self, gold: str, answer: str | None) -> dict:
        """{"status", "detail"} of a normalised pair; answer None asks whether the gold itself parses."""
        worker = self.slots.get()
        try:
            if worker is None or not worker.alive:
                worker = _Worker(self.cpu_limit_s, self.memory_limit)
            if not worker.ready:
                worker.start()
            reply = worker.ask(gold, answer)
            if worker.alive and reply["detail"].startswith(("MemoryError", "RecursionError")):
                worker.stop(0)
            return reply
        finally:
            self.slots.put(worker if worker is not None and worker.alive else None)

    def close(self) -> None:
        if os.getpid() != self.process_id:
            return
        for _ in range(self.slots.qsize()):
            worker = self.slots.get_nowait()
            if worker is not None and worker.alive:
                worker.stop(0)
            self.slots.put(None)


_lock = threading.Lock()
_default: Pool | None = None


def default_pool() -> Pool:
    """The process's own pool; a forked child gets a new one."""
    global _default
    with _lock:
        if _default is None or _default.process_id != os.getpid():
            _default = Pool()
        return _default
