"""Resume points as rows: what commands, the page and notebooks show of each.

`point_rows` reads them from storage while the run may delete some of them. The page makes the same rows from
what it keeps in memory (`views.points_table`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from orchestrator.checkpoint.export.export_files import export_states
from orchestrator.checkpoint.points.pins import Hold
from orchestrator.checkpoint.points.points import Commit, Point, newest_first, parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import Mark, point_path
from orchestrator.coordinator.attempt.survey import LOOKS, Survey, deleted_now, moved_on, survey
from orchestrator.errors import RefusedError
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.journal.journal_reader import JournalEvent
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.status.integrity import Verifying
from orchestrator.json_form import encode
from orchestrator.planning.state.state_layout import Layout, layout_of
from orchestrator.records.points import DamagedPointError
from orchestrator.storage.parallel import at_once

HEALTHY, DAMAGED, ORPHAN = "healthy", "damaged", "orphan"
SIZES, DIGESTS = "sizes", "digests"  # what was compared


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedAs:
    """What is known of a save: its COMMIT, where in the stream it is, and the line of its commit in the
    journal. None is what cannot be read.

    `cursor` has `consumed_samples`, `consumed_tokens` and `target_tokens`, or is empty. `t` is when it was
    committed, seconds since 1970; `start` its generation; `layout` how its group held the state.
    """

    commit: Commit | None
    cursor: Mapping[str, Any]
    event: Mapping[str, Any] | None
    t: float | None
    start: GenerationStart | None
    layout: Layout | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What reading a point's files found. `wrong` is the fault of each damaged file, `away` the nodes whose
    disks hold files that cannot be reached from here; both are empty if there are none. `checked` is `SIZES`
    or `DIGESTS`, `t` when digests were last read.
    """

    wrong: str = ""
    away: str = ""
    checked: str = SIZES
    t: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PointRow:
    """A committed resume point. None means unknown. Times are seconds since 1970.

    `t`: when it was committed. `healthy`: False if a file is damaged, True if every digest was read and is
    right, None if only sizes were compared; `reason` is the damage, or why files could not be read (`away`).
    `checked` and `checked_at`: what was compared, and when digests were last read. `on_lineage`: it belongs
    to the history; `orphan_why` says why not. `quarantined`: it is marked as damaged, by `mark`. `held`: the
    newest attempt continued from it. `nodes`: those whose disks hold its parts. `export`: the state of its
    automatic export. `peak_memory_bytes`: of each rank's process, if it was recorded.
    """

    name: str
    attempt: int
    generation: int
    step: int
    t: float | None
    consumed_samples: int | None
    consumed_tokens: int | None
    target_tokens: int | None
    world_size: int | None
    global_batch_size: int | None
    seq_len: int | None
    num_shards: int | None
    num_replicas: int | None
    bytes: int
    save_s: float | None
    save_blocked_s: float | None
    parent: str | None
    weights_digest: str
    healthy: bool | None
    reason: str
    away: str
    checked: str
    checked_at: float | None
    on_lineage: bool
    orphan_why: str
    pin: Mapping[str, Any] | None
    quarantined: bool
    mark: Mapping[str, Any] | None
    peak_memory_bytes: Mapping[str, Any] | list[int] | None = None
    held: bool = False
    nodes: tuple[str, ...] = ()
    export: str | None = None

    @property
    def state(self) -> str:
        """`DAMAGED`, else `ORPHAN`, else `HEALTHY`."""
        return DAMAGED if self.healthy is False else HEALTHY if self.on_lineage else ORPHAN

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with `state` and `pinned`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "nodes": list(self.nodes), "state": self.state, "pinned": self.pin is not None}


def point_row(
    name: str, saved: SavedAs, found: Checked, orphan_why: str, hold: Hold | None, mark: Mark | None
) -> PointRow:
    """Returns the row of a point. `orphan_why` is empty if it is on the history. `hold` is its pin."""
    key = parse_point_name(name)
    assert key is not None, "only names of points are listed"
    commit, start, event = saved.commit, saved.start, saved.event
    layout = saved.layout
    if layout is None and start is not None and start.num_shards:
        layout = layout_of(start.world_size, start.num_shards)
    num_bytes = sum(entry.bytes for entry in commit.files) if commit is not None else 0
    is_whole = found.checked == DIGESTS and not found.away
    return PointRow(
        name=name,
        attempt=key.attempt,
        generation=key.generation,
        step=key.step,
        t=saved.t,
        consumed_samples=saved.cursor.get("consumed_samples"),
        consumed_tokens=saved.cursor.get("consumed_tokens"),
        target_tokens=saved.cursor.get("target_tokens"),
        world_size=commit.world_size if commit else start.world_size if start else None,
        global_batch_size=start.global_batch_size if start else None,
        seq_len=start.seq_len if start else None,
        num_shards=layout.num_shards if layout else None,
        num_replicas=layout.num_replicas if layout else None,
        bytes=num_bytes or (event["bytes"] if event else 0),
        save_s=commit.save_s if commit else event["save_s"] if event else None,
        save_blocked_s=commit.save_blocked_s if commit else None,
        parent=commit.parent.point_name if commit and commit.parent else None,
        weights_digest=commit.weights_digest if commit else "",
        healthy=False if found.wrong else True if is_whole else None,
        reason=found.wrong or found.away,
        away="" if found.wrong else found.away,
        checked=found.checked,
        checked_at=found.t,
        on_lineage=not orphan_why,
        orphan_why=orphan_why,
        pin=pin_json(hold),
        quarantined=mark is not None,
        mark=_mark_json(mark),
        peak_memory_bytes=(event.get("peak_memory_bytes") or None) if event else None,
        nodes=tuple(str(each.node) for each in commit.nodes) if commit else (),
    )


def pin_json(hold: Hold | None) -> dict[str, Any] | None:
    """Returns the `pin` of a row: by whom, why and when."""
    if hold is None:
        return None
    return {"by": hold.by, "reason": hold.reason, "created": hold.created, "t": stamp(hold.created)}


def _mark_json(mark: Mark | None) -> dict[str, Any] | None:
    return None if mark is None else {"by": mark.by, "created": mark.created, "t": stamp(mark.created)}


def stamp(text: str) -> float | None:
    """A time of a sealed file as seconds since 1970; None if it is no time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


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
