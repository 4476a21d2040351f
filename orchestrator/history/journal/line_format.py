"""The form of a journal's lines: the number of the format, and the two checksums of each line.

A line is one JSON object. From format 3 on it has `prev`, the checksum of the line before it in the attempt's
journal, and ends with `sum`, its own checksum: xxh3_64 of all bytes of the line before `,"sum":` (16 hex
digits). So a reader sees for each line by itself whether it is as it was written, and for two lines whether
one was written after the other. Later formats keep `sum` as it is; else a reader of this version could not
tell a line of a later format from a damaged one.

Lines of formats 1 and 2 have no checksum: they count as whole if they are JSON.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson
import xxhash

from orchestrator.errors import LaterFormatError, OrchestratorError, StorageError

FORMAT = 3
WITHOUT_SUMS = (1, 2)  # lines of format 1 have no number
DAMAGED = "journal.damaged"  # the code of the error for a line that is not as it was written
FIRST = "0" * 16  # `prev` of an attempt's first line
_KEY = b',"sum":"'
_TAIL = len(_KEY) + 16 + len(b'"}')  # bytes of a line from `_KEY` on


class LaterLineError(StorageError):
    """A later version wrote the line: nothing is torn or damaged, and nothing was decided from it."""

    code = LaterFormatError.code


class DamagedLineError(OrchestratorError):
    """A line is not as it was written. The text says why, and names no file."""

    code = DAMAGED


class ParsedLine(NamedTuple):
    """A line that is as it was written.

    `sum` is its checksum (16 hex digits), also for a line without the field. `prev` is None for such a line.
    """

    fields: dict[str, Any]
    seq: int
    sum: str
    prev: str | None


def line_bytes(fields: dict[str, Any], prev: str) -> tuple[bytes, str]:
    """The line with these fields, line feed included, and its checksum.

    `prev` is the checksum of the line before it, `FIRST` for the first. `fields` are JSON values, `format`
    the first of them, and without `prev` and `sum`.
    """
    text = orjson.dumps({**fields, "prev": prev})
    found = xxhash.xxh3_64_hexdigest(text[:-1])
    return b"%b%b%b\"}\n" % (text[:-1], _KEY, found.encode()), found


def parse_line(text: bytes) -> ParsedLine:
    """Checks one line, without its line feed.

    Raises `DamagedLineError`, and `LaterLineError` (its text names no file) for a line of a later format.
    """
    has_sum = text[-_TAIL:-18] == _KEY
    found = xxhash.xxh3_64_hexdigest(text[:-_TAIL] if has_sum else text)
    if has_sum and text[-18:] != found.encode() + b'"}':
        raise DamagedLineError(f"its checksum is {found}, the line says {_shown(text[-18:-2])}")
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise DamagedLineError(f"it is no JSON: {error}") from error
    if type(fields) is not dict:
        raise DamagedLineError("it is no JSON object")
    number = fields.get("format", 1)
    if number != FORMAT or type(number) is not int or not has_sum:
        _require_known(number, has_sum)
    seq = fields.get("seq")
    if type(seq) is not int or seq < 1 or type(fields.get("kind")) is not str:
        raise DamagedLineError(f"its fields are seq {seq!r} and kind {fields.get('kind')!r}")
    fields.pop("sum", None)
    return ParsedLine(fields, seq, found, fields.pop("prev", None))


def _require_known(number: Any, has_sum: bool) -> None:
    """Checks the number of a line that is not of this format, or has no checksum."""
    if number == FORMAT and type(number) is int:
        raise DamagedLineError(f"it has format {FORMAT}, but does not end with its checksum")
    if type(number) is not int or number < 1:
        raise DamagedLineError(f"its format is {number!r}")
    if number in WITHOUT_SUMS and has_sum:
        raise DamagedLineError(f"it has a checksum, which lines of format {number} do not have")
    if number not in WITHOUT_SUMS:
        known = ", ".join(map(str, (*WITHOUT_SUMS, FORMAT)))
        raise LaterLineError(
            f"has format {number}, this version reads {known}; use the version that wrote it, or a later one"
        )


def first_line(data: bytes, path: str) -> ParsedLine | None:
    """The first line of a journal's beginning; None if it is incomplete or damaged.

    Raises `LaterLineError`, which names `path`.
    """
    text, end, _ = data.partition(b"\n")
    try:
        return parse_line(text) if end else None
    except LaterLineError as error:
        raise LaterLineError(f"{path} line 1 {error}") from error
    except DamagedLineError:
        return None


def _shown(text: bytes) -> str:
    return text.decode("ascii", "backslashreplace")
