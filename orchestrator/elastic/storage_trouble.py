"""How long a run goes on although its storage fails: until a stated limit, while the user is notified.

It knows times and reasons; what is tried again meanwhile is its caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from orchestrator.errors import StorageError

Result = TypeVar("Result")
AGAIN_S = 0.5  # between two tries
# Training goes on so long without a journal on disk, and a finished run tries so long to save its last state.
STORAGE_LIMIT_S = 300.0


class StorageTrouble:
    """Since when, and why, storage fails. All times are seconds of one monotonic clock."""

    def __init__(self, limit_s: float = STORAGE_LIMIT_S, meanwhile: str = "Training goes on") -> None:
        """`meanwhile`: what a report to the user says of the run."""
        self._limit_s, self._meanwhile = limit_s, meanwhile
        self._since: float | None = None
        self._reason = ""

    def failed(self, reason: str, since: float) -> str | None:
        """An operation that began at `since` failed. What to report to the user; None if that has been
        reported.
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
        """An operation succeeded. What to report to the user; None if there was no trouble."""
        if self._since is None:
            return None
        self._since = None
        return "storage works again"

    def verdict(self, now: float) -> str | None:
        """Why the run must stop now; None while it may go on."""
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
    """What `work` returns, which is tried again while storage fails. Raises the `StorageError` that says for
    how long it did, once that is `limit_s`; `tell` hears of the first failure, and that storage works again.
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
                raise StorageError(reason) from error
        else:
            if text := trouble.worked():
                tell(text)
            return result
        wait(AGAIN_S)
