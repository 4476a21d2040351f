"""Loads large libraries at less cost: Python's garbage collector rests meanwhile.

Loading makes hundreds of thousands of objects and hardly any garbage, and the collector walks through all of
them again and again: a third of the time that torch and transformers take. For processes of our own only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Around imports and what is made once for the life of the process.

    The collector never looks at it again, which makes each later full collection 0.3 s shorter, and never
    frees it should it become a cycle of garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
