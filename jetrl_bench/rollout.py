"""The rollout interface and ReferenceEngine: token-level continuous batching on one process, deterministic and exact.

One `step()` admits waiting requests into free slots, in the order they were added, and decodes one token for every
running slot. New weights may be loaded between any two steps: that *is* the in-flight update. Every token records the
version of the weights that sampled it. With kv "keep" the cache still holds what older weights computed; "recompute"
fills it again under the new ones.

A token's draw and log-prob depend on the request alone (its seed, its tokens, the versions), never on slot, order or
batch: GEMMs and attention are row-invariant and the uniform of token t is a function of (request seed, t).

Shapes: R running slots, L response tokens, V vocabulary.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

from jetrl_bench import kernels, sampling
from jetrl_bench.config import ModelConfig
from jetrl_bench.kernels import Heads, KVCache
from jetrl_bench.layers import Inference, run_layers
from jetrl_bench.model import check_manifest, manifest, prepare, rope_table
from jetrl_bench.precision import PrecisionFlow

PREFILL_TOKENS = 8192
"""Tokens of one packed prefill; a memory limit, no effect on any value."""


@dataclass(frozen=True)
class Request:
    """One completion to sample; `seed` alone decides its random numbers. temperature 0 is greedy."""

    request_id: int
    problem_id: int
    sample: int
    token_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...] = ()


@dataclass
class Completion:
    """What was sampled, stop token included, with the log-probs of the distribution sampled from (fp32 values; greedy:
    at temperature 1) and the version of the weights behind each token."""

    request_id: int
    problem_id: int
    sample: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length"]
    log_softmax: torch.Tensor | None = None
    """fp32 [L, V] where the engine records it."""


class SyncStats(NamedTuple):
    version: int
    num_tensors: int
    num_bytes: int
    recomputed_tokens: int


class RolloutEngine(Protocol):
    """What the training loop drives."""

    policy_version: int
    resume: Literal["exact", "drained"]

    def add(self, request: Request) -> None: ...
    def step(self) -> list[Completion]: ...
    def load_weights(
        self, named: Iterable[tuple[str, torch.Tensor]], *, version: int, kv: Literal["keep", "recompute"]
    ) -> SyncStats: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> None: ...
    def num_unfinished(self) -> int: ...
    def close(self) -> None: ...


@dataclass
class _Running:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    full: list[torch.Tensor] = field(default_factory=list)


class ReferenceEngine:
    """Continuous batching over `max_slots` slots of `max_len` tokens (prompt and response)."""

    resume: Literal["exact"] = "exact"

    def __init__(
        self, cfg: ModelConfig, vocab_size: int, flow: PrecisionFlow, *, max_slots: int, max_len: int,
        record_full: bool = False, device: torch.device | str = "cpu",
    ):  # fmt: skip
        kernels.check_length(max_len, cfg.max_position)
        self.cfg, self.vocab_size, self.flow = cfg, vocab_size, flow
        self.max_slots, self.max_len, self.record_full = max_slots, max_len, record_full
        self.device = torch.device(device)
        self.policy_version = -1
        self._side = flow.rollout_side
        self._ops = Inference(self._side)
        self._kernels = self._ops.kernels
        self._heads = Heads(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)
        self._rope = rope_table(cfg, self.device)
        self._manifest = manifest(cfg, vocab_size)
        length = max_len + -max_len % 16
        shape = (max_slots, cfg.num_kv_heads)
        self._caches = [
            KVCache(
                torch.zeros(*shape, cfg.head_dim, length, dtype=self._side.dtype, device=self.device),
                torch.zeros(*shape, length, cfg.head_dim, dtype=self._side.dtype, device=self.device),
            )
            for _ in range(cfg.num_layers)
        ]
        self._waiting: deque[Request] = deque()
        self._pending: list[tuple] = []
        self._running: dict[int, _Running] = {}
        self._received: dict[str, torch.Tensor] = {}
        self._weights = None
        self._refresh()

    # -------------------------------------------------------------------------------------------- requests

    def add(self, request: Request) -> None:
        """Queue a request; prompts that are empty, hold unknown tokens or do not fit are refused."""
        n = len(request.token_ids)
        where = f"request {request.request_id}"
        if n == 0:
            raise ValueError(f"{where}: the prompt is empty")
        if request.max_tokens < 1:
            raise ValueError(f"{where}: max_tokens {request.max_tokens} is below 1")
        if n + request.max_tokens > self.max_len:
            raise ValueError(
                f"{where}: {n} prompt tokens and {request.max_tokens} new ones exceed the engine's {self.max_len}"
            )
        if min(request.token_ids) < 0 or max(request.token_ids) >= self.vocab_size:
            raise ValueError(f"{where}: a token id lies outside 0..{self.vocab_size - 1}")
        self._waiting.append(request)

    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def num_running(self) -> int:
        return len(self._running)

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._caches, self._weights, self._received = [], None, {}

    # -------------------------------------------------------------------------------------------- weights

    def load_weights(
        self, named: Iterable[tuple[str, torch.Tensor]], *, version: int, kv: Literal["keep", "recompute"]
    ) -> SyncStats:
        """Replace the weights by flow.export's tensors. All or nothing: on any error the engine keeps its weights and
        its version. kv "recompute" computes the cache of every running sequence again."""
        if kv not in ("keep", "recompute"):
            raise ValueError(f"kv {kv!r} is not valid; known: keep, recompute")
        where = f"weight update to version {version}"
        received: dict[str, torch.Tensor] = {}
        for name, tensor in named:
            if name in received:
                raise ValueError(f"{where}: tensor {name} came twice")
            if tensor.dtype != self._side.dtype:
                raise ValueError(f"{where}: tensor {name} is {tensor.dtype}, expected {self._side.dtype} of the master")
            received[name] = tensor.to(self.device)
        check_manifest(self._manifest, received, where)
        for name, tensor in received.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{where}: tensor {name} holds NaN or inf")
        self._weights = prepare(self.cfg, received, self._side)
        self._received = received
        self.policy_version = version
        tokens = 0
        self._settle()
        if kv == "recompute" and self._running:
            tokens = self._prefill({s: [*r.request.token_ids, *r.token_ids][:-1] for s, r in self._running.items()})
        return SyncStats(version, len(received), sum(t.nbytes for t in received.values()), tokens)

    # -------------------------------------------------------------------------------------------- generation

    def step(self) -> list[Completion]:
        """Admit, decode one token in every running slot, and return what finished, in slot order."""
        if self._weights is None:
            raise ValueError("the engine has no weights yet: call load_weights first")
        self._admit()
        if not self._running:
            return []
        R = len(self._order)
        h, delta = run_layers(self.cfg, self._weights, self._last, self._ops, self._attend)
        y = self._ops.norm(h, delta, self._weights.norm, self.cfg.norm_eps)[1]
        logits = self._ops.head(y, self._weights.head)
        full = self._empty(R, self.vocab_size) if self.record_full else None
        sampling.sample(logits, self._temperatures, self._seeds, self._counts, self._last, self._logprobs, full)
        self._positions += 1
        self._counts += 1
        tokens = self._last.tolist()
        self._pending.append((tokens, self._logprobs.tolist(), self.policy_version, full))
        stopped = [i for i, token in enumerate(tokens) if token in self._stops[i]]
        if not stopped and len(self._pending) < self._shortest:
            return []
        self._settle()
        finished = {self._order[i]: "stop" for i in stopped}
        for slot, run in self._running.items():
            if len(run.token_ids) == run.request.max_tokens:
                finished.setdefault(slot, "length")
        done = [self._complete(self._running.pop(slot), finished[slot]) for slot in sorted(finished)]
        self._refresh()
        return done

    def _settle(self) -> None:
        """Hand the pending steps' tokens, log-probs and versions to the sequences they belong to."""
        for tokens, logprobs, version, full in self._pending:
            for i, slot in enumerate(self._order):
                run = self._running[slot]
                run.token_ids.append(tokens[i])
                run.logprobs.append(logprobs[i])
                run.versions.append(version)
                if full is not None:
                    run.full.append(full[i])
        self._shortest -= len(self._pending)  # steps until a sequence reaches its limit
        self._pending = []

    def _complete(self, run: _Running, reason: str) -> Completion:
        r = run.request
        return Completion(
            r.request_id, r.problem_id, r.sample, list(r.token_ids), run.token_ids, run.logprobs, run.versions, reason,
            torch.stack(run.full).cpu() if self.record_full else None,
        )  # fmt: skip

    def _attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        return self._kernels.decode(
            qkv, self._slots, self._positions, self._heads, *self._rope, self._side.kv, self._caches[layer], self._out
        )

    def _admit(self) -> None:
        """Waiting requests, oldest first, into free slots; the prompt's last token is left to the decode step."""
        if not self._waiting or len(self._running) == self.max_slots:
            return
        self._settle()
        free = [s for s in range(self.max_slots) if s not in self._running]
        admitted = {}
        for slot in free:
            if not self._waiting:
                break
            request = self._waiting.popleft()
            self._running[slot] = _Running(request)
            admitted[slot] = request.token_ids[:-1]
        self._prefill(admitted)
        self._refresh()

    def _prefill(self, sequences: dict[int, list[int]]) -> int:
        """Compute the cache of slot -> tokens; equal token lists once, then copied. Returns the tokens computed."""
        first: dict[tuple[int, ...], int] = {}
        copies = []
        for slot, tokens in sequences.items():
            if tokens:
                source = first.setdefault(tuple(tokens), slot)
                if source != slot:
                    copies.append((slot, source, len(tokens)))
        chunk: list[tuple[int, tuple[int, ...]]] = []
        total = 0
        for tokens, slot in first.items():
            if chunk and total + len(tokens) > PREFILL_TOKENS:
                self._prefill_packed(chunk)
                chunk, total = [], 0
            chunk.append((slot, tokens))
            total += len(tokens)
        if chunk:
            self._prefill_packed(chunk)
        if copies:
            slots, sources, lengths = (list(c) for c in zip(*copies))
            n = max(lengths)
            for keys, values in self._caches:
                keys[slots, :, :, :n] = keys[sources, :, :, :n]
                values[slots, :, :n] = values[sources, :, :n]
        return sum(len(t) for t in first)

    def _prefill_packed(self, chunk: list[tuple[int, tuple[int, ...]]]) -> None:
        ids = self._ints([t for _, tokens in chunk for t in tokens])
        starts = self._ints([0, *np.cumsum([len(tokens) for _, tokens in chunk])])
        slots = self._ints([slot for slot, tokens in chunk for _ in tokens])
        positions = self._ints([p for _, tokens in chunk for p in range(len(tokens))])

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            self._kernels.append(qkv, slots, positions, self._heads, *self._rope, self._side.kv, self._caches[layer])
            return self._ops.attention(qkv, starts, self._heads, *self._rope, self._side.kv)

        run_layers(self.cfg, self._weights, ids, self._ops, attend)

    def _refresh(self) -> None:
        """Rebuild the per-slot tensors after slots were filled or freed."""
        assert not self._pending
        self._order = sorted(self._running)
        runs = [self._running[s] for s in self._order]
        R = len(runs)
        self._slots = self._ints(self._order)
        self._positions = self._ints([len(r.request.token_ids) + len(r.token_ids) - 1 for r in runs])
        self._counts = self._ints([len(r.token_ids) for r in runs])
        self._last = self._ints([(r.token_ids or r.request.token_ids)[-1] for r in runs])
        self._seeds = self._ints([r.request.seed for r in runs])
        temperatures = [r.request.temperature for r in runs]
        self._temperatures = torch.tensor(temperatures, dtype=torch.float32, device=self.device)
        self._stops = [frozenset(r.request.stop_ids) for r in runs]
        self._shortest = min((r.request.max_tokens - len(r.token_ids) for r in runs), default=0)
        self._logprobs = self._empty(R)
        self._out = self._empty(R, self._heads.num_heads * self._heads.head_dim, dtype=self._side.dtype)

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    # -------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict:
        """Everything a fresh engine needs to continue to the same bytes; copies, safe to keep across steps."""
        self._settle()
        return {
            "policy_version": self.policy_version,
            "weights": dict(self._received),
            "waiting": [asdict(r) for r in self._waiting],
            "running": {
                slot: {
                    "request": asdict(r.request), "token_ids": list(r.token_ids), "logprobs": list(r.logprobs),
                    "versions": list(r.versions), "full": list(r.full),
                    "keys": [c.keys[slot].clone() for c in self._caches],
                    "values": [c.values[slot].clone() for c in self._caches],
                }
                for slot, r in self._running.items()
            },
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> None:
        """Continue from state_dict() of an engine of the same model, flow, slots and length."""
        for slot, r in state["running"].items():
            if slot >= self.max_slots or r["values"][0].shape != self._caches[0].values[0].shape:
                raise ValueError("engine state was saved with other max_slots or max_len")
        if state["weights"]:
            self.load_weights(state["weights"].items(), version=state["policy_version"], kv="keep")
        self._pending = []
        self._waiting = deque(_request(r) for r in state["waiting"])
        self._running = {}
        for slot, r in state["running"].items():
            self._running[slot] = _Running(
                _request(r["request"]), list(r["token_ids"]), list(r["logprobs"]), list(r["versions"]), list(r["full"])
            )
            for cache, keys, values in zip(self._caches, r["keys"], r["values"]):
                cache.keys[slot], cache.values[slot] = keys, values
        self._refresh()


def _request(raw: dict) -> Request:
    return Request(**{**raw, "stop_ids": tuple(raw["stop_ids"])})
