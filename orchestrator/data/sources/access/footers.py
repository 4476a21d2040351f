"""Caches the footers of Parquet files.

A file is opened once for each of its row groups. Its footer, which describes all of them, is read once.
"""

from __future__ import annotations

import threading
from typing import Any

from orchestrator.data.sources.access.input_file import InputFile, for_arrow

# The cache keeps the most recently used footers, up to this many bytes as stored in their files (six times as
# many in memory), and always the newest, which is in use.
MAX_BYTES = 8 << 20
_Key = tuple[str, int, int, str]
_lock = threading.Lock()
_kept: dict[_Key, Any] = {}  # least recently used first


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
