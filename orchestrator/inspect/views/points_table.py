"""The resume points of a run as a table, and one of them in detail.

The health in the table is from sizes, and from earlier reads of digests (by the run itself, or `verify`): no
file of a point is read for it. The detail has the content of a point, its differences from the one before it,
the cost of going back, and commands. It reads the point's documents and their digests, not its tensors.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.checkpoint.points.points import Point, newest_first, parse_point_name
from orchestrator.checkpoint.points.store import PointStatus, maybe_deleted, point_fates
from orchestrator.config.field_rules import field_rules, in_todays_fields
from orchestrator.config.redaction import redacted
from orchestrator.errors import RefusedError, ResumePointError, StorageError
from orchestrator.history.claims.claims import ORIGIN, ClaimParent
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import VERIFY
from orchestrator.inspect.status.point_rows import (
    DAMAGED,
    HEALTHY,
    ORPHAN,
    SIZES,
    Checked,
    PointRow,
    SavedAs,
    point_row,
    stamp,
)
from orchestrator.inspect.views.facts.columns import Event
from orchestrator.inspect.views.facts.facts import PointFacts, RunFacts, mean_loss, short
from orchestrator.json_form import encode
from orchestrator.planning.resume.identity import differences as planned_differences
from orchestrator.records.steps import StateKey

PINNED, ALL = "pinned", "all"
STATES = (ALL, HEALTHY, PINNED, DAMAGED, ORPHAN)
LIMIT = 500
_KINDS = (
    EventKind.POINT_COMMITTED,
    EventKind.POINT_VERIFIED,
    EventKind.DAMAGED_POINT,
    EventKind.DELETING_POINTS,
    EventKind.POINTS_DELETED,
)

_COUNTS = ("consumed_samples", "consumed_tokens", "target_tokens")

Row = dict[str, Any]

SORTS: Mapping[str, Callable[[PointRow], Any]] = {
    "step": lambda row: (row.attempt, row.generation, row.step),
    "t": lambda row: row.t or 0.0,
    "tokens": lambda row: row.consumed_tokens or 0,
    "bytes": lambda row: row.bytes,
    "save_s": lambda row: row.save_s or 0.0,
    "save_blocked_s": lambda row: row.save_blocked_s or 0.0,
}


def points(
    facts: RunFacts, state: str = ALL, sort: str = "-step", q: str = "", offset: int = 0, limit: int = 100
) -> dict[str, Any]:
    """A page of the table. Raises `RefusedError` for an unknown state or order."""
    if state not in STATES:
        raise RefusedError(
            f"resume points have no state {state!r}; use one of {', '.join(STATES)}",
            code="command.unknown_state",
        )
    if sort.lstrip("-") not in SORTS:
        raise RefusedError(
            f"resume points cannot be sorted by {sort!r}; use one of {', '.join(SORTS)}",
            code="command.unknown_order",
        )
    rows = table(facts)
    found = [row for row in rows if _is(row, state) and q in row.name]
    found.sort(key=SORTS[sort.lstrip("-")], reverse=sort.startswith("-"))
    offset = max(0, offset)
    return {
        "total": len(found),
        "offset": offset,
        "counts": {each: sum(_is(row, each) for row in rows) for each in STATES},
        "head_tokens": facts.tokens,
        "rows": [row.to_json() for row in found[offset : offset + max(0, min(LIMIT, limit))]],
    }


def table(facts: RunFacts) -> list[PointRow]:
    """All points except deleted ones, oldest first."""
    return facts.kept("points", (facts.shape, facts.points_seen), lambda: _table(facts))


def by_name(facts: RunFacts) -> dict[str, PointRow]:
    """The rows of `table` by name."""
    key = facts.shape, facts.points_seen
    return facts.kept("points by name", key, lambda: {row.name: row for row in table(facts)})


def newest_healthy(facts: RunFacts) -> PointRow | None:
    """The newest point of the history that is whole: a start would continue from it."""
    return next((row for row in reversed(table(facts)) if row.state == HEALTHY), None)


def deleted(facts: RunFacts) -> list[Row]:
    """The points that the run, or a prune, has deleted: name, t (committed), consumed_tokens, step."""
    gone = fates(facts).deleted.difference(facts.files.points)
    rows = []
    for event in facts.events(EventKind.POINT_COMMITTED):
        key = parse_point_name(event.fields["point"])
        if event.fields["point"] in gone and key is not None:
            tokens = event.fields["cursor"]["consumed_tokens"]
            rows.append(
                {"name": event.fields["point"], "t": event.t, "consumed_tokens": tokens, "step": key.step}
            )
    return rows


def fates(facts: RunFacts) -> PointStatus:
    """The fate of every point, from journal, claims and prunes."""
    key = seen(facts), len(facts.files.parents), facts.files.deletions
    return facts.kept("fates", key, lambda: _fates(facts))


def _fates(facts: RunFacts) -> PointStatus:
    events = facts.events(EventKind.POINT_COMMITTED, EventKind.DELETING_POINTS, EventKind.POINTS_DELETED)
    inherited = (name for parent in facts.files.parents.values() for name in parent.inherited)
    told = point_fates(((event.kind, event.fields) for event in events), inherited)
    return told.without(facts.files.deletions)


def lost(facts: RunFacts) -> frozenset[str]:
    """Points that were committed and have no COMMIT, although nobody meant to delete them."""
    gone = fates(facts).kept.difference(facts.files.points)
    if not gone or not facts.columns.damages:
        return gone
    events = facts.events(EventKind.POINT_COMMITTED)
    committed_at = {event.fields["point"]: (event.attempt, event.seq) for event in events}
    return gone - maybe_deleted(gone, committed_at, facts.columns.damages)


def of_no_generation(facts: RunFacts) -> frozenset[str]:
    """Points whose generation is missing in the journal."""
    keys = {name: parse_point_name(name) for name in facts.files.points}
    return frozenset(n for n, k in keys.items() if k and (k.attempt, k.generation) not in facts.columns.index)


def _is(row: PointRow, state: str) -> bool:
    if state == PINNED:
        return row.pin is not None
    return state in (ALL, row.state)


def _table(facts: RunFacts) -> list[PointRow]:
    committed = {event.fields["point"]: event for event in facts.events(EventKind.POINT_COMMITTED)}
    findings = _findings(facts)
    held = facts.parent(facts.files.begun)
    names = set(facts.files.points)
    gone = {name for name in facts.missing if _is_missed(facts, name)}
    rows = []
    for name in newest_first({*names, *gone})[::-1]:
        row = _row(facts, name, facts.files.points.get(name), committed.get(name), findings.get(name))
        is_held = held is not None and held.parent is not None and held.parent.point_name == name
        rows.append(replace(row, held=is_held))
    return rows


def _is_missed(facts: RunFacts, name: str) -> bool:
    """Whether a point that lost its COMMIT is shown. One off the history of which nothing is left is not
    missed.
    """
    key = parse_point_name(name)
    return key is not None and (name in facts.files.leftovers or not facts.path.why_orphan(key))


def _row(
    facts: RunFacts, name: str, there: PointFacts | None, event: Event | None, finding: Row | None
) -> PointRow:
    key = parse_point_name(name)
    assert key is not None, "only names of points are listed"
    commit = there.commit if there is not None else None
    at = facts.columns.index.get((key.attempt, key.generation))
    begun = inherited(facts, key)
    start = begun.begins if begun is not None else None
    if at is not None:
        start = facts.columns.generations[at].start
    wrong = dict(there.wrong) if there is not None else {"COMMIT": "is missing"}
    if finding is not None:
        wrong = {**finding["wrong"], **wrong}
    if (mark := facts.files.marks.get(name)) is not None:
        wrong.pop("", None)  # the mark names the files
        wrong = {**{damage.file: damage.reason for damage in mark.damages}, **wrong}
    orphan_why = facts.path.why_orphan(key)
    run = facts.files.run
    if commit is not None and run is not None and commit.run_id != run.id:
        orphan_why = f"it belongs to run {commit.run_id or 'without an id'}"
    saved = SavedAs(
        commit=commit,
        cursor=event.fields["cursor"] if event is not None else _cursor(facts, name, there),
        event=event.fields if event is not None else None,
        t=event.t if event is not None else _time_of(facts, key),
        start=start,
    )
    found = Checked(
        wrong="; ".join(f"{file} {reason}".strip() for file, reason in wrong.items()),
        away=there.away if there is not None else "",
        checked=finding["checked"] if finding is not None else SIZES,
        t=finding["t"] if finding is not None else None,
    )
    return point_row(name, saved, found, orphan_why, facts.files.pins.get(name), mark)


def _cursor(facts: RunFacts, name: str, there: PointFacts | None) -> Mapping[str, Any]:
    """The cursor of a point whose commit is in no journal: from its step's record, or from a fork's
    origin.
    """
    key = parse_point_name(name)
    if key is not None and (begun := inherited(facts, key)) is not None and begun.begins is not None:
        return {f: getattr(begun.begins, f) for f in _COUNTS}
    row = _row_of(facts, key) if key is not None and there is not None else None
    if row is None:
        return {}
    columns = facts.columns
    return {f: int(columns[f][row]) for f in _COUNTS}


def inherited(facts: RunFacts, key: StateKey) -> ClaimParent | None:
    """The parent file of the claim that took over the state with which this fork begins; None for any other
    state.
    """
    parent = facts.parent(key.generation) if key.attempt == ORIGIN else None
    return parent if parent is not None and parent.origin is not None else None


def _time_of(facts: RunFacts, key: StateKey) -> float | None:
    if inherited(facts, key) is not None:  # it is this run's since that claim
        return stamp(facts.files.claims[key.generation].created)
    row = _row_of(facts, key)
    return float(facts.columns["t"][row]) if row is not None else None


def _row_of(facts: RunFacts, key: StateKey) -> int | None:
    at = facts.columns.index.get((key.attempt, key.generation))
    if at is None:
        return None
    rows = facts.columns.rows(at)
    found = rows[facts.columns["step"][rows] == key.step]
    return int(found[0]) if len(found) else None


def _findings(facts: RunFacts) -> dict[str, Row]:
    """The newest result for each point whose files were read, by the run or a verification: the amount
    `checked`, the time, and what is `wrong` by file.
    """
    told: list[tuple[float, str, Row]] = [
        (event.t, event.kind, event.fields)
        for event in facts.events(EventKind.POINT_VERIFIED, EventKind.DAMAGED_POINT)
    ]
    told += [
        (
            stamp(finding.created) or 0.0,
            EventKind.POINT_VERIFIED,
            {**each, "checked": finding.result["checked"]},
        )
        for finding in facts.files.findings
        if finding.what == VERIFY
        for each in finding.result["points"]
    ]
    found: dict[str, Row] = {}
    for t, kind, fields in sorted(told, key=lambda each: each[0]):
        known = found.get(fields["point"], {"checked": SIZES, "wrong": {}})
        wrong: dict[str, str] = dict(known["wrong"])
        if kind == EventKind.DAMAGED_POINT:
            wrong[fields["file"]] = fields["reason"]
            checked = known["checked"]
        else:  # damage is reported file by file, before or after the result
            checked = fields["checked"]
            wrong = (
                {} if fields["healthy"] else wrong or {"": "a file is not as committed; `verify` names it"}
            )
        found[fields["point"]] = {"t": t, "checked": checked, "wrong": wrong}
    return found


def seen(facts: RunFacts) -> int:
    """A number that grows with every event that may change the table."""
    return sum(len(facts.columns.kinds.get(kind, ())) for kind in _KINDS)


NEAR = 50  # number of steps whose mean is the loss at a point


def point(facts: RunFacts, name: str, now: float) -> dict[str, Any]:
    """The document of a point. Raises `RefusedError` if there is no such point, and `StorageError`."""
    row = by_name(facts).get(name)
    if row is None:
        raise RefusedError(f"{facts.name} has no resume point {name[:60]}", code="point.unknown")
    newest = newest_healthy(facts)
    there = facts.files.points.get(name)
    commit = there.commit if there is not None else None
    held, before = _read(facts, name), _before(facts, row)
    old = _read(facts, before.name) if before is not None else None
    return {
        "point": row.to_json(),
        "now": now,
        "newest": newest is not None and newest.name == name,
        "forked_from": _forked_from(facts, name),
        **_cost(facts, row),
        "cursor": encode(held.cursor) if held is not None else None,
        "before": before.name if before is not None else None,
        "differences": differences(old.config, held.config) if old is not None and held is not None else [],
        "optimizer_steps": commit.optimizer_steps if commit is not None else None,
        "weights_digest": commit.weights_digest if commit is not None else None,
        "files_digest": commit.files_digest if commit is not None else None,
        "files": _files(facts, name, row),
        "config": shown(held.config) if held is not None else None,
        "commands": _commands(facts, row),
    }


def differences(old: Row, new: Row) -> list[Row]:
    """How two flat configurations differ: field (of a source, by its name; the path of what differs inside a
    mapping), old, new, what a resume may do with it (rule), its meaning.
    """
    declared = {rule.path: rule for rule in field_rules()}
    rules = {path: rule.rule for path, rule in declared.items()}
    found = []
    for each in planned_differences(in_todays_fields(old), in_todays_fields(new), rules):
        path = "data.sources" if each.field.startswith("data.sources.") else each.field
        known = declared.get(path)
        found += [
            {
                "field": part.field,
                "old": redacted(part.old, part.field),
                "new": redacted(part.new, part.field),
                "rule": each.rule if known else None,
                "meaning": known.doc if known else "",
            }
            for part in each.parts()
        ]
    return found


def shown(flat: Row) -> Row:
    """A flat configuration without its secrets."""
    return {path: redacted(value, path) for path, value in flat.items()}


def _forked_from(facts: RunFacts, name: str) -> Row | None:
    """The run, its id, point and weights that a fork made this point from; None for any other point."""
    key = parse_point_name(name)
    begun = inherited(facts, key) if key is not None else None
    return encode(begun.origin.forked_from) if begun is not None and begun.origin is not None else None


def _read(facts: RunFacts, name: str) -> Point | None:
    try:
        return facts.files.store.read_point(name)
    except StorageError:
        raise
    except ResumePointError:
        return None  # damaged; its row has the reason, or will at the next look


def _before(facts: RunFacts, row: PointRow) -> PointRow | None:
    """The point it is compared with: the healthy one before it. For a damaged point, any one before it."""
    wanted = {HEALTHY} if row.state == HEALTHY else {HEALTHY, DAMAGED, ORPHAN}
    rows = [r for r in table(facts) if r.state in wanted]
    at = next(i for i, r in enumerate(rows) if r.name == row.name)
    return rows[at - 1] if at else None


def _cost(facts: RunFacts, row: PointRow) -> Row:
    """What going back there sets aside, and the loss there; None for a point off the history."""
    if row.state != HEALTHY or row.consumed_tokens is None:
        return {"aside": None, "loss": None}
    at = facts.index_after(row.consumed_tokens)
    near = facts.history["loss"][max(0, at - NEAR) : at]
    aside = {
        "steps": len(facts.history) - at,
        "tokens": max(0, facts.tokens - row.consumed_tokens),
        "seconds": round(float(facts.history["step_s"][at:].sum()), 1),
    }
    return {"aside": aside, "loss": short(mean_loss(near))}


def _files(facts: RunFacts, name: str, row: PointRow) -> list[Row]:
    there = facts.files.points.get(name)
    commit, wrong = (there.commit, there.wrong) if there is not None else (None, {})
    told = dict(part.split(" ", 1) for part in row.reason.split("; ") if " " in part)
    problems = {**told, **wrong} if row.state == DAMAGED else wrong
    entries = commit.files if commit is not None else ()
    return [{**encode(entry), "problem": problems.get(entry.path)} for entry in entries]


def _commands(facts: RunFacts, row: PointRow) -> dict[str, str]:
    """Commands for a terminal that do the same. CONFIG stands for an unrecorded configuration file."""
    uri, name = shlex.quote(facts.uri), row.name
    commanded = facts.commanded()
    train = commanded[1] if commanded else f"orchestrator train CONFIG run.name={shlex.quote(facts.name)}"
    fork = shlex.quote(f"{facts.uri}-fork")
    return {
        "resume": train,
        "rewind": f"orchestrator rewind {uri} --to {name}",
        "fork": f"orchestrator fork {uri} {fork} --at {name}",
        "export": f"orchestrator export {uri} {name} exports/{shlex.quote(facts.name)}-{row.step}",
        "verify": f"orchestrator verify {uri} {name}",
    }
