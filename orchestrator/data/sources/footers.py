"""Footers of Parquet files that a process reads: a file is opened once for each of its row groups, and its
footer, which describes all of them, is read once for all.
"""

from __future__ import annotations

import threading
from typing import Any

from orchestrator.data.sources.input_file import InputFile, for_arrow

# Kept are the last ones, of so many bytes together as they lie in their files (in memory six times as many),
# and the newest in any case: it is in use.
MAX_BYTES = 8 << 20
_Key = tuple[str, int, int, str]
_lock = threading.Lock()
_kept: dict[_Key, Any] = {}  # the one that was used last comes last


def footer(file: InputFile) -> Any:
    """The `pyarrow.parquet.FileMetaData` of an open file. Raises as pyarrow does, if it has none."""
    import pyarrow.parquet as pq

    key = (file.name, file.size, file.mtime_ns, file.etag)
    with _lock:
        found = _kept.pop(key, None)
    if found is None:
        found = pq.read_metadata(for_arrow(file))
    with _lock:
        _kept[key] = found
        while len(_kept) > 1 and sum(each.serialized_size for each in _kept.values()) > MAX_BYTES:
            del _kept[next(iter(_kept))]
    return found
