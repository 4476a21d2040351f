"""Reads how an attempt began from the first lines of its journal, without reading the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.segments import journal_folder, read_first
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.history.journal.journal_reader import JournalEvent
from orchestrator.history.journal.line_format import DamagedLineError, first_line, parse_line
from orchestrator.json_form import decode
from orchestrator.planning.state.memory import ParallelChoice
from orchestrator.storage.files import Storage

_MARK = f'"kind":"{EventKind.ATTEMPT.value}"'.encode()


def beginning_of(storage: Storage, attempt: int) -> dict[str, Any] | None:
    """The fields of an attempt's event `attempt`; None if it has not begun, or if that line is damaged.

    Raises `StorageError`, also for the journal of a later version (`LaterLineError`).
    """
    try:
        data = read_first(storage, attempt)
    except FileNotFoundError:
        return None
    first_line(data, journal_folder(attempt))
    for text in data.split(b"\n"):
        if _MARK in text:
            try:
                line = parse_line(text)
            except DamagedLineError:
                return None  # or it is being written
            if line.fields["kind"] == EventKind.ATTEMPT:
                return line.fields
    return None


def newest_choice(storage: Storage, attempts: Sequence[int]) -> tuple[int, ParallelChoice] | None:
    """The choice for `train.parallel` in the newest of these attempts that recorded one, with its number.

    None if none has. Raises `StorageError`.
    """
    for number in sorted(attempts, reverse=True):
        fields = beginning_of(storage, number) or {}
        if fields.get("parallel"):
            return _choice(number, fields)
    return None


def choice_in(events: Sequence[JournalEvent]) -> tuple[int, ParallelChoice] | None:
    """Like `newest_choice`, for a journal that was read."""
    begun = (event for event in events if event.kind == EventKind.ATTEMPT and event.fields.get("parallel"))
    newest = max(begun, key=lambda event: event.attempt, default=None)
    return None if newest is None else _choice(newest.attempt, newest.fields)


def _choice(number: int, fields: Mapping[str, Any]) -> tuple[int, ParallelChoice] | None:
    try:
        return number, decode(ParallelChoice, fields["parallel"], "the event `attempt`")
    except OrchestratorError:
        return None  # written by a later version: not known
