"""The number of failures that a run may have without a finished step between them (`cluster.max_failures`).

The journal stores what a restarted coordinator needs: each failure with the step after which it occurred, and
the newest step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something ended unexpectedly, when `step` was the last finished step."""

    step: int
    reason: str


class FailureBudget:
    """The failures of one launch.

    The arguments `failures` and `last_step` are the state before its coordinator was restarted.
    """

    def __init__(self, max_failures: int, failures: Iterable[Failure] = (), last_step: int = 0) -> None:
        self._max = max_failures
        self.failures: tuple[Failure, ...] = tuple(failures)
        self._last_step = last_step

    def failed(self, reason: str) -> Failure:
        """Counts a failure, after the last finished step."""
        failure = Failure(step=self._last_step, reason=reason)
        self.failures = (*self.failures, failure)
        return failure

    def applied(self, step: int) -> None:
        """Records `step` as the newest step.

        Failures before it no longer count, unless the run goes back before them.
        """
        self._last_step = step

    def verdict(self) -> str | None:
        """Returns why the run must stop now, or None."""
        here = [failure.reason for failure in self.failures if failure.step >= self._last_step]
        if len(here) <= self._max:
            return None
        listed = "\n".join(f"  {reason}" for reason in dict.fromkeys(here))
        return (
            f"{len(here)} failures after step {self._last_step} without a finished step between them, "
            f"cluster.max_failures={self._max}:\n{listed}"
        )

    def copy(self) -> FailureBudget:
        """An independent copy."""
        return FailureBudget(self._max, self.failures, self._last_step)
