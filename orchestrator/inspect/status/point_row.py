"""A resume point as commands, the page and notebooks show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from orchestrator.checkpoint.points.pins import Hold
from orchestrator.checkpoint.points.points import Commit, parse_point_name
from orchestrator.checkpoint.points.quarantine import Mark
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.planning.state.state_layout import Layout, layout_of

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
