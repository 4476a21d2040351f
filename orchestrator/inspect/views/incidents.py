"""A run's events for people, one entry for each: a fault and its healing are one entry.

It uses generations, begins and ends of attempts, and the journal's lines on faults. If the journal says who
was lost, the sentences are those of `history.sentences`.
"""

from __future__ import annotations

import bisect
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.config.redaction import redacted, redacted_text
from orchestrator.errors import OrchestratorError
from orchestrator.history import sentences
from orchestrator.history.claims.claim_files import FORK, RESTARTED, RESUME, REWIND
from orchestrator.history.claims.claims import GenerationId
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.status.point_rows import stamp
from orchestrator.inspect.views.facts.columns import Event, RecordedGeneration
from orchestrator.inspect.views.facts.effective_steps import left_behind
from orchestrator.inspect.views.facts.facts import DRAIN, RunFacts
from orchestrator.inspect.views.points_table import by_name
from orchestrator.json_form import decode
from orchestrator.records.run_status import GroupChange
from orchestrator.text import span, steps, workers

HEALED_S = 900.0  # a group of the old size within this time: the fault and its healing are one entry
_FAULTS = ("worker", "frozen", "crash", "error", "damaged", "nosave", "failed", "waiting", "coordinator",
           "feeder")  # fmt: skip
_CHANGES = ("join", "resume", "resize", "change", "start", "fork", "done")
_OF_A_SOURCE = "data.sources."
_SHAPE = frozenset({"train.global_batch_size", "pack.seq_len"})
_SKIP = frozenset({"resume.from", "run.storage"})
SHOWN = ("t", "kind", "level", "text", "attempt", "generation", "step", "tokens", "lost_steps", "world_from",
         "world_to", "point")  # fmt: skip

Entry = dict[str, Any]


def happenings(facts: RunFacts) -> list[Entry]:
    """All entries, oldest first."""
    key = (facts.shape, sum(len(facts.columns.kinds.get(kind, ())) for kind in _KINDS))
    return facts.kept("happenings", key, lambda: _happenings(facts))


def brief(entry: Entry) -> Entry:
    """The part of an entry that a list shows."""
    return {name: entry.get(name) for name in SHOWN}


def waiting_now(facts: RunFacts) -> Entry | None:
    """The entry on what the newest attempt waits for, if it waits."""
    newest = facts.files.begun
    return next(
        (e for e in reversed(happenings(facts)) if e["kind"] == "waiting" and e["attempt"] == newest), None
    )


_KINDS = (EventKind.DAMAGED_POINT, EventKind.SAVE_GIVEN_UP, EventKind.END, EventKind.GROUP_FORMED,
          EventKind.FEEDER_DIED, "waiting")  # fmt: skip


def _happenings(facts: RunFacts) -> list[Entry]:
    found: list[Entry] = []
    open_fault: Entry | None = None
    before: RecordedGeneration | None = None
    changes = _changes(facts)
    for generation in facts.generations():
        entry = _formed(facts, generation, before, changes.get(generation.id))
        if before is None or before.id[0] != generation.id[0]:
            open_fault = None
        before = generation
        if open_fault is not None and _heals(entry, open_fault):
            open_fault["recovered_s"] = round(entry["t"] - open_fault["t"], 1)
            for lost in ("lost_steps", "lost_tokens"):
                open_fault[lost] += entry[lost]
            open_fault = None
            continue
        found.append(entry)
        if entry["kind"] in ("worker", "frozen") and entry["world_to"] < entry["world_from"]:
            open_fault = entry
    found += [*_from_events(facts), *_by_command(facts)]
    found.sort(key=lambda entry: entry["t"])
    return [_placed(facts, entry) for entry in found]


def _heals(entry: Entry, fault: Entry) -> bool:
    is_whole = entry["kind"] == "join" and entry["world_to"] >= fault["world_from"]
    return is_whole and bool(entry["t"] - fault["t"] < HEALED_S)


@dataclass(frozen=True, slots=True)
class _Group:
    """A generation, the one before it, and the journal's events between them."""

    now: RecordedGeneration
    before: RecordedGeneration | None
    events: list[Event]
    change: GroupChange | None

    @property
    def world(self) -> int:
        return self.now.start.world_size if self.now.start else 0

    @property
    def world_before(self) -> int:
        return self.before.start.world_size if self.before and self.before.start else 0


def _formed(
    facts: RunFacts,
    generation: RecordedGeneration,
    before: RecordedGeneration | None,
    change: GroupChange | None,
) -> Entry:
    start = generation.start
    assert start is not None, "only generations with a start are listed"
    attempt = generation.id[0]
    entry: Entry = {
        "t": generation.t, "tokens": start.consumed_tokens, "step": start.step, "attempt": attempt,
        "generation": generation.id[1], "world_to": start.world_size, "lost_steps": 0, "lost_tokens": 0,
        "pause_s": _pause(facts, generation, before),
        "world_from": before.start.world_size if before and before.start else None,
    }  # fmt: skip
    _lost(facts, entry, generation.id[1])
    if before is None or before.id[0] != attempt:
        _begun(facts, entry, before)
        return entry
    of_attempt = facts.columns.of_attempt.get(attempt, [])
    first, last = (
        bisect.bisect(of_attempt, g.event.seq, key=lambda e: e.seq) if g.event else 0
        for g in (before, generation)
    )
    _within(entry, _Group(generation, before, of_attempt[first:last], change))
    return entry


def _pause(
    facts: RunFacts, generation: RecordedGeneration, before: RecordedGeneration | None
) -> float | None:
    if before is None or not generation.ranges or not before.ranges:
        return None
    columns = facts.columns
    row, last = generation.ranges[0][0], before.ranges[-1][1] - 1
    return round(max(0.0, float(columns["t"][row] - columns["step_s"][row] - columns["t"][last])), 2)


def _begun(facts: RunFacts, entry: Entry, before: RecordedGeneration | None) -> None:
    """The first generation of an attempt."""
    attempt = entry["attempt"]
    claim = facts.files.claims.get(attempt)
    why = claim.why if claim is not None else "start"
    entry["kind"] = "coordinator" if why == RESTARTED else why
    if why == FORK:
        entry["origin"] = _origin(facts, attempt)
    if before is None and why == RESUME:  # nothing was trained that it could continue, but a fork's origin
        entry["kind"] = "start"
    if before is None or why not in (RESUME, REWIND):
        return
    end, last = facts.end_of(before.id[0]), facts.wrote(before.id[0])
    entry["down_s"] = round(max(0.0, entry["t"] - (last if last is not None else entry["t"])), 1)
    entry["ended"], entry["ended_by"] = (end.outcome, end.by) if end is not None else (None, None)
    if why == RESUME and end is None:
        entry["kind"] = "crash"
        return
    parent = facts.parent(attempt)
    diffs = [d for d in parent.differences if d.field not in _SKIP] if parent is not None else []
    has_shape = entry["world_from"] != entry["world_to"] or any(d.field in _SHAPE for d in diffs)
    if why == RESUME and (diffs or has_shape):
        entry["kind"] = "resize" if has_shape else "change"
        entry["diffs"] = [
            {"field": d.field, "old": redacted(d.old, d.field), "new": redacted(d.new, d.field)}
            for whole in diffs
            for d in whole.parts()
        ]


def _by_command(facts: RunFacts) -> list[Entry]:
    """Attempts that a command made and that train nothing: rewinds and forks."""
    found, trained = list[Entry](), {generation.id[0] for generation in facts.generations()}
    for number, claim in facts.files.claims.items():
        parent = facts.parent(number)
        if number in trained or claim.why not in (REWIND, FORK) or parent is None or parent.parent is None:
            continue
        row = by_name(facts).get(parent.parent.point_name)
        entry: Entry = {
            "t": facts.began(number) or stamp(claim.created) or 0.0, "kind": claim.why, "attempt": number,
            "generation": None, "step": parent.parent.step, "tokens": row and row.consumed_tokens,
            "lost_steps": 0, "lost_tokens": 0,
        }  # fmt: skip
        if claim.why == FORK:
            entry["origin"] = _origin(facts, number)
        _lost(facts, entry)
        found.append(entry)
    return found


def _origin(facts: RunFacts, attempt: int) -> str:
    """The run and point that an attempt is a fork of, as text."""
    parent = facts.parent(attempt)
    if parent is None or parent.origin is None:
        return "another run"
    found = parent.origin.forked_from
    return f"{found.run.rstrip('/').rpartition('/')[2]} at {found.point}"


def _lost(facts: RunFacts, entry: Entry, generation: int = 0) -> None:
    """The steps that were abandoned when this generation was formed, or when an attempt began that formed
    none (0).
    """
    attempt, columns = entry["attempt"], facts.columns
    by = facts.kept(
        f"left behind by {attempt}", facts.shape, lambda: left_behind(columns, facts.path, attempt)
    )
    rows = by.get((attempt, generation), ())
    entry["lost_steps"], entry["lost_tokens"] = (
        len(rows),
        int(columns["width"][rows].sum()) if len(rows) else 0,
    )


def _within(entry: Entry, group: _Group) -> None:
    """A generation that an attempt formed after another of its own."""
    kinds: dict[str, list[Event]] = {}
    for event in group.events:
        kinds.setdefault(event.kind, []).append(event)
    change = group.change
    if change is not None:
        entry["change"] = change
    members = {
        "error": [e.fields["member"] for e in kinds.get(EventKind.MEMBER_FAILED, ())],
        "worker": [e.fields["member"] for e in kinds.get(EventKind.MEMBER_DEAD, ())],
        "frozen": [e.fields["member"] for e in kinds.get(EventKind.LEFT_OUT, ())],
    }
    if members["error"]:
        entry["kind"] = "error"
        entry["detail"] = kinds[EventKind.MEMBER_FAILED][0].fields["text"]
    elif members["worker"] and group.world <= group.world_before:
        entry["kind"], entry["members"] = "worker", members["worker"]
        if "waiting" in kinds:
            entry["waited_s"] = round(group.now.t - kinds["waiting"][0].t)
    elif members["frozen"]:
        entry["kind"], entry["members"] = "frozen", members["frozen"]
    elif change is not None and change.lost:
        entry["kind"], entry["members"] = "worker", [loss.worker.host for loss in change.lost]
    elif group.world > group.world_before:
        entry["kind"] = "join"
    else:
        entry["kind"] = "reform"
        entry["detail"] = group.now.start.reason if group.now.start else ""


def _changes(facts: RunFacts) -> dict[GenerationId, GroupChange]:
    """The coordinators' records of the generations that they formed."""
    found = {}
    for event in facts.events(EventKind.GROUP_FORMED):
        known = {k: v for k, v in event.fields.items() if k in GroupChange.__slots__}
        with suppress(OrchestratorError):  # of a version that says other things
            change = decode(GroupChange, known)
            found[change.attempt, change.generation] = change
    return found


def _from_events(facts: RunFacts) -> list[Entry]:
    found = []
    kinds = EventKind.DAMAGED_POINT, EventKind.SAVE_GIVEN_UP, EventKind.END, EventKind.FEEDER_DIED
    for event in facts.events(*kinds):
        fields = event.fields
        entry: Entry = {
            "t": event.t, "attempt": event.attempt, "generation": None, "step": None, "tokens": None,
            "lost_steps": 0,
        }  # fmt: skip
        if event.kind == EventKind.END:
            if fields["outcome"] == "stopped":
                continue
            found.append(entry | {"kind": fields["outcome"], "detail": fields["reason"]})
            continue
        if event.kind == EventKind.FEEDER_DIED:
            detail = sentences.died("feeder", fields["pid"], fields["host"], fields["reason"])
            found.append(entry | {"kind": "feeder", "detail": detail})
            continue
        key = parse_point_name(fields["point"])
        entry |= {"point": fields["point"], "step": key.step if key else None, "detail": fields["reason"]}
        if event.kind == EventKind.DAMAGED_POINT:
            found.append(entry | {"kind": "damaged", "detail": f"{fields['file']} {fields['reason']}"})
        else:
            found.append(entry | {"kind": "nosave"})
    return [*found, *_waiting(facts)]


def _waiting(facts: RunFacts) -> list[Entry]:
    """The newest attempt waits for workers, if that is its last record of the group."""
    newest = facts.files.begun
    events = [e for e in facts.events("waiting") if e.attempt == newest]
    formed = max((g.t for g in facts.generations() if g.id[0] == newest), default=0.0)
    if not events or events[-1].t <= formed or facts.end_of(newest) is not None:
        return []
    last = events[-1]
    return [
        {
            "t": last.t, "attempt": newest, "generation": None, "step": None, "tokens": None, "lost_steps": 0,
            "kind": "waiting", "needed": last.fields["needed"], "there": last.fields["there"],
        }
    ]  # fmt: skip


def _placed(facts: RunFacts, entry: Entry) -> Entry:
    if entry["tokens"] is None or entry["step"] is None:
        at = facts.index_at(entry["t"])
        if entry["tokens"] is None:
            entry["tokens"] = int(facts.history["consumed_tokens"][at - 1]) if at else 0
        if entry["step"] is None:
            entry["step"] = int(facts.history["step"][at - 1]) if at else 0
    entry["tokens"] = int(np.int64(entry["tokens"]))
    kind = entry["kind"]
    entry["level"] = (
        "fault"
        if kind in _FAULTS
        else REWIND
        if kind == REWIND
        else "change"
        if kind in _CHANGES
        else "routine"
    )
    entry["text"] = redacted_text(_sentence(entry))
    entry.pop("change", None)
    return entry


def _sentence(e: Entry) -> str:  # noqa: C901, PLR0912  a sentence for each kind
    a, b = e.get("world_from"), e.get("world_to")
    lost = f"{steps(e['lost_steps'])} lost" if e["lost_steps"] else "no step lost"
    also_lost = f"; {lost}" if e["lost_steps"] else ""
    match e["kind"]:
        case "worker" | "frozen":
            return _faulted(e, lost)
        case "crash":
            return f"Everything died; resumed after {span(e['down_s'])} with {workers(b or 0)}, {lost}"
        case "error":
            return f"A worker failed: {sentences.failure('', e['detail'])}{also_lost}"
        case "coordinator":
            return f"The coordinator restarted; {_pause_text(e)}{lost}"
        case "feeder":
            return f"{e['detail'][:1].upper()}{e['detail'][1:]}; no step lost"
        case "join":
            more = (b or 0) - (a or 0)
            return f"{more} worker{'s' if more > 1 else ''} joined: {a} → {b}{also_lost}"
        case "start":
            return f"Started with {workers(b or 0)}{also_lost}"
        case "fork":
            return f"Begun as a fork of {e['origin']}" + (f", with {workers(b)}" if b else "") + also_lost
        case "resume":
            why = "a drain notice" if DRAIN in (e.get("ended_by") or "") else "a stop"
            return f"Resumed after {why} ({span(e['down_s'])} down), {lost}"
        case "resize" | "change":
            changed = ", ".join(map(_difference, (e.get("diffs") or [])[:3])) or f"{a} → {b} workers"
            return f"Resumed with another configuration: {changed}; {lost}"
        case "rewind":
            return f"Rewound to step {e['step']:,}: {steps(e['lost_steps'])} set aside as an orphan branch"
        case "damaged":
            return f"Resume point {e['point']} is damaged: {e['detail']}"
        case "nosave":
            return f"A save was given up: {e['detail']}"
        case "waiting":
            return f"Waiting for workers: {e['there']} of at least {e['needed']} are there"
        case "failed":
            return f"The run failed: {sentences.first_sentence(e['detail'])}"
        case "done":
            return f"Done: {e['detail']}"
    detail = sentences.first_sentence(e.get("detail") or "")
    return "The group formed again" + (f" after: {detail}" if detail else "") + also_lost


def _faulted(e: Entry, lost: str) -> str:
    """The sentence on a group that lost a member."""
    a, b, members = e["world_from"], e["world_to"], e["members"]
    sizes = f"{a} → {b} workers, " if a != b else ""
    change: GroupChange | None = e.get("change")
    tail = f", back to {a} after {span(e['recovered_s'])}" if "recovered_s" in e else ""
    if change is not None and change.lost:
        who = sentences.losses(change.lost)
        return f"{who[:1].upper()}{who[1:]}: {sizes}{_pause_text(e)}{lost}{tail}"
    if e["kind"] == "frozen":
        return f"Worker {members[0][:8]} did not answer and was left out: {sizes}{_pause_text(e)}{lost}{tail}"
    head = f"{workers(len(members))} died" if len(members) > 1 else f"Worker {members[0][:8]} died"
    if "waited_s" in e:
        waited = f"waited {span(e['waited_s'])} for workers, then went on with {b}"
        return f"{head}. Below the minimum: {waited}; {lost}"
    return f"{head}: {sizes}{_pause_text(e)}{lost}{tail}"


def _pause_text(e: Entry) -> str:
    return f"training paused {span(e['pause_s'])}, " if e.get("pause_s") is not None else ""


def _difference(diff: dict[str, Any]) -> str:
    old, new = ("…" if isinstance(v, list | dict) else json.dumps(v) for v in (diff["old"], diff["new"]))
    field = diff["field"]
    name = field.removeprefix(_OF_A_SOURCE) if field.startswith(_OF_A_SOURCE) else field.split(".")[-1]
    return f"{name} {old} → {new}"
