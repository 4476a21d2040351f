"""The coordinator of a torchrun group in its own process, with members that are sockets of this test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

import orchestrator
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.elastic.formation import GroupSize
from orchestrator.faults import FaultPlan
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import SAVE, STOP_NOW, RequestFiles, asker
from orchestrator.launch.member.coordinator_calls import UnansweredError
from orchestrator.launch.start import run_preparation as starting
from orchestrator.records.membership import GenerationView, RunOver, StillWaiting
from orchestrator.records.run_status import RunStatus
from orchestrator.torchrun.coordinator_process import HostedCoordinator, SocketCalls
from tests.checkpoint.samples import key, record, write_vote
from tests.coordinator.builders import JOIN
from tests.forked import FORKED
from tests.launch.runner import Runner
from tests.processes import ended as has_ended

pytestmark = pytest.mark.xdist_group("forked")

LIMIT_S = 60.0


@pytest.fixture
def runner(tiny_config: Any) -> Runner:
    return Runner(tiny_config({"train.max_steps": 1000}))


class Rank:
    """A member of the group, whose calls are repeated as a real one's are."""

    def __init__(self, host: HostedCoordinator, launch: str, rank: int) -> None:
        self.name, self._launch, self._rank = f"rank{rank}", launch, rank
        self.calls = SocketCalls("localhost", host.port, host.key, self.name)
        self.calls.connect()

    def ask(self, method: str, *arguments: Any) -> Any:
        while isinstance(answer := self.calls.call(method, arguments, LIMIT_S), StillWaiting):
            pass
        return answer

    def join(self, **changes: Any) -> Any:
        request = replace(JOIN, member=self.name, launch=self._launch, port=self._rank + 1, pid=os.getpid())
        return self.ask("join", replace(request, **changes))

    def end_of_run(self) -> RunStatus:
        """The status that says how the run ended."""
        status: RunStatus = self.ask("status", (-1, -1), 0.0)
        while status.ended is None:
            status = self.ask("status", (status.attempt, status.version), 1.0)
        return status


class Group:
    """Two ranks with a coordinator."""

    def __init__(self, runner: Runner, fault_plan: str = "") -> None:
        attempt, job = runner.begin(), runner.config()
        start = starting.coordinator_start(
            job, attempt, runner.store.storage.root, GroupSize.fixed(2), fault_plan, fixed=True
        )
        self.host, self.launch = HostedCoordinator(start), attempt.launch
        self.ended = os.pidfd_open(self.host.pid)
        self.ranks = [Rank(self.host, attempt.launch, rank) for rank in range(2)]
        self.pool = ThreadPoolExecutor(8)

    def all_ask(self, method: str, *arguments: Any) -> list[Any]:
        answers = [self.pool.submit(getattr(rank, method), *arguments) for rank in self.ranks]
        return [answer.result(LIMIT_S) for answer in answers]

    def votes(self, runner: Runner, step: int) -> list[Future[bool]]:
        """The answers to the votes of both ranks, to come."""
        votes = [write_vote(runner.store.storage, key(step), rank) for rank in range(2)]
        return [
            self.pool.submit(rank.ask, "vote", self.launch, vote)
            for rank, vote in zip(self.ranks, votes, strict=True)
        ]

    def report(self, *steps: int) -> None:
        records = tuple(record(key(step)) for step in steps)
        self.ranks[0].ask("report", self.launch, "rank0", 1, 1, records)

    def close(self) -> None:
        for rank in self.ranks:
            rank.calls.close()
        self.host.close(LIMIT_S)


@contextmanager
def group(runner: Runner, fault_plan: str = "") -> Iterator[Group]:
    made = Group(runner, fault_plan)
    try:
        yield made
        made.close()
        assert has_ended(made.ended, LIMIT_S), "the process ends with the run"
    finally:
        made.host._process.kill()


def test_the_votes_of_all_ranks_commit_a_point_and_the_end_is_written(runner: Runner) -> None:
    with group(runner) as ranks:
        views = ranks.all_ask("join")
        assert [(view.rank, view.attempt, view.world_size) for view in views] == [(0, 1, 2), (1, 1, 2)]
        ranks.report(1)
        assert [answer.result(LIMIT_S) for answer in ranks.votes(runner, 1)] == [True, True]
        # nobody has brought the record of step 2
        assert [answer.result(LIMIT_S) for answer in ranks.votes(runner, 3)] == [False, False]
        for rank in ranks.ranks:
            assert rank.ask("finished", ranks.launch, rank.name, key(1), "stopped") is None
        status = ranks.ranks[0].end_of_run()
        assert (status.ended, status.pid) == ("stopped", ranks.host.pid)
        assert "the journal lacks step records before it" in status.warnings[0]
        assert ranks.ranks[0].ask("settle", LIMIT_S) is True
    (point,) = orchestrator.open(runner.folder).list_points()
    assert point["name"] == key(1).point_name
    end = runner.store.read_end(1)
    assert end is not None
    assert end.outcome == "stopped"
    seen = survey(runner.store).journal
    (generation,) = seen.generations
    assert (generation.cause, generation.copies) == ("start", 2)
    (committed,) = [event.fields for event in seen.events if event.kind == EventKind.POINT_COMMITTED]
    assert committed["peak_memory_bytes"] == [1 << 30, 2 << 30]


def test_a_rank_whose_process_ends_ends_the_run_for_all_with_one_reason(runner: Runner) -> None:
    with group(runner) as ranks:
        ranks.all_ask("join")
        first, second = ranks.ranks
        second.calls.close()
        status = first.end_of_run()
        assert (status.ended, status.code) == ("failed", "training.group_ended")
        assert f"the group of 2 ranks ended (rank 1 (pid {os.getpid()} on " in status.reason
        over = first.join(key=key(1), leaves=(1, 1))
        assert over == RunOver(reason=status.reason)
    end = runner.store.read_end(1)
    assert end is not None
    assert (end.outcome, end.reason) == ("failed", status.reason)


def test_a_rank_that_ends_before_it_has_joined_ends_the_run_too(runner: Runner) -> None:
    with group(runner) as ranks:
        first, second = ranks.ranks
        waits = ranks.pool.submit(first.join)
        second.calls.close()
        assert isinstance(waits.result(LIMIT_S), RunOver)
        assert first.end_of_run().code == "training.group_ended"


def test_a_rank_that_ends_after_it_has_finished_changes_nothing(runner: Runner) -> None:
    with group(runner) as ranks:
        ranks.all_ask("join")
        first, second = ranks.ranks
        ranks.report(1)
        assert [answer.result(LIMIT_S) for answer in ranks.votes(runner, 1)] == [True, True]
        assert second.ask("finished", ranks.launch, second.name, key(1), "done") is None
        second.calls.close()
        assert first.ask("finished", ranks.launch, first.name, key(1), "done") is None
        assert first.end_of_run().ended == "done"


def test_signals_to_the_whole_job_do_not_end_the_coordinator(runner: Runner) -> None:
    with group(runner) as ranks:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1) * 2:
            os.kill(ranks.host.pid, number)  # at once: it is still beginning
        ranks.all_ask("join")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(ranks.host.pid, number)
        ranks.ranks[0].ask("stop", "SIGTERM to me")
        assert ranks.ranks[0].ask("watch", ranks.launch, 1, 1, None).stop
        ranks.ranks[0].ask("end", "stopped", "enough")
        assert ranks.ranks[0].end_of_run().ended == "stopped"


def test_requests_from_storage_and_signals_are_answered_also_that_to_stop_at_once(runner: Runner) -> None:
    with group(runner) as ranks:
        ranks.all_ask("join")
        ranks.report(*range(1, 11))
        first = ranks.ranks[0]
        first.ask("save", "SIGUSR1 to me")
        wanted = first.ask("watch", ranks.launch, 1, 1, None)
        while not wanted.save:
            wanted = first.ask("watch", ranks.launch, 1, 1, wanted)
        assert [answer.result(LIMIT_S) for answer in ranks.votes(runner, 10)] == [True, True]
        claim = runner.store.newest_claim()
        assert claim is not None
        files = RequestFiles(runner.store.storage, claim.launch, claim.run_id)
        for what in (SAVE, STOP_NOW):
            files.ask(what)
        status = first.end_of_run()
        assert status.ended == "stopped"
        assert "stopped at once" in status.reason
    events = read_journal(runner.store.storage).events
    wishes = [(e.fields["what"], e.fields["by"]) for e in events if e.kind == EventKind.CONTROL_REQUEST]
    assert wishes == [("save", "SIGUSR1 to me"), (SAVE, asker()), (STOP_NOW, asker())]
    answers = [e.fields for e in events if e.kind == EventKind.REQUEST_ANSWERED]
    assert [(each["what"], each["outcome"]) for each in answers] == [("save", "done"), ("stop now", "done")]


def test_a_coordinator_that_is_killed_leaves_every_call_unanswered_at_once(
    runner: Runner, tmp_path: Any
) -> None:
    plan = FaultPlan(folder=str(tmp_path)).kill("generation_journalled")
    with group(runner, plan.to_json()) as ranks:
        for joining in [ranks.pool.submit(rank.join) for rank in ranks.ranks]:
            with pytest.raises(UnansweredError):
                joining.result(LIMIT_S)
        assert all(rank.calls.has_ended for rank in ranks.ranks)
    assert plan.struck() == [0]


def rank_zero(runner: Runner, says: Connection) -> None:
    """Hosts a coordinator, which two members join, and says where it is."""
    made = Group(runner)
    views = made.all_ask("join")
    assert all(isinstance(view, GenerationView) for view in views)
    says.send(made.host.pid)
    signal.pause()


def rank_zero_alone(runner: Runner, says: Connection) -> None:
    """Hosts a coordinator that nobody calls."""
    attempt = runner.begin()
    start = starting.coordinator_start(
        runner.config(), attempt, runner.store.storage.root, GroupSize.fixed(2), fixed=True
    )
    says.send(HostedCoordinator(start).pid)
    signal.pause()


@pytest.mark.parametrize("life", [rank_zero, rank_zero_alone])
def test_the_coordinator_of_a_killed_rank_0_writes_the_end_and_is_gone(runner: Runner, life: Any) -> None:
    hears, says = FORKED.Pipe()
    process = FORKED.Process(target=life, args=(runner, says), daemon=True)
    process.start()
    coordinator = os.pidfd_open(hears.recv())
    process.kill()
    assert has_ended(coordinator, LIMIT_S)
    end = runner.store.read_end(1)
    assert (end.outcome if end else "no end") == ("failed" if life is rank_zero else "no end")
