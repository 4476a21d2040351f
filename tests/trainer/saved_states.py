"""States as committed resume points, as the ranks of a group of any layout save them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from orchestrator.checkpoint.files.part_file import make_part, write_part
from orchestrator.checkpoint.files.part_writer import PartWritten
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.planning.state.state_layout import Layout, StateTensor, held_rows, written_rows
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.state_tensors import Item, rows_of, saved_tensors
from tests.trainer.member import tiny_job
from tests.trainer.states import begun_state


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


KEY = StateKey(attempt=1, generation=1, step=1)
SHAPES: dict[tuple[str, str], tuple[int, ...]] = {
    ("model", "embedding"): (50, 6),
    ("model", "bias"): (5,),
    ("model", "norm"): (2, 3),
    ("optimizer", "steps"): (),
    ("optimizer", "exp_avg.embedding"): (50, 6),
}


def whole_tensors(dtype: torch.dtype) -> dict[tuple[str, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def items_of(whole: dict[tuple[str, str], torch.Tensor], layout: Layout, rank: int) -> list[Item]:
    """What a rank holds, in memory of its own."""
    items = []
    for (group, name), tensor in whole.items():
        form = StateTensor(
            group=group,
            name=name,
            shape=tuple(tensor.shape),
            itemsize=tensor.element_size(),
            sharded=tensor.ndim > 0,
        )
        rows = held_rows(form, layout.num_shards, layout.shard_of(rank))
        mine = tensor[rows.start : rows.stop].clone() if tensor.ndim else tensor.clone()
        items.append(Item(whole=form, tensor=mine, first_row=rows.start))
    return items


def save(folder: Path, layout: Layout, items: Sequence[Sequence[Item]]) -> str:
    """Commits a point; the digest of its weights."""
    return commit_state(RunStore(Storage(str(folder))), KEY, layout, items).commit.weights_digest


CPU = torch.device("cpu")


def new_state(steps: int = 0) -> TrainState:
    job = tiny_job()
    state = begun_state(job.model, job.train, CPU, invariant=True)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in state.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        state.apply(0.01, num_units=1)
    return state
