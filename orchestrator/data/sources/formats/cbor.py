"""`cbor`: one map per item of a CBOR sequence (RFC 8949, RFC 8742), as Epochraft reads it.

The end of an item shows only when it is read, so a file is read from its first byte to its last. The ends of
items are found here, which distinguishes a truncated file from a complete one. `cbor2` decodes their content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from orchestrator.data.sources.access.compressed import decoded, with_compressed
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, join, packed
from orchestrator.data.sources.formats.base import Format, Parser
from orchestrator.data.sources.records.content import BadRecordError, Content, Described, Document
from orchestrator.data.sources.records.documents import described
from orchestrator.data.sources.records.line_records import Batch
from orchestrator.data.sources.records.plain_values import plain
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow
    from orchestrator.data.sources.readers import Part

_MAX_DEPTH = 256
_BREAK, _INDEFINITE = 0xFF, 31
_BYTES, _TEXT, _ARRAY, _MAP, _TAG = 2, 3, 4, 5, 6


class CborSequence(Format):
    """One map per item."""

    name = "cbor"
    suffixes = with_compressed(".cbor")

    @override
    def require_content(self, source: str, content: Content) -> None:
        """Also raises `ConfigError` if cbor2 is not installed."""
        super().require_content(source, content)
        _cbor2()

    @override
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """Raises `OSError` at data that are no CBOR, or longer than a record may be.

        The next item could not be found after such data.
        """
        del part, content, whole
        held, num_held, wanted, place, number = list[bytes](), 0, 1, 0, 1
        for piece in chain(decoded(file, row.path, row.bytes), (None,)):
            if piece is not None:
                held.append(piece)
                num_held += len(piece)
                if (
                    num_held < wanted
                ):  # an incomplete item is parsed again when twice as many bytes are available
                    continue
            data, items, at = join(held) if held else b"", list[bytes](), 0
            while at < len(data) and (end := item_end(data, at, place)) is not None:
                items.append(data[at:end])
                at = end
            if items:
                yield number, packed(items), place
            place, number = place + at, number + len(items)
            held, num_held = [data[at:]], len(data) - at
            wanted = 2 * num_held
            if num_held > MAX_RECORD_BYTES:
                raise OSError(f"the item at byte {place} has more than {MAX_RECORD_BYTES:,} bytes")
        if num_held:
            raise EOFError(f"cut off: the item at byte {place} does not end")

    @override
    def parser(self, content: Content) -> Parser:
        cbor2 = _cbor2()

        def document(item: bytes) -> Document | Described | None:
            try:
                value = cbor2.loads(item)
            except cbor2.CBORDecodeError as error:
                raise BadRecordError(f"no CBOR: {error}", code="record.not_cbor") from error
            if not isinstance(value, Mapping):
                raise BadRecordError(
                    f"a CBOR {type(value).__name__}, a map is expected", code="record.not_object"
                )
            return described(_with_dicts(value), content, plain)

        return document

    def place(self, path: str, part: Part, index: int, line: Callable[[], int | None]) -> str:
        """The byte and the number of the item."""
        del line
        assert part.line is not None, "items are counted as they are read"
        return f"{path}: byte {part.place_of(index)}, item {part.line + index}"


def _with_dicts(value: Any) -> Any:
    """The value with maps as dicts and arrays as lists: inside tags, cbor2 makes immutable ones."""
    if isinstance(value, Mapping):
        return {key: _with_dicts(each) for key, each in value.items()}
    return [_with_dicts(each) for each in value] if isinstance(value, (list, tuple)) else value


def item_end(data: bytes, at: int, place: int) -> int | None:
    """The end of the item that begins at `at`; None if it continues beyond the data.

    Raises `OSError` if it is no CBOR. `place` is the position of the data in the file.
    """
    left = [1]  # items to come at each depth, -1: until a break
    while left:
        if left[-1] == 0:
            left.pop()
            continue
        if at >= len(data):
            return None
        if data[at] == _BREAK and left[-1] < 0:
            left.pop()
            at += 1
            continue
        left[-1] -= left[-1] > 0
        begin, at, major, value = (at, *_head(data, at, place))
        if at > len(data):
            return None
        if value is None:
            left.append(-1)
        elif major in (_BYTES, _TEXT):
            at += value
        elif major in (_ARRAY, _MAP, _TAG):
            left.append({_ARRAY: value, _MAP: 2 * value, _TAG: 1}[major])
        if len(left) > _MAX_DEPTH:
            raise OSError(f"items lie in each other more than {_MAX_DEPTH} deep at byte {place + begin}")
    return at if at <= len(data) else None


def _head(data: bytes, at: int, place: int) -> tuple[int, int, int | None]:
    """(end of an item's head, its major type, its value).

    The value is None if a break ends the item. The end may lie beyond the data; then the value is not known.
    """
    major, value = data[at] >> 5, data[at] & 31
    if value < 24:
        return at + 1, major, value
    if value < 28:
        end = at + 1 + (1 << (value - 24))
        return end, major, int.from_bytes(data[at + 1 : end], "big")
    if value == _INDEFINITE and _BYTES <= major <= _MAP:
        return at + 1, major, None
    raise OSError(f"no CBOR at byte {place + at}")


def _cbor2() -> Any:
    try:
        import cbor2
    except ImportError as error:
        raise ConfigError(
            "data.sources[].format=cbor needs the package cbor2, which is not installed; "
            "pip install -e '.[cbor]' in the checkout",
            code="machine.missing_package",
        ) from error
    return cbor2


FORMATS: tuple[Format, ...] = (CborSequence(),)
