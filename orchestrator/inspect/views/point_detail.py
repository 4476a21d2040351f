"""One resume point: its content, its differences from the one before it, the cost of going back, and
commands.

It reads the point's documents and checks their digests. It does not read its tensors.
"""

from __future__ import annotations

import shlex
from typing import Any

from orchestrator.checkpoint.points.points import Point, parse_point_name
from orchestrator.config.field_rules import field_rules, in_todays_fields
from orchestrator.config.redaction import redacted
from orchestrator.errors import RefusedError, ResumePointError, StorageError
from orchestrator.inspect.views.facts.facts import Facts, mean_loss, short
from orchestrator.inspect.views.points_table import (
    DAMAGED,
    HEALTHY,
    ORPHAN,
    by_name,
    inherited,
    newest_healthy,
    table,
)
from orchestrator.json_form import encode
from orchestrator.planning.resume.identity import differences as planned_differences

NEAR = 50  # number of steps whose mean is the loss at a point

Row = dict[str, Any]


def point(facts: Facts, name: str, now: float) -> dict[str, Any]:
    """The document of a point. Raises `RefusedError` if there is no such point, and `StorageError`."""
    row = by_name(facts).get(name)
    if row is None:
        raise RefusedError(f"{facts.name} has no resume point {name[:60]}", code="point.unknown")
    newest = newest_healthy(facts)
    there = facts.files.points.get(name)
    commit = there.commit if there is not None else None
    held, before = _read(facts, name), _before(facts, row)
    old = _read(facts, before["name"]) if before is not None else None
    return {
        "point": row,
        "now": now,
        "newest": newest is not None and newest["name"] == name,
        "forked_from": _forked_from(facts, name),
        **_cost(facts, row),
        "cursor": encode(held.cursor) if held is not None else None,
        "before": before["name"] if before is not None else None,
        "differences": differences(old.config, held.config) if old is not None and held is not None else [],
        "optimizer_steps": commit.optimizer_steps if commit is not None else None,
        "weights_digest": commit.weights_digest if commit is not None else None,
        "files_digest": commit.files_digest if commit is not None else None,
        "files": _files(facts, name, row),
        "config": shown(held.config) if held is not None else None,
        "commands": _commands(facts, row),
    }


def differences(old: Row, new: Row) -> list[Row]:
    """How two flat configurations differ: field (of a source, by its name), old, new, what a resume may do
    with it (rule), its meaning.
    """
    declared = {rule.path: rule for rule in field_rules()}
    rules = {path: rule.rule for path, rule in declared.items()}
    found = []
    for each in planned_differences(in_todays_fields(old), in_todays_fields(new), rules):
        path = "data.sources" if each.field.startswith("data.sources.") else each.field
        known = declared.get(path)
        found.append(
            {
                "field": each.field,
                "old": redacted(each.old, each.field),
                "new": redacted(each.new, each.field),
                "rule": each.rule if known else None,
                "meaning": known.doc if known else "",
            }
        )
    return found


def shown(flat: Row) -> Row:
    """A flat configuration without its secrets."""
    return {path: redacted(value, path) for path, value in flat.items()}


def _forked_from(facts: Facts, name: str) -> Row | None:
    """The run, its id, point and weights that a fork made this point from; None for any other point."""
    key = parse_point_name(name)
    begun = inherited(facts, key) if key is not None else None
    return encode(begun.origin.forked_from) if begun is not None and begun.origin is not None else None


def _read(facts: Facts, name: str) -> Point | None:
    try:
        return facts.files.store.read_point(name)
    except StorageError:
        raise
    except ResumePointError:
        return None  # damaged; its row has the reason, or will at the next look


def _before(facts: Facts, row: Row) -> Row | None:
    """The point it is compared with: the healthy one before it. For a damaged point, any one before it."""
    wanted = {HEALTHY} if row["state"] == HEALTHY else {HEALTHY, DAMAGED, ORPHAN}
    rows = [r for r in table(facts) if r["state"] in wanted]
    at = next(i for i, r in enumerate(rows) if r["name"] == row["name"])
    return rows[at - 1] if at else None


def _cost(facts: Facts, row: Row) -> Row:
    """What going back there sets aside, and the loss there; None for a point off the history."""
    if row["state"] != HEALTHY or row["consumed_tokens"] is None:
        return {"aside": None, "loss": None}
    at = facts.index_after(row["consumed_tokens"])
    near = facts.history["loss"][max(0, at - NEAR) : at]
    aside = {
        "steps": len(facts.history) - at,
        "tokens": max(0, facts.tokens - row["consumed_tokens"]),
        "seconds": round(float(facts.history["step_s"][at:].sum()), 1),
    }
    return {"aside": aside, "loss": short(mean_loss(near))}


def _files(facts: Facts, name: str, row: Row) -> list[Row]:
    there = facts.files.points.get(name)
    commit, wrong = (there.commit, there.wrong) if there is not None else (None, {})
    told = dict(part.split(" ", 1) for part in row["reason"].split("; ") if " " in part)
    problems = {**told, **wrong} if row["state"] == DAMAGED else wrong
    entries = commit.files if commit is not None else ()
    return [{**encode(entry), "problem": problems.get(entry.path)} for entry in entries]


def _commands(facts: Facts, row: Row) -> dict[str, str]:
    """Commands for a terminal that do the same. CONFIG stands for an unrecorded configuration file."""
    uri, name = shlex.quote(facts.uri), row["name"]
    commanded = facts.commanded()
    train = commanded[1] if commanded else f"orchestrator train CONFIG run.name={shlex.quote(facts.name)}"
    fork = shlex.quote(f"{facts.uri}-fork")
    return {
        "resume": train,
        "rewind": f"orchestrator rewind {uri} --to {name}",
        "fork": f"orchestrator fork {uri} {fork} --at {name}",
        "export": f"orchestrator export {uri} {name} exports/{shlex.quote(facts.name)}-{row['step']}",
        "verify": f"orchestrator verify {uri} {name}",
    }
