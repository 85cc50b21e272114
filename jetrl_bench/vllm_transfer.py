"""How weights travel from the trainer into vLLM's workers: a manifest, buckets, and a channel.

An update is one transaction. The manifest (names, dtypes, shapes, checksums) goes first and every worker compares it
with what it was started with, before anything is touched. Then the tensors travel in buckets of bounded size, each a
flat byte buffer, through one of four channels with one interface:

    memory   one process: the buffer is handed over
    shm      a file under /dev/shm that the workers map (one machine)
    gloo     broadcast over TCP from the trainer, rank 0, to the workers, ranks 1..n
    nccl     the same broadcast between GPUs

The trainer's end is `Channel.offer`, a context that yields what a worker needs to fetch the buffer; the worker's end is
`open_receiver`. Nothing here imports vLLM except the groups of gloo and nccl.
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Transport = Literal["memory", "shm", "gloo", "nccl"]
ALIGN = 64  # bytes between two tensors of a bucket
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor of an update: what it is called, what it looks like, and the sum of its bits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int
    offset: int = 0
    """Bytes from the start of its bucket."""

    @property
    def nbytes(self) -> int:
        size = getattr(torch, self.dtype).itemsize
        for n in self.shape:
            size *= n
        return size

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Entry":
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), checksum(tensor))


def checksum(tensor: Tensor) -> int:
    """Sum of the tensor's bits in 64-bit words, modulo 2^64: one fast pass, changes with any single flipped bit."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum(dtype=torch.int64))


def check_manifest(expected: Iterable[Entry], sent: Iterable[Entry]) -> None:
    """ValueError with one line where `sent` is not, tensor for tensor, what the engine holds."""
    want = {entry.name: entry for entry in expected}
    seen = set()
    for entry in sent:
        if entry.name not in want:
            raise ValueError(f"weight update refused: tensor {entry.name!r} is not in the engine's model")
        if entry.name in seen:
            raise ValueError(f"weight update refused: tensor {entry.name!r} is sent twice")
        seen.add(entry.name)
        known = want[entry.name]
        if entry.shape != known.shape:
            raise ValueError(
                f"weight update refused: tensor {entry.name!r} has shape {list(entry.shape)}, "
                f"the engine's has {list(known.shape)}"
            )
        if entry.dtype != known.dtype:
            raise ValueError(
                f"weight update refused: tensor {entry.name!r} is {entry.dtype}, the engine's is {known.dtype}"
            )
    missing = [name for name in want if name not in seen]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"weight update refused: tensor {missing[0]!r}{more} is missing")


@dataclass(frozen=True)
class Bucket:
    buffer_B: Tensor
    """uint8, flat."""
    entries: tuple[Entry, ...]


def buckets(manifest: list[Entry], tensors: list[Tensor], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Pack tensors, in order, into flat buffers of at most `limit` bytes (a larger tensor travels alone)."""
    if limit < 1:
        raise ValueError(f"bucket size {limit} bytes is below 1")
    batch: list[tuple[Entry, Tensor]] = []
    end = 0
    for entry, tensor in zip(manifest, tensors, strict=True):
        if batch and end + entry.nbytes > limit:
            yield _pack(batch, end)
            batch, end = [], 0
        batch.append((replace(entry, offset=end), tensor))
        end = -(-(end + entry.nbytes) // ALIGN) * ALIGN
    if batch:
        yield _pack(batch, end)


def _pack(batch: list[tuple[Entry, Tensor]], nbytes: int) -> Bucket:
    buffer_B = torch.zeros(nbytes, dtype=torch.uint8, device=batch[0][1].device)
    for entry, tensor in batch:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        buffer_B[entry.offset : entry.offset + entry.nbytes] = flat
    return Bucket(buffer_B, tuple(entry for entry, _ in batch))


def unpack(buffer_B: Tensor, entries: Iterable[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Views into a bucket; RuntimeError where the bits that arrived are not the bits that were sent."""
    for entry in entries:
        flat = buffer_B[entry.offset : entry.offset + entry.nbytes]
        tensor = flat.view(getattr(torch, entry.dtype)).view(entry.shape)
        if checksum(tensor) != entry.checksum:
            raise RuntimeError(f"tensor {entry.name!r} arrived with other bits than were sent")
        yield entry.name, tensor


def to_wire(entries: Iterable[Entry]) -> list[dict]:
    """What RPC layers can carry."""
    return [{**asdict(entry), "shape": list(entry.shape)} for entry in entries]


def from_wire(rows: Iterable[dict]) -> list[Entry]:
    return [Entry(**{**row, "shape": tuple(row["shape"])}) for row in rows]


_HANDED_OVER: dict[str, Tensor] = {}


class Channel:
    """The trainer's end. `workers` is the number of receivers that must be reached, on `device`."""

    def __init__(
        self,
        transport: Transport,
        *,
        workers: int = 1,
        device: str = "cpu",
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
    ):
        self.transport = transport
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.init_info: dict = {"transport": transport, "timeout_s": timeout_s}
        """What every worker needs to open its end."""
        self._group = None
        if transport in ("gloo", "nccl"):
            self.init_info |= {"host": host, "port": _free_port(host), "world_size": workers + 1}

    def connect(self) -> None:
        """Open the trainer's end; blocks until every worker has opened its own (run it beside their call)."""
        if self.transport in ("gloo", "nccl"):
            self._group = _Group(self.init_info, 0, self.device)

    @contextlib.contextmanager
    def offer(self, buffer_B: Tensor) -> Iterator[dict]:
        """Yield what a worker needs to fetch the buffer; leaving the context takes it back."""
        if self.transport == "memory":
            key = f"{id(self)}"
            _HANDED_OVER[key] = buffer_B
            try:
                yield {"key": key}
            finally:
                _HANDED_OVER.pop(key, None)
        elif self.transport == "shm":
            shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
            handle, path = tempfile.mkstemp(prefix="jetrl-weights-", dir=shared)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(buffer_B.cpu().numpy().data)
                yield {"path": path, "nbytes": buffer_B.numel()}
            finally:
                os.unlink(path)
        else:
            failures: list[BaseException] = []

            def broadcast():
                try:
                    self._group.broadcast(buffer_B.to(self.device))
                except BaseException as error:
                    failures.append(error)

            sender = threading.Thread(target=broadcast, name="weight-broadcast", daemon=True)
            sender.start()
            yield {"nbytes": buffer_B.numel()}
            sender.join(self.timeout_s)
            if sender.is_alive():
                raise RuntimeError(f"weight broadcast over {self.transport} did not end within {self.timeout_s:g} s")
            if failures:
                raise RuntimeError(f"weight broadcast over {self.transport} failed: {failures[0]}") from failures[0]

    def close(self) -> None:
        self._group = None


def open_receiver(init_info: dict, rank: int, device: torch.device) -> Callable[[dict], Tensor]:
    """A worker's end: a function from what `Channel.offer` yielded to the buffer (uint8, flat, on `device`)."""
    transport = init_info["transport"]
    if transport == "memory":
        return lambda info: _HANDED_OVER[info["key"]].to(device)
    if transport == "shm":
        # shared=False maps the file copy-on-write, so that a worker cannot disturb another one.
        return lambda info: torch.from_file(info["path"], shared=False, size=info["nbytes"], dtype=torch.uint8).to(
            device
        )
    if transport not in ("gloo", "nccl"):
        raise ValueError(f"weight transport {transport!r} is unknown; known: memory, shm, gloo, nccl")
    group = _Group(init_info, rank + 1, device)

    def receive(info: dict) -> Tensor:
        buffer_B = torch.empty(info["nbytes"], dtype=torch.uint8, device=device)
        group.broadcast(buffer_B)
        return buffer_B

    return receive


class _Group:
    """Trainer (rank 0) and workers (ranks 1..n) in a group of their own, apart from any global process group."""

    def __init__(self, init_info: dict, rank: int, device: torch.device):
        self.transport, self.device = init_info["transport"], device
        host, port, size = init_info["host"], init_info["port"], init_info["world_size"]
        if self.transport == "nccl":
            from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

            self.group = stateless_init_process_group(host, port, rank, size, device)
        else:
            from vllm.distributed.utils import stateless_init_torch_distributed_process_group

            timeout = timedelta(seconds=init_info["timeout_s"])
            self.group = stateless_init_torch_distributed_process_group(host, port, rank, size, "gloo", timeout=timeout)

    def broadcast(self, buffer_B: Tensor) -> None:
        if self.transport == "nccl":
            self.group.broadcast(buffer_B, src=0)
            torch.cuda.current_stream(self.device).synchronize()
        else:
            options = torch.distributed.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self.group.broadcast([buffer_B], options).wait()


def _free_port(host: str) -> int:
    import socket

    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
