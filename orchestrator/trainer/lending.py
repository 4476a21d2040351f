"""Buffers that processes of one machine lend each other: who keeps a copy of a memory point for a rank beside
it reads that where its owner has it, in shared memory, which outlives the owner while somebody has it open.

Nothing is copied when it is lent. Before an owner writes to a buffer again it sets the buffer's mark, which
lies in shared memory too: a copy is there as long as the mark is what it was.
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

from orchestrator.parts.part_job import shared_path

_TOKEN_BYTES = 16
_MARK = struct.Struct("=Q")
_PIECE = 64 << 20  # bytes of one read, during which the GIL is free


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Where the marks and the buffers of a process are opened by another of the same user and machine.
    `token`: how the marks begin, so that another process's file of the same name is not taken for them.
    """

    marks: str
    buffers: tuple[str, ...]
    token: str


class Marks:
    """The owner's side: a number for each of its buffers, in shared memory."""

    def __init__(self, buffers: Sequence[str]) -> None:
        self._handle = os.memfd_create("orchestrator-marks", os.MFD_CLOEXEC)
        token = secrets.token_hex(_TOKEN_BYTES)
        os.pwrite(self._handle, bytes.fromhex(token) + bytes(_MARK.size * len(buffers)), 0)
        self.offer = Offer(marks=shared_path(self._handle), buffers=tuple(buffers), token=token)

    def renew(self, number: int) -> int:
        """To be called before the buffer is written to: what was lent of it is gone from here on, in whatever
        process it is asked for. The new mark, which holds for what is written now.
        """
        mark = _mark(self._handle, number) + 1
        os.pwrite(self._handle, _MARK.pack(mark), _place(number))
        return mark

    def close(self) -> None:
        """What is lent stays with whoever has it."""
        os.close(self._handle)


class Lender:
    """A process of this machine that lends its buffers. Raises `OSError` if they cannot be opened from here,
    or are another process's.
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
        """What lies in one of its buffers since that has this mark."""
        marks, buffer = self._handles[0], self._handles[1 + number]
        return LentCopy(os.dup(marks), os.dup(buffer), number, mark, num_bytes)

    def close(self) -> None:
        """Copies of it stay."""
        while self._handles:
            os.close(self._handles.pop())


class LentCopy:
    """A copy in another process's buffer, which is there until that process writes to the buffer, and after
    its end, until `close`.
    """

    def __init__(self, marks: int, buffer: int, number: int, mark: int, num_bytes: int) -> None:
        self._marks, self._buffer = marks, buffer
        self._number, self._mark, self._num_bytes = number, mark, num_bytes

    @property
    def is_there(self) -> bool:
        """Whether its owner has not begun to write over it."""
        return _mark(self._marks, self._number) == self._mark

    def taken(self) -> Tensor | None:
        """Its bytes, flat uint8, in memory of this process; None if its owner has begun to write over it, at
        the latest while it was read.
        """
        data = torch.empty(self._num_bytes, dtype=torch.uint8)
        view, at = memoryview(data.numpy()), 0  # type: ignore[arg-type]
        while at < self._num_bytes:
            count = os.preadv(self._buffer, [view[at : at + _PIECE]], at)
            if count == 0:
                return None  # nothing that ends so early was lent
            at += count
        return data if self.is_there else None

    def close(self) -> None:
        """Gives it back."""
        for handle in (self._marks, self._buffer):
            with suppress(OSError):
                os.close(handle)


def _place(number: int) -> int:
    return _TOKEN_BYTES + _MARK.size * number


def _mark(handle: int, number: int) -> int:
    (found,) = _MARK.unpack(os.pread(handle, _MARK.size, _place(number)))
    return int(found)
