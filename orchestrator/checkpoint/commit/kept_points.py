"""The resume points on an attempt's history, and which of them to delete (membership rule 16).

A pure part of the commit machine. It learns of a point once that is committed. `retention.py` defines
retention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.checkpoint.commit.commit_events import (
    Deleted,
    DeletePoints,
    DeletesFail,
    DeletesWork,
    VerifyPoint,
)
from orchestrator.checkpoint.commit.save_retries import FIRST_S, MOST_S
from orchestrator.checkpoint.points.points import newest_first, parse_point_name
from orchestrator.checkpoint.points.retention import held_point, spared, to_delete, to_verify
from orchestrator.records.steps import StateKey


# Schedules retries for points that could not be deleted: a pure part of `kept_points`.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPoints:
    """The points of one attempt. Each method returns the next state, and the actions if there are any.

    `names`: those on the lineage, oldest first; initially those that the claim inherited.
    `losses`: their mean losses as far as known, for `keep_every` and `keep_best`, which spare some points.
    `pinned`: the claim's parent if that is a point of this run.
    `quarantined`: the points marked as damaged, as of the last check for claims (None: the marks could not be
    listed, so nothing is deleted).
    `verifying`, `deleting`: points with an unanswered action.

    Guarantee: a point that is being read back is not deleted, and none is deleted twice. Failing deletions
    and their recovery are reported once each.
    """

    keep_latest: int
    keep_every: int | None = None
    keep_best: int = 0
    names: tuple[str, ...] = ()
    losses: Mapping[str, float | None] = field(default_factory=dict)
    pinned: str | None = None
    verified: frozenset[str] = frozenset()
    quarantined: frozenset[str] | None = frozenset()
    verifying: frozenset[str] = frozenset()
    deleting: frozenset[str] = frozenset()
    retries: DeleteRetries = DeleteRetries()

    @property
    def newest(self) -> StateKey | None:
        """The key of the newest one; None: there is none."""
        return parse_point_name(self.names[-1]) if self.names else None

    def with_point(self, name: str) -> KeptPoints:
        """Adds a committed point."""
        return dataclasses.replace(self, names=tuple(newest_first([*self.names, name])[::-1]))

    def with_loss(self, name: str, mean_loss: float | None) -> KeptPoints:
        """Records the mean loss of the steps before a point that is being committed; None: unknown."""
        return dataclasses.replace(self, losses={**self.losses, name: mean_loss})

    def on_path(self, is_on: Callable[[StateKey], bool]) -> KeptPoints:
        """Drops points that are not on the path of a newly formed generation. They are orphans and no longer
        count.
        """
        keys = {name: parse_point_name(name) for name in self.names}
        kept = tuple(name for name, key in keys.items() if key is not None and is_on(key))
        return dataclasses.replace(self, names=kept)

    def marked(self, quarantined: frozenset[str] | None) -> KeptPoints:
        """Records the points that are now marked as damaged; None: unknown."""
        return dataclasses.replace(self, quarantined=quarantined)

    def prune(
        self, new_point: bool, now_s: float
    ) -> tuple[KeptPoints, tuple[DeletePoints | VerifyPoint, ...]]:
        """Deletes what is not needed. After a new point also reads back the points that would release the
        pinned one.

        A point that is marked as damaged stays, and does not count. While the marks are unknown, all points
        stay.
        """
        if self.quarantined is None:
            return self, ()
        points = tuple(name for name in self.names if name not in self.quarantined)
        pinned = held_point(self.names, self.pinned, self.quarantined)
        busy = self.deleting | self.verifying  # a point that is being read back is not deleted meanwhile
        also = spared(points, self.keep_every, self.keep_best, self.losses)
        unneeded = to_delete(points, self.keep_latest, pinned, self.verified, also)
        free = tuple(name for name in unneeded if name not in busy)
        names = self.retries.to_try(free, bool(self.deleting), now_s)
        wanted = to_verify(points, self.keep_latest, pinned, self.verified) if new_point else []
        check = [name for name in wanted if name not in busy]
        after = dataclasses.replace(
            self, deleting=self.deleting.union(names), verifying=self.verifying.union(check)
        )
        delete = (DeletePoints(names=names),) if names else ()
        return after, (*delete, *(VerifyPoint(name=name) for name in check))

    def read_back(self, name: str, healthy: bool) -> KeptPoints:
        """Handles that a point was read back."""
        after = dataclasses.replace(self, verifying=self.verifying - {name})
        return dataclasses.replace(after, verified=self.verified | {name}) if healthy else after

    def deleted(
        self, event: Deleted, now_s: float
    ) -> tuple[KeptPoints, tuple[DeletesFail | DeletesWork, ...]]:
        """Handles deleted and failed points. Reports a change between failure and success."""
        names = tuple(name for name in self.names if name not in event.names)
        after = dataclasses.replace(
            self,
            names=names,
            deleting=self.deleting.difference(event.names, event.failed),
            verified=self.verified.intersection(names),
            losses={name: loss for name, loss in self.losses.items() if name not in event.names},
        )
        if event.reason:
            tell = () if self.retries.fails else (DeletesFail(name=event.failed[0], reason=event.reason),)
            return dataclasses.replace(after, retries=self.retries.failed(now_s)), tell
        if event.names and self.retries.fails:
            return dataclasses.replace(after, retries=self.retries.worked()), (
                DeletesWork(name=event.names[0]),
            )
        return after, ()
