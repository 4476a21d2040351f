"""Schedules retries for points that could not be deleted: a pure part of `kept_points`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from orchestrator.checkpoint.commit.save_retries import FIRST_S, MOST_S


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteRetries:
    """Whether deletions work in storage, and when failed ones are retried.

    After a failure only the oldest point is tried, after 5, 10, 20, ... 320 s, and then every 320 s. Once
    that succeeds, all are deleted. All times are seconds of one clock.

    Guarantee: while deletions fail, only one is in progress at a time.
    """

    wait_s: float = 0.0  # before the next try; 0: nothing has failed
    next_s: float = 0.0

    @property
    def fails(self) -> bool:
        """Whether the last deletion failed."""
        return self.wait_s > 0

    def to_try(self, names: tuple[str, ...], deleting: bool, now_s: float) -> tuple[str, ...]:
        """Returns which of the points to delete, oldest first, are deleted now. `deleting`: some are being
        deleted.
        """
        if not self.fails:
            return names
        return () if deleting or now_s < self.next_s else names[:1]

    def failed(self, now_s: float) -> DeleteRetries:
        """A deletion failed."""
        wait_s = min(2 * self.wait_s, MOST_S) or FIRST_S
        return dataclasses.replace(self, wait_s=wait_s, next_s=now_s + wait_s)

    def worked(self) -> DeleteRetries:
        """A point was deleted."""
        return dataclasses.replace(self, wait_s=0.0)
