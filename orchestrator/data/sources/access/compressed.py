"""Decodes the content of a file in pieces: gzip, zstd, bzip2, xz, or plain, by the ending of its name.

A truncated stream raises `EOFError`, a damaged one the error of its library (`DAMAGE`). Consecutive streams
in a file are all read. Memory is bounded, however much a few bytes decode to.
"""

from __future__ import annotations

import bz2
import io
import lzma
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import zstandard
from zlib_ng import gzip_ng, zlib_ng

from orchestrator.data.common.process_limits import process_limits
from orchestrator.data.sources.access.input_file import InputFile
from orchestrator.data.sources.access.records_in_memory import join

# The bytes of a read of plain input, and at most of a decoded piece.
READ_BYTES = 1 << 20
# bz2 and xz are read in pieces of this size: the rest of one is copied at each stream's end.
_STREAM_READ_BYTES = 1 << 16
# This much of a zstd file may decode to 64 MiB at most.
_ZSTD_READ_BYTES = 1 << 11
# Memory limits of a zstd or xz stream if the process has no limit of its own. The strongest preset of xz
# takes 65 MiB, a typical zstd stream 8.
_ZSTD_WINDOW_BYTES, _XZ_MEMORY_BYTES = 1 << 31, 1 << 30
COMPRESSED = (".gz", ".zst", ".zstd", ".bz2", ".xz")
DAMAGE: tuple[type[Exception], ...] = (  # type: ignore[assignment]  # its stub calls error an instance
    OSError,
    EOFError,
    zlib_ng.error,
    zstandard.ZstdError,
    lzma.LZMAError,
)


def damage_code(error: Exception) -> str:
    """The code of the error to raise for one of `DAMAGE`: an error of the system, or a damaged file."""
    is_of_system = isinstance(error, OSError) and error.errno is not None
    return "data.unreadable_file" if is_of_system else "data.damaged_file"


def with_compressed(*suffixes: str) -> tuple[str, ...]:
    """The endings, each also with that of every compression appended."""
    return tuple(suffix + pressed for suffix in suffixes for pressed in ("", *COMPRESSED))


def decoded(file: InputFile, path: str, file_bytes: int) -> Iterator[bytes]:
    """The decoded content of the file's first `file_bytes`, in pieces, by the ending of `path`."""
    begin = io.BufferedReader(_Begin(file.stream(), file_bytes))
    try:
        if path.endswith(".gz"):
            yield from _gunzip(begin)
        elif path.endswith((".zst", ".zstd")):
            yield from _unzstd(begin)
        elif path.endswith(".bz2"):
            yield from _streams(begin, bz2.BZ2Decompressor, b"")
        elif path.endswith(".xz"):
            yield from _streams(begin, _unxz, b"\0")
        else:
            while piece := begin.read(READ_BYTES):
                yield piece
    except (zstandard.ZstdError, lzma.LZMAError) as error:
        if "memory" in str(error).lower():
            process_limits().refuse_decoder(file.name, str(error))
        raise
    except EOFError as error:
        if file.size <= file_bytes:
            raise
        raise EOFError(
            f"{error}; it has {file.size} bytes, and the run reads the {file_bytes} that it was started with"
        ) from error


class _Begin(io.RawIOBase):
    """The first bytes of a stream. Data appended while it is read is not visible."""

    def __init__(self, stream: io.BufferedIOBase, num_bytes: int) -> None:
        self._stream, self._at, self._left = stream, 0, num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num = self._stream.readinto(memoryview(buffer)[: self._left])
        self._at, self._left = self._at + num, self._left - num
        return num

    def tell(self) -> int:
        return self._at


def _gunzip(file: io.BufferedReader[Any]) -> Iterator[bytes]:
    if not file.peek(1):
        raise EOFError("it is empty, which no gzip file is")
    # zlib-ng is zlib at three times its speed; every tokenizer that reads a large file decodes all of it
    with gzip_ng.GzipNGFile(fileobj=file, mode="rb") as stream:  # type: ignore[no-untyped-call]
        while piece := stream.read(READ_BYTES):
            yield piece


def _unzstd(file: io.BufferedReader[Any]) -> Iterator[bytes]:
    """Decodes frame after frame. python-zstandard's own reader ends without an error if the file is
    truncated.
    """
    decompressor = zstandard.ZstdDecompressor(
        max_window_size=min(_ZSTD_WINDOW_BYTES, process_limits().decoder_bytes)
    )
    frame, data = None, b""
    pieces, num_bytes = list[bytes](), 0
    while data := data or file.read(_ZSTD_READ_BYTES):
        frame = frame or decompressor.decompressobj()
        pieces.append(frame.decompress(data))
        num_bytes += len(pieces[-1])
        data = b""
        if frame.eof:
            data, frame = frame.unused_data, None
        if num_bytes >= READ_BYTES:
            yield from _cut(join(pieces))
            pieces, num_bytes = [], 0
    yield from _cut(b"".join(pieces))
    if frame is not None or not file.tell():
        raise EOFError("the compressed stream is cut off: its last frame does not end")


class _Decompressor(Protocol):
    """The common interface of the bz2 and lzma decompressors."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


def _unxz() -> _Decompressor:
    return lzma.LZMADecompressor(
        lzma.FORMAT_XZ, memlimit=min(_XZ_MEMORY_BYTES, process_limits().decoder_bytes)
    )


def _streams(
    file: io.BufferedReader[Any], begin: Callable[[], _Decompressor], padding: bytes
) -> Iterator[bytes]:
    """Decodes stream after stream, with `padding` between them.

    The libraries' own readers silently skip data after a stream that are no stream.
    """
    stream, data = None, b""
    while data := (data if stream else data.lstrip(padding)) or file.read(_STREAM_READ_BYTES):
        if stream is None and not (data := data.lstrip(padding)):
            continue
        stream = stream or begin()
        if piece := stream.decompress(data, READ_BYTES):
            yield piece
        while not (stream.needs_input or stream.eof):
            if piece := stream.decompress(b"", READ_BYTES):
                yield piece
        data = b""
        if stream.eof:
            data, stream = stream.unused_data, None
    if stream is not None or not file.tell():
        raise EOFError("the compressed stream is cut off: it does not end")


def _cut(data: bytes) -> Iterator[bytes]:
    return (data[start : start + READ_BYTES] for start in range(0, len(data), READ_BYTES))


class ExactReader:
    """Reads exact numbers of bytes from a stream of pieces. `place` counts the bytes read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._held, self._at = pieces, b"", 0
        self.place = 0

    def read(self, num_bytes: int, what: str) -> bytes:
        """`num_bytes` bytes of `what`. Raises `EOFError` if there are fewer."""
        found = list[bytes]()
        self._pass(num_bytes, what, found)
        return join(found) if found else b""

    def skip(self, num_bytes: int, what: str) -> None:
        """Skips `num_bytes` bytes of `what`. Raises as `read`."""
        self._pass(num_bytes, what, None)

    def at_end(self) -> bool:
        """Whether no bytes follow."""
        while self._at == len(self._held):
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self._held, self._at = piece, 0
        return False

    def _pass(self, num_bytes: int, what: str, found: list[bytes] | None) -> None:
        left = num_bytes
        while left:
            if self.at_end():
                raise EOFError(f"cut off: {what} at byte {self.place} lacks {left} of {num_bytes} bytes")
            piece = self._held[self._at : self._at + left]
            self._at += len(piece)
            left -= len(piece)
            if found is not None:
                found.append(piece)
        self.place += num_bytes
