"""`parquet`: one record per row, cut by row groups. A row group is never held as a whole.

A file is opened once for each of its row groups. Its footer, which describes all of them, is read once and
cached.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from orchestrator.data.sources.access.compressed import damage_code
from orchestrator.data.sources.access.input_file import InputFile, LocalFile, RangedReads, for_arrow
from orchestrator.data.sources.formats.base import Attempt, Format, Parser, Units
from orchestrator.data.sources.lists.file_rows import Cut
from orchestrator.data.sources.records.columns import BATCH_BYTES, read_columns, require_readable
from orchestrator.data.sources.records.content import Content
from orchestrator.data.sources.records.documents import described, utf8_text
from orchestrator.data.sources.records.line_records import Batch
from orchestrator.data.sources.records.plain_values import columns_of
from orchestrator.errors import ConfigError, DataError

if TYPE_CHECKING:
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow

_MAGIC = b"PAR1"
# Rows are decoded in batches of this many, or of fewer with about `BATCH_BYTES`. Compressed data are read in
# pieces of `_BUFFER_BYTES`.
_BATCH_ROWS, _BUFFER_BYTES = 64, 1 << 20
# The cache keeps the most recently used footers, up to this many bytes as stored in their files (six times as
# many in memory), and always the newest, which is in use.
FOOTERS_BYTES = 8 << 20
_FooterKey = tuple[str, int, int, str]
_footers_lock = threading.Lock()
_footers: dict[_FooterKey, Any] = {}  # least recently used first


class RowFormat(Format):
    """A format whose records are rows of columns. Only the needed columns are read."""

    cut = Cut.UNITS
    counts_records = True
    says_fields = True
    unit = "row"

    @override
    def parser(self, content: Content) -> Parser:
        if content.kind == "text" and not content.transform_fields:
            return utf8_text
        return lambda row: described(row, content)

    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """None: the columns of a file were checked when it was listed."""
        del file, row, content
        return iter(())


class Parquet(RowFormat):
    """One record per row."""

    name = "parquet"
    suffixes = (".parquet",)

    def units(self, file: InputFile, content: Content) -> Units:
        """Its row groups, with the decoded bytes of all their columns."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(for_arrow(file)) as opened:
                schema, facts = opened.schema_arrow, opened.metadata
                groups = [facts.row_group(i) for i in range(facts.num_row_groups)]
                schema.names  # noqa: B018  (decodes them)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if (begin := file.read_at(0, len(_MAGIC))) != _MAGIC:
                raise ConfigError(
                    f"{file.name}: not a Parquet file: it begins with {begin!r}, not with {_MAGIC!r}; "
                    "correct data.sources[].format=parquet, or leave this file out",
                    code="data.wrong_format",
                ) from error
            raise DataError(
                f"{file.name}: not a whole Parquet file: {error}; replace it or leave it out",
                code=damage_code(error),
            ) from error
        require_readable(file.name, schema, content)
        return tuple(g.num_rows for g in groups), tuple(g.total_byte_size for g in groups)

    @override
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        import pyarrow as pa

        del whole
        assert part.group is not None, "a Parquet file is cut by row groups"
        try:
            facts = footer(file)
        except pa.ArrowException as error:
            raise OSError(str(error)) from error
        first_row = sum(row.group_rows[: part.group])
        source = file.name if isinstance(file, LocalFile) else RangedReads(file)
        yield from read_row_group(source, part.group, content, first_row, facts)


def read_row_group(
    source: str | RangedReads, group: int, content: Content, first_row: int, facts: Any = None
) -> Iterator[Batch]:
    """The records of a row group of a Parquet file; their places are rows.

    `facts` is its footer; None: read here. Holds a page of each column (as large as its writer made it), its
    dictionary, and values of a few `BATCH_BYTES` or one value. In a column of very uneven values it holds up
    to `_BATCH_ROWS` of them. Raises `OSError` if the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    opened = source if isinstance(source, str) else pa.PythonFile(source, mode="r")
    try:
        # without prefetching, which would hold the whole group
        with pq.ParquetFile(opened, metadata=facts, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            if group >= file.metadata.num_row_groups:
                raise OSError(f"row group {group} is asked for, it has {file.metadata.num_row_groups}")
            columns = columns_of(file.schema_arrow, content)
            names = [".".join(way) for way in columns.values()]
            chosen = file.metadata.row_group(group)
            chunks = _chunks(chosen, names)
            if isinstance(source, RangedReads):
                source.expect(map(_place, chunks))
            mean = sum(chunk.total_uncompressed_size for chunk in chunks) // max(1, chosen.num_rows)
            num = min(max(1, BATCH_BYTES // max(1, mean)), _BATCH_ROWS)
            batches = file.iter_batches(batch_size=num, row_groups=[group], columns=names)
            yield from read_columns(batches, content, first_row, columns)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise OSError(str(error)) from error


def _chunks(group: Any, names: Sequence[str]) -> list[Any]:
    """The column chunks of a row group that hold these columns, each once."""
    all_chunks = [group.column(i) for i in range(group.num_columns)]
    found = dict[str, Any]()
    for name in names:
        own = {c.path_in_schema: c for c in all_chunks if f"{c.path_in_schema}.".startswith(f"{name}.")}
        if not own:
            raise OSError(f"it has no column {name!r}")
        found |= own
    return list(found.values())


def _place(chunk: Any) -> tuple[int, int]:
    """The bytes [start, stop) of a column chunk in the file, including its dictionary."""
    start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
    return start, start + chunk.total_compressed_size


def footer(file: InputFile) -> Any:
    """The `pyarrow.parquet.FileMetaData` of an open file. Raises as pyarrow does, if it has none."""
    import pyarrow.parquet as pq

    key = (file.name, file.size, file.mtime_ns, file.etag)
    with _footers_lock:
        found = _footers.pop(key, None)
    if found is None:
        found = pq.read_metadata(for_arrow(file))
    with _footers_lock:
        _footers[key] = found
        while len(_footers) > 1 and sum(each.serialized_size for each in _footers.values()) > FOOTERS_BYTES:
            del _footers[next(iter(_footers))]
    return found


FORMATS: tuple[Format, ...] = (Parquet(),)
