"""The places and sizes of a window's records as arrays, to process many records at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.data.sources.access.records_in_memory import Lines, Values
from orchestrator.data.sources.readers import Part
from orchestrator.records.arrays import BoolArray, Int32Array, Int64Array

# The arrays take 12 bytes a record, little beside this many. Records that are shorter on average, or parts
# with fewer records than this, are processed one by one.
_LEAST_BYTES, _LEAST_RECORDS = 64, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRun:
    """Texts of consecutive records in a window's order, and their places.

    The text is empty for a record that must be processed alone (for example a blank, empty or bad one).
    """

    texts: list[str]
    files: Int64Array
    places: Int64Array
    sizes: Int64Array
    sampled: BoolArray  # the result of `OrderedWindow.is_sampled`

    def __len__(self) -> int:
        return len(self.texts)


class WindowColumns:
    """Of all records of a window in file order: each one's place in its file, and its decoded bytes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        nums = [len(part.records) for part in parts]
        self._stops = np.cumsum(nums)
        self._firsts = self._stops - nums
        self._parts = parts
        self._records = [part.records for part in parts]
        self._files = np.array([part.file for part in parts], np.int64)
        self._first_samples = np.array([part.sample_number for part in parts], np.int64)
        self.places: Int64Array = np.concatenate([part.places for part in parts])
        sizes = np.concatenate([part.records.sizes for part in parts])
        self.sizes = sizes.astype(np.int32) if sizes.max(initial=0) < 1 << 31 else sizes

    def lie_at(
        self, numbers: Int32Array, one_in: int
    ) -> tuple[Int64Array, Int64Array, Int64Array, BoolArray]:
        """(file, place, decoded bytes, whether in a sample of one in `one_in`) of these records."""
        parts = np.searchsorted(self._stops, numbers, side="right")
        samples = self._first_samples[parts] + numbers - self._firsts[parts]
        sizes = self.sizes[numbers].astype(np.int64)
        return self._files[parts], self.places[numbers], sizes, samples % one_in == 0

    def records(self, numbers: Int32Array) -> list[bytes | None]:
        """These records. None: a null, or one at the beginning of its file, which may have a byte order
        mark.
        """
        parts = np.searchsorted(self._stops, numbers, side="right")
        indices, held = numbers - self._firsts[parts], self._records
        found = [held[part][i] for part, i in zip(parts.tolist(), indices.tolist(), strict=True)]
        for at in np.flatnonzero(self.places[numbers] == 0).tolist():
            found[at] = None
        return found


def columns_of(parts: Sequence[Part]) -> WindowColumns | None:
    """The columns of a window's parts.

    None if its records are not bytes in memory, or are processed as quickly one by one.
    """
    num = sum(len(part.records) for part in parts)
    if num < _LEAST_RECORDS * max(1, len(parts)):
        return None
    if not all(isinstance(part.records, Lines | Values) for part in parts):
        return None
    if sum(_num_bytes(part) for part in parts) < _LEAST_BYTES * num:
        return None
    return WindowColumns(parts)


def _num_bytes(part: Part) -> int:
    last = len(part.records) - 1
    return part.records.bytes_before(last) + part.records.size(last) if last >= 0 else 0
