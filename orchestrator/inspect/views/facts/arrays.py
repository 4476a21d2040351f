"""Growing arrays, and pyramids over them: any range of a long column costs about the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
FOLD = 32  # rows of one level in a row of the next


class Growing:
    """A column to which rows are appended; `array` is a view of all of them, valid until the next append."""

    def __init__(self, dtype: Any, values: Any = ()) -> None:
        self._data: Array = np.array(values, dtype=dtype)
        self._size = len(self._data)

    def __len__(self) -> int:
        return self._size

    @property
    def array(self) -> Array:
        """All rows."""
        return self._data[: self._size]

    def extend(self, values: Any) -> None:
        """Appends rows. Doubles its memory if it is full."""
        new = np.asarray(values, dtype=self._data.dtype)
        size = self._size + len(new)
        if size > len(self._data):
            data = np.empty(max(size, 2 * len(self._data), 64), dtype=self._data.dtype)
            data[: self._size] = self.array
            self._data = data
        self._data[self._size : size] = new
        self._size = size

    def cut(self, size: int) -> None:
        """Removes the rows from `size` on."""
        self._size = min(self._size, size)


class Pyramid:
    """The least, the greatest and the sum of a column's rows over 32, 1,024, … of them, so that those of any
    range take at most about 60 look-ups a level. Rows that are not finite count as not there. The column
    itself is not copied.
    """

    def __init__(self) -> None:
        self._column: Array = np.zeros(0)
        self._levels: list[tuple[Growing, Growing, Growing, Growing]] = []

    def extend(self, column: Array) -> None:
        """Adds the column's rows beyond those known; only these cost time. `over` reads the same column."""
        done, self._column = len(self._column), column
        size = len(column)
        if size == done:
            return
        level = 0
        while size > FOLD:
            if level == len(self._levels):
                self._levels.append((Growing("f8"), Growing("f8"), Growing("f8"), Growing("f8")))
                done = 0  # a new level has no row yet
            first = done // FOLD
            below = self._rows(level, np.s_[first * FOLD :])
            cuts = np.arange(0, size - first * FOLD, FOLD)
            for kept, fold, part in zip(self._levels[level], _FOLDS, below, strict=True):
                kept.cut(first)
                kept.extend(fold.reduceat(part, cuts))
            done, size, level = first, len(self._levels[level][0]), level + 1

    def over(self, starts: Array, stops: Array) -> tuple[Array, Array, Array, Array]:
        """(least, greatest, sum, how many are finite) of each range [starts[i], stops[i])."""
        found = (
            np.full(len(starts), np.inf),
            np.full(len(starts), -np.inf),
            np.zeros(len(starts)),
            np.zeros(len(starts)),
        )
        start, stop = starts.astype(np.int64), stops.astype(np.int64)
        for level in range(len(self._levels) + 1):
            last = level == len(self._levels)
            # the rows at both ends that do not fill a row of the next level are taken here
            left = np.where(last, stop, np.minimum(-(-start // FOLD) * FOLD, stop))
            right = np.where(last, stop, np.maximum(stop // FOLD * FOLD, left))
            for begins, ends in ((start, left), (right, stop)):
                some = np.flatnonzero(ends > begins)
                if len(some):
                    rows, cuts = _ranges(begins[some], ends[some])
                    for out, fold, part in zip(found, _FOLDS, self._rows(level, rows), strict=True):
                        out[some] = fold(out[some], fold.reduceat(part, cuts))
            start, stop = left // FOLD, right // FOLD
        return found

    def _rows(self, level: int, which: Any) -> tuple[Array, ...]:
        """(least, greatest, sum, how many are finite) of these rows of a level; 0 is the column."""
        if level:
            return tuple(kept.array[which] for kept in self._levels[level - 1])
        values = self._column[which].astype(np.float64)
        finite = np.isfinite(values)
        return (
            np.where(finite, values, np.inf),
            np.where(finite, values, -np.inf),
            np.where(finite, values, 0.0),
            finite.astype(np.float64),
        )


_FOLDS = (np.minimum, np.maximum, np.add, np.add)


def _ranges(begins: Array, ends: Array) -> tuple[Array, Array]:
    """The rows of ranges, none of which is empty, one after the other; where each range begins among them."""
    sizes = ends - begins
    cuts = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) + np.repeat(begins - cuts, sizes), cuts
