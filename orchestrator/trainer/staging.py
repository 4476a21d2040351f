"""The buffer into which a rank copies what it saves, so that training goes on while that is hashed and
written: shared memory that another process can read, allocated once and reused.

It knows tensors and places, not what they are saved for; when the buffer is free, its caller knows.
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

from orchestrator.errors import StorageError
from orchestrator.parts.part_job import shared_path
from orchestrator.planning.state_layout import Place

_log = logging.getLogger(__name__)
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process

Copies = Sequence[tuple[Place, Tensor]]  # where in the buffer, and the rows that go there


class Staging:
    """A copy under way. `done` is answered when the buffer holds all of it, or raises what went wrong."""

    def __init__(self) -> None:
        self.done: Future[None] = Future()
        self.read = threading.Event()  # nothing of the source is read on the CPU's side any more
        self.copied: torch.cuda.Event | None = None  # nor on the GPU's
        self.beside: tuple[Tensor, ...] = ()  # what `StagingBuffer.stage` computed beside the copy

    def wait(self) -> None:
        """Returns when the source may be written to: on a GPU by what the current stream does from here on,
        which waits for the copy while the CPU goes on.
        """
        self.read.wait()
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


class StagingBuffer:
    """One flat buffer in shared memory, as large as the largest part that was `reserve`d.

    On a GPU it is pinned: copies run beside the computation, on a stream of their own. Where the driver does
    not pin shared memory, a second buffer of the same size is, and the CPU copies from one to the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = os.memfd_create("orchestrator-staging", os.MFD_CLOEXEC)
        self._reserved = 0
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # one thread, which alone touches the memory: what is warmed is warm before it is copied to
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        self._shared = self._pinned = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """Under which a process of this user opens it."""
        return shared_path(self._handle)

    @property
    def num_bytes(self) -> int:
        """How much it holds."""
        return self._reserved

    @property
    def memory(self) -> Tensor:
        """The buffer itself, flat uint8 on the CPU: what was staged lies in it once that is `done`."""
        return self._shared

    def reserve(self, num_bytes: int) -> None:
        """Makes room for so many bytes and has each page of it written to, in the thread, so that the first
        copy costs what every other does. Only while nobody reads the buffer. Where the machine has no room,
        what is staged next tries once more, and fails if there is none then.
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
        """Begins to copy into the buffer, and returns. `begun` is called in the thread before the first byte
        is copied, `ended` after the last. `beside` reads the sources after the copy, in the same stream; its
        result is `Staging.beside` once the copy is `done`. Until `Staging.wait` nobody may write to the
        sources, nor to the buffer until `done`.
        """
        staging = Staging()
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._device))
        self._thread.submit(self._copy, copies, staging, ready, (begun, ended, beside))
        return staging

    def close(self) -> None:
        """Gives the memory back, when what is under way has ended."""
        self._thread.submit(self._release)
        self._thread.shutdown(wait=True)
        os.close(self._handle)

    # ---------------------------------------------------------------------- in the thread
    def _make(self, num_bytes: int) -> None:
        self._release()
        os.ftruncate(self._handle, num_bytes)
        # where there is no room it fails here; a page that cannot be had is a SIGBUS later
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
        """If there was no room before."""
        if self._shared.numel() >= self._reserved:
            return
        try:
            self._make(self._reserved)
        except (OSError, RuntimeError, MemoryError) as error:  # of the system, of torch
            raise StorageError(
                f"there is no room for a staging buffer of {self._reserved} bytes in shared memory "
                f"({error}); give the workers more memory"
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
        except BaseException as error:  # noqa: BLE001  whoever waits for the copy hears of it
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
                torch._foreach_copy_(targets, sources)  # one call, which holds no GIL
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


def _view(buffer: Tensor, place: Place, like: Tensor) -> Tensor:
    """The bytes of `place` as a tensor of the form of `like`."""
    flat = buffer[place.offset : place.offset + place.num_bytes]
    return flat.view(like.dtype).view(like.shape)
