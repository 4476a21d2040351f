"""Fetches pieces of a point's files to their targets, and verifies their digests.

Pieces are fetched in order, from remote storage with several requests at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

from orchestrator.checkpoint.files.manifest import Name, PartDamage
from orchestrator.storage.files import Storage

REQUEST_BYTES = 8 << 20  # the largest request, and thus the length of a buffer
_DIRECT_BYTES = 1 << 20  # smaller pieces are read together through a buffer: one request for many


class Target(Protocol):
    """The destination of rows of a tensor: their bytes, one row after the other."""

    def view(self, start: int, num_bytes: int) -> memoryview | None:
        """Returns these bytes of the target for writing.

        None if they are not directly accessible (on a GPU).
        """

    def write(self, start: int, data: memoryview) -> None:
        """Writes `data` at byte `start`. `data` may be overwritten afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePiece:
    """Bytes of a file with one digest, all of one tensor.

    `length` of these bytes, from `skip` on, are wanted at byte `at` of `target` (None: they are only
    verified).
    """

    file: str
    tensor: Name
    start: int
    num_bytes: int
    digest: str
    target: Target | None = None
    skip: int = 0
    length: int = 0
    at: int = 0

    @property
    def direct(self) -> memoryview | None:
        """The memory that the whole piece can be read into, or None."""
        if self.target is None or self.length != self.num_bytes:
            return None
        return self.target.view(self.at, self.num_bytes)


def new_buffer(num_bytes: int) -> memoryview:
    """Allocates memory of this process, which is taken as it is written to."""
    import numpy as np  # reading a run needs no tensors, and thus no numpy

    return np.empty(num_bytes, np.uint8).data


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """Bytes of a file that are read at once: some whole pieces, or a part of one.

    `into`: they are read directly into a target, else through a buffer.
    """

    file: str
    start: int
    num_bytes: int
    pieces: tuple[FilePiece, ...]
    into: memoryview | None


class PieceFetcher:
    """Fetches pieces from the folder `folder` of a storage. For use by one thread.

    Besides the targets it takes a buffer of 8 MiB (from `make_buffer`) for each of `at_a_time` requests, as
    needed.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        make_buffer: Callable[[int], memoryview],
        at_a_time: int,
        was_read: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """`was_read` is called with the bytes of each request once they are verified."""
        self._storage, self._folder, self._make_buffer = storage, folder, make_buffer
        self._was_read = was_read
        self._at_a_time = at_a_time
        self._buffers: list[memoryview] = []  # the free buffers
        self._hasher = blake3()

    def fetch(self, pieces: Iterable[FilePiece]) -> None:
        """Fills the targets of these pieces, file by file, each from begin to end.

        Raises `PartDamage` naming the first file in this order whose bytes are not the committed ones, and
        `StorageError`. Then the targets hold anything, and are not written to any more.
        """
        requests = _requests(sorted(pieces, key=lambda piece: (piece.file, piece.start)))
        if self._at_a_time == 1:
            for request in requests:
                memory = self._memory(request)
                self._fill(request, memory)
                self._arrived(request, memory)
            return
        with _pool(self._at_a_time) as pool:
            under_way: deque[tuple[_Request, memoryview, Future[None]]] = deque()
            for request in requests:
                if len(under_way) == self._at_a_time:
                    self._first_arrived(under_way)
                memory = self._memory(request)
                under_way.append((request, memory, pool.submit(self._fill, request, memory)))
            while under_way:
                self._first_arrived(under_way)

    def _first_arrived(self, under_way: deque[tuple[_Request, memoryview, Future[None]]]) -> None:
        request, memory, filled = under_way.popleft()
        filled.result()
        self._arrived(request, memory)

    def _memory(self, request: _Request) -> memoryview:
        if request.into is not None:
            return request.into
        return self._buffers.pop() if self._buffers else self._make_buffer(REQUEST_BYTES)

    def _fill(self, request: _Request, memory: memoryview) -> None:
        path, data = f"{self._folder}/{request.file}", memory[: request.num_bytes]
        try:
            found = self._storage.read_into(path, request.start, data)
        except FileNotFoundError as error:
            raise PartDamage(request.file, "is missing") from error
        if found != request.num_bytes:
            raise PartDamage(request.file, f"ends {request.num_bytes - found} bytes too early")

    def _arrived(self, request: _Request, memory: memoryview) -> None:
        """Handles a completed request. Requests complete in order, so that a piece of several is hashed in
        order.
        """
        for piece in request.pieces:
            offset = request.start - piece.start  # below 0: the piece begins within the request
            first, last = max(0, offset), min(piece.num_bytes, offset + request.num_bytes)
            data = memory[first - offset : last - offset]
            if first == 0:
                self._hasher = blake3()
            self._hasher.update(data)
            if request.into is None:
                _give(piece, data, first)
            if last == piece.num_bytes:
                _compare(piece, self._hasher)
        if request.into is None:
            self._buffers.append(memory)
        self._was_read(request.num_bytes)


@contextmanager
def _pool(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """A thread pool. When the block ends, no task runs in it any more, and pending ones are cancelled."""
    pool = ThreadPoolExecutor(num_threads, "reading")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _requests(pieces: Iterable[FilePiece]) -> Iterator[_Request]:
    for group in _together(pieces):
        first, last = group[0], group[-1]
        if len(group) > 1:
            size = last.start + last.num_bytes - first.start
            yield _Request(file=first.file, start=first.start, num_bytes=size, pieces=tuple(group), into=None)
            continue
        direct = first.direct
        for done in range(0, max(1, first.num_bytes), REQUEST_BYTES):
            size = min(REQUEST_BYTES, first.num_bytes - done)
            into = None if direct is None else direct[done : done + size]
            yield _Request(
                file=first.file, start=first.start + done, num_bytes=size, pieces=(first,), into=into
            )


def _together(pieces: Iterable[FilePiece]) -> Iterator[list[FilePiece]]:
    """Yields small consecutive pieces, to be read together, and each large one by itself."""
    group: list[FilePiece] = []
    num_bytes = 0
    for piece in pieces:
        follows = (
            bool(group)
            and group[-1].file == piece.file
            and group[-1].start + group[-1].num_bytes == piece.start
        )
        small = piece.num_bytes < _DIRECT_BYTES and (not group or group[-1].num_bytes < _DIRECT_BYTES)
        if group and not (follows and small and num_bytes + piece.num_bytes <= REQUEST_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(piece)
        num_bytes += piece.num_bytes
    if group:
        yield group


def _compare(piece: FilePiece, hasher: blake3) -> None:
    found = hasher.hexdigest(length=len(piece.digest) // 2)
    if found != piece.digest:
        raise PartDamage(
            piece.file,
            f"holds {'/'.join(piece.tensor)} from byte {piece.start} on with digest {found}, saved was "
            f"{piece.digest}",
        )


def _give(piece: FilePiece, data: memoryview, done: int) -> None:
    """Writes the wanted part of `data`, which begins `done` bytes after the piece's begin."""
    first, last = max(piece.skip, done), min(piece.skip + piece.length, done + len(data))
    if piece.target is not None and first < last:
        piece.target.write(piece.at + first - piece.skip, data[first - done : last - done])
