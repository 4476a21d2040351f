"""Many small questions to a storage at a time: one that is far away takes long for each.

It knows no file; what is asked, the caller says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# An item is not worth a task of its own.
_STRETCH = 64
# So much later than a quick storage would it may have answered.
_PATIENCE_S = 0.05


def in_threads(
    look: Callable[[Item], Result], items: Sequence[Item], num_threads: int = 8, quick_s: float = 0.0
) -> list[Result]:
    """What `look` says of each, in order. As long as an item takes no more than `quick_s`, it is called
    in this thread: threads would only wait for each other. Raises what `look` raises.
    """
    parts = stretches_in_threads(lambda stretch: [*map(look, stretch)], items, num_threads, quick_s)
    return [found for part in parts for found in part]


def stretches_in_threads(
    look: Callable[[Sequence[Item]], Result],
    items: Sequence[Item],
    num_threads: int = 8,
    quick_s: float = 0.0,
) -> list[Result]:
    """The same where `look` is asked for a stretch of items at a time: what it says of each stretch, in
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
