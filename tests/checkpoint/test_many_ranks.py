"""A save of 10,000 ranks: what is stored of it stays small."""

from __future__ import annotations

import pytest

from orchestrator.checkpoint.commit.commit_events import (
    Acknowledge,
    ClaimChecked,
    CommitWritten,
    GenerationFormed,
    JournalDurable,
    VoteCast,
    WriteCommit,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.checkpoint.files.part_file import FOLDER, part_path
from orchestrator.checkpoint.points.points import COMMIT
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.planning.state.state_layout import Layout, layout_of
from orchestrator.records.points import FileEntry, SavedTensor, Vote
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import CONFIG, cursor, key, no_sleep
from tests.storage.crashfs import Files, ModelDisk

NUM_RANKS, NUM_TENSORS = 10_000, 900
AT = key(480, attempt=3, generation=7)
CONTENT = b"12345678"
TENSORS = tuple(
    SavedTensor(
        group=group,
        name=f"{moment}model.layers.{number}.self_attn.q_proj.weight",
        dtype="float32",
        shape=(65_536, 8192),
        sharded=True,
    )
    for group, moment in (("model", ""), ("optimizer", "exp_avg."), ("optimizer", "exp_avg_sq."))
    for number in range(NUM_TENSORS // 3)
)


def vote(rank: int, layout: Layout) -> Vote:
    entry = FileEntry(path=part_path(rank, NUM_RANKS), bytes=len(CONTENT), digest=f"{rank:064x}")
    return Vote(
        key=AT,
        rank=rank,
        world_size=NUM_RANKS,
        cursor=cursor(AT),
        optimizer_steps=AT.step,
        files=(entry,),
        tensors=TENSORS if rank == 0 else (),
        save_blocked_s=0.0,
        records=(),
        layout=(layout.num_shards, layout.num_replicas),
        sums={"model": (1 << 128) - 1 - rank, "optimizer": rank << 100},
    )


def disk_with_parts() -> ModelDisk:
    folder = f"/run/points/{AT.point_name}"
    files: Files = {"/run": None, "/run/points": None, folder: None, f"{folder}/{FOLDER}": None}
    return ModelDisk.of(
        files | {f"{folder}/{part_path(rank, NUM_RANKS)}": CONTENT for rank in range(NUM_RANKS)}
    )


@pytest.mark.quick("hsdp")
@pytest.mark.parametrize(
    "layout", [layout_of(NUM_RANKS, None), layout_of(NUM_RANKS, 8)], ids=["fsdp", "hsdp"]
)
def test_a_save_of_ten_thousand_ranks_is_small(layout: Layout) -> None:
    store = RunStore(Storage("/run", disk_with_parts(), no_sleep))
    votes = [vote(rank, layout) for rank in range(NUM_RANKS)]
    machine = CommitMachine(attempt=3, kept=KeptPoints(keep_latest=3), vote_limit_s=600.0)
    machine, _ = machine.on(GenerationFormed(generation=7, parent=None))
    for each in votes:
        machine, _ = machine.on(VoteCast(vote=each, now_s=1.0))
    machine, _ = machine.on(JournalDurable(key=AT))
    machine, (write,) = machine.on(ClaimChecked(key=AT, newer=False))
    assert isinstance(write, WriteCommit)
    store.commit_point(write.votes, CONFIG, {"rule": "none"}, None)
    machine, _ = machine.on(CommitWritten(key=AT))
    machine, actions = machine.on(ClaimChecked(key=AT, newer=False))
    assert isinstance(actions[0], Acknowledge)
    assert len(actions[0].ranks) == NUM_RANKS

    folder = f"points/{AT.point_name}"
    sizes = {name: store.storage.size(f"{folder}/{name}") for name in (COMMIT, "parts.json")}
    assert sum(sizes.values()) <= 2 << 20, sizes
    point, manifest = store.read_point(AT.point_name), store.read_manifest(AT.point_name)
    assert (point.commit.world_size, len(manifest.files), len(manifest.tensors)) == (NUM_RANKS, 10_000, 900)
    name = ("model", "model.layers.7.self_attn.q_proj.weight")
    files = manifest.files_of(name, range(65_536))
    assert len(files) == min(layout.num_shards, 65_536 // 7 + 1)
    assert len(manifest.files_of(name, range(100, 101))) == 1
