"""The same loop under torchrun's environment: a static group, with a keeper in rank 0's process."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from orchestrator.records import Cursor, StateKey, StepRecord, Vote
from orchestrator.storage import Storage
from orchestrator.train.loop import train
from orchestrator.train.static import Start, StaticMembership
from tests.train.feed import FormulaFeed
from tests.train.meeting import WAIT_S
from tests.train.member import tiny_job


class NotingKeeper:
    """Starts from nothing, commits when all votes are in, and notes what it was told in a file."""

    def __init__(self, folder: Path, stop_at: int | None = None) -> None:
        self.folder, self.stop_at = folder, stop_at
        self.membership: StaticMembership | None = None
        self.steps: list[int] = []
        self.votes: list[Vote] = []
        self.answers: list[Future[bool]] = []

    def begin(self, world_size: int) -> Start:
        if world_size == 3:
            raise ValueError("three are too many")
        return Start(launch="l", attempt=4, generation=1, parent=None, point=None, cursor=Cursor(), step=0)

    def records(self, records: Sequence[StepRecord]) -> None:
        self.steps += [record.step for record in records]
        if self.stop_at in self.steps and self.membership is not None:
            self.membership.ask_stop()

    def acknowledged_step(self) -> int:
        return max(self.steps, default=-1)

    def vote(self, vote: Vote) -> Future[bool]:
        self.votes.append(vote)
        self.answers.append(Future())
        if len(self.votes) % vote.world_size == 0:
            for answer in self.answers[-vote.world_size :]:
                answer.set_result(True)
        return self.answers[-1]

    def finished(self, key: StateKey, reason: str) -> None:
        told = {
            "key": key.point_name,
            "reason": reason,
            "steps": self.steps,
            "voters": [v.rank for v in self.votes],
        }
        (self.folder / "told.json").write_text(json.dumps(told))


def rank_main(rank: int, world_size: int, port: int, folder: Path, stop_at: int | None) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    keeper = NotingKeeper(folder, stop_at) if rank == 0 else None
    try:
        membership = StaticMembership(keeper)
        if keeper is not None:
            keeper.membership = membership
        outcome = train(tiny_job(train__max_steps=5), membership, FormulaFeed(), Storage(str(folder)))
        (folder / f"outcome-{rank}").write_text(f"{outcome.reason} {outcome.key}")
    except Exception as error:  # noqa: BLE001  the test reads it
        (folder / f"outcome-{rank}").write_text(f"{type(error).__name__}: {error}")


def torchrun(folder: Path, world_size: int, stop_at: int | None = None) -> list[str]:
    """As torchrun does: one program for every rank, an address in the environment. Returns how each ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.member"])
    ranks = [
        context.Process(target=rank_main, args=(rank, world_size, port, folder, stop_at), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WAIT_S)
        process.kill()
    return [(folder / f"outcome-{rank}").read_text() for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_static_group_trains_saves_and_tells_its_keeper(tmp_path, world_size):
    ends = torchrun(tmp_path, world_size)
    assert ends == [f"done {StateKey(attempt=4, generation=1, step=5)}"] * world_size
    told = json.loads((tmp_path / "told.json").read_text())
    assert told == {
        "key": "00000005-a0004-g0001",
        "reason": "done",
        "steps": [1, 2, 3, 4, 5],
        "voters": list(range(world_size)),
    }
    assert (tmp_path / "points/00000005-a0004-g0001/model").is_dir()


def test_a_stop_asked_of_rank_0_stops_all_after_a_save(tmp_path):
    ends = torchrun(tmp_path, 2, stop_at=2)
    assert ends[0] == ends[1]
    assert ends[0].startswith("stopped")
    assert json.loads((tmp_path / "told.json").read_text())["reason"] == "stopped"


def test_a_refused_start_reaches_every_rank(tmp_path):
    ends = torchrun(tmp_path, 3)
    assert ends[0] == "ValueError: three are too many"
    assert ends[1] == ends[2] == "ElasticError: rank 0 failed: ValueError: three are too many"
