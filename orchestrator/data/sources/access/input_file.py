"""Opens a file of a source for reading: a local file, an object of a remote store, or records of code.

`RangedReads` is a file for pyarrow of which the parts to be read are known in advance. It requests each part
in few large requests, and nothing else.
"""

from __future__ import annotations

import errno
import io
import operator
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Self

from typing_extensions import override

from orchestrator.data.common.user_code import load, shown
from orchestrator.data.sources.access.records_in_memory import join
from orchestrator.data.sources.access.remote_stores import is_remote, remote_store, repeated
from orchestrator.errors import ConfigError, DataError

_BUFFER_BYTES = 1 << 20
_REMOTE_BUFFER_BYTES = 4 << 20


class InputFile(Protocol):
    """An open file. Reading raises `OSError`. Readers do not share a position. Leaving its block closes it.

    `name` is for messages, and the path of a local file. `size` is in bytes, `mtime_ns` the modification time
    in nanoseconds since 1970, both of when the file was opened. `etag` is the storage's identifier of the
    content, empty if it has none.
    """

    name: str
    size: int
    mtime_ns: int
    etag: str

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Bytes [offset, offset + num_bytes); fewer only at the end of the file."""
        ...

    def stream(self) -> io.BufferedIOBase:
        """The whole file as a seekable stream with its own position, at its first byte."""
        ...

    def close(self) -> None:
        """Closes what is held open. A second call does nothing."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


class LocalFile(InputFile):
    """An open local file."""

    def __init__(self, name: str) -> None:
        self.name, self.etag = name, ""
        self._file = open(name, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        status = os.fstat(self._file.fileno())
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns

    @override
    def read_at(self, offset: int, num_bytes: int) -> bytes:
        # repeats, because a single system call may read less than requested
        pieces, stop = list[bytes](), offset + num_bytes
        while offset < stop and (piece := os.pread(self._file.fileno(), stop - offset, offset)):
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @override
    def stream(self) -> io.BufferedIOBase:
        """A stream that is valid while the file is open."""
        return io.BufferedReader(_Stream(self.size, self._read_into), _BUFFER_BYTES)

    def _read_into(self, offset: int, into: memoryview) -> int:
        return os.preadv(self._file.fileno(), [into], offset)

    @override
    def close(self) -> None:
        self._file.close()


class _Seekable(io.RawIOBase):
    """A file of `size` bytes that is read from its own position."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    @override
    def tell(self) -> int:
        return self._at


class _Stream(_Seekable):
    """`read_into` fills a buffer with the file's bytes from an offset, fewer only at its end."""

    def __init__(self, size: int, read_into: Callable[[int, memoryview], int]) -> None:
        super().__init__(size)
        self._read_into = read_into

    @override
    def readinto(self, buffer: Any) -> int:
        num = self._read_into(self._at, memoryview(buffer).cast("B"))
        self._at += num
        return num


class RemoteFile(InputFile):
    """An object as it was when opened: reading raises `OSError` if it was replaced since.

    Holds no connection. Thread-safe.
    """

    def __init__(self, uri: str) -> None:
        """Raises `FileNotFoundError`, or another `OSError` with an explanation. One request."""
        self.name = uri
        self._store, self._key = remote_store(uri)
        facts = self._store.facts(self._key)
        self.size, self.mtime_ns, self.etag = facts.size, facts.mtime_ns, facts.tag

    @override
    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Reads with one request, with retries if its answer is interrupted."""
        data = bytearray(max(0, min(offset + num_bytes, self.size) - offset))
        self._read_into(offset, memoryview(data))
        return bytes(data)

    @override
    def stream(self) -> io.BufferedIOBase:
        """A stream that reads 4 MiB at a time."""
        return io.BufferedReader(_Stream(self.size, self._read_into), _REMOTE_BUFFER_BYTES)

    def _read_into(self, offset: int, into: memoryview) -> int:
        part = into[: max(0, self.size - offset)]

        def request() -> None:
            num = self._store.read(self._key, offset, part, self.etag)
            if num != len(part):
                raise OSError(
                    errno.EIO,
                    f"bytes [{offset}, {offset + len(part)}) were asked for, and {num} came",
                    self.name,
                )

        if part:
            repeated(request)
        return len(part)



# -------------------------------------------------------------------------------------------- announced parts
# The bytes of a part that are requested, and held, at a time.
PIECE_BYTES = 4 << 20


class RangedReads(_Seekable):
    """The file as a seekable stream. Not thread-safe."""

    def __init__(self, file: InputFile) -> None:
        super().__init__(file.size)
        self._file = file
        self._starts, self._stops = list[int](), list[int]()
        self._held: dict[int, tuple[int, bytes]] = {}  # by part, its last piece: place and bytes

    def expect(self, parts: Iterable[tuple[int, int]]) -> None:
        """Declares the parts that will be read: bytes [start, stop) each, which do not overlap."""
        ordered = sorted(parts)
        self._starts, self._stops = [start for start, _ in ordered], [stop for _, stop in ordered]
        self._held = {}

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer only at the file's end."""
        stop = self._size if size < 0 else self._at + size
        found = self.read_at(self._at, stop - self._at)
        self._at += len(found)
        return found

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """As `InputFile.read_at`. Does not move the stream's position."""
        at, stop = offset, min(offset + num_bytes, self._size)
        found = list[bytes]()
        while at < stop:
            found.append(self._piece(at, stop - at))
            at += len(found[-1])
        return join(found) if found else b""

    def _piece(self, at: int, num_bytes: int) -> bytes:
        """Up to `num_bytes` bytes from `at`."""
        number = bisect_right(self._starts, at) - 1
        if number < 0 or at >= self._stops[number]:
            ahead = self._starts[number + 1] if number + 1 < len(self._starts) else self._size
            return self._file.read_at(at, min(num_bytes, ahead - at))
        begin, held = self._held.get(number, (at, b""))
        if not begin <= at < begin + len(held):
            begin, held = at, self._file.read_at(at, min(self._stops[number] - at, PIECE_BYTES))
            self._held[number] = begin, held
        return held[at - begin : at - begin + num_bytes]


# ------------------------------------------------------------------------------------------- records of code
# The folder of a source that is code. Its one virtual file is called `package.module:function`.
BASE = "python://"


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenedRecords:
    """The object that a factory returned, its number of records, and the identity of the object and its
    code.
    """

    records: Any
    num_records: int
    identity: str


_opening = threading.Lock()
_opened_records: dict[str, _OpenedRecords] = {}


class CodeRecords(InputFile):
    """Records instead of bytes: `size` is their number, `etag` the identity of the records and their
    code.
    """

    mtime_ns = 0

    def __init__(self, name: str) -> None:
        """Calls the factory, once per process.

        Raises `ConfigError` if it cannot be called, or returns an object without indexing or a length.
        """
        self.name = name
        with _opening:
            if name not in _opened_records:
                _opened_records[name] = _open_records(name)
            opened = _opened_records[name]
        self.size, self.etag, self._records = opened.num_records, opened.identity, opened.records

    @classmethod
    def anew(cls, name: str) -> Self:
        """The same, with a new call of the factory, which may return other records by now."""
        with _opening:
            _opened_records.pop(name, None)
        return cls(name)

    def record(self, index: int) -> Any:
        """The record. Raises `DataError` with the place and the traceback if the user's code fails."""
        try:
            return self._records[index]
        except (Exception, SystemExit) as error:  # user code may raise anything; no bad record
            raise DataError(
                f"{self.name}[{index}]: its __getitem__ failed; fix the code (changed code has another "
                f"identity, see resume.accept_changed):\n{shown(error)}",
                code="user_code.raised",
            ) from error

    def several(self, indices: range) -> list[Any]:
        """The records of `indices`.

        Uses one call if the user's object has `__getitems__`, the protocol of torch and of `datasets`. Raises
        as `record`, with the place of the record that fails if one fails by itself.
        """
        ask = getattr(self._records, "__getitems__", None)
        if not callable(ask):
            return [self.record(index) for index in indices]
        where = f"{self.name}[{indices.start}:{indices.stop}]"
        try:
            found = ask(list(indices))
        except (Exception, SystemExit) as error:  # see `record`
            for index in indices:
                self.record(index)
            raise DataError(
                f"{where}: its __getitems__ failed, but __getitem__ returns each of these records; fix the "
                f"code (changed code has another identity, see resume.accept_changed):\n{shown(error)}",
                code="user_code.raised",
            ) from error
        if not isinstance(found, list | tuple) or len(found) != len(indices):
            what = f"{len(found)} records" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            raise DataError(
                f"{where}: its __getitems__ returned {what} for {len(indices)} indices; return a list with "
                "one record for each index, in their order, or remove the method",
                code="user_code.wrong_result",
            )
        return list(found)

    @override
    def read_at(self, offset: int, num_bytes: int) -> bytes:
        self._no_bytes()

    @override
    def stream(self) -> io.BufferedIOBase:
        self._no_bytes()

    def _no_bytes(self) -> NoReturn:
        raise AssertionError(f"{self.name} has records and no bytes")


def _open_records(name: str) -> _OpenedRecords:
    where = f"data.sources[].path={name}"
    code = load(name, where)
    try:
        records = code.function()
        num_records = operator.index(len(records))
        fingerprint = getattr(records, "fingerprint", None)
        known_by = fingerprint() if callable(fingerprint) else None
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ConfigError(
            f"{where}: a call without arguments failed, or the returned object has no length, or its "
            f"fingerprint() failed:\n{shown(error)}",
            code="user_code.raised",
        ) from error
    if not hasattr(records, "__getitem__") or isinstance(records, str | bytes):
        raise ConfigError(
            f"{where}: it returned {type(records).__name__}; return an object with __len__ and "
            "__getitem__(i), such as a list of mappings",
            code="user_code.wrong_result",
        )
    identity = f"{num_records} records, {code.identity}"
    if known_by is not None:
        identity += f", fingerprint {known_by}"
    return _OpenedRecords(records=records, num_records=num_records, identity=identity)
