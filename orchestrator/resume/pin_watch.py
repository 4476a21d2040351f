"""What a coordinator notices of pins, which anybody makes and gives back at any time: the changes between two
looks, for the journal.

It protects nothing: whoever deletes a point takes hold of it (`pins.may_delete`), whatever was seen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import JournalWriter
from orchestrator.resume.pins import Hold, PinFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class PinChanges:
    """Pins that are new, and those that are gone."""

    made: tuple[Hold, ...]
    gone: tuple[Hold, ...]


def pin_changes(old: Mapping[str, Hold], new: Mapping[str, Hold]) -> PinChanges:
    """What is different between two looks at the pins by point. One that stands in another's place is new,
    and the other gone.
    """
    return PinChanges(
        made=tuple(hold for point, hold in new.items() if old.get(point) != hold),
        gone=tuple(hold for point, hold in old.items() if new.get(point) != hold),
    )


class PinWatch:
    """Looks at a run's pins again and again. The first look finds all that are there new."""

    def __init__(self, pins: PinFiles) -> None:
        self._pins, self._known = pins, dict[str, Hold]()

    def look(self) -> PinChanges:
        """What has changed since the look before. Waits for storage; raises `StorageError`, after which the
        next look finds what this one did not.
        """
        now = self._pins.pins_since(self._known)
        changes, self._known = pin_changes(self._known, now), now
        return changes


def note_pins(journal: JournalWriter, changes: PinChanges) -> None:
    """Journals them."""
    for hold in changes.gone:
        journal.event(EventKind.POINT_UNPINNED, point=hold.point, by=hold.by, reason=hold.reason)
    for hold in changes.made:
        journal.event(EventKind.POINT_PINNED, point=hold.point, by=hold.by, reason=hold.reason)
