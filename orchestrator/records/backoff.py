"""Delays between tries of something that fails."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Delays of `first_s`, then twice as long after each failure, and at most `most_s` seconds."""

    first_s: float
    most_s: float

    def after(self, delay_s: float) -> float:
        """Returns the delay that follows one of `delay_s`; 0: none was before."""
        return min(2 * delay_s, self.most_s) if delay_s else self.first_s

    def nth(self, num_failures: int) -> float:
        """Returns the delay after `num_failures` earlier failures."""
        return min(self.first_s * (1 << num_failures), self.most_s)


MOST_RETRY_S = 320.0
STORAGE_BACKOFF = Backoff(first_s=5.0, most_s=MOST_RETRY_S)  # of saves and deletions that storage refuses
