"""Detects text files in UTF-16 or UTF-32 by their first bytes. Such a file is refused by name."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError, DataError

if TYPE_CHECKING:
    from orchestrator.data.sources.access.input_file import InputFile

CODE = "data.text_encoding"
# The number of first bytes by which a file's encoding is detected.
BEGIN_BYTES = 4 << 10
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32LE"),  # before UTF-16LE, whose mark it begins with
    (codecs.BOM_UTF32_BE, "UTF-32BE"),
    (codecs.BOM_UTF16_LE, "UTF-16LE"),
    (codecs.BOM_UTF16_BE, "UTF-16BE"),
)
_LOW = bytes(range(0x20))
_LAST_PLANE = 3  # the highest Unicode plane with letters and signs
_NUM_KNOWN = 1 << 14
_known: set[tuple[str, int, int, str]] = set()


def other_encoding(begin: bytes) -> str | None:
    """The encoding of a text with these first bytes, if that is UTF-16 or UTF-32.

    It is shown by a byte order mark, or by zero bytes at every other place. A text in UTF-8 may have zero
    bytes at any other places.
    """
    begin = begin[:BEGIN_BYTES]
    for mark, name in _MARKS:
        if begin.startswith(mark):
            return name
    if begin.count(0) < 2:
        return None
    first, second, third, fourth = (begin[i : len(begin) - len(begin) % 4 : 4] for i in range(4))
    if _is_utf32(first, third, fourth):
        return "UTF-32LE"
    if _is_utf32(fourth, second, first):
        return "UTF-32BE"
    even, odd = (begin[i : len(begin) - len(begin) % 2 : 2] for i in range(2))
    if _is_utf16(even, odd, begin):
        return "UTF-16LE"
    return "UTF-16BE" if _is_utf16(odd, even, begin) else None


def _is_utf32(lowest: bytes, second_highest: bytes, highest: bytes) -> bool:
    """Whether these bytes of each four are those of characters."""
    has_planes = not any(highest) and max(second_highest, default=0) <= _LAST_PLANE
    return len(lowest) > 1 and has_planes and 2 * lowest.count(0) <= len(lowest)


def _is_utf16(low: bytes, high: bytes, begin: bytes) -> bool:
    """Whether these are the lower and higher bytes of characters.

    In most alphabets most of the higher bytes are below 0x20, and those of spaces and line ends are 0.
    """
    num_zeros = high.count(0)
    if num_zeros < 2 or 16 * low.count(0) > len(low):
        return False
    num_low = len(high) - len(high.translate(None, _LOW))
    return 4 * num_low >= 3 * len(high) or (8 * num_zeros >= len(high) and not _is_utf8(begin))


def _is_utf8(begin: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError:
        return False
    return True


@contextmanager
def before_a_start() -> Iterator[None]:
    """Before a run has started, a file in another encoding raises `ConfigError`."""
    try:
        yield
    except DataError as error:
        if error.code != CODE:
            raise
        raise ConfigError(str(error), code=error.code) from error


def require_utf8(name: str, begin: bytes) -> None:
    """Raises `DataError` if the file `name` with these first bytes is UTF-16 or UTF-32."""
    if (encoding := other_encoding(begin)) is not None:
        raise DataError(
            f"{name}: it is {encoding}, and texts are read as UTF-8; convert it, for example by "
            f"iconv -f {encoding} -t UTF-8",
            code=CODE,
        )


def require_utf8_file(file: InputFile, file_bytes: int) -> None:
    """The same for a file of which another part is read. Its first bytes are read once in a process."""
    key = (file.name, file.size, file.mtime_ns, file.etag)
    if key not in _known:
        require_utf8(file.name, file.read_at(0, min(BEGIN_BYTES, file_bytes)))
        if len(_known) >= _NUM_KNOWN:
            _known.clear()
        _known.add(key)


def utf8_pieces(name: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the decoded pieces of the file `name`. Raises as `require_utf8`."""
    for number, piece in enumerate(pieces):
        if number == 0:
            require_utf8(name, piece)
        yield piece
