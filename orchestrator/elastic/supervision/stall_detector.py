"""Detects that no step was finished for too long, so that the workers' processes are inspected.

The result is only reported to people. The rendezvous decides which members are left out, and when (membership
rule 17).
"""

from __future__ import annotations

import statistics
from collections import deque

from orchestrator.records.run_status import RunStatus

# an inspection is due after max(5 s, 3 × median step), then each time that has doubled
LEAST_S, MEDIANS = 5.0, 3.0


class StallWatch:
    """Watches each status, and decides when an inspection is due."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=30)
        self._at: tuple[int, int, int] | None = None
        self._since = 0.0
        self._looks = 0

    @property
    def median_s(self) -> float:
        """The median duration of a step."""
        return statistics.median(self._steps) if self._steps else 0.0

    def saw(self, status: RunStatus, now: float) -> None:
        """Handles a status. Only a group that has done a step is watched, because a first step may take any
        time.
        """
        step, at = status.last_step, None
        if step is not None and (step.attempt, step.generation) == (status.attempt, status.generation):
            at = (step.attempt, step.generation, step.step)
        if status.waiting_since is not None or status.ended is not None:
            at = None
        if at != self._at:
            self._at, self._since, self._looks = at, now, 0
            if at is not None and step is not None:
                self._steps.append(step.step_s)

    def due(self, now: float) -> float | None:
        """Returns how long no step was finished, if an inspection is due now. The next is due after twice
        that time.
        """
        quiet = now - self._since
        if self._at is None or quiet < max(LEAST_S, MEDIANS * self.median_s) * 2**self._looks:
            return None
        self._looks += 1
        return quiet
