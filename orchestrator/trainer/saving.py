"""One rank's part of a save: its share of the state in files, the vote that says so, and the wait for its
answer at the end.

It knows the state and where files go; whether the point is committed is decided by whoever collects the
votes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future

import torch

from orchestrator.planning.state_layout import layout_of
from orchestrator.records import GenerationView, StateKey, StepRecord, Vote
from orchestrator.trainer.group import GenerationEnded, Group
from orchestrator.trainer.loading import StateFiles, saved_tensors, write_share
from orchestrator.trainer.membership import Membership
from orchestrator.trainer.state import TrainState

_ASK_AGAIN_S = 0.05


def save_share(
    state: TrainState,
    view: GenerationView,
    files: StateFiles,
    records: Sequence[StepRecord],
    peak_memory_bytes: int = 0,
) -> Vote:
    """Writes this rank's share of the save of `state.key` and returns its vote; when it returns, the share is
    durable.

    Training waits meanwhile (`save_blocked_s`). Raises `StorageError`; then nothing was voted and the save
    cannot be committed.
    """
    key = state.key
    assert key is not None, "a blank member has nothing to save"
    begin = time.monotonic()
    items, layout = state.items(), layout_of(view.world_size, 1)
    written = write_share(items, key.point_name, layout, view.rank, files.storage)
    return Vote(
        key=key,
        rank=view.rank,
        world_size=view.world_size,
        cursor=state.cursor,
        optimizer_steps=state.optimizer_steps,
        files=(written.entry,),
        tensors=saved_tensors(items) if view.rank == 0 else (),
        save_blocked_s=time.monotonic() - begin,
        records=tuple(records),
        peak_memory_bytes=peak_memory_bytes,
        layout=(layout.num_shards, layout.num_replicas),
        sums=written.sums,
    )


def await_votes(
    group: Group,
    membership: Membership,
    votes: Sequence[tuple[StateKey, Future[bool]]],
    last: StateKey | None,
) -> bool:
    """Waits until every vote of every rank is answered; True if the save of `last` is committed (None: it was
    so before).

    The ranks ask each other, so that one that dies, or hears that the generation is over, ends the wait for
    all: `GenerationEnded`. A rank that knows of the commit needs nobody any more and returns. An error that
    answers a vote is raised.
    """
    pending = [answer for _, answer in votes]
    of_last = next((answer for key, answer in votes if key == last), None)

    def committed() -> bool:
        return last is None or (of_last is not None and of_last.done() and of_last.result())

    while True:
        futures.wait(pending, timeout=_ASK_AGAIN_S)
        answered = all(answer.done() for answer in pending)
        if membership.control_requests(group.view).ended and not (answered and committed()):
            raise GenerationEnded("the membership ended it while votes were unanswered")
        mine = torch.tensor([int(answered), int(committed())], dtype=torch.int64)
        try:
            num_answered, num_committed = group.sum(mine, "waiting for the answers to votes").tolist()
        except GenerationEnded:
            if answered and committed():
                return True
            raise
        if num_answered == group.view.world_size:
            return bool(num_committed == group.view.world_size)
