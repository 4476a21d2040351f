"""A buffer for copies of the training state, and digests of the rows that are copied.

A rank copies into the buffer what it saves, so that training continues while the copy is hashed and written.
The buffer is shared memory that another process can read. It is allocated once and reused.

Under `replicate` and HSDP several ranks hold the same rows, and only one of them writes each row to a point.
A bit that flipped in the memory of another rank would stay unnoticed. Each rank therefore sums its rows while
it copies its part of the save, and sends the digest with its vote.
`checkpoint.points.points.differing_replicas` compares the digests.

    rows of a tensor     |---- 64 KiB ----|---- 64 KiB ----|-- rest --|
    sums (int64, mod 2^64)       s0               s1            s2
    digest               blake3 over the sums of all tensors, in the order of the state's items

A sum of integers changes with every single flipped bit and does not depend on the order of addition. A GPU
and a CPU thus compute the same sum. Each byte is read once: 6 GB/s on one CPU core, and memory speed on a
GPU.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from orchestrator.checkpoint.files.part_writer import shared_path
from orchestrator.errors import StorageError
from orchestrator.planning.state.state_layout import BufferRows, Layout
from orchestrator.records.points import ReplicaDigests
from orchestrator.trainer.weights.state_tensors import Item

_log = logging.getLogger(__name__)
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process

Copies = Sequence[tuple[BufferRows, Tensor]]  # places in the buffer, each with the rows that are copied there


class Staging:
    """A copy in progress. `done` completes when the buffer holds all of it, or with the error."""

    def __init__(self) -> None:
        self.done: Future[None] = Future()
        self.read = threading.Event()  # the CPU no longer reads the source
        self.copied: torch.cuda.Event | None = None  # the GPU no longer reads it
        self.beside: tuple[Tensor, ...] = ()  # the result of `beside`, see `StagingBuffer.stage`

    def wait(self) -> None:
        """Returns when the source may be written to.

        On a GPU, later work in the current stream waits for the copy, while the CPU continues.
        """
        self.read.wait()
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


class BriefThread:
    """Runs calls one after the other, in a thread that ends as soon as none is left.

    A thread that has run a parallel operation of torch on the CPU keeps helpers for it (libgomp). As long as
    it lives, these and those of the main thread may be more than the cores. Then all of them sleep between
    operations, where they would spin, and each step takes longer.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._calls: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None  # under the lock; None: it has ended or is about to
        self._is_open = True

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        """Runs the call after those before it. Raises `RuntimeError` after `shutdown`."""
        outcome: Future[None] = Future()
        with self._lock:
            if not self._is_open:
                raise RuntimeError("no call can follow a shutdown")
            self._calls.append((outcome, partial(function, *arguments)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name)
                self._thread.start()
        return outcome

    def shutdown(self) -> None:
        """Waits until all calls have ended."""
        with self._lock:
            self._is_open, thread = False, self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
                outcome, call = self._calls.popleft()
            try:
                call()
            except BaseException as error:  # noqa: BLE001  the caller may look at it
                outcome.set_exception(error)
            else:
                outcome.set_result(None)


class StagingBuffer:
    """One flat buffer in shared memory, as large as the largest part that was `reserve`d.

    On a GPU it is pinned, and copies run on their own stream, concurrently with the computation. If the
    driver cannot pin shared memory, a second buffer of the same size is pinned, and the CPU copies from it to
    the shared one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = os.memfd_create("orchestrator-staging", os.MFD_CLOEXEC)
        self._reserved = 0
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Pages are warm before data is copied to them: calls run in their order.
        self._thread = BriefThread("staging")
        self._shared = self._pinned = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """The path under which a process of the same user opens it."""
        return shared_path(self._handle)

    @property
    def num_bytes(self) -> int:
        """Its size in bytes."""
        return self._reserved

    @property
    def memory(self) -> Tensor:
        """The buffer itself, flat uint8 on the CPU. It holds the staged data once that is `done`."""
        return self._shared

    def reserve(self, num_bytes: int) -> None:
        """Enlarges the buffer to `num_bytes` and touches each page, in the thread.

        The first copy is then as fast as later ones. Must only be called while no process reads the buffer.
        If the machine has no room, the next `stage` tries again, and fails if there is still none.
        """
        if num_bytes > self._reserved:
            self._reserved = num_bytes
            self._thread.submit(self._make, num_bytes)

    def stage(
        self,
        copies: Copies,
        begun: Callable[[], None],
        ended: Callable[[], None],
        beside: Callable[[], tuple[Tensor, ...]] = tuple,
    ) -> Staging:
        """Starts copying into the buffer and returns.

        `begun` is called in the thread before the first byte is copied, `ended` after the last. `beside`
        reads the sources after the copy, in the same stream. Its result is `Staging.beside` once the copy is
        `done`. The sources must not be written to until `Staging.wait` returns, nor the buffer until `done`.
        """
        staging = Staging()
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._device))
        self._thread.submit(self._copy, copies, staging, ready, (begun, ended, beside))
        return staging

    def close(self) -> None:
        """Releases the memory once the current work has ended."""
        self._thread.submit(self._release)
        self._thread.shutdown()
        os.close(self._handle)

    # ---------------------------------------------------------------------- in the thread
    def _make(self, num_bytes: int) -> None:
        self._release()
        os.ftruncate(self._handle, num_bytes)
        # If there is no room, this call fails. Without it, a missing page would be a SIGBUS later.
        os.posix_fallocate(self._handle, 0, num_bytes)
        memory = mmap.mmap(self._handle, num_bytes, mmap.MAP_SHARED)
        self._shared = self._pinned = torch.frombuffer(memory, dtype=torch.uint8).zero_()
        if self._stream is None:
            return
        error = int(_cuda_runtime().cudaHostRegister(self._shared.data_ptr(), num_bytes, _PORTABLE))
        if error != 0:
            _log.warning(
                "shared memory cannot be pinned (CUDA error %d): staging takes %d bytes more",
                error,
                num_bytes,
            )
            self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _make_again(self) -> None:
        """Retries `_make` if there was no room before."""
        if self._shared.numel() >= self._reserved:
            return
        try:
            self._make(self._reserved)
        except (OSError, RuntimeError, MemoryError) as error:  # raised by the system or by torch
            raise StorageError(
                f"there is no room for a staging buffer of {self._reserved} bytes in shared memory "
                f"({error}); give the workers more memory",
                code="machine.shared_memory",
            ) from error

    def _release(self) -> None:
        if self._stream is not None and self._pinned is self._shared and self._shared.numel():
            _cuda_runtime().cudaHostUnregister(self._shared.data_ptr())
        self._shared = self._pinned = torch.empty(0, dtype=torch.uint8)

    def _copy(
        self,
        copies: Copies,
        staging: Staging,
        ready: torch.cuda.Event | None,
        calls: tuple[Callable[[], None], Callable[[], None], Callable[[], tuple[Tensor, ...]]],
    ) -> None:
        begun, ended, beside = calls
        try:
            begun()
            self._make_again()
            targets = [_view(self._pinned, place, source) for place, source in copies]
            self._into(targets, [source for _, source in copies], staging, ready, beside)
            staging.read.set()
            if staging.copied is not None:
                staging.copied.synchronize()
                if self._pinned is not self._shared:
                    self._shared.copy_(self._pinned)
            ended()
        except BaseException as error:  # noqa: BLE001  the thread that waits for the copy receives it
            staging.read.set()
            staging.done.set_exception(error)
        else:
            staging.done.set_result(None)

    def _into(
        self,
        targets: list[Tensor],
        sources: list[Tensor],
        staging: Staging,
        ready: torch.cuda.Event | None,
        beside: Callable[[], tuple[Tensor, ...]],
    ) -> None:
        if self._stream is None or ready is None:
            if targets:
                torch._foreach_copy_(targets, sources)  # one call, which releases the GIL
            staging.beside = beside()
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            staging.beside = beside()
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
            staging.copied = copied


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _view(buffer: Tensor, place: BufferRows, like: Tensor) -> Tensor:
    """Returns the bytes of `place` as a tensor with the dtype and shape of `like`."""
    flat = buffer[place.offset : place.offset + place.num_bytes]
    return flat.view(like.dtype).view(like.shape)


BLOCK_BYTES = 64 << 10
_WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """The tensors that other ranks hold, too.

    `of_shard` are held by the ranks with the same shard, `of_all` by every rank. Either is empty if no other
    rank holds them.
    """

    of_shard: tuple[Tensor, ...]
    of_all: tuple[Tensor, ...]

    def sums(self) -> tuple[Tensor, Tensor]:
        """Returns the block sums of both, int64 on the tensors' device. Work is queued on the
        current stream.
        """
        return block_sums(self.of_shard), block_sums(self.of_all)


def shared_rows(items: Sequence[Item], layout: Layout) -> SharedRows:
    """Returns the rows of `items`, as one rank holds them, that other ranks of `layout` also hold."""
    replicated = layout.num_replicas > 1
    return SharedRows(
        of_shard=tuple(item.tensor for item in items if item.whole.sharded and replicated),
        of_all=tuple(item.tensor for item in items if not item.whole.sharded and layout.world_size > 1),
    )


def block_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Sums each block of `BLOCK_BYTES` bytes of each tensor, and the bytes after the last whole block.

    Blocks are read as little-endian words of 8 bytes and summed modulo 2^64. Shape (num_sums,), int64; empty
    for no tensors.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    device = tensors[0].device
    return torch.cat([part.to(device) for tensor in tensors for part in _sums_of(tensor)])


def _sums_of(tensor: Tensor) -> tuple[Tensor, ...]:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % _WORD_BYTES or flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()
    whole = flat.numel() // BLOCK_BYTES * BLOCK_BYTES
    blocks = flat[:whole].view(torch.int64).view(-1, BLOCK_BYTES // _WORD_BYTES).sum(1)
    words_end = flat.numel() // _WORD_BYTES * _WORD_BYTES
    words = flat[whole:words_end].view(torch.int64).sum().reshape(1)
    return blocks, words, flat[words_end:].sum(dtype=torch.int64).reshape(1)


def replica_digests(sums: tuple[Tensor, Tensor]) -> ReplicaDigests:
    """Computes the digests of `SharedRows.sums`, which are copied to the CPU."""
    of_shard, of_all = (
        blake3(each.cpu().numpy().tobytes()).hexdigest(length=16) if each.numel() else "" for each in sums
    )
    return ReplicaDigests(of_shard=of_shard, of_all=of_all)
