"""Whether a run's newest attempt lives, judged by changes on this process's own clocks.

The page has one watch for each run, shared by its row in the list, its page and its stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

WATCH_S = 10.0  # without any change for so long, a run without an end is dead (membership rule 12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """Whether the newest attempt lives, as this process saw it.

    `alive`: it changed something within `limit_s` seconds; None: it was not watched for so long, or it has
    ended. `last_sign`: the time of its last change, seconds since 1970; None if there was none while it was
    watched for `watched_s`.
    """

    alive: bool | None = None
    last_sign: float | None = None
    watched_s: float = 0.0
    limit_s: float = WATCH_S


class LifeWatch:
    """Watches the signs of life of one run. Safe to use from threads."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        watch_s: float = WATCH_S,
    ) -> None:
        """`clock`: gives times for people. `monotonic`: measures the watch of `watch_s`."""
        self._clock, self._monotonic, self._watch_s = clock, monotonic, watch_s
        self._lock = threading.Lock()
        self._signs: tuple[int, bytes] | None = None  # of the newest attempt, as they were last seen
        self._watched_since = self._changed_at = 0.0
        self._sign_at: float | None = None

    def look(self, number: int, over: bool, found: bytes) -> Life:
        """`number`: the newest attempt, 0 if there is none; `over`: it has ended, or there is none; `found`:
        its signs of life (`ClaimFiles.signs_of_life`), empty if it is over.
        """
        signs = (number, found)
        with self._lock:
            now = self._monotonic()
            if self._signs is None:
                self._watched_since = self._changed_at = now
            elif signs != self._signs and not over:  # an end without signs is no sign
                self._changed_at, self._sign_at = now, self._clock()
            self._signs = signs
            quiet = now - self._changed_at
            alive = None if self._sign_at is None and quiet < self._watch_s else quiet < self._watch_s
            return Life(
                alive=None if over else alive,
                last_sign=self._sign_at,
                watched_s=now - self._watched_since,
                limit_s=self._watch_s,
            )
