"""States as committed resume points, as the ranks of a group of any layout save them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.checkpoint.files.part_file import make_part, write_part
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.writer.part_job import PartWritten
from orchestrator.planning.state.state_layout import Layout, written_rows
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.trainer.loading.state_tensors import Item, rows_of, saved_tensors


def write_share(
    items: Sequence[Item], point: str, layout: Layout, rank: int, storage: Storage
) -> PartWritten:
    """Writes this rank's part of the point, whole and durable: of `items`, which are all that it holds, those
    rows that it writes. Raises `StorageError`.
    """
    rows = written_rows([item.whole for item in items], layout, rank)
    parts = [rows_of(item, its) for item, its in zip(items, rows, strict=True) if its]
    made = make_part(point, layout, rank, parts)
    return PartWritten(entry=write_part(storage, point, made), sums=made.sums)


def commit_state(
    store: RunStore,
    key: StateKey,
    layout: Layout,
    items: Sequence[Sequence[Item]],
    *,
    optimizer_steps: int = 1,
    config: Mapping[str, Any] | None = None,
    rng: Mapping[str, Any] | None = None,
) -> Point:
    """A state, of which each rank holds its `items`."""
    votes = []
    for rank, mine in enumerate(items):
        written = write_share(mine, key.point_name, layout, rank, store.storage)
        votes.append(
            Vote(
                key=key,
                rank=rank,
                world_size=layout.world_size,
                cursor=Cursor(),
                optimizer_steps=optimizer_steps,
                files=(written.entry,),
                tensors=() if rank else saved_tensors(mine),
                save_blocked_s=0.0,
                records=(),
                layout=(layout.num_shards, layout.num_replicas),
                sums=written.sums,
            )
        )
    return store.commit_point(votes, config or {}, rng or {}, None)
