"""One rank's part of a save: its share of the state in files, and the vote that says so.

It knows the state and where files go; whether the point is committed is decided by whoever collects the votes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.records import GenerationView, StepRecord, Vote
from orchestrator.train.state import TrainState
from orchestrator.train.weights import PointFiles, write_share


def save_share(state: TrainState, view: GenerationView, files: PointFiles, records: Sequence[StepRecord]) -> Vote:
    """Writes this rank's share of the save of `state.key` and returns its vote; when it returns, the share is durable.

    Training waits meanwhile (`save_blocked_s`). Raises `StorageError`; then nothing was voted and the save cannot be committed.
    """
    key = state.key
    assert key is not None, "a blank member has nothing to save"
    begin = time.monotonic()
    entries, tensors = write_share(state.items(), key.point_name, view.rank, view.world_size, files)
    return Vote(
        key=key,
        rank=view.rank,
        world_size=view.world_size,
        cursor=state.cursor,
        optimizer_steps=state.optimizer_steps,
        files=entries,
        tensors=tensors,
        save_blocked_s=time.monotonic() - begin,
        records=tuple(records),
    )
