"""The resume points of a run as a table: position, health and pins of each.

Health here is from sizes, and from earlier reads of digests (by the run itself, or `verify`): no file of a
point is read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.checkpoint.points.point_status import Fates, maybe_deleted, point_fates
from orchestrator.checkpoint.points.points import newest_first, parse_point_name
from orchestrator.errors import RefusedError
from orchestrator.history.claims.claims import ORIGIN, ClaimParent
from orchestrator.history.finding_files import VERIFY
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.inspect.status.point_row import (
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
from orchestrator.inspect.views.facts.facts import Facts
from orchestrator.inspect.views.facts.files import PointFacts
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
    facts: Facts, state: str = ALL, sort: str = "-step", q: str = "", offset: int = 0, limit: int = 100
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


def table(facts: Facts) -> list[PointRow]:
    """All points except deleted ones, oldest first."""
    return facts.kept("points", (facts.shape, facts.points_seen), lambda: _table(facts))


def by_name(facts: Facts) -> dict[str, PointRow]:
    """The rows of `table` by name."""
    key = facts.shape, facts.points_seen
    return facts.kept("points by name", key, lambda: {row.name: row for row in table(facts)})


def newest_healthy(facts: Facts) -> PointRow | None:
    """The newest point of the history that is whole: a start would continue from it."""
    return next((row for row in reversed(table(facts)) if row.state == HEALTHY), None)


def deleted(facts: Facts) -> list[Row]:
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


def fates(facts: Facts) -> Fates:
    """The fate of every point, from journal, claims and prunes."""
    key = seen(facts), len(facts.files.parents), facts.files.deletions
    return facts.kept("fates", key, lambda: _fates(facts))


def _fates(facts: Facts) -> Fates:
    events = facts.events(EventKind.POINT_COMMITTED, EventKind.DELETING_POINTS, EventKind.POINTS_DELETED)
    inherited = (name for parent in facts.files.parents.values() for name in parent.inherited)
    told = point_fates(((event.kind, event.fields) for event in events), inherited)
    return told.without(facts.files.deletions)


def lost(facts: Facts) -> frozenset[str]:
    """Points that were committed and have no COMMIT, although nobody meant to delete them."""
    gone = fates(facts).kept.difference(facts.files.points)
    if not gone or not facts.columns.damages:
        return gone
    events = facts.events(EventKind.POINT_COMMITTED)
    committed_at = {event.fields["point"]: (event.attempt, event.seq) for event in events}
    return gone - maybe_deleted(gone, committed_at, facts.columns.damages)


def of_no_generation(facts: Facts) -> frozenset[str]:
    """Points whose generation is missing in the journal."""
    keys = {name: parse_point_name(name) for name in facts.files.points}
    return frozenset(n for n, k in keys.items() if k and (k.attempt, k.generation) not in facts.columns.index)


def _is(row: PointRow, state: str) -> bool:
    if state == PINNED:
        return row.pin is not None
    return state in (ALL, row.state)


def _table(facts: Facts) -> list[PointRow]:
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


def _is_missed(facts: Facts, name: str) -> bool:
    """Whether a point that lost its COMMIT is shown. One off the history of which nothing is left is not
    missed.
    """
    key = parse_point_name(name)
    return key is not None and (name in facts.files.leftovers or not facts.path.why_orphan(key))


def _row(
    facts: Facts, name: str, there: PointFacts | None, event: Event | None, finding: Row | None
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


def _cursor(facts: Facts, name: str, there: PointFacts | None) -> Mapping[str, Any]:
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


def inherited(facts: Facts, key: StateKey) -> ClaimParent | None:
    """The parent file of the claim that took over the state with which this fork begins; None for any other
    state.
    """
    parent = facts.parent(key.generation) if key.attempt == ORIGIN else None
    return parent if parent is not None and parent.origin is not None else None


def _time_of(facts: Facts, key: StateKey) -> float | None:
    if inherited(facts, key) is not None:  # it is this run's since that claim
        return stamp(facts.files.claims[key.generation].created)
    row = _row_of(facts, key)
    return float(facts.columns["t"][row]) if row is not None else None


def _row_of(facts: Facts, key: StateKey) -> int | None:
    at = facts.columns.index.get((key.attempt, key.generation))
    if at is None:
        return None
    rows = facts.columns.rows(at)
    found = rows[facts.columns["step"][rows] == key.step]
    return int(found[0]) if len(found) else None


def _findings(facts: Facts) -> dict[str, Row]:
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


def seen(facts: Facts) -> int:
    """A number that grows with every event that may change the table."""
    return sum(len(facts.columns.kinds.get(kind, ())) for kind in _KINDS)
