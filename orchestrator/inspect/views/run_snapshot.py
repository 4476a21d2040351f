"""Makes the snapshot of a run from its whole journal, which the page keeps in memory."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from orchestrator.history.claims.claim_files import RESUME
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.inspect.status.point_rows import stamp
from orchestrator.inspect.status.snapshot import (
    RECENT_STEPS,
    NewestFault,
    NewestGeneration,
    NewestStep,
    RunSnapshot,
    Shortage,
    speed,
)
from orchestrator.inspect.status.tail import LOST
from orchestrator.inspect.status.verdict import GONE, OPEN, STARTING, WAITING, Risk
from orchestrator.inspect.views.facts.facts import RunFacts
from orchestrator.inspect.views.incidents import happenings, waiting_now
from orchestrator.inspect.views.points_table import newest_healthy
from orchestrator.json_form import decode
from orchestrator.records.cursor import Cursor


def run_snapshot(facts: RunFacts) -> RunSnapshot:
    """Returns the snapshot of the run. Its times leave out jumps of a clock, as those of `RunFacts` do."""
    files, number = facts.files, facts.files.newest
    end, point, life = facts.end_of(number), newest_healthy(facts), facts.life
    parent = facts.parent(files.begun)
    faults = [entry for entry in happenings(facts) if entry["level"] == "fault"]
    formed, committed = facts.events(EventKind.GROUP_FORMED), facts.events(EventKind.POINT_COMMITTED)
    inherited = parent.inherited if parent is not None else ()
    waits = waiting_now(facts)
    snapshot = RunSnapshot(
        number=number,
        outcome=end.outcome if end is not None else "",
        reason=end.reason if end is not None else "",
        resumes=number is not None and files.claims[number].why == RESUME,
        stop_tokens=parent.budgets.stop_tokens if parent is not None and parent.budgets else None,
        stop_samples=parent.budgets.stop_samples if parent is not None and parent.budgets else None,
        alive=False if end is not None else life.alive,
        watched_s=life.watched_s,
        watch_s=life.limit_s,
        point=point.name if point is not None else None,
        point_t=point.t if point is not None else None,
        cursor=_cursor(facts, point.name) if point is not None else None,
        num_points=len(files.points),
        has_no_point=not inherited and all(e.attempt != files.begun for e in committed),
        quarantined=tuple(name for name in files.points if name in files.marks),
        generation=_generation(facts),
        step=_step(facts),
        wanted=(formed[-1].fields.get("wanted") or None) if formed else None,
        shortage=Shortage(there=waits["there"], needed=waits["needed"], t=waits["t"]) if waits else None,
        tokens_per_s=_tokens_per_s(facts),
        risk=_risk(facts, (point.consumed_tokens or 0) if point is not None else 0),
        fault=NewestFault(text=faults[-1]["text"], t=faults[-1]["t"]) if faults else None,
        last_sign=(None if end is not None else life.last_sign) or facts.wrote(number) or facts.created,
        missing=facts.pieces,
    )
    if snapshot.resumes and snapshot.state == STARTING:
        snapshot = replace(snapshot, risk=_left_behind(facts) or snapshot.risk)
    return replace(snapshot, since=_since(facts, snapshot))


def _since(facts: RunFacts, snapshot: RunSnapshot) -> float | None:
    """When the run's state began."""
    number = facts.files.newest
    if number is None:
        return facts.created
    if (end := facts.end_of(number)) is not None:
        return end.t
    if snapshot.state in (GONE, OPEN):
        return snapshot.last_sign
    if snapshot.state == WAITING and snapshot.shortage is not None:
        return snapshot.shortage.t
    if snapshot.state == STARTING:
        claimed = stamp(facts.files.claims[number].created)
        return facts.began(number) or claimed or facts.created
    return facts.began(number)


def _generation(facts: RunFacts) -> NewestGeneration | None:
    """The newest generation of the history, or the begin that a fork took over."""
    start, head = facts.begin, facts.head
    if start is None:
        return None
    gone = set[str]()
    if head is not None and head.event is not None:
        gone = {
            event.fields["member"]
            for event in facts.events(*LOST, EventKind.MEMBER_LEFT)
            if event.attempt == head.event.attempt and event.seq > head.event.seq
        }
    return NewestGeneration(
        attempt=start.attempt,
        generation=start.generation,
        world_size=start.world_size,
        num_workers=start.world_size - len(gone.intersection(start.members)),
        step=start.step,
        consumed_samples=start.consumed_samples,
        consumed_tokens=start.consumed_tokens,
        global_batch_size=start.global_batch_size,
        seq_len=start.seq_len,
        num_shards=head.said("num_shards") if head is not None else None,
    )


def _step(facts: RunFacts) -> NewestStep | None:
    history = facts.history
    if not len(history):
        return None
    at = facts.columns.generations[int(facts.columns["generation"][history.rows[-1]])].id
    loss, lr = float(history["loss"][-1]), float(history["lr"][-1])
    return NewestStep(
        attempt=at[0],
        generation=at[1],
        step=int(history["step"][-1]),
        consumed_samples=int(history["consumed_samples"][-1]),
        consumed_tokens=int(history["consumed_tokens"][-1]),
        loss=loss if math.isfinite(loss) else None,
        lr=lr if math.isfinite(lr) else None,
        t=float(history["t"][-1]),
    )


def _tokens_per_s(facts: RunFacts) -> float | None:
    rows = facts.history.rows[-RECENT_STEPS:]
    generations = facts.columns["generation"][rows]
    rows = rows[generations == generations[-1]] if len(rows) else rows
    return speed(facts.columns["consumed_tokens"][rows].tolist(), facts.columns["step_s"][rows].tolist())


def _risk(facts: RunFacts, saved_tokens: int) -> Risk:
    at = facts.index_after(saved_tokens)
    return Risk(
        steps=len(facts.history) - at,
        tokens=max(0, facts.tokens - saved_tokens),
        seconds=round(float(facts.history["step_s"][at:].sum()), 1),
    )


def _left_behind(facts: RunFacts) -> Risk | None:
    """The trained steps that the newest attempt does not continue. None: there are none, or that is not
    recorded yet.
    """
    pieces = facts.path.dropped(facts.files.newest or 0)
    if not pieces:
        return None
    rows, columns = np.concatenate([piece.rows for piece in pieces]), facts.columns
    seconds = round(float(columns["step_s"][rows].sum()), 1)
    return Risk(steps=len(rows), tokens=int(columns["width"][rows].sum()), seconds=seconds)


def _cursor(facts: RunFacts, point: str) -> Cursor | None:
    """The cursor of a point; None if no journal says that it was committed."""
    events = facts.events(EventKind.POINT_COMMITTED)
    event = next((e for e in reversed(events) if e.fields["point"] == point), None)
    return decode(Cursor, event.fields["cursor"]) if event is not None else None
