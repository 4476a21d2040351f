"""The newest steps of a launch: how long a step takes, and whether the group is silent.

A part of the launch machine, pure: times are seconds of one monotonic clock.
"""

from __future__ import annotations

import statistics

from orchestrator.records.steps import StepRecord

SILENCE_S = 5.0  # after this long without a record, members are checked as while a group forms
_MEDIAN_OF = 31  # steps


class RecentSteps:
    """Tracks step records. `newest` has the greatest key; None before the first.

    `heard_at` is when the last record arrived, which may be a copy.
    """

    def __init__(self) -> None:
        self.newest: StepRecord | None = None
        self.heard_at = float("-inf")
        self._durations: list[float] = []

    def recorded(self, record: StepRecord, now: float) -> bool:
        """Takes a record, possibly a copy. Returns whether it is the newest."""
        self.heard_at = now
        if self.newest is not None and record.key <= self.newest.key:
            return False
        self.newest = record
        self._durations = [*self._durations[1 - _MEDIAN_OF :], record.step_s]
        return True

    @property
    def median_s(self) -> float:
        """The median duration of the last 31 steps; 0 before the first."""
        return statistics.median(self._durations) if self._durations else 0.0

    def is_training(self, attempt: int, generation: int, now: float) -> bool:
        """Whether this generation has done a step and sent a record a short while ago."""
        step = self.newest
        done = step is not None and (step.attempt, step.generation) == (attempt, generation)
        return done and now - self.heard_at < SILENCE_S
