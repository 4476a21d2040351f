"""A column of a Parquet file as records, a stretch at a time: a row group is never held as a whole.

It knows no plan and no order; damage shows as `OSError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from orchestrator.data.sources.records_in_memory import MAX_RECORD_BYTES, Records, Values, Whole
from orchestrator.records import Int64Array

# Rows are decoded by so many, or by fewer that have about so many bytes, and handed on in stretches of about
# so many bytes; what is compressed is read in such pieces.
_BATCH_ROWS, BATCH_BYTES, _BUFFER_BYTES = 64, 4 << 20, 1 << 20


def read_column(path: str, group: int, column: str, first_row: int) -> Iterator[tuple[int, Records, int]]:
    """(line, records, place of the first) of the column's values in a row group; places are rows of the file.

    At any time it holds a page of the column (as large as its writer made it), its dictionary, and values of
    a few `BATCH_BYTES` or one value, in a column of very uneven values up to `_BATCH_ROWS` of them. Raises
    `OSError` where the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        facts = pq.read_metadata(path)
        if group >= facts.num_row_groups:
            raise OSError(f"row group {group} is asked for, it has {facts.num_row_groups}")
        chunks = (facts.row_group(group).column(i) for i in range(facts.num_columns))
        chunk = next((chunk for chunk in chunks if chunk.path_in_schema == column), None)
        if chunk is None:
            raise OSError(f"it has no column {column!r}")
        mean = chunk.total_uncompressed_size // max(1, chunk.num_values)
        # not read ahead: that would hold the whole group
        with pq.ParquetFile(path, metadata=facts, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            num = min(max(1, BATCH_BYTES // max(1, mean)), _BATCH_ROWS)
            done = first_row
            batches = file.iter_batches(batch_size=num, row_groups=[group], columns=[column])
            for stretch in _joined(batch.column(0) for batch in batches):
                for records in _values(stretch):
                    yield done + 1, records, done
                    done += len(records)
    except pa.ArrowException as error:
        raise OSError(str(error)) from error


def _joined(columns: Iterator[Any]) -> Iterator[Any]:
    """The columns, of which several that have at most `BATCH_BYTES` together are made one: what follows costs
    about the same for one value as for a thousand. A dictionary counts as often as it comes.
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


def _values(column: Any) -> Iterator[Records]:
    """The column in stretches of at most about `BATCH_BYTES` decoded, or of one value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    sizes = _value_sizes(column)
    begin = 0
    while begin < len(column):
        fits = int(np.searchsorted(np.cumsum(sizes[begin:]), BATCH_BYTES, side="right"))
        end = begin + max(1, fits)
        if sizes[begin] > MAX_RECORD_BYTES:
            yield Whole(None, int(sizes[begin]))
        else:
            part = column[begin:end]
            if pa.types.is_dictionary(part.type):
                part = pc.take(part.dictionary, part.indices)
            yield _as_bytes(part)
        begin = end


def _value_sizes(column: Any) -> Int64Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
    else:
        lengths = pc.binary_length(column)
    return np.asarray(pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False), dtype=np.int64)


def _as_bytes(array: Any) -> Values:
    """The values of an Arrow array of strings or bytes, without a copy of them. What is no UTF-8 is there,
    too: it must show as a bad document, not end the reading.
    """
    import pyarrow as pa

    binary = array.cast(pa.large_binary())
    _, offsets, data = binary.buffers()
    valid = binary.is_valid().to_numpy(zero_copy_only=False) if binary.null_count else None
    first, end = binary.offset, binary.offset + len(binary) + 1
    return Values(memoryview(data or b""), np.frombuffer(offsets, np.int64)[first:end], valid)
