"""Reads rows of a point's tensors directly into their targets, and verifies every byte's digest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Protocol, TypeVar

from blake3 import blake3
from typing_extensions import override

from orchestrator.checkpoint.files.manifest import Name, PartDamage, PartManifest
from orchestrator.checkpoint.files.part_file import Extent, parse_header, part_path, read_header
from orchestrator.planning.state.state_layout import SUM_MODULUS
from orchestrator.storage.files import Storage
from orchestrator.storage.parallel import at_once

Result = TypeVar("Result")
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

    Besides the targets it takes a buffer of 8 MiB (from `make_buffer`) for each of at most `at_a_time`
    requests.
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
        requests = _requests(sorted(pieces, key=_by_place))
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


def _by_place(piece: FilePiece) -> tuple[str, int]:
    return piece.file, piece.start


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


# ---------------------------------------------------------------------------------------------------- tensors
class BytesTarget(Target):
    """A target in the memory of this process."""

    def __init__(self, memory: memoryview | bytearray) -> None:
        self._memory = memoryview(memory)

    @override
    def view(self, start: int, num_bytes: int) -> memoryview | None:
        return self._memory[start : start + num_bytes]

    @override
    def write(self, start: int, data: memoryview) -> None:
        self._memory[start : start + len(data)] = data


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRequest:
    """Rows of a tensor, and their target."""

    rows: range
    target: Target


class PointReader:
    """The tensors of one point, whose manifest is known to be the committed one. Safe to use from threads.

    Each call takes 8 MiB of memory besides the targets. From a bucket `read` makes several requests at a
    time (`Traits.reads_at_a_time`), and takes 8 MiB from `make_buffer` for each. The headers of the files
    that were read stay in memory.
    """

    def __init__(
        self, storage: Storage, manifest: PartManifest, make_buffer: Callable[[int], memoryview] = new_buffer
    ) -> None:
        self._storage, self._manifest, self._make_buffer = storage, manifest, make_buffer
        self._extents: dict[str, dict[Name, Extent]] = {}
        self._sums: dict[str, dict[str, int]] = {}

    def read(self, wanted: Mapping[Name, TensorRequest]) -> None:
        """Fills all targets, file by file, each from begin to end.

        Raises `PartDamage` naming the file whose bytes are not the committed ones, and `StorageError`. Then
        the targets hold anything.
        """
        self.fetch(self.pieces(wanted))

    def pieces(self, wanted: Mapping[Name, TensorRequest]) -> list[FilePiece]:
        """Returns all pieces that contain wanted rows, sorted by file and place.

        The list is the same wherever the same rows are wanted. Reads headers, several at a time from remote
        storage. Raises as `extents`.
        """
        found: list[FilePiece] = []
        files = (file for name, want in wanted.items() for file in self._manifest.files_of(name, want.rows))
        at_once(self._storage, self.extents, [*dict.fromkeys(files)])
        for name, want in wanted.items():
            num_rows = 0
            for file in self._manifest.files_of(name, want.rows):
                extent = self.extents(file)[name]
                found += self._pieces(file, name, extent, want)
                num_rows += max(
                    0, min(extent.rows.stop, want.rows.stop) - max(extent.rows.start, want.rows.start)
                )
            assert num_rows == len(want.rows), f"{num_rows} of {len(want.rows)} rows of {name} are in it"
        return sorted(found, key=_by_place)

    def fetch(
        self, pieces: Iterable[FilePiece], was_read: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """Fills the targets of these pieces.

        `was_read` is called with a number of bytes once they are verified. Raises as `read`.
        """
        together = list[FilePiece]()
        for file, group in groupby(sorted(pieces, key=_by_place), key=attrgetter("file")):
            if self._storage.on_nodes(self._path(file)):
                self._fetch_any_copy(file, list(group), was_read)
            else:
                together += group
        at_a_time = self._storage.traits.reads_at_a_time
        self._fetcher(self._make_buffer, at_a_time, was_read).fetch(together)

    def check(self, file: str, first_byte: int = 0, end: int | None = None) -> None:
        """Verifies the size of a file, and the digests of all its pieces that begin in [first_byte, end).

        Raises as `read`.
        """
        self._again(file, lambda: self._check_size(file))
        pieces = [
            piece
            for name, extent in self.extents(file).items()
            for piece in self._pieces(file, name, extent, None)
            if first_byte <= piece.start and (end is None or piece.start < end)
        ]
        self._again(file, lambda: self._fetcher(new_buffer, 1).fetch(pieces))

    def extents(self, file: str) -> dict[Name, Extent]:
        """Returns the places of rows in a file, from its header.

        The header is verified against the point's documents first. Raises `PartDamage`.
        """
        if file not in self._extents:
            self._extents[file] = self._again(file, lambda: self._read_extents(file))
        return self._extents[file]

    def sums(self) -> dict[str, int]:
        """Returns the sum of all rows for each group (`planning.state.state_layout`), from the headers of all
        files.

        Raises as `extents`.
        """
        total: dict[str, int] = {}
        for file in self._manifest.files:
            self.extents(file)
            for group, found in self._sums[file].items():
                total[group] = (total.get(group, 0) + found) % SUM_MODULUS
        return total

    # ---------------------------------------------------------------------- headers
    def _read_extents(self, file: str) -> dict[Name, Extent]:
        manifest, entry, path = self._manifest, self._manifest.files[file], self._path(file)
        size = entry.bytes
        try:
            header = read_header(self._storage, path, size)
        except FileNotFoundError as error:
            raise PartDamage(file, "is missing") from error
        except ValueError as error:
            raise PartDamage(file, f"is not a valid safetensors file ({error})") from error
        found = blake3(header).hexdigest()
        if found != entry.digest:
            raise PartDamage(file, f"has a header of digest {found}, committed was {entry.digest}")
        try:
            part = parse_header(header, size)
        except ValueError as error:
            raise PartDamage(file, f"was written wrong: {error}") from error
        expected = manifest.rows_of_rank(part.rank) if part.rank < manifest.layout.world_size else {}
        saved = {name: extent.rows for name, extent in part.extents.items()}
        here = (part.layout, part_path(part.rank, part.layout.world_size), saved)
        if here != (manifest.layout, file, expected):
            raise PartDamage(
                file,
                f"is that of rank {part.rank} of {part.layout} with {len(saved)} tensors, parts.json says "
                f"{manifest.layout} with {len(expected)} tensors there",
            )
        for name, extent in part.extents.items():
            whole = manifest.tensors[name]
            shape = (len(extent.rows), *whole.shape[1:]) if whole.shape else ()
            if (extent.dtype, extent.shape) != (whole.dtype, shape):
                raise PartDamage(
                    file,
                    f"holds {'/'.join(name)} as {(extent.dtype, extent.shape)}, saved was "
                    f"{(whole.dtype, shape)}",
                )
        self._sums[file] = part.sums
        return part.extents

    # ---------------------------------------------------------------------- pieces
    def _pieces(
        self, file: str, name: Name, extent: Extent, want: TensorRequest | None
    ) -> Iterator[FilePiece]:
        """Yields the pieces of an extent that contain wanted rows (`want` None: all, without a target)."""
        row_bytes = extent.num_bytes // len(extent.rows) if extent.rows else 0
        begin = extent.rows.start * row_bytes  # of the extent in the tensor
        low, high = (want.rows.start * row_bytes, want.rows.stop * row_bytes) if want else (0, 0)
        for number, digest in enumerate(extent.digests):
            first = number * extent.piece_bytes
            num_bytes = min(extent.piece_bytes, extent.num_bytes - first)
            start, stop = max(begin + first, low), min(begin + first + num_bytes, high)
            if want is not None and start >= stop:
                continue
            yield FilePiece(
                file=file,
                tensor=name,
                start=extent.start + first,
                num_bytes=num_bytes,
                digest=digest,
                target=want.target if want else None,
                skip=start - (begin + first) if want else 0,
                length=stop - start if want else 0,
                at=start - low if want else 0,
            )

    # ---------------------------------------------------------------------- bytes
    def _again(self, file: str, act: Callable[[], Result]) -> Result:
        """Runs `act`, and again for the next copy of the file while there is one."""
        while True:
            try:
                return act()
            except PartDamage:
                if not self._storage.elsewhere(self._path(file)):
                    raise

    def _check_size(self, file: str) -> None:
        committed = self._manifest.files[file].bytes
        try:
            found = self._storage.size(self._path(file))
        except FileNotFoundError as error:
            raise PartDamage(file, "is missing") from error
        if found != committed:
            raise PartDamage(file, f"has {found} bytes, committed were {committed}")

    def _fetch_any_copy(self, file: str, pieces: list[FilePiece], was_read: Callable[[int], None]) -> None:
        """Uses only this thread, because the place of the last read is recorded per thread."""
        self._again(file, lambda: self._fetcher(self._make_buffer, 1, was_read).fetch(pieces))

    def _fetcher(
        self,
        make_buffer: Callable[[int], memoryview],
        at_a_time: int,
        was_read: Callable[[int], None] = lambda num_bytes: None,
    ) -> PieceFetcher:
        return PieceFetcher(self._storage, self._path("")[:-1], make_buffer, at_a_time, was_read)

    def _path(self, file: str) -> str:
        return f"points/{self._manifest.point}/{file}"
