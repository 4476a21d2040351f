"""A buffer for copies of the training state.

A rank copies into it what it saves, so that training continues while the copy is hashed and written. The
buffer is shared memory that another process can read. It is allocated once and reused.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from orchestrator.checkpoint.writer.part_job import shared_path
from orchestrator.errors import StorageError
from orchestrator.planning.state.state_layout import BufferRows

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
        # Only this one thread touches the memory, so that pages are warm before data is copied to them.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
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
        self._thread.shutdown(wait=True)
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
