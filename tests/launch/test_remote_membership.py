"""A member's calls to a coordinator that is away, frozen, or has nothing to say yet."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.sealed_votes import keep_vote, read_votes
from orchestrator.errors import ElasticError, FencedError, StorageError
from orchestrator.launch.member import remote_membership
from orchestrator.launch.member.coordinator_calls import GenerationEnd, UnansweredError
from orchestrator.launch.member.remote_membership import MemberAddress, RemoteMembership, frame_of
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import (
    ControlRequests,
    GenerationView,
    JoinRequest,
    MemberState,
    RunOver,
    StillWaiting,
)
from orchestrator.records.points import Vote
from orchestrator.records.run_status import CODE, PEERS, Doing
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, record, write_vote
from tests.ports import free_ports
from tests.raising import raises

BLANK = MemberState(
    key=None, cursor=None, leaves=None, prepared=None, saving=None, records=(), reason="start"
)
VIEW = GenerationView(
    attempt=1,
    generation=1,
    rank=0,
    world_size=1,
    members=("m",),
    host="127.0.0.1",
    port=1,
    parent=None,
    source_rank=None,
    point=None,
    cursor=Cursor(),
    step=0,
    launch="l",
)
OVER = ControlRequests(ended=True, save=False, stop=False, reform=False, acknowledged_step=0)
WAIT_S = 60.0


def held(until: threading.Event, answer: Any) -> Callable[[], Any]:
    """An answer that comes late."""

    def wait() -> Any:
        assert until.wait(WAIT_S), f"{answer} was never given"
        return answer

    return wait


def wait_until(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < limit, "it does not come about"
        threading.Event().wait(0.01)


class Line:
    """Answers each method with its answers, one after the other, the last one again and again."""

    def __init__(self, **answers: Sequence[Any]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.changed = threading.Condition()
        self._answers = {method: list(values) for method, values in answers.items()}

    def call(self, method: str, arguments: Sequence[Any], limit_s: float) -> Any:
        with self.changed:
            self.calls.append((method, tuple(arguments)))
            self.changed.notify_all()
            left = self._answers[method]
            answer = left.pop(0) if len(left) > 1 else left[0]
        if callable(answer):
            return answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answer(self, **answers: Any) -> None:
        """From now on these methods are answered so."""
        with self.changed:
            self._answers |= {method: [value] for method, value in answers.items()}

    def wait_for(self, method: str) -> tuple[Any, ...]:
        def came() -> tuple[Any, ...] | None:
            return next((arguments for name, arguments in self.calls if name == method), None)

        with self.changed:
            found = self.changed.wait_for(came, WAIT_S)
        assert found is not None, f"{method} was not called"
        return found


def member(line: Line, limit_s: float = WAIT_S) -> RemoteMembership:
    return RemoteMembership(line, "l", MemberAddress(actor_id="a", node_id="n", host="127.0.0.1"), limit_s)


def test_a_join_is_asked_again_while_the_coordinator_is_away_or_has_nothing_to_say() -> None:
    away = UnansweredError("died")
    line = Line(join=[away, StillWaiting(), away, RunOver(reason="over")])
    assert member(line).join(BLANK) is None
    requests = [arguments[0] for _, arguments in line.calls]
    assert len(requests) == 4
    assert all(isinstance(request, JoinRequest) and request == requests[0] for request in requests)


def test_a_coordinator_that_answers_nothing_for_its_limit_is_named_with_what_to_do() -> None:
    line = Line(join=[UnansweredError("GetTimeoutError")])
    with raises(ElasticError, "launch.coordinator_silent", "launch l", "0 s", "GetTimeoutError"):
        member(line, 0.2).join(BLANK)


def test_rank_0_saves_and_stops_by_itself_when_the_coordinator_stays_away() -> None:
    line = Line(join=[VIEW], watch=[UnansweredError("died")])
    mine = member(line, 0.2)
    assert mine.join(BLANK) == VIEW
    line.wait_for("watch")
    deadline = threading.Event()
    wanted = mine.control_requests(VIEW)
    while not wanted.stop and not deadline.wait(0.01):
        wanted = mine.control_requests(VIEW)
    assert (wanted.save, wanted.stop, wanted.ended) == (True, True, False)


@pytest.mark.parametrize("full", [False, True])
def test_a_vote_that_no_coordinator_hears_is_written_into_storage(tmp_path: Path, full: bool) -> None:
    storage, kept = Storage(str(tmp_path)), list[Vote]()
    vote = replace(write_vote(storage, key(3), 1), records=(record(key(2)), record(key(3))))

    def keep(cast: Vote) -> None:
        if full:
            raise StorageError("no space left on device")
        keep_vote(storage, cast, "run-id")
        kept.append(cast)

    line = Line(vote=[UnansweredError("died")])
    place = MemberAddress(actor_id="a", node_id="n", host="127.0.0.1")
    answer = RemoteMembership(line, "l", place, 0.2, keep).vote(vote)
    silent = "launch.coordinator_silent"
    with raises(ElasticError, silent, key(3).point_name, *["no space left on device"] * full):
        answer.result(WAIT_S)
    assert read_votes(storage, key(3).point_name, "run-id") == tuple(kept) == (() if full else (vote,))
    assert read_votes(storage, key(3).point_name, "another run") == ()


def test_a_member_whose_ray_is_gone_writes_its_vote_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_membership, "ORPHANED_LIMIT_S", 0.2)
    storage, orphaned = Storage(str(tmp_path)), threading.Event()
    vote = replace(write_vote(storage, key(3), 1), records=(record(key(3)),))
    line = Line(vote=[UnansweredError("died")])
    place = MemberAddress(actor_id="a", node_id="n", host="127.0.0.1")
    keep = partial(keep_vote, storage, run_id="run-id")
    mine = RemoteMembership(line, "l", place, 100 * WAIT_S, keep, orphaned.is_set)
    answer = mine.vote(vote)
    line.wait_for("vote")
    assert not answer.done(), "its coordinator may come back"
    orphaned.set()
    with pytest.raises(ElasticError):
        answer.result(WAIT_S)
    assert read_votes(storage, key(3).point_name, "run-id") == (vote,)


@pytest.mark.parametrize("late", [False, True], ids=["asked before", "asked after"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_hears_that_its_generation_is_over_and_acts_once(rank: int, late: bool) -> None:
    view, asked, acts = replace(VIEW, rank=rank), threading.Event(), list[str]()
    answer = OVER if rank == 0 else None  # of `watch`, and of `ended`
    line = Line(join=[view], watch=[held(asked, answer)], ended=[StillWaiting(), held(asked, answer)])
    mine = member(line)
    mine.join(BLANK)
    acted = threading.Event()

    def act() -> None:
        acts.append("acted")
        acted.set()

    if late:
        asked.set()
        wait_until(lambda: mine.control_requests(view).ended)
        mine.when_ended(view, act)
    else:
        mine.when_ended(view, act)
        assert not mine.control_requests(view).ended
        asked.set()
    assert acted.wait(WAIT_S)
    assert mine.control_requests(view).ended
    assert acts == ["acted"]


def test_the_end_of_a_generation_that_was_left_is_nobodys_business_any_more() -> None:
    end, acts = GenerationEnd(), list[str]()
    end.enter((1, 1))
    end.leave()
    end.enter((1, 2))
    end.when_heard((1, 2), lambda: acts.append("acted"))
    end.hear((1, 1))
    assert (acts, end.heard_at) == ([], None)
    end.hear((1, 2))
    assert acts == ["acted"]
    assert end.heard_at is not None


def test_who_is_in_a_step_when_its_generation_ends_says_how_long_the_others_may_have_to_wait() -> None:
    view = replace(VIEW, rank=1)
    line = Line(join=[view, RunOver(reason="over")], ended=[None], phase=[None])
    mine = member(line)
    mine.join(BLANK)
    mine.step_limit(123.0)
    assert line.wait_for("phase") == ("l", mine.member, 123.0)


def test_reports_go_on_after_the_coordinator_was_away_for_longer_than_the_members_wait() -> None:
    """Its process comes back, and the members meet under a new attempt."""
    again = replace(VIEW, attempt=2)
    away = UnansweredError("died")
    line = Line(join=[VIEW, again], watch=[held(threading.Event(), None)], report=[away])
    mine = member(line, 0.2)
    mine.join(BLANK)

    def calls() -> int:
        mine.report(VIEW, [record(key(1))])
        return sum(name == "report" for name, _ in line.calls)

    wait_until(lambda: calls() > 10)  # far more than it makes within its limit
    line.answer(report=None)
    mine.join(BLANK)
    later = record(key(2))

    def told() -> bool:
        mine.report(again, [later])
        return any(name == "report" and arguments[-1][-1] == later for name, arguments in line.calls)

    wait_until(told)


def test_what_ends_a_thread_unforeseen_is_raised_by_the_loops_next_call() -> None:
    line = Line(join=[VIEW], watch=[ValueError("cannot be")], report=[None])
    mine = member(line)
    mine.join(BLANK)
    line.wait_for("watch")

    def train_on() -> None:
        while True:
            mine.control_requests(VIEW)

    with raises(ElasticError, "internal.thread_ended", mine.member, "ValueError: cannot be"):
        train_on()


def test_a_failure_is_told_after_the_steps_whose_report_is_not_answered_yet() -> None:
    failed, early = threading.Event(), list[bool]()
    line = Line(
        join=[VIEW], watch=[OVER], report=[lambda: early.append(failed.wait(1.0))], failed=[failed.set]
    )
    mine = member(line)
    mine.join(BLANK)
    mine.report(VIEW, [record(key(1))])
    line.wait_for("report")  # by the reporting thread
    mine.failed(ElasticError("enough"))
    assert failed.is_set()
    assert early == [False]


def test_steps_that_were_not_reported_yet_are_told_before_a_failure() -> None:
    line = Line(join=[VIEW], watch=[OVER], report=[None], failed=[None])
    mine = member(line)
    view = mine.join(BLANK)
    assert view is not None
    mine.report(view, [record(key(1))])
    mine.failed(ElasticError("enough", code="area.what"))
    assert line.wait_for("failed")[1:6] == (mine.member, "ElasticError", "enough", True, "area.what")
    told = [name for name, _ in line.calls if name in ("report", "failed")]
    assert told == ["report", "failed"]
    steps: tuple[StepRecord, ...] = line.wait_for("report")[-1]
    assert [step.key for step in steps] == [StateKey(attempt=1, generation=1, step=1)]


def test_a_member_says_whether_its_part_has_grown_since_it_said_so_last_until_it_votes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_membership, "_REPORT_EVERY_S", 0.01)
    monkeypatch.setattr(remote_membership, "_GIVEN_UP_EVERY_S", 0.0)
    line = Line(is_given_up=[False, False, True], save_failed=[None])
    mine, saved, grown = member(line), StateKey(attempt=1, generation=1, step=4), [7]

    def asked() -> list[bool]:
        return [arguments[-1] for method, arguments in line.calls if method == "is_given_up"]

    assert not mine.is_given_up(VIEW, saved, lambda: grown[0])
    wait_until(lambda: bool(asked()))
    grown[0] += 1
    wait_until(lambda: True in asked())
    assert asked()[0] is False
    wait_until(lambda: mine.is_given_up(VIEW, saved, lambda: grown[0]))
    assert mine.save_failed(VIEW, saved, StorageError("the save was given up")).result(WAIT_S) is False
    assert mine._undecided is None
    assert asked().count(True) == 1
    assert line.calls[0] == ("is_given_up", ("l", saved, 0, 1, False))


@pytest.mark.parametrize(("members", "every_s"), [(1, 5.0), (1_000, 5.0), (10_000, 50.0), (100_000, 500.0)])
def test_members_ask_about_their_saves_200_times_a_second_at_most(members: int, every_s: float) -> None:
    assert remote_membership.ask_every_s(members) == every_s
    assert members / every_s <= 200.0


@pytest.mark.parametrize(("rank", "call"), [(0, "watch"), (1, "ended")])
def test_who_is_fenced_leaves_what_it_waits_in_and_its_next_join_says_why(rank: int, call: str) -> None:
    view = replace(VIEW, rank=rank, world_size=2, members=("m", "n"))
    until, called_off = threading.Event(), threading.Event()
    fenced = FencedError("another start has begun")
    line = Line(join=[view, fenced], **{call: [held(until, None), fenced]})
    one = member(line)
    assert one.join(BLANK) == view
    one.when_ended(view, called_off.set)
    line.answer(**{call: fenced})
    until.set()
    assert called_off.wait(WAIT_S), "nothing waits in gloo for a generation that has no coordinator"
    assert one.control_requests(view).ended
    with raises(FencedError, "run.fenced", "another start has begun"):
        one.join(BLANK)


def test_a_member_that_finishes_no_step_says_in_which_line_of_code_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_membership, "QUIET_S", 0.0)
    over = threading.Event()
    line = Line(join=[VIEW], watch=[held(over, OVER)], doing=[None])
    mine = member(line)
    mine.join(BLANK)
    _, said, what = line.wait_for("doing")
    assert (said, what.kind) == (mine.member, CODE)
    assert what.place.startswith("test_remote_membership.py:")
    over.set()


def test_a_member_that_waits_for_its_peers_tries_their_ports_and_names_who_is_not_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_membership, "QUIET_S", 0.0)
    waits = Doing(kind=PEERS, place="", since_s=5.0)
    monkeypatch.setattr(remote_membership, "doing", lambda phase, stack, since_s: waits)
    over, (closed,) = threading.Event(), free_ports(1)
    line = Line(join=[VIEW], watch=[held(over, OVER)])
    mine = member(line)
    line.answer(doing=(("127.0.0.1", mine.store.port), ("127.0.0.1", closed)))
    mine.join(BLANK)
    wait_until(lambda: any(a[-1].unreached == (1,) for name, a in line.calls if name == "doing"))
    over.set()


def test_a_threads_frame_is_taken_while_no_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a collection runs may give way to a thread that begins: both wait for ever (CPython 106883)."""
    real, collecting = sys._current_frames, list[bool]()

    def frames() -> dict[int, Any]:
        collecting.append(gc.isenabled())
        return real()

    monkeypatch.setattr(sys, "_current_frames", frames)
    frame = frame_of(threading.get_ident())
    assert frame is not None
    assert frame.f_code.co_name == "frames"
    assert collecting
    assert not any(collecting)
    assert gc.isenabled()
    assert frame_of(-1) is None
