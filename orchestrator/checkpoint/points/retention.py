"""Decides which resume points are no longer needed: a pure decision over names.

Callers pass only points on the lineage. Orphans are kept for the record and do not count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from orchestrator.checkpoint.points.points import parse_point_name

# the number of verified points newer than the newest claim's parent after which that may be deleted
# (membership rule 16)
NEEDED_TO_RELEASE = 2


def spared(
    points: Sequence[str], keep_every: int | None, keep_best: int, losses: Mapping[str, float | None]
) -> dict[str, str]:
    """Returns the points that are kept although newer ones exist, with the reasons.

    `keep_every`: those whose step label is a multiple of it (None: disabled). `keep_best`: this many of those
    with the lowest loss, of equal ones the older. `losses`: the mean loss of the steps since the previous
    point, by name. A point without a finite loss is never among the best.
    """
    kept = {}
    for name in points:
        key = parse_point_name(name)
        if keep_every is not None and key is not None and key.step % keep_every == 0:
            kept[name] = f"resume.keep_every={keep_every}"
    known = {name: loss for name in points if (loss := losses.get(name)) is not None and math.isfinite(loss)}
    for name in sorted(known, key=lambda name: (known[name], points.index(name)))[:keep_best]:
        kept.setdefault(name, f"resume.keep_best={keep_best}: mean loss {known[name]:.4f}")
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
