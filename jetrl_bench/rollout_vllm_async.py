"""vLLM in processes of its own behind the rollout interface: they go on generating while the trainer works.

An update pauses them and keeps their requests (the transaction of rollout_vllm.py); a process that dies is noticed.
"""

import asyncio
import concurrent.futures
import contextlib
import importlib
import queue
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

from jetrl_bench.rollout import Completion, Request
from jetrl_bench.rollout_vllm import Engine
from jetrl_bench.vllm_process import untouched_process
from jetrl_bench.vllm_transfer import Channel, Entry, Transport, buckets, to_wire


class AsyncVLLMEngine(Engine):
    """vLLM in its own processes, which generate without waiting for `step()`; same seam, no chosen switch point.

    `step()` waits for the next tokens and returns what has finished. A dead engine or worker process surfaces as
    WorkerDied in `step`, `load_weights` or `health`.
    """

    def __init__(
        self,
        cfg,
        vocab_size,
        flow,
        *,
        max_slots: int,
        max_len: int,
        folder: Path,
        transport: Transport | None = None,
        pause_s: float = 60.0,
        **options,
    ):
        on_gpu = torch.cuda.is_available()
        super().__init__(
            cfg,
            vocab_size,
            flow,
            max_slots=max_slots,
            max_len=max_len,
            folder=folder,
            transport=transport or ("nccl" if on_gpu else "shm"),
            **options,
        )
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.pause_s = pause_s
        self._outputs: queue.Queue = queue.Queue()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True).start()
        self._engine = self._channel = None
        self._workers: list = []
        # Read by the processes that start below; by this one only if torch._dynamo were not imported yet.
        importlib.import_module("torch._dynamo")
        environment = {} if on_gpu else {"TORCH_COMPILE_DISABLE": "1"}

        async def start():
            args = AsyncEngineArgs(weight_transfer_config=WeightTransferConfig(backend="jetrl"), **self._args)
            return AsyncLLM.from_engine_args(args)

        with self._fatal("the engine did not start"):
            with untouched_process({"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment}):
                self._engine = self._call(start(), 600.0)
        self._check_room(self._engine.vllm_config.cache_config)
        with self._fatal("the weight transfer did not start"):
            workers = self._engine.vllm_config.parallel_config.world_size
            self._channel = Channel(
                self._transport, workers=workers, device="cuda" if on_gpu else "cpu", timeout_s=pause_s
            )
            # Trainer and workers meet: each side's call returns when the other's is under way.
            meeting = threading.Thread(target=self._channel.connect, daemon=True)
            meeting.start()
            self._rpc("init_weight_transfer_engine", init_info={"channel": self._channel.init_info})
            meeting.join(pause_s)

    def _call(self, coroutine, timeout_s: float):
        """Run on the client's loop; a dead engine is noticed although its answer never comes."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        end = time.monotonic() + timeout_s
        while True:
            try:
                return future.result(min(0.5, timeout_s))
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                if self._engine is not None and self._engine.errored:
                    raise RuntimeError("an engine or worker process died") from None
                if time.monotonic() > end:
                    raise RuntimeError(f"no answer within {timeout_s:g} s") from None

    def _rpc(self, method: str, *args, **kwargs) -> list:
        return self._call(self._engine.collective_rpc(method, args=args, kwargs=kwargs), self.pause_s)

    def _submit(self, key: str, request: Request, sampling) -> None:
        async def generate():
            try:
                prompt = {"prompt_token_ids": list(request.token_ids)}
                async for result in self._engine.generate(prompt, sampling, request_id=key):
                    self._outputs.put((key, result))
            except BaseException as error:
                self._outputs.put((key, error))

        asyncio.run_coroutine_threadsafe(generate(), self._loop)

    def step(self) -> list[Completion]:
        """Wait for the next tokens; return the requests that finished."""
        self._alive()
        if not self._live:
            return []
        finished = []
        with self._fatal("a step failed"):
            try:
                batch = [self._outputs.get(timeout=self.deadline_s)]
            except queue.Empty:
                self._poison(f"no token for {self.deadline_s:g} s with {len(self._live)} unfinished requests")
            while True:
                try:
                    batch.append(self._outputs.get_nowait())
                except queue.Empty:
                    break
            for key, result in batch:
                if isinstance(result, BaseException):
                    raise result
                live, output = self._live[key], result.outputs[0]
                live.extend(output, self.policy_version)
                if result.finished:
                    del self._live[key]
                    finished.append(live.complete(output))
        return finished

    def _transfer(self, manifest: list[Entry], tensors: list[Tensor], version: int, kv: str) -> None:
        engine = self._engine
        self._rpc("jetrl_prepare", to_wire(manifest))
        self._call(engine.pause_generation(mode="keep", clear_cache=kv == "recompute"), self.pause_s)
        self._call(engine.start_weight_update(), self.pause_s)
        for bucket in buckets(manifest, tensors, self.bucket_bytes):
            with self._channel.offer(bucket.buffer_B) as fetch:
                self._rpc("update_weights", update_info={"fetch": fetch, "entries": to_wire(bucket.entries)})
        self._rpc("finish_weight_update")
        self._rpc("jetrl_confirm", to_wire(manifest))
        self._call(engine.update_weight_version(str(version)), self.pause_s)
        self._call(engine.resume_generation(), self.pause_s)

    def _confirmed(self, workers: list[dict]) -> None:
        import psutil

        if not self._workers:
            self._workers = [psutil.Process(worker["pid"]) for worker in workers]

    def _shutdown(self) -> None:
        engine, self._engine = self._engine, None

        async def stop():
            if engine is not None:
                processes = list(getattr(engine.engine_core.resources.engine_manager, "processes", []))
                engine.shutdown(timeout=5.0)
                for process in [*processes, *self._workers]:
                    # A hung engine, or a worker whose engine was killed, must not outlive the run.
                    with contextlib.suppress(Exception):
                        process.kill()
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(stop(), self._loop).result(15.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._channel is not None:
            self._channel.close()
