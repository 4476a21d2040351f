"""Many small questions to a storage, several of them under way at a time: one that is far away takes long for
each.

It knows neither what is asked nor what that means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from orchestrator.storage.files import Storage

Item = TypeVar("Item")
Answer = TypeVar("Answer")

ASKED_AT_A_TIME = 16


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
    pool = ThreadPoolExecutor(most, "asking")
    try:
        yield from pool.map(ask, items)
    finally:
        pool.shutdown(cancel_futures=True)
