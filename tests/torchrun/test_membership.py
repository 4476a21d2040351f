"""The same loop under torchrun's environment: a static group, with a recorder in rank 0's process."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from orchestrator.checkpoint.points.rank_files import CommittedFiles
from orchestrator.errors import ElasticError
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import HeldShard, MemberState, Source
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from orchestrator.torchrun.membership import Start, StaticMembership
from orchestrator.torchrun.store_rendezvous import meet
from orchestrator.trainer.loop import train
from tests.forked import FORKED
from tests.ports import free_ports
from tests.raising import raises
from tests.torchrun.ranks import as_rank, rank_environment
from tests.trainer.feed import FormulaFeed
from tests.trainer.launch import WAIT_S
from tests.trainer.member import tiny_job

pytestmark = pytest.mark.xdist_group("forked")

BLANK = MemberState(
    key=None, cursor=None, leaves=None, prepared=None, saving=None, records=(), reason="start"
)
FAILURE = 3  # an exit code


class NotingRecorder:
    """Starts from nothing, commits when all votes are in, and notes what was reported to it in a file."""

    def __init__(self, folder: Path, stop_at: int | None = None) -> None:
        self.folder, self.stop_at = folder, stop_at
        self.membership: StaticMembership | None = None
        self.steps: list[int] = []
        self.ended: list[float] = []
        self.votes: list[Vote] = []
        self.answers: list[Future[bool]] = []
        self.given_up: dict[StateKey, tuple[int, str]] = {}
        self.generation = 1

    def begin(self, world_size: int) -> Start:
        if world_size == 3:
            raise ValueError("three are too many")
        return Start(launch="l", attempt=4, generation=1, parent=None, point=None, cursor=Cursor(), step=0)

    def again(self, key: StateKey, cursor: Cursor | None) -> Start:
        self.generation += 1
        return Start(
            launch="l",
            attempt=4,
            generation=self.generation,
            parent=key,
            point=None,
            cursor=cursor,
            step=key.step,
        )

    def ask_save(self, by: str) -> None:
        raise AssertionError("nobody sends a signal")

    def records(self, records: Sequence[StepRecord]) -> None:
        self.steps += [record.step for record in records]
        self.ended += [record.ended for record in records if record.ended is not None]
        if self.stop_at in self.steps and self.membership is not None:
            self.membership.ask_stop()

    def asked(self) -> tuple[bool, bool]:
        return False, False

    def digest(self, key: StateKey, weights_digest: str) -> None:
        raise AssertionError("nobody asked for digests")

    def acknowledged_step(self) -> int:
        return max(self.steps, default=-1)

    def vote(self, vote: Vote) -> Future[bool]:
        if vote.key in self.given_up:
            answer: Future[bool] = Future()
            answer.set_result(False)
            return answer
        self.votes.append(vote)
        self.answers.append(Future())
        if len(self.votes) % vote.world_size == 0:
            for answer in self.answers[-vote.world_size :]:
                answer.set_result(True)
        return self.answers[-1]

    def save_failed(self, key: StateKey, rank: int, world_size: int, reason: str) -> None:
        self.given_up[key] = (rank, reason)

    def finished(self, key: StateKey, reason: str, stop_by: str = "") -> None:
        noted = {
            "given up": {key.step: list(why) for key, why in self.given_up.items()},
            "key": key.point_name,
            "reason": reason,
            "steps": self.steps,
            "voters": [v.rank for v in self.votes],
            "ended in order": self.ended == sorted(self.ended) and len(self.ended) == len(self.steps),
            "memory is known": all(v.peak_memory_bytes > 1 << 20 for v in self.votes),
        }
        (self.folder / "noted.json").write_text(json.dumps(noted))


class UnansweringRecorder(NotingRecorder):
    """Answers no vote, and says when both are there."""

    def __init__(self, folder: Path, voted: Any) -> None:
        super().__init__(folder)
        self.voted = voted

    def vote(self, vote: Vote) -> Future[bool]:
        if vote.rank == 1:
            self.voted.set()
        return Future()


def rank_main(rank: int, world_size: int, port: int, folder: Path, stop_at: int | None) -> None:
    as_rank(rank, world_size, port)
    recorder = NotingRecorder(folder, stop_at) if rank == 0 else None
    try:
        membership = StaticMembership(meet(), recorder)
        if recorder is not None:
            recorder.membership = membership
        files = CommittedFiles(Storage(str(folder)))
        outcome = train(tiny_job(train__max_steps=5), membership, FormulaFeed(), files)
        (folder / f"outcome-{rank}").write_text(f"{outcome.reason} {outcome.key}")
    except Exception as error:  # noqa: BLE001  the test reads it
        (folder / f"outcome-{rank}").write_text(f"{type(error).__name__}: {error}")


class FullFor(OsDisk):
    """No part of the points whose names begin so can be written."""

    def __init__(self, begin: str) -> None:
        self.begin = begin

    def create(self, path: str) -> int:
        if f"/{self.begin}" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


def rank_with_a_full_disk(
    rank: int, port: int, folder: Path, failing: int, full: str, changes: dict[str, Any]
) -> None:
    """Saves after step 3 and at the end; the parts of rank `failing` of `full` points cannot be written."""
    as_rank(rank, 2, port)
    membership = StaticMembership(meet(), NotingRecorder(folder) if rank == 0 else None)
    storage = Storage(str(folder), FullFor(full) if rank == failing else OsDisk(), lambda seconds: None)
    job = tiny_job(train__max_steps=5, resume__every_steps=3, **changes)
    outcome = train(job, membership, FormulaFeed(), CommittedFiles(storage))
    (folder / f"outcome-{rank}").write_text(f"{outcome.reason} {outcome.key}")


def with_a_full_disk(tmp_path: Path, failing: int, full: str, **changes: Any) -> list[str]:
    """How two ranks ended of which the parts of one cannot all be written."""
    port = free_ports(1)[0]
    ranks = [
        FORKED.Process(
            target=rank_with_a_full_disk, args=(rank, port, tmp_path, failing, full, changes), daemon=True
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WAIT_S)
        process.kill()
    return [(tmp_path / f"outcome-{rank}").read_text() for rank in range(2)]


@pytest.mark.quick("1")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_part_that_cannot_be_written_gives_that_save_up_and_the_group_trains_on(tmp_path, failing):
    ends = with_a_full_disk(tmp_path, failing, "00000003-")
    assert ends == [f"done {StateKey(attempt=4, generation=1, step=5)}"] * 2
    noted = json.loads((tmp_path / "noted.json").read_text())
    assert noted["steps"] == [1, 2, 3, 4, 5]
    assert noted["voters"] == [0, 1], "for the save of step 5"
    ((step, (rank, reason)),) = noted["given up"].items()
    assert step == "3"
    assert rank == failing
    assert "No space left on device" in reason


def torchrun(folder: Path, world_size: int, stop_at: int | None = None) -> list[str]:
    """As torchrun does: one program for every rank, an address in the environment. Returns how each ended."""
    port = free_ports(1)[0]
    ranks = [
        FORKED.Process(target=rank_main, args=(rank, world_size, port, folder, stop_at), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WAIT_S)
        process.kill()
    return [(folder / f"outcome-{rank}").read_text() for rank in range(world_size)]


@pytest.mark.quick("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_static_group_trains_saves_and_reports_to_its_recorder(tmp_path, world_size):
    ends = torchrun(tmp_path, world_size)
    assert ends == [f"done {StateKey(attempt=4, generation=1, step=5)}"] * world_size
    noted = json.loads((tmp_path / "noted.json").read_text())
    assert noted == {
        "given up": {},
        "key": "00000005-a0004-g0001",
        "reason": "done",
        "steps": [1, 2, 3, 4, 5],
        "voters": list(range(world_size)),
        "ended in order": True,
        "memory is known": True,
    }
    assert (tmp_path / "points/00000005-a0004-g0001/state").is_dir()


def test_a_stop_asked_of_rank_0_stops_all_after_a_save(tmp_path):
    ends = torchrun(tmp_path, 2, stop_at=2)
    assert ends[0] == ends[1]
    assert ends[0].startswith("stopped")
    assert json.loads((tmp_path / "noted.json").read_text())["reason"] == "stopped"


def empty_vote(rank: int, world_size: int) -> Vote:
    """For a save without tensors."""
    key = StateKey(attempt=4, generation=1, step=1)
    return Vote(
        key=key,
        rank=rank,
        world_size=world_size,
        cursor=Cursor(),
        optimizer_steps=1,
        files=(),
        tensors=(),
        save_blocked_s=0.0,
        records=(),
    )


def failing_rank(rank: int, port: int, folder: Path, voted: Any, other_is_gone: Any) -> None:
    """Votes for a save that is never answered, and fails. Rank 0 fails last: the store is in its process."""
    as_rank(rank, 2, port)
    membership = StaticMembership(meet(), UnansweringRecorder(folder, voted) if rank == 0 else None)
    view = membership.join(BLANK)
    assert view is not None
    answer = membership.vote(empty_vote(rank, 2))
    assert (voted if rank == 1 else other_is_gone).wait(WAIT_S)
    sys.exit("failed too late" if answer.done() else FAILURE)


def test_a_rank_that_fails_while_a_vote_is_unanswered_ends_at_once(tmp_path):
    voted, other_is_gone, port = FORKED.Event(), FORKED.Event(), free_ports(1)[0]
    ranks = [
        FORKED.Process(target=failing_rank, args=(rank, port, tmp_path, voted, other_is_gone), daemon=True)
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    try:
        for process in reversed(ranks):
            process.join(WAIT_S)
            assert process.exitcode == FAILURE
            other_is_gone.set()
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.timeout(60)
def test_a_rank_whose_torchrun_is_gone_fails_at_its_next_call(tmp_path, monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = rank_environment(0, 1, store.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trains, joins = (StaticMembership(meet(), NotingRecorder(tmp_path)) for _ in range(2))
    assert trains.join(BLANK) is not None
    del store
    answer = trains.vote(empty_vote(0, 1))
    with raises(ElasticError, "training.vote_unanswered", "00000001-a0004-g0001"):
        answer.result(WAIT_S)
    with pytest.raises(RuntimeError):
        joins.join(BLANK)


@pytest.mark.chaos
@pytest.mark.parametrize("changes", [{}, {"train__parallel": "shard", "train__numerics": "fast"}])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_last_save_that_is_given_up_is_tried_again_under_a_new_name(tmp_path, failing, changes):
    ends = with_a_full_disk(tmp_path, failing, "00000005-a0004-g0001", **changes)
    assert ends == [f"done {StateKey(attempt=4, generation=2, step=5)}"] * 2
    noted = json.loads((tmp_path / "noted.json").read_text())
    assert noted["steps"] == [1, 2, 3, 4, 5], "none is made again"
    assert noted["key"] == "00000005-a0004-g0002"


def test_ranks_that_do_not_hold_one_state_form_no_other_generation(tmp_path, monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = rank_environment(0, 1, store.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    membership = StaticMembership(meet(), NotingRecorder(tmp_path))
    membership.join(BLANK)
    key, older = (StateKey(attempt=4, generation=1, step=step) for step in (5, 4))
    held = HeldShard(key=older, shard=0, num_shards=1, source=Source.LIVE)
    with raises(ElasticError, "training.states_differ", "00000005-a0004-g0001", "ranks 0 "):
        membership.join(replace(BLANK, key=key, leaves=(4, 1), holdings=(held,), unsaved=True))


def test_a_refused_start_reaches_every_rank(tmp_path):
    ends = torchrun(tmp_path, 3)
    assert ends[0] == "ValueError: three are too many"
    assert ends[1] == ends[2] == "ElasticError: rank 0 failed: ValueError: three are too many"


def rendezvous_rank(rank: int, world_size: int, port: int, restarts: int, name: str, heard: Any) -> None:
    """Meets the others in a store that outlives it; rank 0 gives them its name."""
    as_rank(rank, world_size, port)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    rendezvous = meet()
    if rank == 0:
        rendezvous.publish("name", name)
    heard.put((rank, rendezvous.receive("name")))


def test_ranks_that_were_restarted_unequally_often_meet_and_hear_nothing_of_older_starts():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard = FORKED.Queue()

    def started(rank: int, restarts: int, name: str) -> Any:
        arguments = (rank, 3, store.port, restarts, name, heard)
        process = FORKED.Process(target=rendezvous_rank, args=arguments, daemon=True)
        process.start()
        return process

    killed = started(1, 0, "")
    store.wait(["rendezvous/rank/1"])
    killed.kill()
    killed.join(WAIT_S)
    # the restarts that each machine has counted, start by start
    for name, restarts in {"first": (0, 1, 0), "second": (0, 1, 1), "third": (1, 0, 2)}.items():
        ranks = [started(rank, count, name) for rank, count in enumerate(restarts)]
        assert sorted(heard.get(timeout=WAIT_S) for _ in ranks) == [(rank, name) for rank in range(3)]
        for process in ranks:
            process.join(WAIT_S)


@pytest.mark.parametrize(
    ("rank", "missing"), [(0, "missing: rank 1, rank 2"), (1, "keys: /rendezvous/answer/")]
)
def test_a_rank_that_stays_alone_says_where_it_waited_and_for_whom(monkeypatch, rank, missing):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = rank_environment(rank, 3, store.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    values = (f"rank {rank} of 3", f"127.0.0.1:{store.port}", "3 s", missing)
    with raises(ElasticError, "launch.ranks_not_met", *values):
        meet(limit_s=3.0)
