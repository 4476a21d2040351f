"""A run in one document: state, progress, speed, what is at risk, and the point a start would continue
from.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from orchestrator.config.redaction import redacted, redacted_text
from orchestrator.history.claims.claim_files import RESUME
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.inspect.status.missing import missing_text
from orchestrator.inspect.status.verdict import (
    GONE,
    OPEN,
    RUNNING,
    STARTING,
    WAITING,
    Risk,
    Standing,
    level,
    silence_s,
    there_text,
    verdict,
)
from orchestrator.inspect.views import goodput
from orchestrator.inspect.views.checks import BAD, WARN, checks
from orchestrator.inspect.views.facts.facts import Facts, mean_loss, short, stamp
from orchestrator.inspect.views.incidents import brief, happenings, waiting_now
from orchestrator.inspect.views.points_table import (
    DAMAGED,
    DIGESTS,
    HEALTHY,
    ORPHAN,
    deleted,
    newest_healthy,
    table,
)
from orchestrator.planning.batches import remaining

RECENT = 9
SPEED_STEPS = 200
LOSS_NOW, LOSS_BEFORE = 50, 1000
CONFIG = (
    "train.global_batch_size", "train.micro_batch_size", "pack.seq_len", "cluster.num_workers",
    "resume.every_steps", "resume.keep_latest", "train.lr", "train.schedule", "train.numerics",
    "model.config", "train.precision", "model.dtype",
)  # fmt: skip

Row = dict[str, Any]


def summary(facts: Facts, now: float, full: bool = True) -> Row:
    """The document; without `full` as in the list of runs."""
    state, reason, since = standing(facts)
    out: Row = {
        "name": facts.name,
        "uri": facts.uri,
        "now": now,
        "state": state,
        "reason": reason,
        "since": since,
        "created": facts.created,
        "missing": list(facts.pieces),
        "missing_text": sentence(missing_text(facts.pieces)) if facts.pieces else "",
    }
    out |= _group(facts, state) | _progress(facts, state)
    point = newest_healthy(facts)
    out["risk"] = _risk(facts, point, out)
    out["point"] = _point(facts, point)
    out["points"] = _points(facts)
    out["goodput"] = _goodput(facts)
    out["loss"] = _loss(facts)
    if full:
        out |= _more(facts, out, now)
    return out


def standing(facts: Facts) -> tuple[str, str, float | None]:
    """(state, why, since). The state of a run without an end is from the watch: `open` while it is too short,
    because no other machine's clock is used.
    """
    newest = facts.files.newest
    if newest is None:
        return STARTING, "no attempt has begun", facts.created
    end = facts.end_of(newest)
    if end is not None:
        return end.outcome, redacted_text(end.reason), end.t
    last = facts.life.last_sign or facts.wrote(newest) or facts.created
    if facts.life.alive is False:
        return GONE, "no end is written, and nothing has been written since", last
    if facts.life.alive is None:
        watched = (
            f"no end is written; watched for {facts.life.watched_s:.0f} of {facts.life.limit_s:.0f} s so far"
        )
        return OPEN, watched, last
    if facts.head is None or facts.files.begun != newest:  # or it has claimed, and continues nothing yet
        claimed = stamp(facts.files.claims[newest].created)
        return STARTING, "workers are being started", facts.began(newest) or claimed or facts.created
    waits = waiting_now(facts)
    if waits is not None:
        return WAITING, there_text(waits["there"], waits["needed"]), waits["t"]
    return RUNNING, "", facts.began(newest)


def _group(facts: Facts, state: str) -> Row:
    head, newest = facts.head, facts.files.newest
    config = facts.config(facts.files.begun)
    wanted = config.get("cluster.num_workers")
    world = head.start.world_size if head is not None and head.start is not None else 0
    waits = waiting_now(facts) if state == WAITING else None
    if waits is not None:
        world = waits["there"]
    alive, ended = state in (RUNNING, WAITING, STARTING, OPEN), facts.end_of(newest) is not None
    return {
        "attempt": newest,
        "generation": head.id[1] if head is not None else 0,
        "world_size": world if alive else 0,
        "world_wanted": [wanted, wanted] if isinstance(wanted, int) else wanted,
        "world_since": head.t if head is not None else None,
        "last_sign": (None if ended else facts.life.last_sign) or facts.wrote(newest),
        "alive": False if ended else facts.life.alive,
    }


def _progress(facts: Facts, state: str) -> Row:
    history, config = facts.history, facts.config(facts.files.begun)
    size, parent = len(history), facts.parent(facts.files.begun)
    last = slice(max(0, size - SPEED_STEPS), None)
    seconds = float(history["step_s"][last].sum())
    speed = float(history["width"][last].sum()) / seconds if seconds > 0 else 0.0
    begin, budgets = facts.begin, parent.budgets if parent is not None else None
    batch, seq_len = config.get("train.global_batch_size", 1), config.get("pack.seq_len", 1)
    samples = begin.consumed_samples if begin is not None else 0
    if begin is not None:
        batch, seq_len = begin.global_batch_size, begin.seq_len
    if size:
        samples = int(history["consumed_samples"][-1])
    left = None
    if budgets is not None:
        stops = budgets.stop_tokens, budgets.stop_samples
        left = remaining(samples, facts.tokens, batch, seq_len, *stops)
    step, total = facts.step or 0, None if left is None else facts.tokens + left.tokens
    alive = state in (RUNNING, WAITING, STARTING, OPEN)
    return {
        "last_step": {
            "t": float(history["t"][-1]) if size else None,
            "step": step,
            "loss": short(float(history["loss"][-1])) if size else None,
        },
        "progress": {
            "step": step,
            "max_step": step + left.steps if left is not None else None,
            "tokens": facts.tokens,
            "total_tokens": total,
            "samples": samples,
            "share": facts.tokens / total if total else None,
            "eta_s": left.tokens / speed if left is not None and speed and alive else None,
        },
        "speed": {
            "tokens_per_s": short(speed) if size else None,
            "step_s": short(_upper_median(history["step_s"][last])) if size else None,
            "data_wait_share": short(float(history["data_wait_s"][last].sum()) / seconds)
            if seconds > 0
            else None,
        },
    }


def _upper_median(values: Any) -> float:
    return float(np.sort(values)[len(values) // 2])


def _risk(facts: Facts, point: Row | None, out: Row) -> Row:
    every = facts.config(facts.files.begun).get("resume.every_steps")
    saved = (point["consumed_tokens"] or 0) if point is not None else 0
    at, alive = facts.index_after(saved), out["state"] in (RUNNING, WAITING, STARTING, OPEN)
    step, head = out["progress"]["step"], facts.head
    return {
        "tokens": max(0, facts.tokens - saved),
        "steps": len(facts.history) - at,
        "seconds": round(float(facts.history["step_s"][at:].sum()), 1),
        "every_steps": every,
        "next_in_steps": every - step % every if every and alive else None,
        # only from the journal: who holds a whole state depends on the numerics and on who is loading
        "copies": (getattr(head.start, "copies", None) or head.said("copies")) if head and alive else None,
    }


def _point(facts: Facts, point: Row | None) -> Row | None:
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
    read = [r["checked_at"] for r in table(facts) if r["state"] == HEALTHY and r["checked"] == DIGESTS]
    return {name: point[name] for name in shown} | {"checked_newest": max(filter(None, read), default=None)}


def _points(facts: Facts) -> Row:
    rows = table(facts)
    return {
        "healthy": sum(row["state"] == HEALTHY for row in rows),
        "pinned": sum(row["pinned"] for row in rows),
        "damaged": sum(row["state"] == DAMAGED for row in rows),
        "orphan": sum(row["state"] == ORPHAN for row in rows),
        "deleted": len(facts.kept("deleted", (facts.shape, facts.points_seen), lambda: deleted(facts))),
        "total": len(rows),
        "bytes": sum(row["bytes"] for row in rows),
    }


def _goodput(facts: Facts) -> Row:
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


def _loss(facts: Facts) -> Row:
    losses = facts.history["loss"]
    before = losses[-LOSS_BEFORE - LOSS_NOW : -LOSS_NOW]
    full = len(before) == LOSS_BEFORE
    return {
        "now": short(mean_loss(losses[-LOSS_NOW:])),
        "steps": len(losses[-LOSS_NOW:]),
        "before": short(mean_loss(before)) if full else None,
    }


def _more(facts: Facts, out: Row, now: float) -> Row:
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
    at = _standing(facts, out, more["checks"], now)
    more["verdict"] = {"level": level(at), "text": sentence(verdict(at))}
    more["recent"] = [brief(entry) for entry in told[-RECENT:][::-1]]
    more["last_fault"] = brief(faults[-1]) if faults else None
    more["hour"] = {
        "faults": sum(now - entry["t"] < 3600 for entry in faults if entry["kind"] != "coordinator"),  # noqa: PLR2004  an hour
        "restarts": sum(now - entry["t"] < 3600 for entry in restarts),  # noqa: PLR2004
    }
    more["sources"] = [source["name"] for source in config.get("data.sources") or []]
    return more


def _standing(facts: Facts, out: Row, checked: list[Row], now: float) -> Standing:
    concerns = sorted((c for c in checked if c["level"] in (BAD, WARN)), key=lambda c: c["level"] != BAD)
    wanted, risk = out["world_wanted"], out["risk"]
    since, newest = out["since"], facts.files.newest
    resumes = newest is not None and facts.files.claims[newest].why == RESUME
    at_risk = Risk(steps=risk["steps"], tokens=risk["tokens"], seconds=risk["seconds"])
    return Standing(
        state=out["state"],
        attempt=out["attempt"],
        reason=out["reason"],
        step=facts.step,
        total_steps=out["progress"]["max_step"],
        workers=out["world_size"],
        workers_wanted=wanted[1] if wanted else None,
        there=out["reason"] if out["state"] == WAITING else "",
        silent_s=silence_s(facts.life.watched_s, since, now),
        point=out["point"]["name"] if out["point"] else None,
        has_no_point=not facts.events(EventKind.POINT_COMMITTED),
        risk=(_left_behind(facts) or at_risk) if resumes and out["state"] == STARTING else at_risk,
        resumes=resumes,
        missing=facts.pieces,
        concerns=tuple(f"{c['label'].lower()} ({c['value']})" for c in concerns),
        is_bad=any(c["level"] == BAD for c in concerns),
    )


def _left_behind(facts: Facts) -> Risk | None:
    """The trained steps that the newest attempt does not continue. None: there are none, or that is not
    recorded yet.
    """
    pieces = facts.path.dropped(facts.files.newest or 0)
    if not pieces:
        return None
    rows, columns = np.concatenate([piece.rows for piece in pieces]), facts.columns
    seconds = round(float(columns["step_s"][rows].sum()), 1)
    return Risk(steps=len(rows), tokens=int(columns["width"][rows].sum()), seconds=seconds)


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
