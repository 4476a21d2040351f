"""How many lines of Python some work executes: a measure of its cost that no load of the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Lines:
    """The lines executed so far. Each round of a loop or comprehension counts; loops inside C do not."""

    count: int = 0


@contextmanager
def counted_lines() -> Iterator[Lines]:
    """Counts the lines that this thread executes in the functions called inside the block."""
    lines = Lines()

    def trace(_frame: FrameType, event: str, _value: Any) -> Any:
        if event == "line":
            lines.count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
