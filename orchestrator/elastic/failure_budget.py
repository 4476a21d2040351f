"""How many failures a run may have without a finished step between them (`cluster.max_failures`).

Counts only. What a restarted coordinator must know of it stands in the journal: each failure with the step
after which it came, and the newest step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something ended without having been asked to, when `step` was the last step done."""

    step: int
    reason: str


class FailureBudget:
    """The failures of one launch. `failures` and `last_step` are what it knew before its coordinator was
    restarted.
    """

    def __init__(self, max_failures: int, failures: Iterable[Failure] = (), last_step: int = 0) -> None:
        self._max = max_failures
        self.failures: tuple[Failure, ...] = tuple(failures)
        self._last_step = last_step

    def failed(self, reason: str) -> Failure:
        """Counts a failure, after the last step done."""
        failure = Failure(step=self._last_step, reason=reason)
        self.failures = (*self.failures, failure)
        return failure

    def applied(self, step: int) -> None:
        """`step` is the newest step now; failures before it do not count any more, unless the run goes back
        before them.
        """
        self._last_step = step

    def verdict(self) -> str | None:
        """Why the run must stop now; None while it may go on."""
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
