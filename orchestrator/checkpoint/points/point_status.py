"""Classifies every committed resume point as kept or deleted, from the journal and the claims.

It reads no storage. The caller checks whether the files agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.history.journal.journal_lines import DamagedLines


@dataclass(frozen=True, kw_only=True, slots=True)
class Fates:
    """Names of points.

    `kept` were committed, and were not to be deleted: without COMMIT they are damaged. `deleted` are gone or
    half gone. The rest of one without COMMIT is neither a point nor damage, and may be removed. A kill before
    the deletion began leaves the point whole, and then it is a point as any other.
    """

    kept: frozenset[str]
    deleted: frozenset[str]

    def without(self, pruned: frozenset[str]) -> Fates:
        """Adds the points that a process deletes or has deleted (`PinFiles.deletions`).

        These deletions are in no journal if no launch of the run made them.
        """
        return Fates(kept=self.kept - pruned, deleted=self.deleted | pruned)


def point_fates(events: Iterable[tuple[str, Mapping[str, Any]]], inherited: Iterable[str]) -> Fates:
    """Classifies points from the journal's events (kind, fields) and the names that claims inherited.

    Inherited points were committed, even if the journal ended before their commit event.
    """
    committed, deleted = set(inherited), set[str]()
    for kind, fields in events:
        if kind == EventKind.POINT_COMMITTED:
            committed.add(fields["point"])
        elif kind in (EventKind.DELETING_POINTS, EventKind.POINTS_DELETED):
            deleted.update(fields["points"])
    return Fates(kept=frozenset(committed - deleted), deleted=frozenset(deleted))


def maybe_deleted(
    names: Iterable[str], committed_at: Mapping[str, tuple[int, int]], damages: Iterable[DamagedLines]
) -> frozenset[str]:
    """Returns those of these points whose deletion may have been in a line of the journal that is lost.

    A deletion is journalled after the commit. `committed_at` has the (attempt, line number) of each commit
    that the journal has; another point may have been deleted anywhere.
    """
    newest = max(((each.attempt, each.last or sys.maxsize) for each in damages), default=None)
    if newest is None:
        return frozenset()
    return frozenset(name for name in names if committed_at.get(name, (0, 0)) < newest)
