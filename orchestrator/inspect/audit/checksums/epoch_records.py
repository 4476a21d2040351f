"""Whether an epoch held a record twice, from the places of its records, in parts that are joined."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from orchestrator.records.arrays import Int64Array


class EpochRecords:
    """The records of an epoch, as one interval of places per block and file. A block's own lie side by side
    in its files, so intervals of two blocks that overlap have a record in common.

    The first block and the newest are held record by record, because parts of them may come before or after
    (`join`).
    """

    def __init__(self) -> None:
        self._first: tuple[int, Int64Array] | None = None  # once another has come
        self._block = -1
        self._held: list[Int64Array] = []  # of the current block, (num_records, 2)
        self._intervals: list[tuple[int, int, int]] = []  # of the blocks between: file, first and last place
        self._twice: tuple[int, int] | None = None  # the least found so far

    def add(self, block: int, records: Int64Array) -> None:
        """Adds records, (num_records, 2): file and place. Blocks come one after the other."""
        if block != self._block:
            self._close()
            self._block = block
        self._held.append(records)

    def join(self, later: EpochRecords) -> None:
        """Adds later records, the rest of the newest block first."""
        if later._first is not None:
            self.add(*later._first)
        if later._intervals:
            self._close()
            self._block = -1
        self._intervals += later._intervals
        self._keep_least(later._twice)
        if later._held:
            self.add(later._block, np.concatenate(later._held))

    def twice(self) -> tuple[int, int] | None:
        """(file, place) of the least record that is known to occur twice; None if there is none."""
        intervals, found = list(self._intervals), self._twice
        for records in self._open():
            found = _least(found, _repeated(records))
            intervals += _intervals(records)
        intervals.sort()
        for (file, _, last), (next_file, first, _) in zip(intervals, intervals[1:], strict=False):
            if file == next_file and first <= last:
                return _least(found, (file, first))
        return found

    def _open(self) -> Iterator[Int64Array]:
        if self._first is not None:
            yield self._first[1]
        if self._held:
            yield np.concatenate(self._held)

    def _close(self) -> None:
        """Ends the newest block, because another one follows."""
        if not self._held:
            return
        records, self._held = np.concatenate(self._held), []
        if self._first is None and not self._intervals:
            self._first = (self._block, records)
            return
        self._keep_least(_repeated(records))
        self._intervals += _intervals(records)

    def _keep_least(self, twice: tuple[int, int] | None) -> None:
        self._twice = _least(self._twice, twice)


def _least(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _sorted(records: Int64Array) -> Int64Array:
    found: Int64Array = records[np.lexsort((records[:, 1], records[:, 0]))]
    return found


def _repeated(records: Int64Array) -> tuple[int, int] | None:
    found = _sorted(records)
    same = (found[1:] == found[:-1]).all(axis=1)
    if not same.any():
        return None
    file, place = found[1:][same][0].tolist()
    return file, place


def _intervals(records: Int64Array) -> list[tuple[int, int, int]]:
    found = _sorted(records)
    files, firsts = np.unique(found[:, 0], return_index=True)
    lasts = [*(firsts[1:] - 1), len(found) - 1]
    return [
        (file, int(found[first, 1]), int(found[last, 1]))
        for file, first, last in zip(files.tolist(), firsts.tolist(), lasts, strict=False)
    ]
