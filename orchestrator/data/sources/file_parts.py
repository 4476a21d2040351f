"""The parts into which files are cut, and how."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cut(Enum):
    """How a file is cut into fragments."""

    RANGES = "ranges"  # of bytes, if the file is not compressed
    UNITS = "units"  # that the file itself has: row groups
    WHOLE = "whole"  # not at all: it is one record
    STREAM = "stream"  # not at all: it is read from its first byte to its last


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """A byte range of a file (lines that begin in it), a row group of it (`group`), or all of it."""

    file: int
    start: int
    stop: int
    group: int | None = None
