"""The parts into which files are cut, and the ways to cut them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cut(Enum):
    """How a file is cut into fragments."""

    RANGES = "ranges"  # byte ranges, if the file is not compressed
    UNITS = "units"  # the file's own units: row groups
    WHOLE = "whole"  # not cut: it is one record
    STREAM = "stream"  # not cut: it is read from its first byte to its last


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """A byte range of a file (the lines that begin in it), a row group of it (`group`), or all of it."""

    file: int
    start: int
    stop: int
    group: int | None = None
