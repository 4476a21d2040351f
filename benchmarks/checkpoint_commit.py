"""The commit of a point of 10,000 ranks, as `benchmarks.checkpoint` measures it: the real machine, committer,
journal and storage of a coordinator, to which 10,000 votes come one after the other. Of the ranks' files, 100
MB each, nothing is on the disk but the size.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from orchestrator.checkpoint.commit.commit_events import (
    Acknowledge,
    Event,
    Fence,
    GenerationFormed,
    GiveUp,
    VoteCast,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.checkpoint.commit.store_actions import PointCommitter
from orchestrator.checkpoint.files.part_file import part_path
from orchestrator.checkpoint.points.points import COMMIT, PARTS
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.claims.claims import ClaimParent, GenerationStart
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.points import FileEntry, SavedTensor, Vote
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.storage.files import Storage

NUM_RANKS = 10_000
NUM_LAYERS = 90  # of ten tensors each
PART_BYTES = 100_000_000
_KEY = StateKey(attempt=1, generation=1, step=1000)


def commit(folder: Path) -> dict[str, list[float]]:
    """Bytes of the documents that name files and tensors, and CPU seconds from the first vote to the answer
    of the last.
    """
    storage = Storage(str(folder))
    store = RunStore(storage)
    store.claim(1, "launch", "start", "host")
    store.write_parent(ClaimParent(attempt=1, parent=None))
    votes = [_vote(rank) for rank in range(NUM_RANKS)]
    for vote in votes:
        path = folder / "points" / _KEY.point_name / vote.files[0].path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(PART_BYTES)
    committer = PointCommitter(store, _journal(storage), 1, {"train.seed": 0}, {"rule": "none"}, lambda: 0.0)
    began = time.process_time()
    answered = _drive(committer, votes)
    took_s = time.process_time() - began
    assert answered == NUM_RANKS, f"{answered} of {NUM_RANKS} votes were answered with a point"
    sizes = [storage.size(f"points/{_KEY.point_name}/{name}") for name in (COMMIT, PARTS)]
    return {"manifest_10k_bytes": [float(sum(sizes))], "commit_10k_s": [took_s]}


def _drive(committer: PointCommitter, votes: list[Vote]) -> int:
    """As a coordinator does; how many were answered."""
    machine, answered = CommitMachine(attempt=1, kept=KeptPoints(keep_latest=1), vote_limit_s=600.0), 0
    formed = GenerationFormed(generation=1, parent=None)
    events: deque[Event] = deque([formed, *(VoteCast(vote=vote, now_s=0.0) for vote in votes)])
    while events:
        machine, actions = machine.on(events.popleft())
        for action in actions:
            match action:
                case Acknowledge():
                    answered += len(action.ranks)
                case GiveUp() | Fence():
                    raise RuntimeError(action.reason)
                case _:
                    answer = committer.perform(action)
                    events.extendleft([answer] if answer is not None else [])
    return answered


def _vote(rank: int) -> Vote:
    entry = FileEntry(path=part_path(rank, NUM_RANKS), bytes=PART_BYTES, digest=f"{rank:064x}")
    return Vote(
        key=_KEY,
        rank=rank,
        world_size=NUM_RANKS,
        cursor=Cursor(
            consumed_samples=8 * _KEY.step,
            consumed_tokens=256 * _KEY.step,
            target_tokens=256 * _KEY.step,
            sources={"s": SourceCursor(block=1, token=5, prefix_digest="0" * 16)},
        ),
        optimizer_steps=_KEY.step,
        files=(entry,),
        tensors=_tensors() if rank == 0 else (),
        save_blocked_s=0.001,
        records=(),
        layout=(NUM_RANKS, 1),
        sums={"model": rank, "optimizer": 3 * rank},
    )


def _tensors() -> tuple[SavedTensor, ...]:
    """Of a model and its two moments."""
    names = [
        f"model.layers.{layer}.part.{number}.weight" for layer in range(NUM_LAYERS) for number in range(10)
    ]
    of_groups = [("model", name) for name in names]
    of_groups += [("optimizer", f"{moment}.{name}") for name in names for moment in ("exp_avg", "exp_avg_sq")]
    return tuple(
        SavedTensor(group=group, name=name, dtype="float32", shape=(16_384, 4096), sharded=True)
        for group, name in of_groups
    )


def _journal(storage: Storage) -> JournalWriter:
    """Of a generation that has trained up to the point."""
    journal = JournalWriter(storage, 1)
    journal.generation(
        GenerationStart(
            attempt=1,
            generation=1,
            parent=None,
            step=0,
            consumed_samples=0,
            consumed_tokens=0,
            target_tokens=0,
            world_size=NUM_RANKS,
            global_batch_size=8,
            seq_len=32,
            members=tuple(map(str, range(NUM_RANKS))),
        )
    )
    for step in range(1, _KEY.step + 1):
        journal.step(
            StepRecord(
                attempt=1,
                generation=1,
                step=step,
                consumed_samples=8 * step,
                consumed_tokens=256 * step,
                target_tokens=256 * step,
                loss=3.0,
                grad_norm=1.0,
                lr=1e-4,
                digest="0" * 16,
                step_s=1.0,
                data_wait_s=0.0,
                save_blocked_s=0.0,
                peak_memory_bytes=1 << 30,
            )
        )
    journal.flush()
    return journal
