"""The events of a run as a list with levels and sentences, with search and pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from orchestrator.config.redaction import redacted, redacted_text
from orchestrator.errors import OrchestratorError, RefusedError
from orchestrator.history import sentences
from orchestrator.history.journal.journal_writer import GENERATION
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.views.facts.columns import Event
from orchestrator.inspect.views.facts.facts import RunFacts
from orchestrator.json_form import decode
from orchestrator.records.run_status import GroupChange

# A sentence for each kind of event, made from the fields of its journal line.
Fields = dict[str, Any]

_BEGUN = {
    "start": "The run starts",
    "fork": "The run begins as a fork",
    "resume": "The run is resumed",
    "rewind": "The run is rewound",
    "coordinator_restarted": "The coordinator has restarted",
}
# Formats of fields; `:.8` is the beginning of an id.
_FORMS: dict[str, str] = {
    EventKind.LEFT_OUT: "Worker {member:.8} is left out: {reason}",
    EventKind.MEMBER_FAILED: "Worker {member:.8} failed: {error}: {text}",
    EventKind.MACHINE_REFUSED: "A worker on {host} (pid {pid}) cannot take part: {text}; "
    "its machine is tried again in {retry_s:.0f} s",
    EventKind.MEMBER_LEFT: "Worker {member:.8} leaves: {reason}",
    EventKind.MEMBER_FINISHED: "Worker {member:.8} has finished at step {step:,}: {reason}",
    "waiting": "Waiting for workers: {reason}",
    EventKind.POINT_COMMITTED: "Resume point {point} committed, written in {save_s:.1f} s",
    EventKind.EVALUATED: "Part {part} was evaluated after step {step:,}: loss {loss}",
    EventKind.STATE_DIGEST: "The weights after step {step} have the digest {weights_digest:.16}",
    EventKind.KERNELS: "The model's blocks are {blocks}, its attention is {attention}",
    EventKind.POINT_NOT_DELETED: "Resume point {point} could not be deleted: {reason}",
    EventKind.DAMAGED_POINT: "Resume point {point} is damaged: {file} {reason}",
    EventKind.UNREADABLE_FILE: "{file} is not as it was written: {reason}",
    EventKind.LEFTOVER_KEPT: "What was left of the save of {point} could not be removed: {reason}",
    EventKind.LEFTOVER_REMOVED: "What was left of the save of {point} was removed",
    EventKind.SOURCES_CHANGED: "Sources: {text}",
    EventKind.SAMPLES_SKIPPED: "{samples} samples ({tokens} tokens) after {point} are skipped on purpose, "
    "from sample {first_index} on: {setting}",
    EventKind.CALLBACK_FAILED: "Callback failed: {text}",
    EventKind.BAD_DOCUMENT: "Document skipped: {text}",
    EventKind.ENCODERS_DIFFER: "The encoders differ: {text}",
    EventKind.REQUEST_ANSWERED: "Request {request} ({what}) {outcome}: {text}",
}


def event_text(kind: str, fields: Fields) -> str:
    """Returns the sentence, or the kind's name if it has none. Missing fields, or fields of another type,
    raise their own errors.
    """
    if kind in _FORMS:
        return _FORMS[kind].format_map(fields)
    return _MADE[kind](fields) if kind in _MADE else kind


def _generation(e: Fields) -> str:
    cause = f" ({e['cause']})" if e.get("cause") else ""
    after = "from nothing" if e["parent"] is None else f"after step {e['step']:,}"
    return f"Generation {e['generation']}: {_workers(e['world_size'])}, {after}{cause}"


def _group_formed(e: Fields) -> str:
    known = {name: value for name, value in e.items() if name in GroupChange.__slots__}
    return _upper(sentences.group_change(decode(GroupChange, known)))


def _join(e: Fields) -> str:
    reason = "" if e.get("reason") == "start" else _reason(e)
    return f"Worker {e['member'][:8]} asks to join{reason}"


def _died(what: str) -> Callable[[Fields], str]:
    return lambda e: _upper(sentences.died(what, e["pid"], e["host"], e["reason"]))


def _group_started(e: Fields) -> str:
    return f"{_workers(e['num_workers'])} started on node {e.get('host') or e['node'][:8]}"


def _control_request(e: Fields) -> str:
    return f"Asked to {e['what']}" + (f" by {e['by']}" if e.get("by") else "")


def _drain_notice(e: Fields) -> str:
    when = "when it is idle" if e["grace_s"] is None else f"in {e['grace_s']:.0f} s"
    return f"Node {e['host'] or e['node'][:8]} is taken away {when}"


def _drain_course(e: Fields) -> str:
    takes = "not known how long a save takes" if e["save_s"] is None else f"a save takes {e['save_s']:.1f} s"
    late = "" if e["fits"] else ", which may be too long"
    return f"About {len(e['nodes'])} node(s) that go: {e['course']} ({takes}{late})"


def _save_given_up(e: Fields) -> str:
    again = f"; another one is tried after {e['retry_s']:g} s" if e.get("retry_s") else ""
    return f"The save of {e['point']} was given up: {e['reason']}{again}"


def _point_verified(e: Fields) -> str:
    return f"Resume point {e['point']}" + (": every digest is right" if e["healthy"] else " is damaged")


_MADE: dict[str, Callable[[Fields], str]] = {
    EventKind.CLOCK_JUMPED: lambda e: _upper(sentences.clock_jumped(e["by_s"], e.get("known_by", ""))),
    EventKind.ATTEMPT: lambda e: _BEGUN.get(e["why"], str(e["why"])),
    GENERATION: _generation,
    EventKind.GROUP_FORMED: _group_formed,
    EventKind.JOIN: _join,
    EventKind.MEMBER_DEAD: lambda e: f"Worker {e['member'][:8]} is dead{_reason(e)}",
    EventKind.UNRESPONSIVE: lambda e: _upper(str(e["reason"])),
    EventKind.FAILURE: lambda e: _upper(str(e["reason"])),
    EventKind.FEEDER_DIED: _died(EventKind.FEEDER_DIED.removesuffix(" died")),
    EventKind.COORDINATOR_DIED: _died(EventKind.COORDINATOR_DIED.removesuffix(" died")),
    EventKind.GROUP_STARTED: _group_started,
    EventKind.GROUP_ENDED: lambda e: f"The workers on node {e['node'][:8]} ended{_reason(e)}",
    EventKind.GROUP_STOPPED: lambda e: f"The workers on node {e['node'][:8]} are stopped{_reason(e)}",
    EventKind.DELETING_POINTS: lambda e: f"About to delete: {', '.join(e['points'])}",
    EventKind.POINTS_DELETED: lambda e: f"Deleted by retention: {', '.join(e['points'])}",
    EventKind.POINT_VERIFIED: _point_verified,
    EventKind.SAVE_GIVEN_UP: _save_given_up,
    EventKind.NOT_FINITE: lambda e: _upper(sentences.not_finite(e["names"], e["step"], e["part"])),
    "point pinned": lambda e: f"Resume point {e['point']} pinned by {e['by']}{_reason(e)}",
    "point unpinned": lambda e: f"Resume point {e['point']} unpinned by {e['by']}{_reason(e)}",
    "sources": lambda e: f"Counts of {', '.join(e['counts'])} where the attempt begins",
    EventKind.CONTROL_REQUEST: _control_request,
    EventKind.DRAIN_NOTICE: _drain_notice,
    EventKind.DRAIN_COURSE: _drain_course,
    EventKind.END: lambda e: f"{_upper(e['outcome'])}: {e['reason']}",
}


def _reason(e: Fields) -> str:
    return f": {e['reason']}" if e.get("reason") else ""


def _workers(number: int) -> str:
    return f"{number} worker{'' if number == 1 else 's'}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


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
    EventKind.SOURCES_CHANGED: "data", EventKind.CALLBACK_FAILED: "fault",
    EventKind.NOT_FINITE: "fault",
}  # fmt: skip
_OWN = frozenset(
    {"format", "seq", "run", "run_id", "time", "config"}
)  # of a line, and not shown with an event

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventFilter:
    """Which events are shown: of these levels and kinds (empty: all), between two times, whose text or kind
    contains `text`.
    """

    levels: Collection[str] = ()
    kinds: Collection[str] = ()
    attempt: int | None = None
    text: str = ""
    start: float | None = None
    stop: float | None = None

    def shows(self, row: Row) -> bool:
        """Whether a row of the events is shown."""
        words = self.text.lower()
        low = -math.inf if self.start is None else self.start
        high = math.inf if self.stop is None else self.stop
        return (
            (not self.levels or row["level"] in self.levels)
            and (not self.kinds or row["kind"] in self.kinds)
            and (self.attempt is None or row["attempt"] == self.attempt)
            and low <= row["t"] <= high
            and (not words or words in row["text"].lower() or words in row["kind"])
        )


def events(facts: RunFacts, which: EventFilter, offset: int = 0, limit: int = 100) -> dict[str, Any]:
    """A page of the events of `which`, newest first. Raises `RefusedError` for an unknown level."""
    if unknown := set(which.levels) - set(LEVELS):
        raise RefusedError(
            f"events have no level {sorted(unknown)[0]!r}; use {', '.join(LEVELS)}",
            code="command.unknown_level",
        )
    found = [row for row in _rows(facts) if which.shows(row)]
    counts: dict[str, int] = {}
    for row in _rows(facts):
        counts[row["level"]] = counts.get(row["level"], 0) + 1
    offset = max(0, offset)
    page = found[offset : offset + max(0, min(LIMIT, limit))]
    return {"total": len(found), "counts": counts, "offset": offset, "rows": page}


def event(facts: RunFacts, id_: str) -> dict[str, Any]:
    """One event and the fields of its line. Raises `RefusedError` for an unknown id."""
    attempt = id_.removeprefix("a").partition(":")[0]
    known = facts.columns.of_attempt.get(int(attempt), []) if attempt.isdecimal() else []
    for each in known:
        if each.id == id_:
            fields = {name: redacted(value) for name, value in each.fields.items() if name not in _OWN}
            return {**row_of(each), "fields": fields}
    raise RefusedError(f"{facts.name} has no event {id_[:40]}", code="journal.unknown_event")


def since(facts: RunFacts, id_: str) -> list[Row]:
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


def _rows(facts: RunFacts) -> list[Row]:
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
