"""Tracks whether a member's generation is over, as received by its watching thread, and the actions then
due.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Identity = tuple[int, int]  # (attempt, generation)


class GenerationEnd:
    """The end of one member's generation.

    `heard_at`: since when the member knows that its current generation is over (monotonic clock; None: it is
    not, or the member has left it).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: Identity | None = None
        self._act: Callable[[], None] | None = None
        self.heard_at: float | None = None

    def enter(self, generation: Identity) -> None:
        """The member enters this generation."""
        with self._lock:
            self._inside, self._act, self.heard_at = generation, None, None

    def leave(self) -> None:
        """The member has left its generation. The generation's end no longer matters to it."""
        with self._lock:
            self._inside = self._act = self.heard_at = None

    def is_inside(self, generation: Identity) -> bool:
        """Whether the member is still in this generation."""
        return self._inside == generation

    def hear(self, generation: Identity) -> None:
        """Records that this generation is over."""
        with self._lock:
            if self._inside != generation:
                return
            self.heard_at, act = time.monotonic(), self._act
        if act is not None:
            act()

    def when_heard(self, generation: Identity, act: Callable[[], None]) -> None:
        """Registers `act` to be called when the end is recorded, in the thread that records it. Calls it at
        once if the end is already recorded.
        """
        with self._lock:
            assert self._inside == generation, f"a member of {self._inside} waits for the end of {generation}"
            self._act, known = act, self.heard_at is not None
        if known:
            act()
