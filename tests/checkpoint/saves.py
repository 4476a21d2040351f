"""Committed points with a state of several tensors, and what is read of them."""

from __future__ import annotations

from orchestrator.checkpoint.files.manifest import Name, PartDamage, damaged
from orchestrator.checkpoint.files.part_file import write_part
from orchestrator.checkpoint.files.reading import BytesTarget, PointReader, TensorRequest
from orchestrator.checkpoint.points.store import CommittedFiles, RunStore
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from tests.checkpoint.files.samples import STATE, part_of, saved
from tests.checkpoint.samples import CONFIG as JOB
from tests.checkpoint.samples import cursor


def commit_parts(store: RunStore, at: StateKey, layout: Layout, run_id: str = "") -> str:
    """The name of a point whose bytes are those of its step, saved by a group of this layout."""
    votes = []
    for rank in range(layout.world_size):
        part = part_of(layout, rank, seed=at.step, point=at.point_name)
        votes.append(
            Vote(
                key=at,
                rank=rank,
                world_size=layout.world_size,
                cursor=cursor(at),
                optimizer_steps=at.step,
                files=(write_part(store.storage, at.point_name, part),),
                tensors=tuple(saved().values()) if rank == 0 else (),
                save_blocked_s=0.0,
                records=(),
                layout=(layout.num_shards, layout.num_replicas),
                sums=part.sums,
            )
        )
    return store.commit_point(votes, JOB, {"rule": "none"}, None, run_id=run_id).name


def read_state(store: RunStore, name: str) -> dict[Name, bytes]:
    """All tensors of a point, whole. Raises `DamagedPointError`."""
    manifest = CommittedFiles(store.storage).manifest(name)
    held = {(each.group, each.name): bytearray(each.num_rows * each.row_bytes) for each in STATE}
    wanted = {
        (each.group, each.name): TensorRequest(
            rows=range(each.num_rows), target=BytesTarget(held[each.group, each.name])
        )
        for each in STATE
    }
    try:
        PointReader(store.storage, manifest).read(wanted)
    except PartDamage as error:
        raise damaged(name, error) from error
    return {each: bytes(memory) for each, memory in held.items()}
