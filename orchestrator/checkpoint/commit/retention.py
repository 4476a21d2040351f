"""The resume points on an attempt's history, and which of them to delete (membership rule 16).

A pure part of the commit machine. It learns of a point once that is committed. Callers pass only points on
the lineage. Orphans are kept for the record and do not count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.checkpoint.commit.commit_events import (
    Deleted,
    DeletePoints,
    DeletesFail,
    DeletesWork,
    VerifyPoint,
)
from orchestrator.checkpoint.points.points import newest_first, parse_point_name
from orchestrator.records.steps import StateKey
from orchestrator.storage.tries import STORAGE_BACKOFF

# the number of verified points newer than the newest claim's parent after which that may be deleted
# (membership rule 16)
NEEDED_TO_RELEASE = 2
BY_LOSS = "loss"  # `resume.keep_best_by`: the mean loss of the steps since the previous point


def spared(
    points: Sequence[str],
    keep_every: int | None,
    keep_best: int,
    losses: Mapping[str, float | None],
    best_by: str = BY_LOSS,
) -> dict[str, str]:
    """Returns the points that are kept although newer ones exist, with the reasons.

    `keep_every`: those whose step label is a multiple of it (None: disabled). `keep_best`: this many of those
    with the lowest loss, of equal ones the older. `losses`: by point, those of `best_by`
    (`resume.keep_best_by`). A point without a finite loss is never among the best.
    """
    kept = {}
    for name in points:
        key = parse_point_name(name)
        if keep_every is not None and key is not None and key.step % keep_every == 0:
            kept[name] = f"resume.keep_every={keep_every}"
    known = {name: loss for name in points if (loss := losses.get(name)) is not None and math.isfinite(loss)}
    for name in sorted(known, key=lambda name: (known[name], points.index(name)))[:keep_best]:
        what = "mean loss" if best_by == BY_LOSS else best_by
        kept.setdefault(name, f"resume.keep_best={keep_best}: {what} {known[name]:.4f}")
    return kept


def held_point(points: Sequence[str], pinned: str | None, quarantined: Collection[str]) -> str | None:
    """Returns the `pinned` of `to_delete` if some points are marked as damaged.

    It is the newest claim's parent, or in its place the newest older one without a mark, to which a start
    would fall back.
    """
    if pinned not in points:
        return pinned
    older = [name for name in points[: points.index(pinned) + 1] if name not in quarantined]
    return older[-1] if older else None


def to_delete(
    points: Sequence[str],
    keep_latest: int,
    pinned: str | None,
    verified: Collection[str],
    also: Collection[str] = (),
) -> list[str]:
    """Returns the points to delete, oldest first.

    `points`: names on the lineage, oldest first, without duplicates.
    `pinned`: the newest claim's parent, if that is a point of this run.
    `verified`: points whose every digest was read back and found right.
    `also`: points that stay for another reason (`spared`).

    Guarantee: the newest `keep_latest` stay. The pinned point stays until two newer ones are verified. Until
    then at least the two newest stay too, whatever `keep_latest`, because they can release it.
    """
    assert keep_latest >= 1, f"keep_latest={keep_latest}"
    if _is_held(points, pinned, verified):
        kept = {*points[-max(keep_latest, NEEDED_TO_RELEASE) :], pinned}
    else:
        kept = {*points[-keep_latest:]}
    return [name for name in points if name not in kept and name not in also]


def to_verify(
    points: Sequence[str], keep_latest: int, pinned: str | None, verified: Collection[str]
) -> list[str]:
    """Returns the points to read back, oldest first: the newest, if only they still keep the pinned one."""
    if pinned not in points[:-keep_latest] or not _is_held(points, pinned, verified):
        return []
    newer = points[points.index(pinned) + 1 :]
    if len(newer) < NEEDED_TO_RELEASE:
        return []
    return [name for name in newer[-NEEDED_TO_RELEASE:] if name not in verified]


def _is_held(points: Sequence[str], pinned: str | None, verified: Collection[str]) -> bool:
    if pinned is None or pinned not in points:
        return False
    newer = points[points.index(pinned) + 1 :]
    return sum(name in verified for name in newer) < NEEDED_TO_RELEASE


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
        wait_s = STORAGE_BACKOFF.after(self.wait_s)
        return dataclasses.replace(self, wait_s=wait_s, next_s=now_s + wait_s)

    def worked(self) -> DeleteRetries:
        """A point was deleted."""
        return dataclasses.replace(self, wait_s=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPoints:
    """The points of one attempt. Each method returns the next state, and the actions if there are any.

    `names`: those on the lineage, oldest first; initially those that the claim inherited.
    `losses`: their losses by `best_by` (`resume.keep_best_by`) as far as known, for `keep_best`.
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
    best_by: str = BY_LOSS
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
        if self.best_by != BY_LOSS:
            return self
        return dataclasses.replace(self, losses={**self.losses, name: mean_loss})

    def evaluated(self, name: str, loss: float | None) -> KeptPoints:
        """Records the loss of `best_by` in the state of a point, which may be committed later."""
        return dataclasses.replace(self, losses={**self.losses, name: loss})

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
        also = spared(points, self.keep_every, self.keep_best, self.losses, self.best_by)
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
