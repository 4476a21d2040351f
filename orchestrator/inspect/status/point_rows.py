"""The committed points of a run as rows, read back from storage while the run may delete some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from orchestrator.checkpoint.export.export_files import export_states
from orchestrator.checkpoint.points.pins import Hold
from orchestrator.checkpoint.points.points import Point, newest_first, parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import point_path
from orchestrator.coordinator.attempt.survey import LOOKS, Survey, deleted_now, moved_on, survey
from orchestrator.errors import RefusedError
from orchestrator.inspect.status.verifying import Verifying
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.points import DamagedPointError
from orchestrator.storage.at_once import at_once

Rows = list[dict[str, Any]]
# fields that are unknown for a damaged point
_UNKNOWN = (
    "consumed_samples",
    "consumed_tokens",
    "target_tokens",
    "world_size",
    "global_batch_size",
    "seq_len",
    "num_shards",
    "num_replicas",
)


def names_of(store: RunStore, seen: Survey) -> list[str]:
    """The committed points, including those that lost their COMMIT. One off the lineage of which nothing is
    left is not shown.
    """
    rest = seen.missing.intersection(store.leftovers()) if seen.missing else ()
    return newest_first({*seen.committed, *seen.lost, *rest})[::-1]


def standing(store: RunStore, read: Callable[[Survey], Rows]) -> Rows:
    """The rows from `read` for points that still exist afterwards. Reads again if the run has deleted all
    meanwhile.
    """
    for _ in range(LOOKS):
        rows = read(survey(store, with_steps=False))
        if (left := not_deleted(store, rows)) or not rows:
            return left
    raise moved_on(store)


def not_deleted(store: RunStore, rows: Rows) -> Rows:
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


def point_rows(store: RunStore, seen: Survey, reading: Verifying | None = None) -> Rows:
    """A row for each point: the document of `points --json`.

    It compares documents and sizes, so `healthy` is None for a point without a fault; with `reading` it reads
    every byte, too. From afar it reads several points at a time.
    """
    names = names_of(store, seen)
    read = {row["name"]: row for row in reading.rows(names)} if reading is not None else {}
    pins, exports = store.pins(), export_states(store.storage)
    rows = at_once(store.storage, partial(_row, store, seen, pins, read), names)
    marked = store.quarantined()
    return [{**row, "quarantined": row["name"] in marked, "export": exports.get(row["name"])} for row in rows]


def _row(
    store: RunStore,
    seen: Survey,
    pins: Mapping[str, Hold],
    read: Mapping[str, Mapping[str, Any]],
    name: str,
) -> dict[str, Any]:
    key = parse_point_name(name)
    assert key is not None, "point_names gives names of points"
    row: dict[str, Any] = {
        "name": name,
        "attempt": key.attempt,
        "generation": key.generation,
        "step": key.step,
    }
    point, layout, wrong = _look(store, name, read.get(name))
    away = "" if wrong else _away(store, point, read.get(name))
    on_lineage = seen.lineage.on_lineage(key)
    pin = {f: getattr(pins[name], f) for f in ("by", "reason", "created")} if name in pins else None
    healthy = False if wrong else None if away or name not in read else True
    row |= {**_contents(point, layout), "healthy": healthy, "reason": wrong or away}
    return row | {"on_lineage": on_lineage, "pin": pin, "away": away, "nodes": _nodes(point)}


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


def _nodes(point: Point | None) -> list[str]:
    """The nodes whose disks hold its parts, for people; empty if they lie beside COMMIT."""
    return [str(each.node) for each in point.commit.nodes] if point is not None else []


def _contents(point: Point | None, layout: Layout | None) -> dict[str, Any]:
    """The content of a point, and the result of its save; unknown for a damaged one."""
    if point is None or layout is None:
        return {
            **dict.fromkeys(_UNKNOWN),
            "bytes": 0,
            "save_blocked_s": 0.0,
            "save_s": 0.0,
            "parent": None,
            "weights_digest": "",
        }
    commit, cursor = point.commit, point.cursor
    return {
        "consumed_samples": cursor.consumed_samples,
        "consumed_tokens": cursor.consumed_tokens,
        "target_tokens": cursor.target_tokens,
        "world_size": commit.world_size,
        "global_batch_size": point.config["train.global_batch_size"],
        "seq_len": point.config["pack.seq_len"],
        "num_shards": layout.num_shards,
        "num_replicas": layout.num_replicas,
        "bytes": point.num_bytes,
        "save_blocked_s": commit.save_blocked_s,
        "save_s": commit.save_s,
        "parent": commit.parent.point_name if commit.parent else None,
        "weights_digest": commit.weights_digest,
    }
