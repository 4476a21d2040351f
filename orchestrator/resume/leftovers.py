"""Folders of saves that never became a resume point: a later launch takes them away when it has claimed.

It decides by names and claims only; what it did, or could not do, is for the caller to report.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import StorageError
from orchestrator.resume.fates import Fates
from orchestrator.resume.points import parse_point_name
from orchestrator.resume.store import RunStore

_COMPLETED = "a start that ended before it had done so was making a resume point of its votes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """A folder without COMMIT. `kept`: why it is still there; empty: it is gone."""

    point: str
    kept: str = ""

    def __str__(self) -> str:
        if self.kept:
            return f"points/{self.point}, left of a save that was given up, could not be removed: {self.kept}"
        return f"points/{self.point} was left of a save that was given up; it is removed"


def remove_leftovers(store: RunStore, number: int, fates: Fates) -> tuple[Leftover, ...]:
    """Takes away what attempts before `number` left; a start command calls it when claim and parent file of
    `number` stand.

    A folder with a COMMIT stays, and so does everything of `number` and of later attempts, and a point whose
    COMMIT is lost: nobody meant to delete it, so that it is damaged, not left over. What the launch before
    this one left stays until the next start, unless that launch has recorded its end: its coordinator may
    only be cut off, and about to commit. But the rest of a point that was being deleted goes at once. Before
    each deletion it asks for a newer claim, and does no more if there is one (membership rule 7). Never
    raises `StorageError`: what cannot be removed now is tried again at the next start. A machine that was cut
    off during a whole other launch, and writes its COMMIT at the very moment in which its folder goes, leaves
    a damaged orphan: no claim names it (rule 6), so that it is never resumed, but `verify` shows it.
    """
    found: list[Leftover] = []
    try:
        names = sorted({*store.leftovers(), *store.left_on_nodes()})
        cut_off = _cut_off(store, number)
    except StorageError:
        return ()  # the start itself reads these folders, too, and says what is wrong with them
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
    """The attempts of the launch before `number`, if it did not say that it ended. A claim without a parent
    file never began.
    """
    begun = {parent.attempt for parent in store.parents()[0]}
    older = [claim for claim in store.claims() if claim.number < number and claim.number in begun]
    if not older or store.read_end(older[-1].number) is not None:
        return frozenset()
    return frozenset(claim.number for claim in older if claim.launch == older[-1].launch)
