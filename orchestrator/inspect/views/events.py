"""The events of a run as a list with levels and sentences, with search and pages."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from orchestrator.config.redaction import redacted, redacted_text
from orchestrator.errors import OrchestratorError, RefusedError
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.history.journal.journal_writer import GENERATION
from orchestrator.inspect.views.event_text import event_text
from orchestrator.inspect.views.facts.columns import Event
from orchestrator.inspect.views.facts.facts import Facts

LIMIT = 500
LEVELS = ("fault", "change", "point", "data", "routine")
_LEVEL = {
    EventKind.MEMBER_DEAD: "fault", EventKind.MEMBER_FAILED: "fault", EventKind.LEFT_OUT: "fault",
    EventKind.UNRESPONSIVE: "fault", EventKind.FAILURE: "fault", EventKind.DAMAGED_POINT: "fault",
    EventKind.SAVE_GIVEN_UP: "fault", EventKind.UNREADABLE_FILE: "fault", "waiting": "fault",
    EventKind.FEEDER_DIED: "fault", EventKind.COORDINATOR_DIED: "fault", EventKind.MEMBER_LEFT: "change",
    EventKind.DRAIN_NOTICE: "change", EventKind.DRAIN_COURSE: "change",
    EventKind.MACHINE_REFUSED: "fault", EventKind.CLOCK_JUMPED: "fault",
    EventKind.POINT_NOT_DELETED: "fault", GENERATION: "change", EventKind.ATTEMPT: "change",
    EventKind.END: "change", EventKind.CONTROL_REQUEST: "change", EventKind.REQUEST_ANSWERED: "change",
    EventKind.POINT_COMMITTED: "point", EventKind.DELETING_POINTS: "point", EventKind.POINTS_DELETED: "point",
    EventKind.POINT_VERIFIED: "point", "point pinned": "point", "point unpinned": "point",
    EventKind.BAD_DOCUMENT: "data", EventKind.ENCODERS_DIFFER: "data", EventKind.SAMPLES_SKIPPED: "data",
    EventKind.SOURCES_CHANGED: "data",
}  # fmt: skip
_OWN = frozenset(
    {"format", "seq", "run", "run_id", "time", "config"}
)  # of a line, and not shown with an event

Row = dict[str, Any]


def events(
    facts: Facts,
    level: Collection[str] = (),
    kind: Collection[str] = (),
    attempt: int | None = None,
    q: str = "",
    start: float | None = None,
    stop: float | None = None,
    offset: int = 0,
    limit: int = 100,
) -> dict[str, Any]:
    """A page of the events, newest first, of these levels and kinds (empty: all), whose text or kind contains
    `q`, between two times. Raises `RefusedError` for an unknown level.
    """
    if unknown := set(level) - set(LEVELS):
        raise RefusedError(
            f"events have no level {sorted(unknown)[0]!r}; use {', '.join(LEVELS)}",
            code="command.unknown_level",
        )
    words, low = q.lower(), -math.inf if start is None else start
    high = math.inf if stop is None else stop
    found = [
        row
        for row in _rows(facts)
        if (not level or row["level"] in level)
        and (not kind or row["kind"] in kind)
        and (attempt is None or row["attempt"] == attempt)
        and low <= row["t"] <= high
        and (not words or words in row["text"].lower() or words in row["kind"])
    ]
    counts: dict[str, int] = {}
    for row in _rows(facts):
        counts[row["level"]] = counts.get(row["level"], 0) + 1
    offset = max(0, offset)
    page = found[offset : offset + max(0, min(LIMIT, limit))]
    return {"total": len(found), "counts": counts, "offset": offset, "rows": page}


def event(facts: Facts, id_: str) -> dict[str, Any]:
    """One event and the fields of its line. Raises `RefusedError` for an unknown id."""
    attempt = id_.removeprefix("a").partition(":")[0]
    known = facts.columns.of_attempt.get(int(attempt), []) if attempt.isdecimal() else []
    for each in known:
        if each.id == id_:
            fields = {name: redacted(value) for name, value in each.fields.items() if name not in _OWN}
            return {**row_of(each), "fields": fields}
    raise RefusedError(f"{facts.name} has no event {id_[:40]}", code="journal.unknown_event")


def since(facts: Facts, id_: str) -> list[Row]:
    """The events after a place in the journal, in its order; empty if `id_` is no place."""
    attempt, _, seq = id_.removeprefix("a").partition(":")
    if not (attempt.isdecimal() and seq.isdecimal()):
        return []
    after = int(attempt), int(seq)
    found = [e for n, events in sorted(facts.columns.of_attempt.items()) if n >= after[0] for e in events]
    return [row_of(e) for e in found if (e.attempt, e.seq) > after]


def row_of(each: Event) -> Row:
    """An event as a row."""
    return {
        "id": each.id,
        "t": each.t,
        "level": level_of(each),
        "kind": each.kind,
        "attempt": each.attempt,
        "text": redacted_text(text_of(each)),
    }


def level_of(each: Event) -> str:
    """The level of concern of an event."""
    fields = each.fields
    if each.kind == EventKind.END and fields.get("outcome") == "failed":
        return "fault"
    if each.kind == EventKind.POINT_VERIFIED and not fields.get("healthy"):
        return "fault"
    if each.kind == EventKind.GROUP_ENDED and fields.get("reason"):
        return "fault"
    if each.kind == EventKind.GROUP_FORMED and fields.get("lost"):
        return "fault"
    return _LEVEL.get(each.kind, "routine")


def text_of(each: Event) -> str:
    """A sentence; the kind's name if this version does not know the fields."""
    try:
        return event_text(each.kind, each.fields)
    except (KeyError, TypeError, ValueError, AttributeError, OrchestratorError):
        return each.kind


def _rows(facts: Facts) -> list[Row]:
    """All rows, newest first. Known rows are kept. Order: by time, so that late events of a cut-off attempt
    have their place, then by place in the journal.
    """
    made = facts.kept("event rows", "all", dict[str, list[Row]])
    known, all_events = made.setdefault("rows", []), facts.columns.events
    if len(known) < len(all_events):
        known += [row_of(each) for each in all_events[len(known) :]]
        told = sorted(zip(all_events, known, strict=True), key=lambda both: _place(both[0]), reverse=True)
        made["sorted"] = [row for _, row in told]
    return made.get("sorted", [])


def _place(each: Event) -> tuple[float, int, int]:
    return each.t, each.attempt, each.seq
