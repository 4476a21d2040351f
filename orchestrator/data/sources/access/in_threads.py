"""Runs many small storage queries in parallel, because each takes long on a remote storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# A single item is too small for a task.
_STRETCH = 64
# How much later than a quick storage it may answer.
_PATIENCE_S = 0.05


def in_threads(
    look: Callable[[Item], Result], items: Sequence[Item], num_threads: int = 8, quick_s: float = 0.0
) -> list[Result]:
    """The results of `look` for each item, in order.

    As long as an item takes no more than `quick_s`, `look` runs in this thread, because threads would only
    wait for each other. Raises what `look` raises.
    """
    parts = stretches_in_threads(lambda stretch: [*map(look, stretch)], items, num_threads, quick_s)
    return [found for part in parts for found in part]


def stretches_in_threads(
    look: Callable[[Sequence[Item]], Result],
    items: Sequence[Item],
    num_threads: int = 8,
    quick_s: float = 0.0,
) -> list[Result]:
    """The same with `look` called for a batch of items at a time. Returns the result of each batch, in
    order.
    """
    stretches = (items[start : start + _STRETCH] for start in range(0, len(items), _STRETCH))
    found, num_looked_at = list[Result](), 0
    if quick_s:
        began = time.perf_counter()
        for stretch in stretches:
            found.append(look(stretch))
            num_looked_at += len(stretch)
            if time.perf_counter() - began > quick_s * num_looked_at + _PATIENCE_S:
                break
    with ThreadPoolExecutor(num_threads) as pool:
        found += pool.map(look, stretches)
    return found
