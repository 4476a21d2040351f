"""The rows of a manifest as columns, and the parts into which files are cut.

A hundred thousand files are six arrays. A row object is made on access. `manifest` defines what the rows mean
for the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, chain
from typing import Any, overload

import numpy as np
import orjson
from blake3 import blake3

from orchestrator.errors import DataIdentityError
from orchestrator.records.tokens import Int64Array


class Cut(Enum):
    """How a file is cut into fragments."""

    RANGES = "ranges"  # byte ranges, if the file is not compressed
    UNITS = "units"  # the file's own units: row groups
    WHOLE = "whole"  # not cut: it is one record
    STREAM = "stream"  # not cut: it is read from its first byte to its last


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """A byte range of a file (the lines that begin in it), a row group of it (`group`), or all of it."""

    file: int
    start: int
    stop: int
    group: int | None = None


VERSION = 1
# Rows are converted to Python objects in batches of this size.
_STRETCH = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRow:
    """One file: its path relative to the source's base, its size, and values that detect a change.

    `probe` is the xxh3_64 (16 hex digits) of its first and its last 4 KiB; for a file in an object store,
    `etag:` and its etag. `group_rows` and `group_bytes` (decoded) describe the row groups of a Parquet file.
    """

    path: str
    bytes: int
    mtime_ns: int
    probe: str
    group_rows: tuple[int, ...] = ()
    group_bytes: tuple[int, ...] = ()


_NAMES = ("path", "bytes", "mtime_ns", "probe", "group_rows", "group_bytes")
_LISTS = ("group_rows", "group_bytes")
_DIGESTED = [name for name in _NAMES if name != "mtime_ns"]
# A text with none of these characters is the same in JSON.
_ESCAPED = r'["\\\x00-\x1f]'


class Files(Sequence[FileRow]):
    """A manifest's rows. Immutable; equal to another one with equal rows.

    Pickles as its columns, about 60 bytes and the path of each file. Its arrays are read-only.
    """

    __slots__ = ("_columns", "_digests", "_last")

    def __init__(self, columns: dict[str, Any]) -> None:
        """`columns` are Arrow arrays by the names of `FileRow`'s fields."""
        self._columns = columns
        self._digests: dict[tuple[str, str], str] = {}
        # a file is accessed once for each of its units, and its row may hold tens of thousands of numbers
        self._last: tuple[int, FileRow] | None = None

    @classmethod
    def of(cls, rows: Iterable[FileRow]) -> Files:
        """The rows as columns."""
        rows = list(rows)
        return cls({name: arrow_array([getattr(r, name) for r in rows], kind) for name, kind in _kinds()})

    @classmethod
    def of_table(cls, table: Any) -> Files:
        """The inverse of `table`. Raises `DataIdentityError` if the table has other columns, or nulls."""
        found = {field.name: field.type for field in table.schema}
        if found != dict(_kinds()):
            raise DataIdentityError(
                f"it has the columns {found} instead of {dict(_kinds())}; restore it",
                code="data.damaged_list",
            )
        columns = {name: table.column(name).combine_chunks() for name in _NAMES}
        if any(column.null_count for column in columns.values()):
            raise DataIdentityError("it has null values; restore it", code="data.damaged_list")
        return cls(columns)

    def table(self, facts: dict[str, str]) -> Any:
        """An Arrow table of one row per file, with `facts` as the metadata of its schema."""
        import pyarrow as pa

        return pa.table(self._columns, schema=pa.schema(_kinds(), metadata=facts))

    # ------------------------------------------------------------------------------------ rows
    def __len__(self) -> int:
        return len(self._columns["path"])

    @overload
    def __getitem__(self, index: int) -> FileRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[FileRow, ...]: ...

    def __getitem__(self, index: int | slice) -> FileRow | tuple[FileRow, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        last = self._last
        if last is not None and last[0] == index:
            return last[1]
        values: dict[str, Any] = {name: self._columns[name][index].as_py() for name in _NAMES}
        row = FileRow(**values | {name: tuple(values[name]) for name in _LISTS})
        self._last = index, row
        return row

    def __iter__(self) -> Iterator[FileRow]:
        for values in self._stretches(_NAMES):
            for path, size, mtime_ns, probe, rows, sizes in values:
                yield FileRow(
                    path=path,
                    bytes=size,
                    mtime_ns=mtime_ns,
                    probe=probe,
                    group_rows=tuple(rows),
                    group_bytes=tuple(sizes),
                )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Files):
            return NotImplemented
        return all(self._columns[name].equals(other._columns[name]) for name in _NAMES)

    def __hash__(self) -> int:
        return hash(self.digest("", ""))

    def __repr__(self) -> str:
        return f"Files({len(self)} rows)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self._columns,)

    def _stretches(self, names: Sequence[str]) -> Iterator[Iterator[tuple[Any, ...]]]:
        for start in range(0, len(self), _STRETCH):
            yield _zipped({name: self._columns[name].slice(start, _STRETCH) for name in names})

    # ------------------------------------------------------------------------------------ columns
    @property
    def paths(self) -> list[str]:
        """The paths, as a new list for each call."""
        paths: list[str] = self._columns["path"].to_pylist()
        return paths

    def path(self, index: int) -> str:
        """The path of one file."""
        path: str = self._columns["path"][index].as_py()
        return path

    def bytes(self, index: int) -> int:
        """The size of one file."""
        size: int = self._columns["bytes"][index].as_py()
        return size

    @property
    def sizes(self) -> Int64Array:
        """(num_files,) bytes of each."""
        return _numbers(self._columns["bytes"])

    @property
    def mtimes_ns(self) -> Int64Array:
        """(num_files,) modification time of each."""
        return _numbers(self._columns["mtime_ns"])

    @property
    def probes(self) -> list[str]:
        """The probes, as a new list for each call."""
        probes: list[str] = self._columns["probe"].to_pylist()
        return probes

    @property
    def group_ends(self) -> Int64Array:
        """(num_files + 1,) the first index of each file's row groups in `group_sizes`, and the end of the
        last.
        """
        offsets = _numbers(self._columns["group_bytes"].offsets).astype(np.int64)
        return offsets - offsets[:1]

    @property
    def group_sizes(self) -> Int64Array:
        """(num_groups,) decoded bytes of the row groups of all files."""
        return _numbers(self._columns["group_bytes"].flatten())

    def paths_end(self, endings: Sequence[str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(num_files,) whether each path has one of these endings."""
        # without pyarrow.compute, which takes a CPU second to import
        wanted, paths = tuple(endings), self._columns["path"].to_pylist()
        return np.fromiter((path.endswith(wanted) for path in paths), np.bool_, len(paths))

    def same_paths(self, names: Sequence[str]) -> bool:
        """Whether these are the paths, in this order."""
        import pyarrow as pa

        return len(names) == len(self) and bool(self._columns["path"].equals(arrow_array(names, pa.string())))

    def replaced(self, changed: Mapping[str, FileRow | None]) -> Files:
        """The rows, with these paths' rows replaced. None removes a row."""
        if not changed:
            return self
        rows = (changed.get(row.path, row) for row in self)
        return Files.of(row for row in rows if row is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(int(column.nbytes) for column in self._columns.values())

    def digest(self, format_: str, text_field: str) -> str:
        """blake3 of a JSON list: the version, both arguments, and every row without its time. Computed
        once.
        """
        if (format_, text_field) not in self._digests:
            hasher = blake3(orjson.dumps([VERSION, format_, text_field])[:-1] + b",[")
            for start in range(0, len(self), _STRETCH):
                rows = {name: self._columns[name].slice(start, _STRETCH) for name in _DIGESTED}
                hasher.update(b"," * (start > 0))
                hasher.update(_plain_json(rows) or orjson.dumps(list(_zipped(rows)))[1:-1])
            hasher.update(b"]]")
            self._digests[format_, text_field] = hasher.hexdigest()
        return self._digests[format_, text_field]


def _zipped(columns: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    return zip(*map(_values, columns.values()), strict=True)


def _plain_json(columns: Mapping[str, Any]) -> memoryview | None:
    """The rows as `orjson.dumps` writes them, separated by commas, ten times as fast.

    Returns None if a file has groups or a path needs escapes.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    path, size, probe, *groups = columns.values()
    has_groups = any(len(column.flatten()) for column in groups)
    if has_groups or any(pc.any(pc.match_substring_regex(c, _ESCAPED)).as_py() for c in (path, probe)):
        return None
    # not as Python texts, which pyarrow would convert to scalars, which imports pandas
    begin, first, second, end, nothing = arrow_array([',["', '",', ',"', '",[],[]]', ""], pa.string())
    joined = pc.binary_join_element_wise(
        begin, path, first, pc.cast(size, "string"), second, probe, end, nothing
    )
    _, _, data = joined.buffers()  # a new array: its buffer holds exactly the rows
    return memoryview(data)[1 : int(pc.sum(pc.binary_length(joined)).as_py())]


def _kinds() -> list[tuple[str, Any]]:
    import pyarrow as pa

    one, many = {"path": pa.string(), "probe": pa.string()}, dict.fromkeys(_LISTS, pa.list_(pa.int64()))
    return [(name, one.get(name) or many.get(name) or pa.int64()) for name in _NAMES]


def _values(column: Any) -> list[Any]:
    import pyarrow as pa

    if pa.types.is_list(column.type):
        offsets = _numbers(column.offsets)  # `flatten` imports pyarrow.compute
        if not len(offsets) or offsets[0] == offsets[-1]:
            return [[]] * len(column)
    values: list[Any] = column.to_pylist()
    return values


def _numbers(column: Any) -> Int64Array:
    # without `to_numpy`, which imports pandas
    kind = np.dtype(f"i{column.type.bit_width // 8}")
    numbers = np.frombuffer(column.buffers()[1] or b"", kind)
    return numbers[column.offset : column.offset + len(column)]


# ----------------------------------------------------------------------------------------------- Arrow arrays
def arrow_array(values: Sequence[Any], kind: Any) -> Any:
    """Equivalent of `pyarrow.array(values, kind)`, for texts, 64-bit integers, and lists of these, without
    nulls.

    pyarrow's own conversion imports pandas, which takes 0.7 CPU seconds in each process that reads a list of
    files.
    """
    import pyarrow as pa

    if kind == pa.int64():
        return pa.Array.from_buffers(kind, len(values), [None, _buffer(values, np.int64)])
    if kind == pa.list_(pa.int64()):
        inner = arrow_array(list(chain.from_iterable(values)), pa.int64())
        offsets = _buffer(_offsets(values), np.int32)
        return pa.Array.from_buffers(kind, len(values), [None, offsets], children=[inner])
    assert kind == pa.string(), f"values of type {kind}"
    data = [text.encode() for text in values]
    offsets = _buffer(_offsets(data), np.int32)
    return pa.Array.from_buffers(kind, len(values), [None, offsets, pa.py_buffer(b"".join(data))])


def _offsets(values: Sequence[Any]) -> list[int]:
    return list(accumulate(map(len, values), initial=0))


def _buffer(numbers: Sequence[int], kind: type[np.signedinteger[Any]]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(np.array(numbers, kind))
