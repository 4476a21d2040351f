"""Classifies every committed resume point as kept or deleted, and removes saves that never became a point.

`point_fates` uses the journal and the claims and reads no storage: the caller checks whether the files agree.
`remove_leftovers` removes the folders of abandoned saves. A later launch calls it after its claim. It decides
from names and claims alone. The caller reports the results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import StorageError
from orchestrator.history.journal.journal_lines import DamagedLines
from orchestrator.history.journal.line_format import EventKind


@dataclass(frozen=True, kw_only=True, slots=True)
class PointStatus:
    """Names of points.

    `kept` were committed, and were not to be deleted: without COMMIT they are damaged. `deleted` are gone or
    half gone. The rest of one without COMMIT is neither a point nor damage, and may be removed. A kill before
    the deletion began leaves the point whole, and then it is a point as any other.
    """

    kept: frozenset[str]
    deleted: frozenset[str]

    def without(self, pruned: frozenset[str]) -> PointStatus:
        """Adds the points that a process deletes or has deleted (`PinFiles.deletions`).

        These deletions are in no journal if no launch of the run made them.
        """
        return PointStatus(kept=self.kept - pruned, deleted=self.deleted | pruned)


def point_fates(events: Iterable[tuple[str, Mapping[str, Any]]], inherited: Iterable[str]) -> PointStatus:
    """Classifies points from the journal's events (kind, fields) and the names that claims inherited.

    Inherited points were committed, even if the journal ended before their commit event.
    """
    committed, deleted = set(inherited), set[str]()
    for kind, fields in events:
        if kind == EventKind.POINT_COMMITTED:
            committed.add(fields["point"])
        elif kind in (EventKind.DELETING_POINTS, EventKind.POINTS_DELETED):
            deleted.update(fields["points"])
    return PointStatus(kept=frozenset(committed - deleted), deleted=frozenset(deleted))


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


_COMPLETED = "a start that ended before it had done so was making a resume point of its votes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """A folder without COMMIT. `kept`: why it is still there; empty: it was removed."""

    point: str
    kept: str = ""

    def __str__(self) -> str:
        if self.kept:
            return f"points/{self.point}, left of a save that was given up, could not be removed: {self.kept}"
        return f"points/{self.point} was left of a save that was given up; it is removed"


def remove_leftovers(store: RunStore, number: int, fates: PointStatus) -> tuple[Leftover, ...]:
    """Removes what attempts before `number` left. Called after claim and parent file of `number` are written.

    These stay:
    - a folder with a COMMIT;
    - everything of `number` and of later attempts;
    - a point whose COMMIT is lost: it was not to be deleted, and is thus damaged, not left over;
    - what the previous launch left, until the next start, unless that launch has recorded its end: its
      coordinator may only be cut off, and about to commit.

    The rest of a point that was being deleted is removed at once. Before each deletion it checks for a newer
    claim, and stops if there is one (membership rule 7). It never raises `StorageError`: what cannot be
    removed now is tried again at the next start.

    A machine may have been cut off during a whole other launch, and write its COMMIT at the very moment in
    which its folder is removed. That leaves a damaged orphan. No claim names it (rule 6), so that it is never
    resumed, but `verify` shows it.
    """
    found: list[Leftover] = []
    try:
        names = sorted({*store.leftovers(), *store.left_on_nodes()})
        cut_off = _cut_off(store, number)
    except StorageError:
        return ()  # the start itself also reads these folders, and reports what is wrong with them
    for name in names:
        key = parse_point_name(name)
        assert key is not None, "leftovers gives names of points"
        if key.attempt >= number or name in fates.kept:
            continue
        if key.attempt in cut_off and name not in fates.deleted:
            continue
        try:
            if store.next_claim_exists(number):
                break
            removed = store.discard(name)
        except StorageError as error:
            found.append(Leftover(point=name, kept=str(error)))
        else:
            found.append(Leftover(point=name, kept="" if removed else _COMPLETED))
    return tuple(found)


def _cut_off(store: RunStore, number: int) -> frozenset[int]:
    """Returns the attempts of the launch before `number`, if that launch did not record its end.

    A claim without a parent file never began.
    """
    begun = {parent.attempt for parent in store.parents()[0]}
    older = [claim for claim in store.claims() if claim.number < number and claim.number in begun]
    if not older or store.read_end(older[-1].number) is not None:
        return frozenset()
    return frozenset(claim.number for claim in older if claim.launch == older[-1].launch)
