"""Schedules another save after one that did not become a point: a pure machine over times."""

from __future__ import annotations

FIRST_S = 5.0
MOST_S = 320.0


class SaveRetries:
    """Retries of saves that are given up: after 5, 10, 20, ... 320 s, and then every 320 s.

    A committed save ends the retries. All times are seconds of one monotonic clock. The reason for giving up
    makes no difference: the state is not saved, and the next regular save may be an hour away.

    Guarantees: each save that is given up leads to one try, which `due` reports once. None is due after a
    commit.
    """

    def __init__(self) -> None:
        self._wait_s = FIRST_S
        self._next: float | None = None

    @property
    def next_try(self) -> float | None:
        """When the next try is due; None: there is none."""
        return self._next

    def given_up(self, now: float) -> float:
        """A save was given up. Returns the seconds until another one is tried."""
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, MOST_S)
        self._next = now + wait_s
        return wait_s

    def committed(self) -> None:
        """A save was committed."""
        self._wait_s, self._next = FIRST_S, None

    def due(self, now: float) -> bool:
        """Whether another save is to be tried now."""
        if self._next is None or now < self._next:
            return False
        self._next = None
        return True
