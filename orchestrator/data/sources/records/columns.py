"""Reads columns of Arrow data as records, in batches.

A text is held as its bytes, any other value as Arrow data. A row becomes a Python object on access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, Records, Values, Whole
from orchestrator.data.sources.records.content import BadRecordError, Content
from orchestrator.data.sources.records.documents import utf8_text
from orchestrator.data.sources.records.line_records import Batch
from orchestrator.data.sources.records.plain_values import (
    columns_of,
    is_json,
    is_text,
    parsed_json,
    plain_array,
    plain_value,
    require_columns,
    unreadable_type,
)
from orchestrator.records.steps import PREFERENCE
from orchestrator.records.tokens import Int64Array

# Values are yielded in batches of about this many bytes.
BATCH_BYTES = 4 << 20


def read_columns(
    batches: Iterator[Any], content: Content, first_row: int, columns: dict[str, tuple[str, ...]]
) -> Iterator[Batch]:
    """The rows of record batches as records, from row `first_row` of the file on.

    A record is the bytes of a text if that is all that is read, else an object of the fields. Holds at most
    one record batch, and values of a few `BATCH_BYTES` or one value.
    """
    done = first_row
    is_text = content.kind == "text" and not content.transform_fields
    made = (_text(batch, columns) if is_text else _rows(batch, columns) for batch in batches)
    make = _values if is_text else _Objects(content)
    for stretch in _joined(made):
        for records in _cut(stretch, make):
            yield done + 1, records, done
            done += len(records)


def require_readable(path: str, schema: Any, content: Content) -> None:
    """Raises `ConfigError` if a column that `content` names is missing, has a wrong type, or cannot be
    read.
    """
    require_columns(path, schema, content)
    for field, way in columns_of(schema, content).items():
        column = schema.field(way[0])
        if (error := _why_unreadable(column, content, field, way)) is not None:
            raise unreadable_type(path, field, column.type, error)


@lru_cache(maxsize=256)
def _why_unreadable(column: Any, content: Content, field: str, way: tuple[str, ...]) -> Exception | None:
    """Reads rows of nulls, so that a function that Arrow lacks for a type shows before the start.

    Takes 2 ms. Cached, because the files of a source have the same columns.
    """
    import pyarrow as pa

    try:
        batch = pa.record_batch([plain_array(pa.nulls(2, column.type))], names=[column.name])
        for _, records, _ in read_columns(iter([batch, batch]), content, 0, {field: way}):
            for index in range(len(records)):
                records[index]
    except (pa.ArrowException, TypeError) as error:
        return error
    return None


def _text(batch: Any, columns: dict[str, tuple[str, ...]]) -> Any:
    (way,) = columns.values()
    return _at(batch, way)


def _rows(batch: Any, columns: dict[str, tuple[str, ...]]) -> Any:
    import pyarrow as pa

    return pa.StructArray.from_arrays([_at(batch, way) for way in columns.values()], names=list(columns))


def _at(batch: Any, way: tuple[str, ...]) -> Any:
    import pyarrow.compute as pc

    column = batch.column(way[0])
    for name in way[1:]:
        column = pc.struct_field(column, name)
    return plain_array(column)


def _joined(columns: Iterator[Any]) -> Iterator[Any]:
    """Joins columns that have at most `BATCH_BYTES` together.

    The following steps cost about the same for one value as for a thousand. A dictionary is counted each time
    it occurs.
    """
    import pyarrow as pa

    held, num_bytes = list[Any](), 0
    for column in columns:
        if held and num_bytes + column.nbytes > BATCH_BYTES:
            yield held[0] if len(held) == 1 else pa.concat_arrays(held)
            held, num_bytes = [], 0
        held.append(column)
        num_bytes += column.nbytes
    if held:
        yield held[0] if len(held) == 1 else pa.concat_arrays(held)


def _cut(column: Any, make: Callable[[Any], Records]) -> Iterator[Records]:
    """Cuts the column into parts of about `BATCH_BYTES` decoded at most, or of one value."""
    sizes = value_sizes(column)
    begin = 0
    while begin < len(column):
        fits = int(np.searchsorted(np.cumsum(sizes[begin:]), BATCH_BYTES, side="right"))
        end = begin + max(1, fits)
        if sizes[begin] > MAX_RECORD_BYTES:
            yield Whole(None, int(sizes[begin]))
        else:
            yield make(column[begin:end])
        begin = end


def value_sizes(column: Any) -> Int64Array:
    """(num_values,) bytes of the text in each value, 8 for each number, 1 for each item of a list, 0 for a
    null.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return value_sizes(column.storage)
    if pa.types.is_dictionary(kind):
        inner = value_sizes(column.dictionary)
        indices = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
        sizes = inner[indices] if len(inner) else np.zeros(len(column), np.int64)
    elif pa.types.is_struct(kind):
        sizes = sum((value_sizes(inner) for inner in column.flatten()), np.zeros(len(column), np.int64))
    elif pa.types.is_fixed_size_list(kind):
        return value_sizes(column.cast(pa.large_list(kind.value_type)))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        offsets = column.offsets.to_numpy(zero_copy_only=False)
        first = int(offsets[0])
        is_map = pa.types.is_map(kind)
        items = (
            pa.StructArray.from_arrays([column.keys, column.items], ["k", "v"]) if is_map else column.values
        )
        inner = value_sizes(items[first : int(offsets[-1])]) + 1
        ends = np.concatenate([[0], np.cumsum(inner)])
        sizes = np.diff(ends[offsets - first])
    elif is_text(kind):
        lengths = pc.binary_length(plain_array(column))
        return np.asarray(pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False), dtype=np.int64)
    else:
        sizes = np.full(len(column), 8, np.int64)
    if column.null_count:
        sizes = np.where(column.is_valid().to_numpy(zero_copy_only=False), sizes, 0)
    return np.asarray(sizes, np.int64)


def _values(column: Any) -> Values:
    """The values of an Arrow array of strings or bytes, without a copy.

    Values that are not UTF-8 are kept too: they must show as bad documents, not end the reading.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    array = pc.take(column.dictionary, column.indices) if pa.types.is_dictionary(column.type) else column
    binary = array.cast(pa.large_binary())
    _, offsets, data = binary.buffers()
    valid = binary.is_valid().to_numpy(zero_copy_only=False) if binary.null_count else None
    first, end = binary.offset, binary.offset + len(binary) + 1
    return Values(memoryview(data or b""), np.frombuffer(offsets, np.int64)[first:end], valid)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of several columns, or of nested ones, as an Arrow array of structs.

    A row becomes a dict on access: `made` converts the value of each column.
    """

    array: Any
    sizes: Int64Array  # see `value_sizes`
    made: tuple[tuple[str, Callable[[Any], Any]], ...]

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = self.array[index]
            return {name: make(row[i]) for i, (name, make) in enumerate(self.made)}
        except (UnicodeDecodeError, ValueError) as error:
            raise BadRecordError(f"not UTF-8: {error}", code="record.not_utf8") from error

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def size(self, index: int) -> int:
        """Returns the bytes of a row's value, as `value_sizes` counts them."""
        return int(self.sizes.item(index))

    def bytes_before(self, index: int) -> int:
        """Returns the bytes of the values of all rows before `index`."""
        return int(self.sizes[:index].sum())

    def cut(self, start: int, stop: int) -> Rows:
        """Rows [start, stop) of the same array."""
        return Rows(self.array[start:stop], self.sizes[start:stop], self.made)


class _Objects:
    """Makes `Rows` from arrays of one type."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._made: tuple[tuple[str, Callable[[Any], Any]], ...] = ()

    def __call__(self, array: Any) -> Rows:
        self._made = self._made or tuple((field.name, self._make(field)) for field in array.type)
        return Rows(array, value_sizes(array), self._made)

    def _make(self, field: Any) -> Callable[[Any], Any]:
        content = self._content
        if field.name in content.transform_fields and field.name not in content.fields:
            return plain_value(field.type)
        is_answer = content.kind == PREFERENCE and field.name in content.fields
        if is_answer and is_text(field.type) and not is_json(field.type, field.metadata):
            return _text_value
        return _chat_values(field, content.as_stored) if content.messages_at else _text_value


def _chat_values(field: Any, as_stored: bool) -> Callable[[Any], Any]:
    """Returns the function that converts an Arrow scalar to a chat's messages, or a field beside them.

    Inner fields that are null are left out, because a file of columns has every field in every row. A
    message's `role` and `content` stay. JSON is parsed, and its value stays complete, unless values are
    wanted `as_stored`.
    """
    read = _without_nulls if as_stored else _reader(field)
    return lambda scalar: read(scalar.as_py())


def _reader(field: Any) -> Callable[[Any], Any]:
    """The same for a Python value of the field."""
    import pyarrow as pa

    kind = field.type
    if is_json(kind, field.metadata):
        return parsed_json
    if pa.types.is_struct(kind):
        inner = {each.name: _reader(each) for each in kind}
        return lambda value: (
            None
            if value is None
            else {k: inner[k](v) for k, v in value.items() if v is not None or k in _KEPT}
        )
    if hasattr(kind, "value_field"):  # lists of every kind
        item = _reader(kind.value_field)
        return lambda value: None if value is None else [item(each) for each in value]
    return _without_nulls


def _text_value(scalar: Any) -> Any:
    value = scalar.as_py()
    return utf8_text(value) if isinstance(value, bytes) else value


_KEPT = ("role", "content")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k in _KEPT}
    return value
