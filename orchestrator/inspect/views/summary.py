"""A run in one document: state, progress, speed, what is at risk, and the point a start would continue from.

It is derived from a `RunSnapshot` that is made from the whole journal, which the page keeps in memory.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.config.redaction import redacted, redacted_text
from orchestrator.history.claims.claim_files import RESUME
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.status.point_rows import DAMAGED, DIGESTS, HEALTHY, ORPHAN, PointRow, stamp
from orchestrator.inspect.status.snapshot import (
    GONE,
    NEW,
    OPEN,
    RECENT_STEPS,
    STARTING,
    WAITING,
    NewestEvaluation,
    NewestFault,
    NewestGeneration,
    NewestStep,
    Risk,
    RunSnapshot,
    Shortage,
    Standing,
    eval_record,
    level,
    missing_text,
    newest_evaluation,
    speed,
    verdict,
)
from orchestrator.inspect.status.tail import LOST
from orchestrator.inspect.views import goodput
from orchestrator.inspect.views.checks import BAD, WARN, checks
from orchestrator.inspect.views.facts.facts import RunFacts, mean_loss, short
from orchestrator.inspect.views.incidents import brief, happenings, waiting_now
from orchestrator.inspect.views.points_table import deleted, newest_healthy, table
from orchestrator.json_form import decode
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import EvalRecord


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
        risk=_tokens_at_risk(facts, (point.consumed_tokens or 0) if point is not None else 0),
        evaluation=newest_evaluation(_evaluations(facts)),
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


def _evaluations(facts: RunFacts) -> list[tuple[EvalRecord, float]]:
    """The evaluations of the newest evaluated state of the history, oldest first, with their times."""
    found: list[tuple[EvalRecord, float]] = []
    for event in reversed(facts.events(EventKind.EVALUATED)):
        record = eval_record(event.fields)
        if found and record.key != found[0][0].key:
            break
        if found or facts.path.lineage.has_state(record.key):
            found.append((record, event.t))
    return found[::-1]


def _tokens_per_s(facts: RunFacts) -> float | None:
    rows = facts.history.rows[-RECENT_STEPS:]
    generations = facts.columns["generation"][rows]
    rows = rows[generations == generations[-1]] if len(rows) else rows
    return speed(facts.columns["consumed_tokens"][rows].tolist(), facts.columns["step_s"][rows].tolist())


def _tokens_at_risk(facts: RunFacts, saved_tokens: int) -> Risk:
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


RECENT = 9
SPEED_STEPS = 200
LOSS_NOW, LOSS_BEFORE = 50, 1000
CONFIG = (
    "train.global_batch_size", "train.micro_batch_size", "pack.seq_len", "cluster.num_workers",
    "resume.every_steps", "resume.keep_latest", "train.lr", "train.schedule", "train.numerics",
    "model.config", "train.precision", "model.dtype",
)  # fmt: skip

Row = dict[str, Any]


def summary(facts: RunFacts, now: float, full: bool = True) -> Row:
    """The document of a run's page; without `full` its part that does not need the whole history."""
    at = run_snapshot(facts)
    out = row(facts.name, at, now) | {"uri": facts.uri, "created": facts.created}
    config = facts.config(facts.files.begun)
    wanted, point = config.get("cluster.num_workers"), newest_healthy(facts)
    out["world_wanted"] = [wanted, wanted] if isinstance(wanted, int) else wanted
    out["world_since"] = facts.head.t if facts.head is not None else None
    out["speed"] |= _speed(facts)
    out["risk"] |= _risk(facts, at, config.get("resume.every_steps"))
    out["point"] = _point(facts, point)
    out["points"] = _points(facts)
    out["goodput"] = _goodput(facts)
    out["loss"] = _loss(facts)
    if full:
        out |= _more(facts, at, out, now)
    return out


def row(name: str, at: RunSnapshot, now: float) -> Row:
    """What the list of runs and a run's page show of a snapshot."""
    step, begun, left, risk = at.step, at.generation, at.left, at.risk
    key = parse_point_name(at.point) if at.point is not None else None
    position = step or begun
    tokens = position.consumed_tokens if position else 0
    total = tokens + left.tokens if left is not None else None
    return {
        "name": name,
        "now": now,
        "state": STARTING if at.state == NEW else at.state,
        "reason": redacted_text(at.why),
        "since": at.since,
        "missing": list(at.missing),
        "missing_text": sentence(missing_text(at.missing)) if at.missing else "",
        "attempt": at.number,
        "generation": begun.generation if begun is not None and begun.attempt == at.number else 0,
        "world_size": at.workers or 0,
        "world_wanted": [at.wanted] * 2 if at.wanted else None,
        "last_sign": at.last_sign,
        "alive": at.alive,
        "last_step": {
            "t": step.t if step else None,
            "step": position.step if position else 0,
            "loss": short(step.loss) if step else None,
        },
        "progress": {
            "step": position.step if position else 0,
            "max_step": at.total_steps,
            "tokens": tokens,
            "total_tokens": total,
            "samples": position.consumed_samples if position else 0,
            "share": tokens / total if total else None,
            "eta_s": at.eta_s,
        },
        "speed": {"tokens_per_s": short(at.tokens_per_s)},
        "last_eval": _last_eval(at.evaluation),
        "risk": risk and {"tokens": risk.tokens, "steps": risk.steps, "seconds": risk.seconds},
        "point": key and {"name": at.point, "step": key.step, "t": at.point_t},
        "points": {"total": at.num_points},
    }


def _last_eval(at: NewestEvaluation | None) -> Row | None:
    if at is None:
        return None
    parts = [
        {"part": each.part, "loss": short(each.loss, 6), "perplexity": short(each.perplexity, 6)}
        for each in at.parts
    ]
    return {"step": at.step, "t": at.t, "parts": parts}


def _speed(facts: RunFacts) -> Row:
    history = facts.history
    last = slice(max(0, len(history) - SPEED_STEPS), None)
    seconds = float(history["step_s"][last].sum())
    waited = float(history["data_wait_s"][last].sum())
    return {
        "step_s": short(_upper_median(history["step_s"][last])) if len(history) else None,
        "data_wait_share": short(waited / seconds) if seconds > 0 else None,
    }


def _upper_median(values: Any) -> float:
    return float(np.sort(values)[len(values) // 2])


def _risk(facts: RunFacts, at: RunSnapshot, every: int | None) -> Row:
    head, step, copies = facts.head, facts.step or 0, None
    if head is not None and at.is_live:
        copies = getattr(head.start, "copies", None) or head.said("copies")
    return {
        "every_steps": every,
        "next_in_steps": every - step % every if every and at.is_live else None,
        # only from the journal: who holds a whole state depends on the numerics and on who is loading
        "copies": copies,
    }


def _point(facts: RunFacts, point: PointRow | None) -> Row | None:
    if point is None:
        return None
    shown = (
        "name",
        "step",
        "t",
        "checked",
        "checked_at",
        "bytes",
        "consumed_tokens",
        "attempt",
        "generation",
    )
    read = [r.checked_at for r in table(facts) if r.state == HEALTHY and r.checked == DIGESTS]
    newest = max(filter(None, read), default=None)
    return {name: getattr(point, name) for name in shown} | {"checked_newest": newest}


def _points(facts: RunFacts) -> Row:
    rows = table(facts)
    return {
        "healthy": sum(row.state == HEALTHY for row in rows),
        "pinned": sum(row.pin is not None for row in rows),
        "damaged": sum(row.state == DAMAGED for row in rows),
        "orphan": sum(row.state == ORPHAN for row in rows),
        "deleted": len(facts.kept("deleted", (facts.shape, facts.points_seen), lambda: deleted(facts))),
        "total": len(rows),
        "bytes": sum(row.bytes for row in rows),
    }


def _goodput(facts: RunFacts) -> Row:
    good = goodput.measured(facts)
    parts, wall = good.parts, good.wall_s
    recent: dict[str, float] = {}
    for day in sorted(good.days)[-2:]:
        for part, value in good.days[day].items():
            recent[part] = recent.get(part, 0.0) + value
    lately = sum(recent.values())
    return {
        "share": short(parts["productive"] / wall) if len(facts.history) and wall > 0 else None,
        "recent": short(recent["productive"] / lately) if lately > 0 else None,
        "parts": {part: short(value) for part, value in parts.items()},
        "wall_s": short(wall),
        "off_s": short(good.off_s),
    }


def _loss(facts: RunFacts) -> Row:
    losses = facts.history["loss"]
    before = losses[-LOSS_BEFORE - LOSS_NOW : -LOSS_NOW]
    full = len(before) == LOSS_BEFORE
    return {
        "now": short(mean_loss(losses[-LOSS_NOW:])),
        "steps": len(losses[-LOSS_NOW:]),
        "before": short(mean_loss(before)) if full else None,
    }


def _more(facts: RunFacts, snapshot: RunSnapshot, out: Row, now: float) -> Row:
    """Adds the fields of one run's page."""
    config = facts.config(facts.files.begun)
    commanded = facts.commanded()
    told = [entry for entry in happenings(facts) if entry["kind"] != "coordinator"]
    faults = [entry for entry in happenings(facts) if entry["level"] == "fault"]
    restarts = [entry for entry in happenings(facts) if entry["kind"] == "coordinator"]
    more: Row = {
        "config": {name: redacted(config.get(name), name) for name in CONFIG},
        "command": commanded[1] if commanded is not None else None,
        "files": {"free_bytes": free_bytes(facts.uri)},
    }
    more["checks"] = checks(facts, {**out, **more}, now)
    at = _standing(snapshot, more["checks"], now)
    more["verdict"] = {"level": level(at), "text": sentence(verdict(at))}
    more["recent"] = [brief(entry) for entry in told[-RECENT:][::-1]]
    more["last_fault"] = brief(faults[-1]) if faults else None
    more["hour"] = {
        "faults": sum(now - entry["t"] < 3600 for entry in faults if entry["kind"] != "coordinator"),  # noqa: PLR2004  an hour
        "restarts": sum(now - entry["t"] < 3600 for entry in restarts),  # noqa: PLR2004
    }
    more["sources"] = [source["name"] for source in config.get("data.sources") or []]
    return more


def _standing(at: RunSnapshot, checked: list[Row], now: float) -> Standing:
    concerns = sorted((c for c in checked if c["level"] in (BAD, WARN)), key=lambda c: c["level"] != BAD)
    texts = [f"{c['label'].lower()} ({c['value']})" for c in concerns]
    return at.standing(now, concerns=texts, is_bad=any(c["level"] == BAD for c in concerns))


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")


def free_bytes(path: str) -> int | None:
    """Free bytes of the run's file system; None if that cannot be found out."""
    try:
        s = os.statvfs(path)
    except OSError:
        return None
    return s.f_bavail * s.f_frsize
