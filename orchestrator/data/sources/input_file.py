"""The one face by which the data plane opens a file of a source, wherever it lies.

It knows no format: it gives bytes and what the file system says of the file.
"""

from __future__ import annotations

import io
import os
from types import TracebackType
from typing import Any, Protocol, Self

from orchestrator.data.sources.code_records import BASE, CodeRecords
from orchestrator.data.sources.object_stores import is_remote
from orchestrator.data.sources.remote_files import RemoteFile

_BUFFER_BYTES = 1 << 20


class InputFile(Protocol):
    """An open file. Reading raises `OSError`; nothing of it moves with what another reader reads.

    `name` is for messages, and the path of a local file; `etag` is empty where the storage has none.
    """

    @property
    def name(self) -> str:
        """What the file is called in messages."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        ...

    @property
    def mtime_ns(self) -> int:
        """When it was last written, in nanoseconds since 1970."""
        ...

    @property
    def etag(self) -> str:
        """What the storage says the content is known by."""
        ...

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Bytes [offset, offset + num_bytes); fewer at the end of the file only."""
        ...

    def stream(self) -> io.BufferedIOBase:
        """The whole file as a seekable stream with a place of its own, at its first byte."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_input(base: str, path: str) -> InputFile:
    """The file `path` of the folder `base`, which may be a bucket's, or that of code, open for reading.

    Raises `FileNotFoundError` if it is not there, any other `OSError` if it cannot be opened.
    """
    if base == BASE:
        return CodeRecords(path)
    if is_remote(base):
        return RemoteFile(f"{base}/{path}")
    return LocalFile(os.path.join(base, path))


class LocalFile:
    """An open file of this machine."""

    def __init__(self, name: str) -> None:
        self.name, self.etag = name, ""
        self._file = open(name, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        status = os.fstat(self._file.fileno())
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """See `InputFile`: a single read of the system may give less than asked."""
        pieces, stop = list[bytes](), offset + num_bytes
        while offset < stop and (piece := os.pread(self._file.fileno(), stop - offset, offset)):
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def stream(self) -> io.BufferedIOBase:
        """See `InputFile`. To be read while the file is open."""
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
    """An open file of this machine, read from a place of its own."""

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
    """The file as pyarrow reads it: by its path where this machine has it."""
    import pyarrow as pa

    return file.name if isinstance(file, LocalFile) else pa.PythonFile(file.stream(), mode="r")
