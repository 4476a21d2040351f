"""The common interface for opening a file of a source, on any storage.

`in_threads` makes many small queries in parallel, because each takes long on a remote storage. `RangedReads`
is a file for pyarrow of which the parts to be read are known in advance: each is requested in few large
requests, and nothing else.
"""

from __future__ import annotations

import errno
import io
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential

from orchestrator.data.sources.access.code_records import BASE, CodeRecords
from orchestrator.data.sources.access.records_in_memory import join
from orchestrator.data.sources.access.remote_stores import is_remote, passes, store_of

_BUFFER_BYTES = 1 << 20
_REMOTE_BUFFER_BYTES = 4 << 20
# A read whose answer is interrupted or too short is tried this often, with waits of at most this many
# seconds.
_TRIES, _WAIT_S = 4, 5


class InputFile(Protocol):
    """An open file. Reading raises `OSError`. Readers do not share a position.

    `name` is for messages, and the path of a local file. `etag` is empty if the storage has none.
    """

    @property
    def name(self) -> str:
        """The file's name in messages."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        ...

    @property
    def mtime_ns(self) -> int:
        """The modification time, in nanoseconds since 1970."""
        ...

    @property
    def etag(self) -> str:
        """The storage's identifier of the content."""
        ...

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Bytes [offset, offset + num_bytes); fewer only at the end of the file."""
        ...

    def stream(self) -> io.BufferedIOBase:
        """The whole file as a seekable stream with its own position, at its first byte."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_input(base: str, path: str) -> InputFile:
    """Opens the file `path` of the folder `base` for reading. `base` may be in a bucket, or that of code.

    Raises `FileNotFoundError` if it does not exist, another `OSError` if it cannot be opened.
    """
    if base == BASE:
        return CodeRecords(path)
    if is_remote(base):
        return RemoteFile(f"{base}/{path}")
    return LocalFile(os.path.join(base, path))


def for_arrow(file: InputFile) -> Any:
    """The file for pyarrow: a local file by its path."""
    import pyarrow as pa

    return file.name if isinstance(file, LocalFile) else pa.PythonFile(file.stream(), mode="r")


class LocalFile:
    """An open local file."""

    def __init__(self, name: str) -> None:
        self.name, self.etag = name, ""
        self._file = open(name, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        status = os.fstat(self._file.fileno())
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """See `InputFile`. Repeats, because a single system call may read less than requested."""
        pieces, stop = list[bytes](), offset + num_bytes
        while offset < stop and (piece := os.pread(self._file.fileno(), stop - offset, offset)):
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def stream(self) -> io.BufferedIOBase:
        """See `InputFile`. Valid while the file is open."""
        return io.BufferedReader(_Local(self._file.fileno(), self.size), _BUFFER_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


class _Local(io.RawIOBase):
    """An open local file, read from its own position."""

    def __init__(self, handle: int, size: int) -> None:
        self._handle, self._size, self._at = handle, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num = os.preadv(self._handle, [buffer], self._at)
        self._at += num
        return num

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class RemoteFile:
    """An object as it was when opened: reading raises `OSError` if it was replaced since.

    Holds no connection. Thread-safe. See `InputFile`.
    """

    def __init__(self, uri: str) -> None:
        """Raises `FileNotFoundError`, or another `OSError` with an explanation. One request."""
        self.name, self._store = uri, store_of(uri)
        found = self._store.head(uri)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", uri)
        self.size, self.mtime_ns, self.etag = found.size, found.mtime_ns, found.etag

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """See `InputFile`. One request, with retries if its answer is interrupted."""
        end = min(offset + num_bytes, self.size)
        return self._range(offset, end) if offset < end else b""

    @retry(
        retry=retry_if_exception(passes),
        stop=stop_after_attempt(_TRIES),
        wait=wait_exponential(max=_WAIT_S),
        reraise=True,
    )
    def _range(self, start: int, end: int) -> bytes:
        data = self._store.read(self.name, start, end, self.etag)
        if len(data) != end - start:
            raise OSError(
                errno.EIO, f"bytes [{start}, {end}) were asked for, and {len(data)} came", self.name
            )
        return data

    def stream(self) -> io.BufferedIOBase:
        """See `InputFile`. Reads 4 MiB at a time."""
        return io.BufferedReader(_Remote(self), _REMOTE_BUFFER_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class _Remote(io.RawIOBase):
    """An object, read from its own position."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read_at(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


# ----------------------------------------------------------------------------------------------- many queries
Item = TypeVar("Item")
Result = TypeVar("Result")

# A single item is too small for a task.
_STRETCH = 64
# How much later than a quick storage it may answer.
_PATIENCE_S = 0.05


def in_threads(
    look: Callable[[Item], Result], items: Sequence[Item], num_threads: int = 8, quick_s: float = 0.0
) -> list[Result]:
    """The results of `look` for each item, in order.

    As long as an item takes no more than `quick_s`, `look` runs in this thread, because threads would only
    wait for each other. Raises what `look` raises.
    """
    parts = stretches_in_threads(lambda stretch: [*map(look, stretch)], items, num_threads, quick_s)
    return [found for part in parts for found in part]


def stretches_in_threads(
    look: Callable[[Sequence[Item]], Result],
    items: Sequence[Item],
    num_threads: int = 8,
    quick_s: float = 0.0,
) -> list[Result]:
    """The same with `look` called for a batch of items at a time. Returns the result of each batch, in
    order.
    """
    stretches = (items[start : start + _STRETCH] for start in range(0, len(items), _STRETCH))
    found, num_looked_at = list[Result](), 0
    if quick_s:
        began = time.perf_counter()
        for stretch in stretches:
            found.append(look(stretch))
            num_looked_at += len(stretch)
            if time.perf_counter() - began > quick_s * num_looked_at + _PATIENCE_S:
                break
    with ThreadPoolExecutor(num_threads) as pool:
        found += pool.map(look, stretches)
    return found


# -------------------------------------------------------------------------------------------- announced parts
# The bytes of a part that are requested, and held, at a time.
PIECE_BYTES = 4 << 20


class RangedReads(io.RawIOBase):
    """The file as a seekable stream. Not thread-safe."""

    def __init__(self, file: InputFile) -> None:
        self._file, self._at = file, 0
        self._starts, self._stops = list[int](), list[int]()
        self._held: dict[int, tuple[int, bytes]] = {}  # by part, its last piece: place and bytes

    def expect(self, parts: Iterable[tuple[int, int]]) -> None:
        """Declares the parts that will be read: bytes [start, stop) each, which do not overlap."""
        ordered = sorted(parts)
        self._starts, self._stops = [start for start, _ in ordered], [stop for _, stop in ordered]
        self._held = {}

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer only at the file's end."""
        stop = self._file.size if size < 0 else self._at + size
        found = self.read_at(self._at, stop - self._at)
        self._at += len(found)
        return found

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """See `InputFile`. Does not move the stream's position."""
        at, stop = offset, min(offset + num_bytes, self._file.size)
        found = list[bytes]()
        while at < stop:
            found.append(self._piece(at, stop - at))
            at += len(found[-1])
        return join(found) if found else b""

    def _piece(self, at: int, num_bytes: int) -> bytes:
        """Up to `num_bytes` bytes from `at`."""
        number = bisect_right(self._starts, at) - 1
        if number < 0 or at >= self._stops[number]:
            ahead = self._starts[number + 1] if number + 1 < len(self._starts) else self._file.size
            return self._file.read_at(at, min(num_bytes, ahead - at))
        begin, held = self._held.get(number, (at, b""))
        if not begin <= at < begin + len(held):
            begin, held = at, self._file.read_at(at, min(self._stops[number] - at, PIECE_BYTES))
            self._held[number] = begin, held
        return held[at - begin : at - begin + num_bytes]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._at
