"""Runs many small queries, and digests of whole files, in several threads: a remote storage answers late.

`at_once` and its kin query a run's `Storage`. `in_threads` queries any files, such as a user's data.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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
_HASHED_AT_A_TIME = 4  # files, several parts of which are read ahead
_THREADS = 8  # of `in_threads`
_BATCH = 64  # items: a single item is too small for a task
_PATIENCE_S = 0.05  # how much later than a quick storage one may answer


def asked_at_a_time(storage: Storage) -> int:
    """How many small queries to `storage` may run in parallel.

    1 unless several together are faster than in sequence (`Traits.reads_at_a_time`).
    """
    return 1 if storage.traits.reads_at_a_time == 1 else ASKED_AT_A_TIME


def at_once(storage: Storage, ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """The results of `ask` for each item, in order.

    `ask` queries `storage`. It runs for `asked_at_a_time` items in parallel, each in a thread. If that is 1,
    it runs in this thread. Raises what `ask` raises: of several errors that of the first item in order,
    whichever came first. Items that were not begun are then dropped, and no request is running any more.
    """
    return [*answers_at_once(storage, ask, items)]


def hashed_at_once(storage: Storage, ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """`at_once` for queries that also take CPU time, such as a digest.

    As many run in parallel as there are CPUs, or `asked_at_a_time` if that is more.
    """
    return [*answers_at_once(storage, ask, items, os.cpu_count() or 1)]


def answers_at_once(
    storage: Storage, ask: Callable[[Item], Answer], items: Sequence[Item], at_least: int = 1
) -> Generator[Answer, None, None]:
    """`at_once` as a generator, which yields each answer before the next ones are there.

    A consumer that stops early must close it. At least `at_least` queries run in parallel.
    """
    yield from _answers(ask, items, min(max(asked_at_a_time(storage), at_least), len(items)))


def in_threads(ask: Callable[[Item], Answer], items: Sequence[Item], quick_s: float = 0.0) -> list[Answer]:
    """The results of `ask` for each item, in order.

    Runs in this thread as long as an item takes no more than `quick_s`: threads would only wait for each
    other. Raises what `ask` raises.
    """
    batches = batches_in_threads(lambda batch: [*map(ask, batch)], items, quick_s)
    return [answer for batch in batches for answer in batch]


def batches_in_threads(
    ask: Callable[[Sequence[Item]], Answer], items: Sequence[Item], quick_s: float = 0.0
) -> list[Answer]:
    """`in_threads` with `ask` called for up to 64 items at a time.

    Returns the result of each batch, in order.
    """
    batches = (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))
    answers, num_items = list[Answer](), 0
    if quick_s:
        began = time.perf_counter()
        for batch in batches:
            answers.append(ask(batch))
            num_items += len(batch)
            if time.perf_counter() - began > quick_s * num_items + _PATIENCE_S:
                break
    return [*answers, *_answers(ask, batches, _THREADS)]


def entries_at_once(
    storage: Storage,
    paths: Sequence[str],
    expect: Callable[[int], None] = lambda num_bytes: None,
    was_read: Callable[[int], None] = lambda num_bytes: None,
) -> list[FileEntry]:
    """`Storage.entry` of each file, in order.

    Reads parts of `READ_BYTES`, several of one file and of several files in parallel. Hashes as many files in
    parallel as there are CPUs, at most 4. Holds at most `ASKED_AT_A_TIME` parts in memory: 128 MiB. `expect`
    is called with the bytes of all files before they are read, `was_read` with those of each part, in any
    thread. Raises as `Storage.read` and `at_once`, and `StorageError` for a file that became shorter
    meanwhile.
    """
    sizes = at_once(storage, storage.size, paths)
    expect(sum(sizes))
    num_cpus = os.cpu_count() or 1
    num_files = max(1, min(num_cpus, _HASHED_AT_A_TIME, len(paths)))
    num_readers = max(num_files, min(ASKED_AT_A_TIME, max(asked_at_a_time(storage), num_cpus)))
    with _pool(num_files) as hashers, _pool(num_readers) as readers:  # after an error the readers end first
        entry = partial(_entry, storage, readers, num_readers // num_files, was_read)
        return [*hashers.map(entry, paths, sizes)]


# ---------------------------------------------------------------------------------------------------- inside
def _answers(
    ask: Callable[[Item], Answer], items: Iterable[Item], num_threads: int
) -> Generator[Answer, None, None]:
    """The results of `ask` for each item, in order.

    `ask` runs in `num_threads` threads, or in this one if that is at most 1.
    """
    if num_threads <= 1:
        yield from map(ask, items)
        return
    with _pool(num_threads) as pool:
        yield from pool.map(ask, items)


@contextmanager
def _pool(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that have ended when the context exits. Tasks that have not begun by then are cancelled."""
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
    """The entry of one file. `readers` read up to `ahead` parts of it while this thread hashes."""
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
        del stretch  # frees it before the next one is read


def _stretch(storage: Storage, path: str, start: int, num_bytes: int) -> bytearray:
    data = storage.read_part(path, start, num_bytes)
    if len(data) != num_bytes:
        raise StorageError(
            f"{storage.root}/{path} became shorter while it was read: it ends at byte {start + len(data)}, "
            f"its size was at least {start + num_bytes} bytes; start again when nobody writes it any more",
            code="storage.changed_while_read",
        )
    return data
