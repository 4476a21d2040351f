"""Buffers in shared memory that processes of one machine lend each other.

A process that keeps a copy of a memory point for another rank on its machine reads that copy from its owner's
shared memory. The memory outlives the owner while another process has it open.

Lending copies nothing. Before an owner writes to a buffer again, it changes the buffer's mark, which is also
in shared memory. A lent copy is valid as long as the mark is unchanged.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.checkpoint.writer.part_job import shared_path

_TOKEN_BYTES = 16
_MARK = struct.Struct("=Q")
_PIECE = 64 << 20  # bytes of one read; the GIL is released meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The paths under which another process opens the marks and buffers of a process.

    Both processes have the same user and machine. `token` is the first bytes of the marks. It distinguishes
    them from another process's file of the same name.
    """

    marks: str
    buffers: tuple[str, ...]
    token: str


class Marks:
    """The owner's side: one number per buffer, in shared memory."""

    def __init__(self, buffers: Sequence[str]) -> None:
        self._handle = os.memfd_create("orchestrator-marks", os.MFD_CLOEXEC)
        token = secrets.token_hex(_TOKEN_BYTES)
        os.pwrite(self._handle, bytes.fromhex(token) + bytes(_MARK.size * len(buffers)), 0)
        self.offer = Offer(marks=shared_path(self._handle), buffers=tuple(buffers), token=token)

    def renew(self, number: int) -> int:
        """Changes the mark of a buffer and returns the new one. Must be called before the buffer is written
        to.

        From then on, copies that were lent from the buffer are invalid in every process. The new mark
        identifies what is written next.
        """
        mark = _mark(self._handle, number) + 1
        os.pwrite(self._handle, _MARK.pack(mark), _place(number))
        return mark

    def close(self) -> None:
        """Closes the marks. Processes that have them open can still use lent copies."""
        os.close(self._handle)


class Lender:
    """A process of this machine that lends its buffers.

    Raises `OSError` if the buffers cannot be opened, or belong to another process.
    """

    def __init__(self, offer: Offer) -> None:
        self._handles: list[int] = []
        try:
            for path in (offer.marks, *offer.buffers):
                self._handles.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            if os.pread(self._handles[0], _TOKEN_BYTES, 0) != bytes.fromhex(offer.token):
                raise OSError(f"{offer.marks} is not the file that was offered: it begins in another way")
        except OSError:
            self.close()
            raise

    def copy(self, number: int, mark: int, num_bytes: int) -> LentCopy:
        """Returns the copy that one of its buffers holds under this mark."""
        marks, buffer = self._handles[0], self._handles[1 + number]
        return LentCopy(os.dup(marks), os.dup(buffer), number, mark, num_bytes)

    def close(self) -> None:
        """Closes the handles. Copies stay valid."""
        while self._handles:
            os.close(self._handles.pop())


class LentCopy:
    """A copy in another process's buffer.

    It exists until that process writes to the buffer. If that process ends, the copy stays until `close`.
    """

    def __init__(self, marks: int, buffer: int, number: int, mark: int, num_bytes: int) -> None:
        self._marks, self._buffer = marks, buffer
        self._number, self._mark, self._num_bytes = number, mark, num_bytes

    @property
    def is_there(self) -> bool:
        """Whether its owner has not begun to overwrite it."""
        return _mark(self._marks, self._number) == self._mark

    def taken(self) -> Tensor | None:
        """Reads the copy into memory of this process, flat uint8.

        Returns None if the owner has begun to overwrite it, even during the read.
        """
        data = torch.empty(self._num_bytes, dtype=torch.uint8)
        view, at = memoryview(data.numpy()), 0  # type: ignore[arg-type]
        while at < self._num_bytes:
            count = os.preadv(self._buffer, [view[at : at + _PIECE]], at)
            if count == 0:
                return None  # the buffer is shorter than any lent copy
            at += count
        return data if self.is_there else None

    def close(self) -> None:
        """Closes its handles."""
        for handle in (self._marks, self._buffer):
            with suppress(OSError):
                os.close(handle)


def _place(number: int) -> int:
    return _TOKEN_BYTES + _MARK.size * number


def _mark(handle: int, number: int) -> int:
    (found,) = _MARK.unpack(os.pread(handle, _MARK.size, _place(number)))
    return int(found)
