"""Limits how long a run continues although its storage fails, and builds the reports to the user."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from orchestrator.errors import StorageError

Result = TypeVar("Result")
AGAIN_S = 0.5  # between two attempts
# How long training continues without a journal on disk, and how long a finished run tries to save its last
# state.
STORAGE_LIMIT_S = 300.0


class StorageTrouble:
    """When a storage failure began, and its reason. All times are seconds of one monotonic clock."""

    def __init__(self, limit_s: float = STORAGE_LIMIT_S, meanwhile: str = "Training continues") -> None:
        """`meanwhile`: the state of the run, for reports to the user."""
        self._limit_s, self._meanwhile = limit_s, meanwhile
        self._since: float | None = None
        self._reason = ""

    def failed(self, reason: str, since: float) -> str | None:
        """Records that an operation that began at `since` failed.

        Returns what to report to the user; None if the failure was already reported.
        """
        self._reason = reason
        if self._since is not None:
            return None
        self._since = since
        return (
            f"{reason}. {self._meanwhile}; once it has failed for {self._limit_s:g} s the run stops. "
            "Nothing that was committed is lost"
        )

    def worked(self) -> str | None:
        """Records that an operation succeeded.

        Returns what to report to the user; None if there was no failure.
        """
        if self._since is None:
            return None
        self._since = None
        return "storage works again"

    def verdict(self, now: float) -> str | None:
        """Returns why the run must stop now, or None."""
        if self._since is None or now - self._since < self._limit_s:
            return None
        return (
            f"storage has failed for {now - self._since:.0f} s (allowed: {self._limit_s:g} s): "
            f"{self._reason}; when storage works again, start the same command: it continues from the newest "
            "resume point"
        )


def until_storage_works(
    work: Callable[[], Result],
    limit_s: float,
    meanwhile: str,
    tell: Callable[[str], None] = lambda text: None,
    wait: Callable[[float], None] = time.sleep,
) -> Result:
    """Returns what `work` returns, and retries it while storage fails.

    Raises a `StorageError` with the duration of the failure once that reaches `limit_s`. `tell` is called at
    the first failure, and when storage works again.
    """
    trouble = StorageTrouble(limit_s, meanwhile)
    while True:
        began = time.monotonic()
        try:
            result = work()
        except StorageError as error:
            if text := trouble.failed(str(error), began):
                tell(text)
            if reason := trouble.verdict(time.monotonic()):
                raise StorageError(reason, code="storage.failing") from error
        else:
            if text := trouble.worked():
                tell(text)
            return result
        wait(AGAIN_S)
