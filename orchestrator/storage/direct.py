"""Writes large files past the page cache (O_DIRECT).

A saved file is not read again soon. A copy of it in the cache would cost more CPU time than all other work of
a save, and would evict the training data. FastPersist (arXiv 2406.13768) writes checkpoints the same way.
`LocalStore` decides which files are written this way.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable, Iterator

from orchestrator.storage.disk import Disk

_BLOCK_BYTES = 4096  # memory, position and length must be multiples of this; of less on some systems
_BUFFER_BYTES = 8 << 20  # stays in the CPU's cache between filling and writing


def write_direct(disk: Disk, handle: int, views: Iterable[memoryview]) -> None:
    """Appends all of `views` to a new file, whole blocks of it past the cache.

    The rest after the last block is written normally, and so is everything if the file system does not
    support direct writes. Nothing is durable before `Disk.fsync`.
    """
    direct = disk.direct(handle, on=True)
    for chunk in _regrouped(views, memoryview(mmap.mmap(-1, _BUFFER_BYTES))):
        at = 0
        while at < len(chunk):
            blocks = (len(chunk) - at) // _BLOCK_BYTES
            if direct and not blocks:  # the end
                direct = disk.direct(handle, on=False)
            stop = at + blocks * _BLOCK_BYTES if direct else len(chunk)
            try:
                at += disk.write(handle, chunk[at:stop])
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                direct = disk.direct(handle, on=False)  # its blocks are larger, or it took half a block


def _regrouped(views: Iterable[memoryview], buffer: memoryview) -> Iterator[memoryview]:
    """The same bytes in `buffer`, which is full each time except the last."""
    filled = 0
    for view in views:
        at = 0
        while at < len(view):
            size = min(len(view) - at, len(buffer) - filled)
            buffer[filled : filled + size] = view[at : at + size]
            at += size
            filled += size
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]
