"""Removes folders of saves that never became a resume point. A later launch does so after its claim.

The decision uses only names and claims. The caller reports the results.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.checkpoint.points.point_status import Fates
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import StorageError

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


def remove_leftovers(store: RunStore, number: int, fates: Fates) -> tuple[Leftover, ...]:
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
