"""Which resume points are no longer needed: a pure decision over names.

It reads and deletes nothing. Callers give only points on the lineage; orphans are kept for the record and
never counted here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# verified points newer than the newest claim's parent, before that may go (membership rule 16)
NEEDED_TO_RELEASE = 2


def to_delete(
    points: Sequence[str], keep_latest: int, pinned: str | None, verified: Collection[str]
) -> list[str]:
    """The points to delete, oldest first.

    `points`: names on the lineage, oldest first, without duplicates. `pinned`: the newest claim's parent, if
    that is a point of this run. `verified`: points whose every digest was read back and found right.
    Guarantee: the newest `keep_latest` stay; the pinned point stays until two newer ones are verified, and
    until then at least the two newest stay too, whatever `keep_latest`, because they are the ones that can
    release it.
    """
    assert keep_latest >= 1, f"keep_latest={keep_latest}"
    if _is_held(points, pinned, verified):
        kept = {*points[-max(keep_latest, NEEDED_TO_RELEASE) :], pinned}
    else:
        kept = {*points[-keep_latest:]}
    return [name for name in points if name not in kept]


def to_verify(
    points: Sequence[str], keep_latest: int, pinned: str | None, verified: Collection[str]
) -> list[str]:
    """The points to read back, oldest first: the newest, once they are all that keeps the pinned one."""
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
