"""Checks that a person would make first, each with its value, its limit and a level.

A level is ok, warn or bad, or none if it cannot be determined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.inspect.status.point_rows import DAMAGED, DIGESTS
from orchestrator.inspect.status.snapshot import DONE, FAILED, RUNNING, STARTING, STOPPED, WAITING
from orchestrator.inspect.views import sources
from orchestrator.inspect.views.facts.facts import RunFacts
from orchestrator.inspect.views.incidents import happenings
from orchestrator.inspect.views.points_table import table
from orchestrator.text import span

OK, WARN, BAD, NONE = "ok", "warn", "bad", "none"
STEP_LEAST_S, STEP_MEDIANS = 30.0, 5.0  # when a step is late
WAIT_SHARE = 0.05  # of a step that waiting for data may take
LOSS_SHARE, LOSS_MORE = 0.05, 0.02  # that a loss may rise by

Check = dict[str, Any]


def checks(facts: RunFacts, s: dict[str, Any], now: float) -> list[Check]:
    """All checks that apply; `s` is the run's summary so far."""
    alive = s["state"] in (RUNNING, WAITING, STARTING)
    return [
        *_sign(facts, s, now),
        *(_last_step(s, now) if alive else ()),
        *_loss(s),
        *_data_wait(s),
        *(_workers(s) if alive else ()),
        *(_save(facts, s, now) if alive else ()),
        *(_last_save(facts, s, now) if alive else ()),
        *_damaged(facts, now),
        *_failures(facts),
        *_skipped(facts),
        *_too_long(facts),
        *_audit(facts, now),
        *_disk(s),
    ]


def _check(id_: str, level: str, label: str, value: str, limit: str = "", note: str = "") -> Check:
    return {"id": id_, "level": level, "label": label, "value": value, "limit": limit, "note": note}


def _sign(facts: RunFacts, s: dict[str, Any], now: float) -> Iterator[Check]:
    label, life = "Sign of life", facts.life
    if s["state"] in (DONE, STOPPED, FAILED):
        yield _check(
            "sign",
            NONE,
            label,
            f"ended {span(now - s['since'])} ago" if s["since"] else "ended",
            "",
            s["reason"],
        )
        return
    limit, note = (
        f"at most {span(life.limit_s)}",
        "change of journal or heartbeat, by the clock of who watches",
    )
    if life.alive is None:
        yield _check("sign", NONE, label, f"watched for {span(life.watched_s)}", limit, note)
    elif life.last_sign is None:
        yield _check("sign", BAD, label, f"none for {span(life.watched_s)}", limit, note)
    else:
        yield _check(
            "sign", OK if life.alive else BAD, label, f"{span(now - life.last_sign)} ago", limit, note
        )


def _last_step(s: dict[str, Any], now: float) -> Iterator[Check]:
    last, median = s["last_step"]["t"], s["speed"]["step_s"]
    if last is None or not median:
        return
    limit, age = max(STEP_LEAST_S, STEP_MEDIANS * median), now - last
    level = OK if age < limit else BAD
    yield _check(
        "step",
        level,
        "Last step",
        f"{span(age)} ago",
        f"at most {span(limit)}",
        f"usual step: {span(median)}",
    )


def _loss(s: dict[str, Any]) -> Iterator[Check]:
    before, value = s["loss"]["before"], s["loss"]["now"]
    if value is None:
        return
    level = OK if before is None or value < before * (1 + LOSS_SHARE) + LOSS_MORE else WARN
    limit = f"{before:.3f} before" if before is not None else ""
    yield _check(
        "loss",
        level,
        "Mean loss",
        f"{value:.3f}",
        limit,
        f"mean of the last {s['loss']['steps']} steps against the 1,000 before",
    )


def _data_wait(s: dict[str, Any]) -> Iterator[Check]:
    share = s["speed"]["data_wait_share"]
    if share is not None:
        level = OK if share < WAIT_SHARE else WARN
        yield _check(
            "wait", level, "Waiting for data", f"{share * 100:.1f} % of a step", "below 5 %", "last 200 steps"
        )


def _workers(s: dict[str, Any]) -> Iterator[Check]:
    if s["world_wanted"] is None:
        return
    least, most = s["world_wanted"]
    world = s["world_size"]
    level = OK if world >= most else BAD if world < least else WARN
    if s["state"] == STARTING:
        level = NONE
    yield _check("world", level, "Workers", f"{world} of {most}", f"at least {least}")


def _save(facts: RunFacts, s: dict[str, Any], now: float) -> Iterator[Check]:
    point, every = s["point"], s["risk"]["every_steps"]
    if point is None or point["t"] is None or not every:
        return
    level = OK if s["risk"]["steps"] < 2 * every else BAD
    given_up = len(facts.events("save given up"))
    note = f"{given_up} saves given up so far" if given_up else "no save given up"
    yield _check(
        "save", level, "Newest resume point", f"{span(now - point['t'])} ago", f"every {every:,} steps", note
    )


def _last_save(facts: RunFacts, s: dict[str, Any], now: float) -> Iterator[Check]:
    """Applies only if the newest save of the training attempt was given up, another one will be tried, and no
    point came after it.
    """
    failed = facts.events("save given up")
    point = s["point"]
    if not failed or failed[-1].attempt != s["attempt"] or failed[-1].fields.get("retry_s") is None:
        return
    last = failed[-1]
    if point is not None and point["t"] is not None and point["t"] > last.t:
        return
    in_s = last.t + last.fields["retry_s"] - now
    again = f"next try in {span(in_s)}" if in_s > 0 else "next try: as soon as all workers are free"
    yield _check("last_save", WARN, "Last save", f"failed, {again}", "", str(last.fields["reason"]))


def _damaged(facts: RunFacts, now: float) -> Iterator[Check]:
    rows = table(facts)
    read = [row.checked_at for row in rows if row.checked == DIGESTS and row.checked_at]
    damaged = [row for row in rows if row.state == DAMAGED]
    here = [row for row in damaged if row.on_lineage]
    found = (
        f"{len(here)} on the history"
        if here
        else f"{len(damaged)}, off the history"
        if damaged
        else "none found"
    )
    level = WARN if here else OK if read and len(read) == len(rows) else NONE
    limit = f"{len(read)} of {len(rows)} digests" if read else "sizes only"
    note = (
        f"digests last read {span(now - max(read))} ago"
        + ("; of the others sizes were compared" if len(read) < len(rows) else "")
        if read
        else "sizes compared; digests not read yet"
    )
    yield _check("points", level, "Damaged points", found, limit, note)


def _failures(facts: RunFacts) -> Iterator[Check]:
    """Faults of the newest attempt since its newest step."""
    newest = facts.files.begun
    last = float(facts.history["t"][-1]) if len(facts.history) else 0.0
    recent = [
        e
        for e in happenings(facts)
        if e["level"] == "fault"
        and e["kind"] not in ("coordinator", "feeder")  # restarted by Ray: no failure of the group
        and e["attempt"] == newest
        and e["t"] >= last
    ]
    limit = facts.config(newest).get("cluster.max_failures", 3)
    level = OK if not recent else WARN if len(recent) <= limit else BAD
    yield _check("failures", level, "Failures in a row", f"{len(recent)}", f"at most {limit}")


def _skipped(facts: RunFacts) -> Iterator[Check]:
    found = sources.documents(facts)
    if found is None or not found[0]:
        return
    read, bad = found
    share, limit = bad / read, facts.config(facts.files.begun).get("data.max_bad_share", 0.01)
    level = OK if share < limit / 2 or not bad else WARN if share < limit else BAD
    yield _check(
        "bad", level, "Documents skipped", f"{bad:,} ({share * 100:.4f} %)", f"below {limit * 100:.0f} %"
    )


def _too_long(facts: RunFacts) -> Iterator[Check]:
    """Checks the source with the largest share of too long documents: the limit is each source's."""
    config = facts.config(facts.files.begun)
    found = sources.long_documents(facts) if config.get("pack.long_document") == "skip" else None
    if found is None:
        return
    name, long, read = found
    share, limit = long / read, config.get("pack.max_long_share", 0.5)
    level = OK if share < limit / 2 or not long else WARN if share < limit else BAD
    yield _check(
        "long",
        level,
        "Documents too long",
        f"{long:,} ({share * 100:.1f} %)",
        f"at most {limit * 100:.0f} %",
        f"of source {name}",
    )


def _audit(facts: RunFacts, now: float) -> Iterator[Check]:
    found = sources.audit(facts)
    if found is None:
        yield _check(
            "audit", NONE, "Audit", "not recorded", "", "no finding of an audit is kept with this run"
        )
        return
    proven, upto = found["exactly_once"], found["final_up_to_step"]
    value, level = {True: ("exactly once", OK), False: ("differs", BAD), None: ("not proven", WARN)}[proven]
    yield _check("audit", level, "Audit", value, f"up to step {upto or 0:,}", f"{span(now - found['t'])} ago")


def _disk(s: dict[str, Any]) -> Iterator[Check]:
    each, free = s["point"]["bytes"] if s["point"] else 0, s["files"]["free_bytes"]
    if not each or free is None:
        return
    fits = free / each
    level = OK if fits > 5 else WARN if fits > 2 else BAD  # noqa: PLR2004  points that still fit
    yield _check("disk", level, "Storage", f"{free / 1e9:,.0f} GB free", f"{int(fits):,} more points")
