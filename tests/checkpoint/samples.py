"""Small saves, as ranks would make them, for the tests of points and commits."""

from __future__ import annotations

import dataclasses

from orchestrator.checkpoint.files.manifest import state_tensor
from orchestrator.checkpoint.files.part_file import PartRows, make_part, write_part
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.points import FileEntry, SavedTensor, Vote
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.storage.files import Storage

CONFIG = {"train.seed": 3, "train.global_batch_size": 8, "pack.seq_len": 32}


def no_sleep(seconds: float) -> None:
    """Retries in tests wait for nothing."""


def key(step: int, generation: int = 1, attempt: int = 1) -> StateKey:
    return StateKey(attempt=attempt, generation=generation, step=step)


def record(at: StateKey) -> StepRecord:
    return StepRecord(
        attempt=at.attempt,
        generation=at.generation,
        step=at.step,
        consumed_samples=8 * at.step,
        consumed_tokens=256 * at.step,
        target_tokens=256 * at.step,
        loss=7.0 - at.step / 100,
        grad_norm=1.0,
        lr=0.001 * at.attempt,
        digest=f"{at.step:016x}",
        step_s=0.5,
        data_wait_s=0.0,
        save_blocked_s=0.0,
        peak_memory_bytes=4096 * at.step,
    )


def start(
    generation: int, parent: StateKey | None, attempt: int = 1, step: int | None = None
) -> GenerationStart:
    at = parent.step if parent else 0
    return GenerationStart(
        attempt=attempt,
        generation=generation,
        parent=parent,
        step=at if step is None else step,
        consumed_samples=8 * at,
        consumed_tokens=256 * at,
        target_tokens=256 * at,
        world_size=2,
        global_batch_size=8,
        seq_len=32,
        members=("a", "b"),
    )


def cursor(at: StateKey) -> Cursor:
    source = SourceCursor(block=at.step, token=5, prefix_digest="0" * 16)
    return Cursor(
        consumed_samples=8 * at.step,
        consumed_tokens=256 * at.step,
        target_tokens=256 * at.step,
        sources={"s": source},
    )


TENSORS = tuple(
    SavedTensor(group=group, name="w", dtype="uint8", shape=(20, 10), sharded=True)
    for group in ("model", "optimizer")
)


def write_vote(storage: Storage, at: StateKey, rank: int, world_size: int = 2, num_bytes: int = 100) -> Vote:
    """What a rank does for a save: write its part, sync, vote. A shard of `num_bytes` bytes of a tensor in
    each group.
    """
    layout = Layout(num_shards=world_size, num_replicas=1)
    rows = num_bytes // 10
    tensors = tuple(dataclasses.replace(each, shape=(rows * world_size, 10)) for each in TENSORS)
    parts = []
    for tensor in tensors:
        data = bytes((at.step + 3 * rank + n + len(tensor.group)) % 251 for n in range(num_bytes))
        parts.append(
            PartRows(
                tensor=state_tensor(tensor),
                dtype=tensor.dtype,
                rows=range(rank * rows, rank * rows + rows),
                data=memoryview(data),
            )
        )
    part = make_part(at.point_name, layout, rank, parts)
    return Vote(
        key=at,
        rank=rank,
        world_size=world_size,
        cursor=cursor(at),
        optimizer_steps=at.step,
        files=(write_part(storage, at.point_name, part),),
        tensors=tensors if rank == 0 else (),
        save_blocked_s=0.1 * (rank + 1),
        records=(record(at),),
        peak_memory_bytes=(rank + 1) << 30,
        layout=(layout.num_shards, layout.num_replicas),
        sums=part.sums,
    )


def write_point(store: RunStore, at: StateKey, parent: StateKey | None = None) -> Point:
    """A committed point, its documents different from those of other steps."""
    votes = [write_vote(store.storage, at, rank) for rank in range(2)]
    return store.commit_point(
        votes, {**CONFIG, "train.lr": 1 / at.step}, {"rule": "none", "step": at.step}, parent, 1.5
    )


def started_journal(storage: Storage, attempt: int = 1) -> JournalWriter:
    """The journal of an attempt whose first generation has begun."""
    journal = JournalWriter(storage, attempt)
    journal.generation(start(1, None, attempt))
    journal.flush()
    return journal


def entry_of(point: Point, path: str) -> FileEntry:
    return next(entry for entry in point.commit.files if entry.path == path)
