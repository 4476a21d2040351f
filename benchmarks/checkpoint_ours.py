"""This package's saves, as `benchmarks.checkpoint` compares them: the product's own saver, writer process and
commit, without the rest of a run.

A rank's vote goes through the ranks' store, and rank 0 commits when both are there (a coordinator does it in
a run, and flushes the journal and looks for a newer claim besides).
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_ranks import view_of
from orchestrator.checkpoint.files.part_writer import PartWriter
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import OrchestratorError
from orchestrator.faults import no_fault
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.trainer.saving.saver import Saver
from orchestrator.trainer.state.train_state import TrainState

_POLL_S = 30.0


class Ours:
    """Staged in a thread while the next step computes, hashed and written by a process, committed."""

    def __init__(self, state: TrainState, folder: Path, port: int, name: str) -> None:
        self.name = name
        self._state, self._rank, self._world = state, dist.get_rank(), dist.get_world_size()
        self._store = RunStore(Storage(str(folder)))
        self._votes = _Votes(self._store, self._rank, self._world, port, name)
        membership: Any = self._votes  # of the protocol a save needs these three calls
        self._saver = Saver(membership, PartWriter(self._store.storage, print), torch.device("cpu"), no_fault)
        self._saver.prepare(state, self._rank)
        self._last: StateKey | None = None

    def begin(self, number: int) -> None:
        """See `Way`."""
        key = StateKey(attempt=1, generation=1, step=number + 1)
        self._state.key, self._state.cursor = key, Cursor()
        self._state.writable = self._saver.writable
        self._saver.begin(self._state, view_of(self._rank, self._world), (), 0)
        self._last = key

    def before_write(self) -> None:
        """See `Way`."""
        self._saver.writable()

    def applied(self) -> None:
        """See `Way`."""

    def durable(self) -> float:
        """See `Way`."""
        while not self._saver.is_free:
            self._saver.wait(_POLL_S)
            self._saver.poll(self._state)
        return self._votes.answered

    def tidy(self) -> None:
        """See `Way`."""
        names = self._store.point_names()
        if self._rank == 0:
            for name in names[:-1]:
                self._store.delete_point(name)

    def close(self) -> None:
        """See `Way`."""
        self._saver.close()

    def num_bytes(self) -> int:
        """Of the newest point, its documents included."""
        name = self._store.point_names()[-1]
        return self._store.read_point(name).num_bytes


class _Votes:
    """What a save asks of a membership. Blocks in threads of its own."""

    def __init__(self, store: RunStore, rank: int, world: int, port: int, name: str) -> None:
        self._store, self._rank, self._world, self._port, self._name = store, rank, world, port, name
        self.answered = 0.0

    def vote(self, vote: Vote) -> Future[bool]:
        return self._in_thread(lambda: self._voted(vote))

    def save_failed(self, view: GenerationView, key: StateKey, error: OrchestratorError) -> Future[bool]:
        raise error  # a benchmark in which a save fails says nothing

    def is_given_up(self, view: GenerationView, key: StateKey, progress: Callable[[], int]) -> bool:
        return False

    def _voted(self, vote: Vote) -> bool:
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False)
        at = f"{self._name}/{vote.key.point_name}"
        store.set(f"{at}/{vote.rank}", pickle.dumps(vote))
        if self._rank == 0:
            votes = [pickle.loads(store.get(f"{at}/{rank}")) for rank in range(self._world)]
            self._store.commit_point(votes, {}, {"rule": "none"}, None)
            store.set(f"{at}/committed", b"1")
        store.get(f"{at}/committed")
        self.answered = time.monotonic()
        return True

    def _in_thread(self, act: Callable[[], bool]) -> Future[bool]:
        answer: Future[bool] = Future()

        def run() -> None:
            try:
                answer.set_result(act())
            except BaseException as error:  # noqa: BLE001  the saver raises it
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return answer
