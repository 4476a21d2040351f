"""The attempts of a run as a commit graph.

Each attempt has what it did, what it continued, and the lane in which it is drawn. Lane 0 is the history.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.config.redaction import redacted, redacted_text
from orchestrator.config.sections import NAME
from orchestrator.coordinator.attempt.forking import PARENT_OF_FORK
from orchestrator.history.claims.claim_files import RESTARTED
from orchestrator.history.claims.claims import ORIGIN, ClaimParent
from orchestrator.inspect.views.facts.effective_steps import FATES, LOST, REWOUND, StepSpan
from orchestrator.inspect.views.facts.facts import RunFacts
from orchestrator.inspect.views.points_table import by_name
from orchestrator.records.steps import StateKey

LIMIT = 500
_SKIP = frozenset({"resume.from", "run.storage"})

Row = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Rail:
    """An attempt's place in the graph: its `lane`, the lanes that pass through its row, and those that join
    the history there.
    """

    attempt: int
    lane: int
    through: list[int]
    joins: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A run of the same storage that began with a point of another: its name, that run's id, that point."""

    run: str
    of: str
    point: str


def attempts(
    facts: RunFacts, routine: bool = False, offset: int = 0, limit: int = 200, forks: Sequence[Fork] = ()
) -> dict[str, Any]:
    """A page of the attempts, newest first; those that are nothing but restarts of the coordinator are left
    out unless `routine`. `forks`: those of the storage; the ones of this run stand at the attempt that made
    their point.
    """
    made = _forks(facts, forks)
    rows = [{**row, "forks": made.get(row["attempt"], [])} for row in _rows(facts)]
    shown = [row for row in rows if routine or not _is_routine(row)]
    offset = max(0, offset)
    page = shown[offset : offset + max(0, min(LIMIT, limit))]
    return {"total": len(shown), "all": len(rows), "offset": offset, "rows": page}


def lanes(numbers: list[int], on_history: frozenset[int], parent_of: Mapping[int, int | None]) -> list[Rail]:
    """The graph, newest attempt first. `parent_of`: the attempt whose state each continues."""
    rails, lane_of, tips = list[Rail](), dict[int, int](), dict[int, int]()
    closing: dict[int, int] = {}  # lanes of branches that left the history at an attempt further down
    for number in sorted(numbers, reverse=True):  # lanes open at tips
        lane = 0
        if number not in on_history:
            used = {*tips.values(), *closing}
            lane = lane_of.get(number) or next(i for i in range(1, len(numbers) + 2) if i not in used)
            tips[number] = lane
        through = sorted({0, *tips.values(), *closing})
        joins = sorted(each for each, until in closing.items() if until == number)
        rails.append(Rail(attempt=number, lane=lane, through=through, joins=joins))
        for each in joins:
            del closing[each]
        parent = parent_of.get(number)
        if lane:
            del tips[number]
            if parent is not None and (parent in on_history or parent in tips):
                closing[lane] = parent
            elif parent is not None:
                lane_of[parent] = tips[parent] = lane
    return rails


def _is_routine(row: Row) -> bool:
    told = row["changes"] or row["forks"] or row["joins"] or row["newest"] or not row["on_history"]
    return row["why"] == RESTARTED and not told


def _rows(facts: RunFacts) -> list[Row]:
    rows = facts.kept("lanes", (facts.shape, facts.points_seen), lambda: _all(facts))
    if rows:  # the newest attempt continues between two generations
        newest = rows[0]
        newest |= _trained(facts, newest["attempt"], facts.path.pieces)
        newest["t1"] = facts.wrote(newest["attempt"])
    return rows


def _all(facts: RunFacts) -> list[Row]:
    claims = facts.files.claims
    firsts, generations = _firsts_and_generations(facts)
    continued: dict[int, StateKey | None] = {}
    for number in claims:
        parent = facts.parent(number)
        continued[number] = firsts.get(number) or (parent.parent if parent is not None else None)
    by_attempt: dict[int, list[StepSpan]] = {}
    for piece in facts.path.pieces:
        by_attempt.setdefault(facts.columns.generations[piece.generation].id[0], []).append(piece)
    parents = {n: p.attempt if p else None for n, p in continued.items()}
    graph = lanes(list(claims), facts.path.attempts, parents)
    points, rows = by_name(facts), list[Row]()
    for rail in graph:
        number = rail.attempt
        pieces = by_attempt.get(number, [])
        row = _row(facts, rail, continued[number], pieces, generations.get(number, 0), points)
        rows.append(row)
    for i, row in enumerate(rows):
        row["below"] = rows[i + 1]["through"] if i + 1 < len(rows) else []
        row["above"] = rows[i - 1]["through"] if i else []
    return rows


def _firsts_and_generations(facts: RunFacts) -> tuple[dict[int, StateKey | None], dict[int, int]]:
    """By attempt: what its first generation continued, and how many it had."""
    firsts: dict[int, StateKey | None] = {}
    generations: dict[int, int] = {}
    for generation in facts.generations():
        number = generation.id[0]
        generations[number] = generations.get(number, 0) + 1
        if number not in firsts and generation.start is not None:
            firsts[number] = generation.start.parent
    return firsts, generations


def _row(
    facts: RunFacts,
    rail: Rail,
    state: StateKey | None,
    pieces: list[StepSpan],
    num_generations: int,
    points: Container[str],
) -> Row:
    """An attempt that continued `state`, without the lanes beside it."""
    claims, number = facts.files.claims, rail.attempt
    claim, parent, end = claims[number], facts.parent(number), facts.end_of(number)
    after = claims.get(number + 1)
    return {
        "attempt": number,
        "why": claim.why,
        "t0": facts.began(number),
        "t1": facts.wrote(number),
        "lane": rail.lane,
        "through": rail.through,
        "joins": rail.joins,
        "on_history": number in facts.path.attempts,
        **_trained(facts, number, pieces),
        "generations": num_generations,
        "outcome": end.outcome if end is not None else None,
        "ended_by": end.by if end is not None else None,
        "reason": redacted_text(end.reason) if end is not None else "",
        "parent": state.point_name if state is not None else None,
        "parent_is_point": state is not None and state.point_name in points,
        "changes": _changes(parent),
        "forked_from": _forked_from(parent),
        "host": claim.host or None,
        "newest": number == facts.files.begun,
        "next_why": after.why if after is not None else None,
    }


def _changes(parent: ClaimParent | None) -> list[Row]:
    """The fields of the configuration that differ from those of what was continued."""
    return [
        {
            "field": part.field,
            "old": redacted(part.old, part.field),
            "new": redacted(part.new, part.field),
            "rule": d.rule,
        }
        for d in (parent.differences if parent is not None else ())
        if d.field not in _SKIP
        for part in d.parts()
    ]


def _forked_from(parent: ClaimParent | None) -> Row | None:
    """Of which run (name, uri, id) and point it is a fork, where its parent file says so."""
    if parent is None or parent.origin is None:
        return None
    found = parent.origin.forked_from
    name = found.run.rstrip("/").rpartition("/")[2]
    return {"run": name, "uri": found.run, "run_id": found.run_id, "point": found.point}


def _forks(facts: RunFacts, forks: Sequence[Fork]) -> dict[int, list[Row]]:
    """Those of this run, by the attempt that made their point; what a fork itself began with counts for the
    claim that took it over. `path` is where one lies that is not among `forks`, as its pin says: it cannot be
    opened here.
    """
    found: dict[int, list[Row]] = {}
    run_id = facts.files.run.id if facts.files.run is not None else ""
    here = [(fork.run, fork.point, None) for fork in forks if run_id and fork.of == run_id]
    known = {(run, point) for run, point, _ in here}
    there = [(run, point, path) for run, point, path in _pinned_forks(facts) if (run, point) not in known]
    for run, point, path in [*here, *there]:
        key = parse_point_name(point)
        if key is not None:
            number = key.generation if key.attempt == ORIGIN else key.attempt
            fork = {"run": run, "point": point, "step": key.step, "is_here": path is None, "path": path}
            found.setdefault(number, []).append(fork)
    return found


def _pinned_forks(facts: RunFacts) -> list[tuple[str, str, str]]:
    """(run, point, folder) of the forks that the pins of their parents name, wherever they lie: a fork pins
    its point before it begins. Whether one is still there is not looked at; nothing tells of one whose pin
    was given back, or that found another pin on its point.
    """
    found = []
    for point, pin in sorted(facts.files.pins.items()):
        path = pin.reason.removeprefix(PARENT_OF_FORK)
        name = path.rstrip("/").rpartition("/")[2]
        if path != pin.reason and re.fullmatch(NAME, name):  # a replay's scratch folder has no name of a run
            found.append((redacted_text(name), point, redacted_text(path)))
    return found


def _trained(facts: RunFacts, number: int, pieces: list[StepSpan]) -> Row:
    """What an attempt trained, and what of it was left aside."""
    columns, worlds = facts.columns, list[int]()
    mine = [piece for piece in pieces if columns.generations[piece.generation].id[0] == number]
    for piece in mine:
        start = columns.generations[piece.generation].start
        if start is not None and (not worlds or worlds[-1] != start.world_size):
            worlds.append(start.world_size)
    aside = {
        FATES[fate]: sum(len(piece.rows) for piece in mine if piece.fate == fate) for fate in (LOST, REWOUND)
    }
    return {
        "first_step": int(columns["step"][mine[0].rows[0]]) if mine else None,
        "last_step": int(columns["step"][mine[-1].rows[-1]]) if mine else None,
        "worlds": worlds,
        "trained": sum(len(piece.rows) for piece in mine),
        "aside": sum(aside.values()),
        "aside_by_fate": {fate: steps for fate, steps in aside.items() if steps},
    }
