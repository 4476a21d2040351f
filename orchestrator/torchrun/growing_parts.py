"""Lets the ranks of a static group wait for one another's votes for a save as long as its parts grow.

The progress is exchanged through torchrun's store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch._C._distributed_c10d import Store

from orchestrator.records.steps import StateKey

TELL_EVERY_S = 5.0
_LOOKS = 20  # checks for growth within the limit
_FIRST_S, _MOST_S = 0.005, 0.5  # between two checks for the names


def place_of(key: StateKey) -> str:
    """Returns the prefix of the store's keys for the save of `key`."""
    return f"vote/{key.point_name}"


class Growth:
    """Reports from time to time how much of one rank's part of a save is written. For use by one thread."""

    def __init__(self, store: Store, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._store, self._rank, self._clock = store, rank, clock
        self._told_at = float("-inf")

    def tell(self, key: StateKey, progress: int) -> None:
        """Reports progress, at most every `TELL_EVERY_S`. Never waits. A store that is gone shows where it is
        needed.
        """
        if self._clock() - self._told_at < TELL_EVERY_S:
            return
        self._told_at = self._clock()
        with suppress(RuntimeError):
            self._store.set(_name(key, self._rank), str(progress))


def wait_while_growing(
    store: Store,
    names: Sequence[str],
    key: StateKey,
    world_size: int,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until all names are in the store.

    Raises `TimeoutError` if they are not although no rank has written more of its part of the save of `key`
    for `limit_s`, and `RuntimeError` if the store is gone.
    """
    grown, deadline = _grown(store, key, world_size), clock() + limit_s
    look_at, wait_s = clock() + limit_s / _LOOKS, _FIRST_S
    while not store.check([*names]):  # torch warns about each of its own waits that ends without an answer
        if clock() >= look_at:
            look_at, found = clock() + limit_s / _LOOKS, _grown(store, key, world_size)
            if found != grown:
                grown, deadline = found, clock() + limit_s
            elif clock() >= deadline:
                raise TimeoutError(f"nothing under {', '.join(n for n in names if not store.check([n]))}")
        wait(wait_s)
        wait_s = min(2 * wait_s, _MOST_S)


def _grown(store: Store, key: StateKey, world_size: int) -> list[bytes]:
    names = [_name(key, rank) for rank in range(world_size)]
    return [store.get(name) if store.check([name]) else b"" for name in names]


def _name(key: StateKey, rank: int) -> str:
    return f"{place_of(key)}/grown/{rank}"
