"""Arrays that grow, and pyramids over them: what makes any range of a long column cost the same.

It knows numbers, not what they mean.
"""

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
        """Append rows; doubles its memory where it is full."""
        new = np.asarray(values, dtype=self._data.dtype)
        size = self._size + len(new)
        if size > len(self._data):
            data = np.empty(max(size, 2 * len(self._data), 64), dtype=self._data.dtype)
            data[: self._size] = self.array
            self._data = data
        self._data[self._size : size] = new
        self._size = size

    def cut(self, size: int) -> None:
        """Forget the rows from `size` on."""
        self._size = min(self._size, size)


class Pyramid:
    """The least, the greatest and the sum of a column's rows over 1, 32, 1,024, … of them, so that those of
    any range take at most about 60 look-ups a level. Rows that are not finite count as not there.
    """

    def __init__(self) -> None:
        self._size = 0
        self._levels: list[tuple[Growing, Growing, Growing, Growing]] = []

    def extend(self, column: Array) -> None:
        """Take up the rows that the column has beyond those known; at the cost of these."""
        done, self._size = self._size, len(column)
        values = column[done:].astype(np.float64)
        finite = np.isfinite(values)
        parts = (
            np.where(finite, values, np.inf),
            np.where(finite, values, -np.inf),
            np.where(finite, values, 0.0),
            finite.astype(np.float64),
        )
        level = 0
        while len(parts[0]):
            if level == len(self._levels):
                self._levels.append((Growing("f8"), Growing("f8"), Growing("f8"), Growing("f8")))
            for kept, new in zip(self._levels[level], parts, strict=True):
                kept.cut(done)
                kept.extend(new)
            size = len(self._levels[level][0])
            if size <= FOLD:
                break
            done = done // FOLD if level + 1 < len(self._levels) else 0  # a new level has no row yet
            cuts = np.arange(done * FOLD, size, FOLD)
            low, high, total, count = (kept.array for kept in self._levels[level])
            parts = (
                np.minimum.reduceat(low, cuts),
                np.maximum.reduceat(high, cuts),
                np.add.reduceat(total, cuts),
                np.add.reduceat(count, cuts),
            )
            level += 1

    def over(self, starts: Array, stops: Array) -> tuple[Array, Array, Array, Array]:
        """(least, greatest, sum, how many are finite) of each range [starts[i], stops[i])."""
        low, high = np.full(len(starts), np.inf), np.full(len(starts), -np.inf)
        total, count = np.zeros(len(starts)), np.zeros(len(starts))
        start, stop = starts.astype(np.int64), stops.astype(np.int64)
        for number, (lows, highs, totals, counts) in enumerate(self._levels):
            last = number + 1 == len(self._levels)
            # what does not fill a row of the next level is taken here, at both ends
            left = np.where(last, stop, np.minimum(-(-start // FOLD) * FOLD, stop))
            right = np.where(last, stop, np.maximum(stop // FOLD * FOLD, left))
            for begins, ends in ((start, left), (right, stop)):
                some = np.flatnonzero(ends > begins)
                if not len(some):
                    continue
                cuts = np.stack([begins[some], ends[some]], axis=1).ravel()
                for out, column, fold in (
                    (low, lows, np.minimum),
                    (high, highs, np.maximum),
                    (total, totals, np.add),
                    (count, counts, np.add),
                ):
                    out[some] = fold(out[some], _folded(fold, column.array, cuts))
            start, stop = left // FOLD, right // FOLD
        return low, high, total, count


def _folded(fold: Any, column: Array, cuts: Array) -> Array:
    """`fold` over column[cuts[0]:cuts[1]], column[cuts[2]:cuts[3]], …; every such range has rows."""
    longer = np.append(column, column[-1:])  # a cut may stand behind the last row
    return fold.reduceat(longer, cuts)[::2]  # type: ignore[no-any-return]
