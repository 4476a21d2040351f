"""Large files written past the page cache (O_DIRECT): what a save writes is not read again soon, and a copy
of it in the cache costs the processor more than all else that a save does, and pushes out the training data.
FastPersist (arXiv 2406.13768) writes checkpoints so, too.

It knows blocks and calls of `Disk`; which files are written so, `LocalStore` decides.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable, Iterator

from orchestrator.storage.disk import Disk

_BLOCK_BYTES = 4096  # what the system wants memory, place and length to be multiples of; some less
_BUFFER_BYTES = 8 << 20  # stays in the processor's cache between its filling and its writing


def write_direct(disk: Disk, handle: int, views: Iterable[memoryview]) -> None:
    """Append all of `views` to a new file, whole blocks of it past the cache; what is behind the last block,
    and all of it where the file system takes no direct writes, as any other write. Nothing is durable before
    `Disk.fsync`.
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
                direct = disk.direct(handle, on=False)  # its blocks are larger, or it took half a one


def _regrouped(views: Iterable[memoryview], buffer: memoryview) -> Iterator[memoryview]:
    """The same bytes in `buffer`, which is full each time but the last."""
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
