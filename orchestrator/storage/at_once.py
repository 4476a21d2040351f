"""Many small questions to a storage, and the digests of whole files, with several requests under way at a
time: one that is far away takes long for each.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from blake3 import blake3

from orchestrator.errors import StorageError
from orchestrator.records.points import FileEntry
from orchestrator.storage.files import READ_BYTES, Storage

Item = TypeVar("Item")
Answer = TypeVar("Answer")

ASKED_AT_A_TIME = 16
_HASHED_AT_A_TIME = 4  # files, each of which is read several stretches ahead


def asked_at_a_time(storage: Storage) -> int:
    """How many small questions to `storage` may be under way: 1 unless several together are faster than one
    after the other (`Traits.reads_at_a_time`).
    """
    return 1 if storage.traits.reads_at_a_time == 1 else ASKED_AT_A_TIME


def at_once(storage: Storage, ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """What `ask` says of each item, in their order; it asks `storage`, of `asked_at_a_time` items at a time,
    each in a thread. Where that is 1, this thread asks.

    Raises what `ask` raises, of several errors that of the first item in their order, whichever came first.
    Then those that were not begun are not asked for, and nothing is under way any more.
    """
    return [*answers_at_once(storage, ask, items)]


def hashed_at_once(storage: Storage, ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """`at_once` for questions whose answers also take CPU time, as a digest does: as many at a time as there
    are CPUs, or more where `asked_at_a_time` is more.
    """
    return [*answers_at_once(storage, ask, items, os.cpu_count() or 1)]


def answers_at_once(
    storage: Storage, ask: Callable[[Item], Answer], items: Sequence[Item], at_least: int = 1
) -> Generator[Answer, None, None]:
    """`at_once` for who looks at each answer before the next ones are there; who stops before the end closes
    it. It asks `at_least` so many at a time.
    """
    most = min(max(asked_at_a_time(storage), at_least), len(items))
    if most <= 1:
        yield from map(ask, items)
        return
    with _pool(most) as pool:
        yield from pool.map(ask, items)


def entries_at_once(
    storage: Storage,
    paths: Sequence[str],
    expect: Callable[[int], None] = lambda num_bytes: None,
    was_read: Callable[[int], None] = lambda num_bytes: None,
) -> list[FileEntry]:
    """`Storage.entry` of each file, in their order. It reads stretches of `READ_BYTES`, several of one file
    and of several files at a time, and hashes as many files at a time as there are CPUs,
    at most 4.

    It holds at most `ASKED_AT_A_TIME` stretches in memory: 128 MiB. `expect` is called with the bytes of all
    files before they are read, `was_read` with those of each stretch, in any thread. Raises as `Storage.read`
    and `at_once`, and `StorageError` for a file that became shorter meanwhile.
    """
    sizes = at_once(storage, storage.size, paths)
    expect(sum(sizes))
    num_cpus = os.cpu_count() or 1
    num_files = max(1, min(num_cpus, _HASHED_AT_A_TIME, len(paths)))
    num_readers = max(num_files, min(ASKED_AT_A_TIME, max(asked_at_a_time(storage), num_cpus)))
    with _pool(num_files) as hashers, _pool(num_readers) as readers:  # after an error reading ends first
        entry = partial(_entry, storage, readers, num_readers // num_files, was_read)
        return [*hashers.map(entry, paths, sizes)]


# ---------------------------------------------------------------------------------------------------- inside
@contextmanager
def _pool(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that have ended when the block is left. What has not begun by then is cancelled."""
    pool = ThreadPoolExecutor(num_threads, "asking")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _entry(
    storage: Storage,
    readers: ThreadPoolExecutor,
    ahead: int,
    was_read: Callable[[int], None],
    path: str,
    size: int,
) -> FileEntry:
    """The entry of one file. `readers` read up to `ahead` stretches of it while this thread hashes."""
    hasher, under_way = blake3(), deque[Future[bytearray]]()
    starts = iter(range(0, size, READ_BYTES))
    while True:
        while len(under_way) < ahead and (start := next(starts, None)) is not None:
            wanted = min(READ_BYTES, size - start)
            under_way.append(readers.submit(_stretch, storage, path, start, wanted))
        if not under_way:
            return FileEntry(path=path, bytes=size, digest=hasher.hexdigest())
        stretch = under_way.popleft().result()
        hasher.update(stretch)
        was_read(len(stretch))
        del stretch  # the next one is asked for before this name is used again


def _stretch(storage: Storage, path: str, start: int, num_bytes: int) -> bytearray:
    data = storage.read_part(path, start, num_bytes)
    if len(data) != num_bytes:
        raise StorageError(
            f"{storage.root}/{path} became shorter while it was read: it ends at byte {start + len(data)}, "
            f"its size was at least {start + num_bytes} bytes; start again when nobody writes it any more",
            code="storage.changed_while_read",
        )
    return data
