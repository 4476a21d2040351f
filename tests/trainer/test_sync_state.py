"""A state that is copied from rank to rank is used only if every bit of it arrived."""

from __future__ import annotations

import datetime
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView, ShardSource, Source
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.trainer.comm.group import GenerationEnded, Group
from orchestrator.trainer.state.sync_state import StateSources, sync_state
from orchestrator.trainer.state.train_state import TrainState
from tests.forked import FORKED
from tests.ports import free_ports
from tests.trainer.launch import WAIT_S
from tests.trainer.member import tiny_job
from tests.trainer.states import begun_state

pytestmark = pytest.mark.xdist_group("forked")

PARENT, STALE = (StateKey(attempt=1, generation=1, step=step) for step in (4, 3))
CPU = torch.device("cpu")


def trained_state() -> TrainState:
    """After one step; it stands for the parent."""
    job = tiny_job()
    state = begun_state(job.model, job.train, CPU, invariant=True)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.apply(0.01, num_units=1)
    state.key = PARENT
    return state


def rank_main(rank: int, port: int, folder: Path, changed: int | None, heard: Any) -> None:
    """Rank 0 holds the parent's state, rank 1 an older one, and receives a copy; half-way one bit of its copy
    of item number `changed` changes.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job = tiny_job()
    state = trained_state() if rank == 0 else begun_state(job.model, job.train, CPU, invariant=True)
    if rank == 1:
        state.key = STALE
    view = GenerationView(
        attempt=1, generation=2, rank=rank, world_size=2, members=("a", "b"), host="127.0.0.1", port=port,
        parent=PARENT, source_rank=0, point=None, cursor=Cursor(), step=4, launch="launch",
        sources=((ShardSource(rank=0, source=Source.LIVE),),),
    )  # fmt: skip

    def fault(place: str, step: int, rank: int) -> None:
        if place == "state_half_received" and changed is not None:
            state.items()[changed].tensor.view(-1).view(torch.uint8)[0] ^= 1

    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=datetime.timedelta(seconds=WAIT_S))
    ended = ""
    try:
        with Group.formed(view, store, CPU, WAIT_S, lambda: False) as group:
            sources = StateSources(files=Storage(str(folder)))
            sync_state(group, state, "config", None, sources, fault, warm=True)
    except GenerationEnded as error:
        ended = str(error)
    heard.put((rank, state.key, state.digest(), ended))


def copied(folder: Path, changed: int | None) -> list[tuple[int, StateKey | None, bytes, str]]:
    """(rank, key, digest, why its generation ended) of both ranks, afterwards."""
    heard, port = FORKED.Queue(), free_ports(1)[0]
    ranks = [
        FORKED.Process(target=rank_main, args=(rank, port, folder, changed, heard), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        return sorted((heard.get(timeout=WAIT_S) for _ in ranks), key=lambda found: found[0])
    finally:
        for process in ranks:
            process.join(WAIT_S)
            process.kill()


def test_a_member_without_the_newest_state_receives_the_whole_state(tmp_path: Path) -> None:
    source, receiver = copied(tmp_path, None)
    now = StateKey(attempt=1, generation=2, step=4)
    assert [(key, ended) for _, key, _, ended in (source, receiver)] == [(now, "")] * 2
    assert source[2] == receiver[2] == trained_state().digest()


@pytest.mark.quick("1")
@pytest.mark.parametrize("changed", [0, 1])
def test_a_member_whose_copy_has_one_other_bit_stays_blank_and_says_so(tmp_path: Path, changed: int) -> None:
    source, receiver = copied(tmp_path, changed)
    assert "that rank 1 received from rank 0 has another digest than its source" in receiver[3]
    assert receiver[1] is None, "neither the old state nor a whole new one: it must not be anybody's source"
    assert source[1] == PARENT, "the source keeps the key with which it came"
