"""Where the records of a window lie, as arrays, for whoever takes many of them at once.

It knows neither their order nor what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.data.sources.readers import Part
from orchestrator.data.sources.records_in_memory import Lines, Values
from orchestrator.records.arrays import BoolArray, Int32Array, Int64Array

# Beside a record of so many bytes its 12 in the arrays are few; where records are shorter in the mean, or a
# part has fewer of them, they are taken one by one.
_LEAST_BYTES, _LEAST_RECORDS = 64, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRun:
    """Texts of records that follow each other in a window's order, and where they lie; of a record whose text
    is not asked for in this way (it is blank, empty or bad, say) the text is empty.
    """

    texts: list[str]
    files: Int64Array
    places: Int64Array
    sizes: Int64Array
    sampled: BoolArray  # whether `OrderedWindow.is_sampled` says so

    def __len__(self) -> int:
        return len(self.texts)


class WindowColumns:
    """Of all records of a window in file order: the place in its file and the decoded bytes of each."""

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
        """(file, place, decoded bytes, whether it is one of a sample of one in so many) of these records."""
        parts = np.searchsorted(self._stops, numbers, side="right")
        samples = self._first_samples[parts] + numbers - self._firsts[parts]
        sizes = self.sizes[numbers].astype(np.int64)
        return self._files[parts], self.places[numbers], sizes, samples % one_in == 0

    def records(self, numbers: Int32Array) -> list[bytes | None]:
        """These records; None: a null, or one at the beginning of its file, where a mark may stand."""
        parts = np.searchsorted(self._stops, numbers, side="right")
        indices, held = numbers - self._firsts[parts], self._records
        found = [held[part][i] for part, i in zip(parts.tolist(), indices.tolist(), strict=True)]
        for at in np.flatnonzero(self.places[numbers] == 0).tolist():
            found[at] = None
        return found


def columns_of(parts: Sequence[Part]) -> WindowColumns | None:
    """Of a window's parts; None where its records are no bytes that lie in memory, or are taken as quickly
    one by one.
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
