"""Progress reports from tokenizers to the feeder.

Decoding what lies before a cursor in a large compressed file may yield no chunk for an hour, and is still
progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# A tokenizer reports at most once in this many seconds, far below any stall limit.
REPORT_EVERY_S = 1.0


class SignsOfWork:
    """The feeder's side: the time of the tokenizers' last progress, and the bytes that they skipped."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._now = limit_s, now
        self._last = now()
        self.bytes_passed = 0

    def note(self, bytes_passed: int = 0) -> None:
        """A tokenizer made progress now. It decoded `bytes_passed` bytes before its cursor."""
        self._last = self._now()
        self.bytes_passed += bytes_passed

    def left_s(self, since: float) -> float:
        """Seconds that a wait begun at `since` (of the same clock) may last without another report.

        The limit counts from the last report. 0 or less: the pipeline has stalled.
        """
        return max(since, self._last) + self._limit_s - self._now()


class WorkReports:
    """The tokenizer's side: called with the bytes of each window that it decodes and skips.

    Reports their sum, the first time at once and then at most once in `every_s`.
    """

    def __init__(
        self,
        report: Callable[[int], bool],
        every_s: float = REPORT_EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` returns whether the work is still wanted."""
        self._report, self._every_s, self._now = report, every_s, now
        self._bytes = 0
        self._reported_at: float | None = None

    def __call__(self, num_bytes: int) -> bool:
        """Returns False if the work is no longer wanted."""
        self._bytes += num_bytes
        now = self._now()
        if self._reported_at is not None and now - self._reported_at < self._every_s:
            return True
        self._reported_at, passed, self._bytes = now, self._bytes, 0
        return self._report(passed)
