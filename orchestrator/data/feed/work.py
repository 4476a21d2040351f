"""Signs of work between tokenizers and feeder: decoding what lies before a cursor in a large compressed file
gives no chunk, for an hour if need be, and is progress all the same.

It knows no call and no thread; clocks are given.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# A tokenizer reports at most once in so many seconds; far below any limit on standing still.
REPORT_EVERY_S = 1.0


class SignsOfWork:
    """The feeder's side: when its tokenizers last did something, and what they passed on the way."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._now = limit_s, now
        self._last = now()
        self.bytes_passed = 0

    def note(self, bytes_passed: int = 0) -> None:
        """A tokenizer did something, now; it decoded so many bytes that lie before its cursor."""
        self._last = self._now()
        self.bytes_passed += bytes_passed

    def left_s(self, since: float) -> float:
        """Seconds that a wait begun at `since` (of the same clock) may still last without another sign: the
        limit counts from the last one. 0 or less: the pipeline stands still.
        """
        return max(since, self._last) + self._limit_s - self._now()


class WorkReports:
    """A tokenizer's side: called with the bytes of each window that it decodes and passes over, it reports
    the sum of them, the first at once and then one call in `every_s`.
    """

    def __init__(
        self,
        report: Callable[[int], bool],
        every_s: float = REPORT_EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` answers whether the work is still wanted."""
        self._report, self._every_s, self._now = report, every_s, now
        self._bytes = 0
        self._reported_at: float | None = None

    def __call__(self, num_bytes: int) -> bool:
        """False: the work is not wanted any more."""
        self._bytes += num_bytes
        now = self._now()
        if self._reported_at is not None and now - self._reported_at < self._every_s:
            return True
        self._reported_at, passed, self._bytes = now, self._bytes, 0
        return self._report(passed)
