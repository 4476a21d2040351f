"""The events of a run as a list with levels and sentences, to be searched and paged through."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from orchestrator.config.redaction import redacted, redacted_text
from orchestrator.errors import OrchestratorError, RefusedError
from orchestrator.history import sentences
from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import GENERATION
from orchestrator.monitor.views.columns import Event
from orchestrator.monitor.views.facts import Facts
from orchestrator.records import GroupChange, decode

LIMIT = 500
LEVELS = ("fault", "change", "point", "data", "routine")
_LEVEL = {
    EventKind.MEMBER_DEAD: "fault", EventKind.MEMBER_FAILED: "fault", EventKind.LEFT_OUT: "fault",
    EventKind.UNRESPONSIVE: "fault", EventKind.FAILURE: "fault", EventKind.DAMAGED_POINT: "fault",
    EventKind.SAVE_GIVEN_UP: "fault", EventKind.UNREADABLE_FILE: "fault", "waiting": "fault",
    EventKind.FEEDER_DIED: "fault", EventKind.COORDINATOR_DIED: "fault",
    EventKind.POINT_NOT_DELETED: "fault", GENERATION: "change", EventKind.ATTEMPT: "change",
    EventKind.END: "change", EventKind.CONTROL_REQUEST: "change", EventKind.REQUEST_ANSWERED: "change",
    EventKind.POINT_COMMITTED: "point", EventKind.DELETING_POINTS: "point", EventKind.POINTS_DELETED: "point",
    EventKind.POINT_VERIFIED: "point", "point pinned": "point", "point unpinned": "point",
    EventKind.BAD_DOCUMENT: "data", EventKind.ENCODERS_DIFFER: "data", EventKind.SAMPLES_SKIPPED: "data",
    EventKind.SOURCES_CHANGED: "data",
}  # fmt: skip
_OWN = frozenset({"seq", "run", "run_id", "time", "config"})  # of a line, and not shown with an event
_BEGUN = {
    "start": "The run starts",
    "fork": "The run begins as a fork",
    "resume": "The run is resumed",
    "rewind": "The run is rewound",
    "coordinator_restarted": "The coordinator has restarted",
}

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
    """A page of the events, newest first, of these levels and kinds (empty: all), in whose text or kind `q`
    stands, between two times. Raises `RefusedError` for a level that there is not.
    """
    if unknown := set(level) - set(LEVELS):
        raise RefusedError(f"there is no level {sorted(unknown)[0]!r} of events; use {', '.join(LEVELS)}")
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
    """One event and the fields of its line. Raises `RefusedError` if there is none of this id."""
    attempt, _, seq = id_.removeprefix("a").partition(":")
    known = facts.columns.of_attempt.get(int(attempt), []) if attempt.isdecimal() else []
    for each in known:
        if seq.isdecimal() and each.seq == int(seq):
            fields = {name: redacted(value) for name, value in each.fields.items() if name not in _OWN}
            return {**row_of(each), "fields": fields}
    raise RefusedError(f"{facts.name} has no event {id_[:40]}")


def since(facts: Facts, id_: str) -> list[Row]:
    """The events after a place in the journal, in its order; empty for what is no place."""
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
    """How much it concerns who looks."""
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
    """A sentence; the kind's name where the fields are not what this version knows."""
    try:
        return _text(each.kind, each.fields)
    except (KeyError, TypeError, ValueError, AttributeError, OrchestratorError):
        return each.kind


def _rows(facts: Facts) -> list[Row]:
    """All, newest first. Those that are known stay; by time, so that a cut-off attempt's late ones fit in,
    and within one instant by place in the journal.
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


def _text(kind: str, e: dict[str, Any]) -> str:  # noqa: C901, PLR0911, PLR0912  a sentence for each kind
    match kind:
        case EventKind.ATTEMPT:
            return _BEGUN.get(e["why"], str(e["why"]))
        case "generation":
            cause = f" ({e['cause']})" if e.get("cause") else ""
            after = "from nothing" if e["parent"] is None else f"after step {e['step']:,}"
            return f"Generation {e['generation']}: {_workers(e['world_size'])}, {after}{cause}"
        case EventKind.GROUP_FORMED:
            known = {name: value for name, value in e.items() if name in GroupChange.__slots__}
            return _upper(sentences.group_change(decode(GroupChange, known)))
        case EventKind.JOIN:
            reason = f": {e['reason']}" if e.get("reason") not in ("start", "", None) else ""
            return f"Worker {e['member'][:8]} asks to join{reason}"
        case EventKind.MEMBER_DEAD:
            reason = f": {e['reason']}" if e.get("reason") else ""
            return f"Worker {e['member'][:8]} is dead{reason}"
        case EventKind.LEFT_OUT:
            return f"Worker {e['member'][:8]} is left out: {e['reason']}"
        case EventKind.MEMBER_FAILED:
            return f"Worker {e['member'][:8]} failed: {e['error']}: {e['text']}"
        case EventKind.MEMBER_FINISHED:
            return f"Worker {e['member'][:8]} has finished at step {e['step']:,}: {e['reason']}"
        case "waiting":
            return f"Waiting for workers: {e['reason']}"
        case EventKind.UNRESPONSIVE | EventKind.FAILURE:
            return _upper(str(e["reason"]))
        case EventKind.FEEDER_DIED | EventKind.COORDINATOR_DIED:
            return _upper(sentences.died(kind.removesuffix(" died"), e["pid"], e["host"], e["reason"]))
        case EventKind.GROUP_STARTED:
            return f"{_workers(e['num_workers'])} started on node {e.get('host') or e['node'][:8]}"
        case EventKind.GROUP_ENDED | EventKind.GROUP_STOPPED:
            what = "ended" if kind == EventKind.GROUP_ENDED else "are stopped"
            reason = f": {e['reason']}" if e.get("reason") else ""
            return f"The workers on node {e['node'][:8]} {what}{reason}"
        case EventKind.POINT_COMMITTED:
            return f"Resume point {e['point']} committed, written in {e['save_s']:.1f} s"
        case EventKind.STATE_DIGEST:
            return f"The weights after step {e['step']} have the digest {e['weights_digest'][:16]}"
        case EventKind.DELETING_POINTS:
            return f"About to delete: {', '.join(e['points'])}"
        case EventKind.POINTS_DELETED:
            return f"Deleted by retention: {', '.join(e['points'])}"
        case EventKind.POINT_NOT_DELETED:
            return f"Resume point {e['point']} could not be deleted: {e['reason']}"
        case EventKind.POINT_VERIFIED:
            return f"Resume point {e['point']}" + (
                ": every digest is right" if e["healthy"] else " is damaged"
            )
        case "point pinned" | "point unpinned":
            reason = f": {e['reason']}" if e.get("reason") else ""
            return f"Resume point {e['point']} {kind.removeprefix('point ')} by {e['by']}{reason}"
        case EventKind.DAMAGED_POINT:
            return f"Resume point {e['point']} is damaged: {e['file']} {e['reason']}"
        case EventKind.SAVE_GIVEN_UP:
            return f"The save of {e['point']} was given up: {e['reason']}"
        case EventKind.UNREADABLE_FILE:
            return f"{e['file']} is not as it was written: {e['reason']}"
        case EventKind.LEFTOVER_KEPT:
            return f"What was left of the save of {e['point']} could not be removed: {e['reason']}"
        case EventKind.LEFTOVER_REMOVED:
            return f"What was left of the save of {e['point']} was removed"
        case EventKind.SAMPLES_SKIPPED:
            return (
                f"{e['samples']} samples ({e['tokens']} tokens) after {e['point']} are skipped on purpose, "
                f"from sample {e['first_index']} on: {e['setting']}"
            )
        case EventKind.SOURCES_CHANGED:
            return f"Sources: {e['text']}"
        case EventKind.BAD_DOCUMENT:
            return f"Document skipped: {e['text']}"
        case EventKind.ENCODERS_DIFFER:
            return f"The encoders differ: {e['text']}"
        case "sources":
            return f"Counts of {', '.join(e['counts'])} where the attempt begins"
        case EventKind.CONTROL_REQUEST:
            return f"Asked to {e['what']}" + (f" by {e['by']}" if e.get("by") else "")
        case EventKind.REQUEST_ANSWERED:
            return f"Request {e['request']} ({e['what']}) {e['outcome']}: {e['text']}"
        case EventKind.END:
            return f"{_upper(e['outcome'])}: {e['reason']}"
    return kind


def _workers(number: int) -> str:
    return f"{number} worker{'' if number == 1 else 's'}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
