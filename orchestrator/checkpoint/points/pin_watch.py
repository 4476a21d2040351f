"""Detects changes of pins between two reads, for the journal. Pins can be made and removed at any time.

It protects nothing: before a deletion, a hold on the point is taken in any case (`pins.may_delete`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.checkpoint.points.pins import Hold, PinFiles
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.history.journal.journal_writer import JournalWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class PinChanges:
    """Pins that are new, and those that are gone."""

    made: tuple[Hold, ...]
    gone: tuple[Hold, ...]


def pin_changes(old: Mapping[str, Hold], new: Mapping[str, Hold]) -> PinChanges:
    """Compares two reads of the pins by point. If a pin was replaced, one is gone and the other new."""
    return PinChanges(
        made=tuple(hold for point, hold in new.items() if old.get(point) != hold),
        gone=tuple(hold for point, hold in old.items() if new.get(point) != hold),
    )


class PinWatch:
    """Reads a run's pins repeatedly. At the first read all pins are new."""

    def __init__(self, pins: PinFiles) -> None:
        self._pins, self._known = pins, dict[str, Hold]()

    def look(self) -> PinChanges:
        """Returns the changes since the last read. Waits for storage.

        Raises `StorageError`; the next read then finds these changes.
        """
        now = self._pins.pins_since(self._known)
        changes, self._known = pin_changes(self._known, now), now
        return changes


def note_pins(journal: JournalWriter, changes: PinChanges) -> None:
    """Journals the changes."""
    for hold in changes.gone:
        journal.event(EventKind.POINT_UNPINNED, point=hold.point, by=hold.by, reason=hold.reason)
    for hold in changes.made:
        journal.event(EventKind.POINT_PINNED, point=hold.point, by=hold.by, reason=hold.reason)
