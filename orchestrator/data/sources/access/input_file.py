"""The common interface for opening a file of a source, on any storage."""

from __future__ import annotations

import io
import os
from types import TracebackType
from typing import Any, Protocol, Self

from orchestrator.data.sources.access.code_records import BASE, CodeRecords
from orchestrator.data.sources.access.object_stores import is_remote
from orchestrator.data.sources.access.remote_files import RemoteFile

_BUFFER_BYTES = 1 << 20


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


def for_arrow(file: InputFile) -> Any:
    """The file for pyarrow: a local file by its path."""
    import pyarrow as pa

    return file.name if isinstance(file, LocalFile) else pa.PythonFile(file.stream(), mode="r")
