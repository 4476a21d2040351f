"""The committed points of a run as rows, read back from storage while the run may delete some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from orchestrator.checkpoint.export.export_files import export_states
from orchestrator.checkpoint.points.points import Point, newest_first, parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import point_path
from orchestrator.coordinator.attempt.survey import LOOKS, Survey, deleted_now, moved_on, survey
from orchestrator.errors import RefusedError
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.history.journal.journal_reader import JournalEvent
from orchestrator.inspect.status.point_row import (
    DIGESTS,
    SIZES,
    Checked,
    PointRow,
    SavedAs,
    pin_json,
    point_row,
    stamp,
)
from orchestrator.inspect.status.verifying import Verifying
from orchestrator.json_form import encode
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.points import DamagedPointError
from orchestrator.storage.at_once import at_once


def names_of(store: RunStore, seen: Survey) -> list[str]:
    """The committed points, including those that lost their COMMIT. One off the lineage of which nothing is
    left is not shown.
    """
    rest = seen.missing.intersection(store.leftovers()) if seen.missing else ()
    return newest_first({*seen.committed, *seen.lost, *rest})[::-1]


def standing(store: RunStore, read: Callable[[Survey], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows from `read` for points that still exist afterwards. Reads again if the run has deleted all
    meanwhile.
    """
    for _ in range(LOOKS):
        rows = read(survey(store, with_steps=False))
        if (left := not_deleted(store, rows)) or not rows:
            return left
    raise moved_on(store)


def not_deleted(store: RunStore, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without points that are incomplete because the run deleted them during the read."""
    unfit = [row["name"] for row in rows if row["healthy"] is False or row["away"]]
    gone = deleted_now(store, unfit)
    return [row for row in rows if row["name"] not in gone]


def verified_point(store: RunStore, uri: str, point: str, reading: Verifying) -> dict[str, Any]:
    """The row of one point of the run at `uri`, as `reading` finds it. Raises `RefusedError` for an unknown
    name, and for a point that the run deletes while it is read.
    """
    names = names_of(store, survey(store, with_steps=False))
    if point not in names:
        raise RefusedError(
            f"{uri} has no resume point {point}; it has {', '.join(names) or 'none'}", code="point.unknown"
        )
    for row in not_deleted(store, reading.rows([point])):
        return row
    raise RefusedError(
        f"{uri}: the run deleted resume point {point} while it was read, because of resume.keep_latest; "
        "verify a newer one",
        code="point.deleted",
    )


def point_rows(store: RunStore, seen: Survey, reading: Verifying | None = None) -> list[PointRow]:
    """A row for each point.

    It compares documents and sizes, so `healthy` is None for a point without a fault; with `reading` it reads
    every byte, too. From afar it reads several points at a time.
    """
    names = names_of(store, seen)
    read = {row["name"]: row for row in reading.rows(names)} if reading is not None else {}
    commits = {e.fields["point"]: e for e in seen.journal.events if e.kind == EventKind.POINT_COMMITTED}
    rows = at_once(store.storage, partial(_row, store, seen, commits, read), names)
    held = seen.parents[-1].parent if seen.parents else None
    exports, pins, marks = export_states(store.storage), store.pins(), store.quarantined()
    return [
        replace(
            row,
            held=held is not None and held.point_name == row.name,
            export=exports.get(row.name),
            pin=pin_json(pins.get(row.name)),
            quarantined=row.name in marks,
        )
        for row in rows
    ]


def _row(
    store: RunStore,
    seen: Survey,
    commits: Mapping[str, JournalEvent],
    read: Mapping[str, Mapping[str, Any]],
    name: str,
) -> PointRow:
    key, event = parse_point_name(name), commits.get(name)
    assert key is not None, "point_names gives names of points"
    point, layout, wrong = _look(store, name, read.get(name))
    away = "" if wrong else _away(store, point, read.get(name))
    started = (start for start in seen.journal.generations if start.id == (key.attempt, key.generation))
    saved = SavedAs(
        commit=point.commit if point is not None else None,
        cursor=encode(point.cursor) if point is not None else event.fields["cursor"] if event else {},
        event=event.fields if event is not None else None,
        t=stamp(event.time) if event is not None else None,
        start=next(started, None),
        layout=layout,
    )
    found = Checked(wrong=wrong, away=away, checked=DIGESTS if name in read else SIZES)
    return point_row(name, saved, found, seen.lineage.why_orphan(key), None, None)


def _look(
    store: RunStore, name: str, read: Mapping[str, Any] | None
) -> tuple[Point | None, Layout | None, str]:
    """Returns a point and the layout of the state on the group that saved it (None: damaged), or else the
    fault. `read`: the result of reading all its bytes.
    """
    if read is not None and read["damaged"]:
        return None, None, "; ".join(f"{each['file']} {each['reason']}" for each in read["damaged"])
    damages = store.compare_sizes(name) if read is None else []
    if damages:
        return None, None, "; ".join(f"{damage.file} {damage.reason}" for damage in damages)
    try:
        return store.read_point(name), store.read_manifest(name).layout, ""
    except DamagedPointError as error:  # since it was looked at
        return None, None, "; ".join(f"{damage.file} {damage.reason}" for damage in error.damages)


def _away(store: RunStore, point: Point | None, read: Mapping[str, Any] | None) -> str:
    """The parts on nodes that cannot be reached from here; empty if there are none."""
    if read is not None:
        return str(read["away"])
    if point is None or not point.commit.nodes:
        return ""
    paths = (point_path(point.name, entry.path) for entry in point.commit.files)
    return next(filter(None, map(store.storage.away, paths)), "")
