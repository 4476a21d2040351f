"""When another save is tried after one that did not become a point: a pure machine over times.

It knows neither what was to be saved nor how long a run may go on without a save.
"""

from __future__ import annotations

FIRST_S = 5.0
MOST_S = 320.0


class SaveRetries:
    """Saves that are given up one after the other are tried again after 5, 10, 20, ... 320 s, and from then
    on every 320 s; one that is committed ends that. All times are seconds of one monotonic clock.

    Why a save was given up makes no difference: what it would have kept is kept by none, and the next that is
    due by itself may be an hour away.

    Guarantees: each save that is given up leads to one try, `due` says so once, and none is due after a
    commit.
    """

    def __init__(self) -> None:
        self._wait_s = FIRST_S
        self._next: float | None = None

    @property
    def next_try(self) -> float | None:
        """When the next try is due; None: none is."""
        return self._next

    def given_up(self, now: float) -> float:
        """A save was given up. In how many seconds another one is tried."""
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
