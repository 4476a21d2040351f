"""What became of each point that was ever committed, by what journal and claims say of it: kept or deleted.

It reads no storage: whether the files agree is for the caller to see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.history.event_kinds import EventKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Fates:
    """Names of points. `kept` were committed, and nobody meant to delete them: without COMMIT they are
    damaged. `deleted` are gone or half gone: what is left of one without COMMIT is neither a point nor
    damage, and may be removed. A kill before the deletion began leaves one whole, and then it is a point as
    any other.
    """

    kept: frozenset[str]
    deleted: frozenset[str]

    def without(self, pruned: frozenset[str]) -> Fates:
        """With the points, too, that somebody holds to delete them, or has deleted (`PinFiles.deletions`):
        no journal says so where no launch of the run did it.
        """
        return Fates(kept=self.kept - pruned, deleted=self.deleted | pruned)


def point_fates(events: Iterable[tuple[str, Mapping[str, Any]]], inherited: Iterable[str]) -> Fates:
    """From the journal's events (kind, fields), and the names that claims inherited: those were committed,
    also where the journal ended before it said so.
    """
    committed, deleted = set(inherited), set[str]()
    for kind, fields in events:
        if kind == EventKind.POINT_COMMITTED:
            committed.add(fields["point"])
        elif kind in (EventKind.DELETING_POINTS, EventKind.POINTS_DELETED):
            deleted.update(fields["points"])
    return Fates(kept=frozenset(committed - deleted), deleted=frozenset(deleted))
