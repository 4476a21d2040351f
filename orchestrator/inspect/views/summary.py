"""A run in one document: state, progress, speed, what is at risk, and the point a start would continue
from.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.config.redaction import redacted, redacted_text
from orchestrator.inspect.status.point_rows import DAMAGED, DIGESTS, HEALTHY, ORPHAN, PointRow
from orchestrator.inspect.status.snapshot import RunSnapshot
from orchestrator.inspect.status.verdict import NEW, STARTING, Standing, level, missing_text, verdict
from orchestrator.inspect.views import goodput
from orchestrator.inspect.views.checks import BAD, WARN, checks
from orchestrator.inspect.views.facts.facts import RunFacts, mean_loss, short
from orchestrator.inspect.views.incidents import brief, happenings
from orchestrator.inspect.views.points_table import deleted, newest_healthy, table
from orchestrator.inspect.views.run_snapshot import run_snapshot

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
        "risk": risk and {"tokens": risk.tokens, "steps": risk.steps, "seconds": risk.seconds},
        "point": key and {"name": at.point, "step": key.step, "t": at.point_t},
        "points": {"total": at.num_points},
    }


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
