"""A member's saver over a storage that stands still; its clock is given."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from orchestrator.checkpoint.files.part_writer import PartWriter
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.faults import no_fault
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.storage.store import Pieces
from orchestrator.trainer.saving.saver import STOP_LIMIT_S, Saver
from tests.raising import raises
from tests.trainer.saved_states import new_state
from tests.trainer.sharded import view_of

LIMIT_S = 60.0


class StandsStill(Storage):
    """A write begins, and ends when the test says so."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def put(self, path: str, pieces: Pieces, size: int) -> None:
        self.begun.set()
        assert self.goes_on.wait(LIMIT_S)
        super().put(path, pieces, size)


class Coordinator:
    """What a saver asks of a membership: every save is given up, and reports are noted."""

    def __init__(self) -> None:
        self.reports, self.reported = list[str](), threading.Event()

    def vote(self, vote: Vote) -> Future[bool]:
        raise AssertionError(f"{vote.key} was called off")

    def save_failed(self, view: GenerationView, key: StateKey, error: OrchestratorError) -> Future[bool]:
        self.reports.append(str(error))
        answer: Future[bool] = Future()
        answer.set_result(False)
        self.reported.set()
        return answer

    def is_given_up(self, view: GenerationView, key: StateKey, progress: Callable[[], int]) -> bool:
        return True


def test_a_part_that_nobody_wants_any_more_and_that_does_not_end_ends_the_member(tmp_path: Path) -> None:
    storage, coordinator, now = StandsStill(str(tmp_path)), Coordinator(), [1000.0]
    membership: Any = coordinator
    saver = Saver(membership, PartWriter(storage, print), torch.device("cpu"), no_fault, lambda: now[0])
    state = new_state(steps=1)
    state.key, state.cursor = StateKey(attempt=1, generation=1, step=1), Cursor()
    saver.prepare(state, 0)
    saver.begin(state, view_of(0, 1), (), 0)
    assert storage.begun.wait(LIMIT_S)
    saver.poll(state)  # hears that the save is given up
    now[0] += STOP_LIMIT_S
    saver.poll(state)
    assert not saver.is_free, "until it has stopped writing no other save begins"
    now[0] += 1.0
    with raises(StorageError, "storage.timeout", "00000001-a0001-g0001", "901 s", "900 s"):
        saver.poll(state)
    storage.goes_on.set()
    assert coordinator.reported.wait(LIMIT_S)
    assert coordinator.reports == ["the save was given up"]
    saver.poll(state)
    assert saver.is_free
    saver.close()


def test_the_buffer_is_there_and_warm_before_the_first_save(tmp_path: Path) -> None:
    membership: Any = Coordinator()
    saver = Saver(membership, PartWriter(Storage(str(tmp_path)), print), torch.device("cpu"), no_fault)
    state = new_state(steps=1)
    state.key, state.cursor = StateKey(attempt=1, generation=1, step=1), Cursor()
    saver.prepare(state, 0)
    buffer = saver._buffer
    buffer._thread.submit(lambda: None).result(LIMIT_S)
    assert buffer.num_bytes >= sum(item.tensor.nbytes for item in state.items())
    pages = 512 * os.stat(buffer.path).st_blocks  # what was never written to has none
    assert pages >= buffer.num_bytes
    saver.close()
