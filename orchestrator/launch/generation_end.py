"""Whether the generation that a member is in is over, as its watching thread has heard: what is to be done
then, and since when it is known.

It knows neither coordinator nor group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Identity = tuple[int, int]  # (attempt, generation)


class GenerationEnd:
    """One member's. `heard_at`: since when it knows that the generation it is in is over (monotonic clock;
    None: it is not, or the member has left it).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: Identity | None = None
        self._act: Callable[[], None] | None = None
        self.heard_at: float | None = None

    def enter(self, generation: Identity) -> None:
        """The member is in this generation from now on."""
        with self._lock:
            self._inside, self._act, self.heard_at = generation, None, None

    def leave(self) -> None:
        """The member has left its generation: its end is nobody's business any more."""
        with self._lock:
            self._inside = self._act = self.heard_at = None

    def is_inside(self, generation: Identity) -> bool:
        """Is the member in this generation still?"""
        return self._inside == generation

    def hear(self, generation: Identity) -> None:
        """This generation is over."""
        with self._lock:
            if self._inside != generation:
                return
            self.heard_at, act = time.monotonic(), self._act
        if act is not None:
            act()

    def when_heard(self, generation: Identity, act: Callable[[], None]) -> None:
        """Has `act` called by whoever hears of the end; by the caller, if it was heard already."""
        with self._lock:
            assert self._inside == generation, f"a member of {self._inside} waits for the end of {generation}"
            self._act, known = act, self.heard_at is not None
        if known:
            act()
