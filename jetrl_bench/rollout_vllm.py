"""vLLM behind the rollout interface (rollout.py), one scheduler step of vLLM at a time in this process.

`Engine` is what both forms share, and `VLLMEngine` the form that the training loop uses: nothing moves between two
steps, and the same requests give the same tokens whatever else ran. The other form is rollout_vllm_async.py.

A weight update is a transaction: every worker compares the manifest with the weights it was started with (a difference
is refused and nothing has happened); generation pauses and keeps its requests; buckets travel and are loaded layer by
layer; every worker confirms; only then is the version raised and generation resumed. Layers hold no usable weights in
the middle of this, so any failure between the first and the last bucket poisons the engine: it says why, and never
generates again.
"""

import contextlib
import importlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from jetrl_bench import model
from jetrl_bench.config import ModelConfig
from jetrl_bench.errors import WorkerDied
from jetrl_bench.record import write_json
from jetrl_bench.rollout import Completion, Request, SyncStats
from jetrl_bench.vllm_flow import checkpoint_format, engine_settings, is_native, read_back
from jetrl_bench.vllm_process import Watchdog, probe, untouched_process
from jetrl_bench.vllm_transfer import BUCKET_BYTES, Channel, Entry, Transport, buckets, check_manifest, to_wire

EXTENSION = "jetrl_bench.vllm_plugin.WorkerExtension"
PREFILL_TOKENS = 2048
"""Prompt tokens of one step on a CPU."""
CPU_BLOCK = 32
"""Tokens of a KV block on a CPU; vLLM's attention there wants a multiple of 32."""


def make_vllm_engine(
    cfg: ModelConfig,
    vocab_size: int,
    flow,
    named: Iterable[tuple[str, Tensor]],
    *,
    version: int,
    max_slots: int,
    max_len: int,
    folder: Path,
    **options,
) -> "VLLMEngine":
    """A ready engine that holds flow.export(named) as `version`; `folder` receives the model's config.json."""
    engine = VLLMEngine(cfg, vocab_size, flow, max_slots=max_slots, max_len=max_len, folder=folder, **options)
    engine.load_weights(flow.export(named), version=version, kv="keep")
    return engine


class _Live:
    """A request under way."""

    def __init__(self, request: Request):
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    def extend(self, output, version: int) -> None:
        """Take a DELTA output: its tokens, and the log-probability of each under the distribution it was drawn from."""
        self.token_ids += output.token_ids
        self.logprobs += [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)]
        self.versions += [version] * len(output.token_ids)

    def complete(self, output) -> Completion:
        # vLLM's own account of which weights wrote which token, exact in both forms.
        spans = [[int(span.version)] * (span.end - span.start) for span in output.weight_versions]
        versions = [version for span in spans for version in span]
        assert len(versions) == len(self.token_ids) == len(self.logprobs)
        request = self.request
        return Completion(
            request_id=request.request_id,
            problem_id=request.problem_id,
            sample=request.sample,
            prompt_ids=list(request.token_ids),
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=versions,
            finish_reason=output.finish_reason,
            log_softmax=None,
        )


class Engine:
    """What both forms share: admission, the transaction, poisoning, the drained state."""

    resume: Literal["drained"] = "drained"
    """No KV cache is saved: the state of an engine is taken when nothing is unfinished."""

    def __init__(
        self,
        cfg: ModelConfig,
        vocab_size: int,
        flow,
        *,
        max_slots: int,
        max_len: int,
        folder: Path,
        transport: Transport,
        bucket_bytes: int = BUCKET_BYTES,
        deadline_s: float = 300.0,
        allow_preemption: bool = False,
        **engine_args,
    ):
        """allow_preemption: run although not every slot's max_len tokens fit the KV cache. vLLM then drops a sequence's
        cache and computes it again, under the weights of that moment: kv "keep" no longer holds for such a sequence."""
        self.vllm_version = probe()
        importlib.import_module("jetrl_bench.vllm_plugin").register()
        self.cfg, self.vocab_size, self.flow = cfg, vocab_size, flow
        self.max_slots, self.max_len = max_slots, max_len
        self.bucket_bytes, self.deadline_s, self._allow_preemption = bucket_bytes, deadline_s, allow_preemption
        self.policy_version = -1
        """-1 until the first weights are loaded."""
        self.poisoned: str | None = None
        self._live: dict[str, _Live] = {}
        self._weights: list[tuple[str, Tensor]] = []
        """What the workers hold, as it was sent: an engine's state is complete without the trainer's."""
        self._shapes = model.manifest(cfg, vocab_size)
        self._expected: list[Entry] | None = None
        self._progress = time.monotonic()
        settings = engine_settings(flow, cfg, vocab_size)
        write_json(Path(folder) / "config.json", settings.hf_config)
        os.environ.update(settings.environment)
        self._args = {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "max_model_len": max_len,
            "max_num_seqs": max_slots,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": False,
            "async_scheduling": False,
            "worker_extension_cls": EXTENSION,
            "disable_log_stats": True,
            **settings.engine_args,
            **engine_args,
        }
        if not torch.cuda.is_available():
            per_token = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * 4
            blocks = max_slots * (-(-max_len // CPU_BLOCK) + 1)
            room = blocks * CPU_BLOCK * per_token
            self._args = {
                "enforce_eager": True,
                # A prompt cut in two makes vLLM take back the first part's draw, which CPU generators cannot.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(PREFILL_TOKENS, max_len),
                "block_size": CPU_BLOCK,
                "kv_cache_memory_bytes": room,
                **self._args,
            }
        self._transport = transport

    def _check_room(self, cache) -> None:
        room, needed = cache.num_gpu_blocks * cache.block_size, self.max_slots * self.max_len
        if room < needed and not self._allow_preemption:
            with contextlib.suppress(Exception):
                self._shutdown()
            raise ValueError(
                f"vLLM's KV cache holds {room} tokens, {self.max_slots} slots of {self.max_len} need {needed}: raise "
                "gpu_memory_utilization, lower the slots, or allow_preemption"
            )

    # ------------------------------------------------------------------ requests
    def add(self, request: Request) -> None:
        self._alive()
        if self.policy_version < 0:
            raise ValueError("the engine holds no weights yet: call load_weights first")
        key = str(request.request_id)
        if key in self._live:
            raise ValueError(f"request {request.request_id} is already running")
        if not request.token_ids:
            raise ValueError(f"request {request.request_id} has an empty prompt")
        if len(request.token_ids) + request.max_tokens > self.max_len:
            raise ValueError(
                f"request {request.request_id}: prompt {len(request.token_ids)} + max_tokens {request.max_tokens} "
                f"exceed max_len {self.max_len}"
            )
        bad = [t for t in request.token_ids if not 0 <= t < self.vocab_size]
        if bad:
            raise ValueError(f"request {request.request_id}: token id {bad[0]} is outside 0..{self.vocab_size - 1}")
        if not self._live:
            self._progress = time.monotonic()
        self._live[key] = _Live(request)
        self._submit(key, request, _sampling(request))

    def num_unfinished(self) -> int:
        return len(self._live)

    def num_running(self) -> int:
        """Sequences that occupy a slot."""
        return min(len(self._live), self.max_slots)

    def _check_progress(self, progressed: bool) -> None:
        if progressed or not self._live:
            self._progress = time.monotonic()
        elif time.monotonic() - self._progress > self.deadline_s:
            self._poison(f"no token for {self.deadline_s:g} s with {len(self._live)} unfinished requests")

    # ------------------------------------------------------------------ weights
    def load_weights(
        self, named: Iterable[tuple[str, Tensor]], *, version: int, kv: Literal["keep", "recompute"]
    ) -> SyncStats:
        """Legal between any two steps. ValueError: refused, the old weights are live. WorkerDied: poisoned."""
        self._alive()
        if kv not in ("keep", "recompute"):
            raise ValueError(f"kv {kv!r} is not valid; known: keep, recompute")
        if version < self.policy_version:
            raise ValueError(
                f"weight update refused: version {version} is older than the engine's {self.policy_version}"
            )
        named = list(named)
        model.check_manifest(self._shapes, dict(named), f"weight update to version {version} refused")
        tensors = list(checkpoint_format(self.flow, named)) if is_native(self.flow.config) else named
        manifest = [Entry.of(name, tensor) for name, tensor in tensors]
        for name, tensor in tensors:
            if tensor.element_size() > 1 and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"weight update refused: tensor {name!r} holds NaN or inf")
        check_manifest(self._expected if self._expected is not None else manifest, manifest)
        started = [live for live in self._live.values() if live.token_ids]
        recomputed = sum(len(live.request.token_ids) + len(live.token_ids) - 1 for live in started)
        with self._fatal(f"weight update to version {version} failed half-way"):
            # A refusal inside a worker is fatal too: the trainer's side has just accepted the same manifest.
            self._transfer(manifest, [tensor for _, tensor in tensors], version, kv)
            confirmed = self._rpc("jetrl_confirm", to_wire(manifest))
            self._confirmed(confirmed)
            if any((c["updates"], c["manifest"]) != (confirmed[0]["updates"], len(manifest)) for c in confirmed):
                raise RuntimeError(f"workers disagree about what they hold: {confirmed}")
            layers = self._rpc("jetrl_layers") if self._expected is None else []
        try:
            read_back(self.flow, layers)
        except ValueError as error:
            self.poisoned = str(error)
            self._shutdown()
            raise
        self._expected, self._weights = manifest, tensors
        self.policy_version = version
        self._progress = time.monotonic()
        return SyncStats(
            version=version,
            num_tensors=len(manifest),
            num_bytes=sum(entry.nbytes for entry in manifest),
            recomputed_tokens=recomputed if kv == "recompute" else 0,
        )

    def _confirmed(self, workers: list[dict]) -> None:
        """What every worker answered after an update."""

    # ------------------------------------------------------------------ life
    def state_dict(self) -> dict:
        """Of a drained engine: the weights it generates with, and their version."""
        self._alive()
        if self._live:
            raise ValueError(f"a vLLM engine is saved drained; {len(self._live)} requests are unfinished")
        weights = {name: tensor.detach().cpu() for name, tensor in self._weights}
        return {
            "engine": "vllm",
            "vllm": self.vllm_version,
            "policy_version": self.policy_version,
            "weights": weights,
        }

    def load_state_dict(self, state: dict) -> None:
        if state.get("engine") != "vllm":
            raise ValueError(f"this state is of engine {state.get('engine', 'reference')!r}, not of vllm")
        if state["vllm"] != self.vllm_version:
            raise ValueError(f"this state was saved with vLLM {state['vllm']}, installed is {self.vllm_version}")
        if self._live:
            raise ValueError("a state is loaded into an engine that runs nothing")
        self.load_weights(state["weights"].items(), version=state["policy_version"], kv="keep")

    def health(self) -> dict:
        """WorkerDied where the engine cannot go on; otherwise what every worker holds."""
        self._alive()
        with self._fatal("the engine does not answer"):
            return {"version": self.policy_version, "workers": self._rpc("jetrl_status")}

    def _alive(self) -> None:
        if self.poisoned is not None:
            raise WorkerDied(self.poisoned)

    def _poison(self, cause: str):
        self.poisoned = f"vLLM engine: {cause}"
        with contextlib.suppress(Exception):
            self._shutdown()
        raise WorkerDied(self.poisoned)

    @contextlib.contextmanager
    def _fatal(self, what: str):
        """Whatever is raised inside ends this engine."""
        try:
            yield
        except WorkerDied:
            raise
        except BaseException as error:
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            with contextlib.suppress(WorkerDied):
                self._poison(f"{what}: {cause}")
            raise WorkerDied(self.poisoned) from error

    def close(self) -> None:
        if self.poisoned is None:
            self.poisoned = "vLLM engine: closed"
            self._shutdown()


class VLLMEngine(Engine):
    """vLLM in this process, one scheduler step at a time; deterministic on a CPU with one thread."""

    def __init__(self, cfg, vocab_size, flow, *, max_slots: int, max_len: int, folder: Path, **options):
        super().__init__(
            cfg, vocab_size, flow, max_slots=max_slots, max_len=max_len, folder=folder, transport="memory", **options
        )
        from vllm import EngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.llm_engine import LLMEngine

        with untouched_process({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}):
            args = EngineArgs(weight_transfer_config=WeightTransferConfig(backend="jetrl"), **self._args)
            self._engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        self._check_room(self._engine.vllm_config.cache_config)
        self._channel = Channel(self._transport)
        self._watchdog = Watchdog(self.deadline_s)
        with self._fatal("the weight transfer did not start"):
            self._rpc("init_weight_transfer_engine", init_info={"channel": self._channel.init_info})

    def _rpc(self, method: str, *args, **kwargs) -> list:
        return self._engine.collective_rpc(method, args=args, kwargs=kwargs)

    def _submit(self, key: str, request: Request, sampling) -> None:
        self._engine.add_request(key, {"prompt_token_ids": list(request.token_ids)}, sampling)

    def step(self) -> list[Completion]:
        """One scheduler step: every running sequence gains a token (a long prompt may take several to its first)."""
        self._alive()
        if not self._live:
            return []
        finished, progressed = [], False
        with self._fatal("a step failed"), self._watchdog, torch.compiler.set_stance("force_eager"):
            for result in self._engine.step():
                live, output = self._live[result.request_id], result.outputs[0]
                progressed = progressed or bool(output.token_ids)
                live.extend(output, self.policy_version)
                if result.finished:
                    del self._live[result.request_id]
                    finished.append(live.complete(output))
        self._check_progress(progressed)
        return finished

    def num_running(self) -> int:
        return len(self._engine.engine_core.engine_core.scheduler.running)

    def _transfer(self, manifest: list[Entry], tensors: list[Tensor], version: int, kv: str) -> None:
        self._rpc("jetrl_prepare", to_wire(manifest))
        self._rpc("start_weight_update")
        for bucket in buckets(manifest, tensors, self.bucket_bytes):
            with self._channel.offer(bucket.buffer_B) as fetch:
                self._rpc("update_weights", update_info={"fetch": fetch, "entries": to_wire(bucket.entries)})
        self._rpc("finish_weight_update")
        self._engine.engine_core.set_weight_version(str(version))
        if kv == "recompute" and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop the KV cache")

    def _shutdown(self) -> None:
        engine, self._engine = getattr(self, "_engine", None), None
        if engine is not None:
            engine.engine_core.shutdown()


def _sampling(request: Request):
    """One request's sampling: its own seed, temperature before the softmax, the whole distribution, tokens only."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        top_p=1.0,
        top_k=0,
        max_tokens=request.max_tokens,
        seed=request.seed,
        stop_token_ids=list(request.stop_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
