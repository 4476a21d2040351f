"""Finds out from storage whether a launch of the run has reached the end of its data.

`planning.resume.data_progress` derives the consequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.field_rules import in_todays_fields
from orchestrator.coordinator.machine.launch_actions import THE_DATA
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.json_form import decode
from orchestrator.planning.resume.data_progress import KnownEpochs, epochs_of, known_epochs
from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig


class AttemptEvent(Protocol):
    """A line of the journal that is not a step."""

    @property
    def attempt(self) -> int:
        """Its attempt."""

    @property
    def kind(self) -> str:
        """A value of `EventKind`."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its kind."""


def find_known_epochs(
    store: RunStore, parents: Sequence[ClaimParent], events: Sequence[AttemptEvent], config: JobConfig
) -> KnownEpochs | None:
    """Returns the newest proof of the length of an epoch of the run's only source.

    Returns None if there is none, or if the job's epochs may have another length. A launch that is done has
    committed its last state (also if a rewind has set it aside), and its end record states whether that was
    the end of the data. `events` are the journal's, at least those of attempts and of points.
    """
    newest = max(parents, key=lambda parent: parent.attempt, default=None)
    # a fork's past is in another run
    if newest is None or any(parent.begins is not None for parent in parents):
        return None
    # another encoder, or another list of files, makes other tokens
    changed = len(newest.encoders) > 1 or any(len(source.spans) > 1 for source in newest.sources)
    if changed or len(newest.sources) > 1:
        return None
    flat = config.flat()
    if epochs_of({**flat, "data.num_epochs": flat["data.num_epochs"] or 1}) is None:
        return None
    begun = {e.attempt: e.fields for e in events if e.kind == EventKind.ATTEMPT}
    if any(fields["config"].get("resume.accept_changed") for fields in begun.values()):
        return None
    for number in sorted(begun, reverse=True):
        end = store.read_end(number)
        if end is None or (end.outcome, end.by) != ("done", THE_DATA):
            continue
        committed = [e for e in events if e.attempt == number and e.kind == EventKind.POINT_COMMITTED]
        if not committed:
            continue  # it trained nothing
        last = decode(Cursor, committed[-1].fields["cursor"])
        found = known_epochs(number, in_todays_fields(begun[number]["config"]), last)
        if found is not None:
            return found
    return None
