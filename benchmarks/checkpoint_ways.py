"""The ways to save that `benchmarks.checkpoint` compares: torch's distributed checkpoints, as its documents
say, and this package's saves.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.checkpoint_memory import MEMORY, MEMORY_SENT, EveryStep
from benchmarks.checkpoint_ours import Ours
from benchmarks.checkpoint_ranks import Way, state_dict
from orchestrator.trainer.state.train_state import TrainState

DCP, DCP_STAGER, OURS, FSDP2 = "dcp", "dcp_stager", "ours", "fsdp2"


def ways(state: TrainState, folder: Path, port: int, names: list[str]) -> list[Way]:
    """Those of these names."""
    found: list[Way] = []
    if DCP in names:
        found.append(Dcp(state, folder / DCP))
    if DCP_STAGER in names:
        found.append(DcpStager(state, folder / DCP_STAGER))
    found += [Ours(state, folder / name, port, name) for name in (OURS, FSDP2) if name in names]
    found += [
        EveryStep(name, state, port, one_machine=name == MEMORY)
        for name in (MEMORY, MEMORY_SENT)
        if name in names
    ]
    return found


class Dcp:
    """`dcp.save`, which returns when all is written and synced."""

    name = DCP

    def __init__(self, state: TrainState, folder: Path) -> None:
        self._state, self._folder, self._at = state, folder, 0.0

    def begin(self, number: int) -> None:
        """See `Way`."""
        dcp.save(state_dict(self._state), checkpoint_id=str(self._folder / str(number)))
        self._at = time.monotonic()

    def before_write(self) -> None:
        """See `Way`."""

    def applied(self) -> None:
        """See `Way`."""

    def durable(self) -> float:
        """See `Way`."""
        return self._at

    def tidy(self) -> None:
        """See `Way`."""
        _keep_newest(self._folder)

    def close(self) -> None:
        """See `Way`."""


class DcpStager:
    """`dcp.async_save` as torchtitan does it: one stager is kept, whose copy runs in a thread, and training
    waits for that before the optimizer writes. Its files are written by a process beside the rank.

    Of torchtitan's four options the two for GPUs (pinned memory, copies that do not block) are off.
    """

    name = DCP_STAGER

    def __init__(self, state: TrainState, folder: Path) -> None:
        self._state, self._folder = state, folder
        self._stager = DefaultStager(StagingOptions(False, True, True, False))
        self._group = dist.new_group(backend="gloo")
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None
        self._at = 0.0

    def begin(self, number: int) -> None:
        """See `Way`."""
        answer = dcp.async_save(
            state_dict(self._state),
            checkpoint_id=str(self._folder / str(number)),
            process_group=self._group,
            async_checkpointer_type=state_dict_saver.AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        self._staged, self._written = answer.staging_completion, answer.upload_completion
        self._written.add_done_callback(self._note)

    def before_write(self) -> None:
        """See `Way`."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def applied(self) -> None:
        """See `Way`."""

    def durable(self) -> float:
        """See `Way`."""
        if self._written is not None:
            self._written.result()
        return self._at

    def tidy(self) -> None:
        """See `Way`."""
        _keep_newest(self._folder)

    def close(self) -> None:
        """See `Way`."""
        self._stager.close()

    def _note(self, _: object) -> None:
        self._at = time.monotonic()


def _keep_newest(folder: Path) -> None:
    """As retention would, by one rank."""
    if dist.get_rank() == 0:
        for left in sorted(folder.iterdir(), key=lambda path: int(path.name))[:-1]:
            shutil.rmtree(left)
