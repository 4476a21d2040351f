"""Rank 0's recorder in this process: what it commits, and when storage fails, what passes ends no run, and
nothing hangs.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

import orchestrator
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.elastic.failure import STORAGE_LIMIT_S
from orchestrator.errors import ElasticError, FencedError, StorageError, UnsavedError
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.request_files import SAVE, STOP, STOP_NOW, RequestFiles, asker
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import ReplicaDigests
from orchestrator.records.run_status import GroupMember
from orchestrator.storage.disk import OsDisk, storage_error
from orchestrator.storage.files import Storage
from orchestrator.torchrun import recorder as recorder_module
from orchestrator.torchrun.recorder import RankZeroRecorder
from tests.checkpoint.samples import key, no_sleep, record, write_vote
from tests.launch.test_run_identity import save
from tests.launch.test_start import LIMIT_S, Runner
from tests.raising import raises


@pytest.fixture
def runner(tiny_config: Any) -> Runner:
    return Runner(tiny_config({"train.max_steps": 1000}))


class FailsOnce(OsDisk):
    """The next `times` syncs fail."""

    times = 0

    def fsync(self, handle: int) -> None:
        if self.times:
            self.times -= 1
            raise OSError(errno.EIO, "Input/output error")
        super().fsync(handle)


def on_disk(
    runner: Runner, disk: OsDisk, say: Callable[[str], None] = lambda text: None
) -> tuple[RankZeroRecorder, RunStore]:
    attempt = runner.begin()
    store = RunStore(Storage(str(runner.folder), disk, no_sleep))
    return RankZeroRecorder(store, attempt, runner.config(), say), store


def votes(made: RankZeroRecorder, store: RunStore, step: int) -> list[Future[bool]]:
    """The answers to the votes of both ranks, to come."""
    return [made.vote(write_vote(store.storage, key(step), rank)) for rank in range(2)]


def test_votes_commit_a_point_only_when_the_journal_has_its_steps(runner: Runner) -> None:
    said = list[str]()
    made, store = on_disk(runner, OsDisk(), said.append)
    assert made.begin(2).attempt == 1
    made.records([record(key(1))])
    assert [answer.result(LIMIT_S) for answer in votes(made, store, 1)] == [True, True]
    # nobody has brought the record of step 2
    assert [answer.result(LIMIT_S) for answer in votes(made, store, 3)] == [False, False]
    assert said == [
        "2 of 2 workers are ready · starting at step 1",
        "warning: the save of 00000003-a0001-g0001 was given up: "
        "the journal lacks step records before it, and no voter brought them",
        "warning: a save that fails does not stop training: another one is tried in 5 s, then ever later (at "
        "least every 320 s), and after the last step at once. Nothing that was committed is lost; until a "
        "save succeeds, losing all workers costs what was trained since the newest resume point",
    ]
    made.finished(key(1), "stopped")
    assert [point["name"] for point in orchestrator.open(runner.folder).list_points()] == [
        "00000001-a0001-g0001"
    ]
    end = store.read_end(1)
    assert end is not None
    assert end.outcome == "stopped"
    seen = survey(store).journal
    (generation,) = seen.generations
    assert (generation.cause, generation.copies) == ("start", 2)
    (committed,) = [event.fields for event in seen.events if event.kind == EventKind.POINT_COMMITTED]
    assert committed["peak_memory_bytes"] == [1 << 30, 2 << 30]
    kinds = [event.kind for event in seen.events]
    assert kinds == ["attempt", "sources", "group formed", "point committed", "save given up", "end"]


def test_a_recorder_whose_run_a_newer_launch_has_claimed_writes_nothing_more(runner: Runner) -> None:
    made, store = on_disk(runner, OsDisk())
    made.begin(2)
    made.records([record(key(1))])
    run = store.read_run()
    assert run is not None
    store.claim(2, "another-launch", "resume", "another-host", run.id)
    for answer in votes(made, store, 1):
        with raises(FencedError, "run.fenced", "attempt 2"):
            answer.result(LIMIT_S)
    with pytest.raises(FencedError):
        made.records([record(key(2))])
    with pytest.raises(FencedError):
        made.finished(key(1), "done")
    made.failed(FencedError("attempt 2 of this run exists"))
    assert store.read_end(1) is None
    points = orchestrator.open(runner.folder).list_points()
    assert not points, "the newer launch did not inherit a point that came after its claim"


def test_one_failure_of_the_first_sync_is_told_and_the_group_begins(runner: Runner) -> None:
    disk, said = FailsOnce(), list[str]()
    before = threading.enumerate()
    made, _ = on_disk(runner, disk, said.append)
    made._over.set()  # no beat that would meet the fault
    made._pulse.join()
    for beat in threading.enumerate():
        if beat not in before and beat.name == "heartbeat":
            beat.join(LIMIT_S)
    disk.times = 1
    assert made.begin(2).attempt == 1
    assert disk.times == 0
    assert any("Input/output error" in text and "Training has not begun" in text for text in said)
    made.finished(key(0), "stopped")
    assert read_journal(runner.store.storage).events[-1].kind == "end"


def test_one_failure_at_the_end_does_not_make_a_finished_run_a_failed_one(runner: Runner) -> None:
    disk = FailsOnce()
    made, store = on_disk(runner, disk)
    made.begin(2)
    assert save(made, store, key(10)) == [True, True]
    made._stop_writing()
    disk.times = 1
    made.finished(key(10), "done")
    assert disk.times == 0
    end = store.read_end(1)
    assert end is not None
    assert (end.outcome, end.reason) == ("done", "done at step 10")
    assert read_journal(store.storage).events[-1].kind == "end"


def test_a_part_that_a_rank_could_not_write_gives_that_save_up_alone(runner: Runner) -> None:
    said = list[str]()
    made, store = on_disk(runner, OsDisk(), said.append)
    made.begin(2)
    made.save_failed(key(5), 1, 2, "No space left on device")
    assert made.vote(write_vote(store.storage, key(5), 0)).result(LIMIT_S) is False
    assert save(made, store, key(10)) == [True, True]
    made.finished(key(10), "done")
    assert store.point_names() == [key(10).point_name]
    given_up = [text for text in said if "was given up" in text]
    assert len(given_up) == 1
    assert "rank 1 could not save its part: No space left on device" in given_up[0]


def test_ranks_that_hold_different_copies_of_the_same_rows_end_the_group_before_a_commit(
    runner: Runner,
) -> None:
    said = list[str]()
    made, store = on_disk(runner, OsDisk(), said.append)
    made.begin(2)
    made.members = [GroupMember(rank=rank, host=f"10.0.0.{rank}", pid=7) for rank in range(2)]
    assert save(made, store, key(5)) == [True, True]
    for rank in range(2):
        vote = write_vote(store.storage, key(10), rank)
        digests = ReplicaDigests(of_all=f"{rank:032x}")
        answer = made.vote(replace(vote, replicas=digests))
    workers = ("rank 0 (pid 7 on 10.0.0.0)", "rank 1 (pid 7 on 10.0.0.1)")
    with raises(ElasticError, "training.replicas_differ", *workers) as raised:
        answer.result(LIMIT_S)
    made.failed(raised.value)
    end = store.read_end(1)
    assert end is not None
    assert end.outcome == "failed"
    assert all(worker in end.reason for worker in workers)
    assert store.point_names() == [key(5).point_name]


def test_a_last_save_that_was_given_up_is_committed_by_another_generation_of_the_same_ranks(
    runner: Runner,
) -> None:
    made, store = on_disk(runner, OsDisk())
    made.begin(2)
    made.save_failed(key(5), 1, 2, "No space left on device")
    assert made.vote(write_vote(store.storage, key(5), 0)).result(LIMIT_S) is False
    again = made.again(key(5), Cursor())
    assert (again.generation, again.parent, again.step, again.point) == (2, key(5), 5, None)
    newer = replace(key(5), generation=2)
    assert save(made, store, newer) == [True, True]
    made.finished(newer, "done")
    assert store.point_names() == [newer.point_name]
    journal = read_journal(store.storage)
    assert [(g.generation, g.parent) for g in journal.generations] == [(1, None), (2, key(5))]


def test_a_save_that_a_signal_asks_for_is_asked_of_the_group_and_journalled(runner: Runner) -> None:
    made, store = on_disk(runner, OsDisk())
    made.begin(2)
    made.ask_save("SIGUSR1 to me")
    assert comes_true(lambda: made.asked() == (True, False))
    made.finished(key(0), "stopped")
    asked = [e for e in read_journal(store.storage).events if e.kind == EventKind.CONTROL_REQUEST]
    assert [(event.fields["what"], event.fields["by"]) for event in asked] == [("save", "SIGUSR1 to me")]


def test_the_end_of_a_group_whose_last_save_failed_says_why_that_was(runner: Runner) -> None:
    made, store = on_disk(runner, OsDisk())
    made.begin(2)
    made.save_failed(key(5), 1, 2, "No space left on device")
    assert made.vote(write_vote(store.storage, key(5), 0)).result(LIMIT_S) is False
    made.failed(UnsavedError("the last state could not be saved"))
    end = store.read_end(1)
    assert end is not None
    assert end.reason == (
        "the last state could not be saved. Why: the save of 00000005-a0001-g0001 was given up: rank 1 could "
        "not save its part: No space left on device"
    )


class HangsInSync(OsDisk):
    """While `goes_on` is not set; `hangs`: in the thread of the journal and the commits."""

    def __init__(self) -> None:
        self.goes_on, self.hangs = threading.Event(), threading.Event()
        self.goes_on.set()

    def fsync(self, handle: int) -> None:
        if not self.goes_on.is_set() and threading.current_thread().name.startswith("storage"):
            self.hangs.set()
        self.goes_on.wait(LIMIT_S)
        super().fsync(handle)


def test_a_group_that_fails_while_storage_hangs_ends_without_waiting_for_it(runner: Runner) -> None:
    disk, said = HangsInSync(), list[str]()
    made, store = on_disk(runner, disk, said.append)
    made._commits._storage_limit_s = 0.1
    made.begin(2)
    disk.goes_on.clear()
    made.records([record(key(1))])
    assert disk.hangs.wait(LIMIT_S)
    assert comes_true(lambda: made._commits.hangs_since is not None)
    made.failed(StorageError("storage has failed for 300 s"))
    assert store.read_end(1) is None
    assert not disk.goes_on.is_set()
    disk.goes_on.set()
    assert [text for text in said if "the end of the run could not be written down" in text]


def comes_true(holds: Callable[[], bool]) -> bool:
    never = threading.Event()
    return any(holds() or never.wait(0.01) for _ in range(int(LIMIT_S / 0.01)))


def test_what_is_asked_from_outside_reaches_the_ranks_and_is_answered(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "REQUESTS_EVERY_S", 0.01)
    said = list[str]()
    made, store = on_disk(runner, OsDisk(), said.append)
    made.begin(2)
    made.records([record(key(step)) for step in range(1, 11)])
    claim = store.newest_claim()
    assert claim is not None
    files = RequestFiles(store.storage, claim.launch, claim.run_id)
    for what in (STOP_NOW, SAVE):
        files.ask(what)
    assert comes_true(lambda: made.asked() == (True, False))
    assert save(made, store, key(10)) == [True, True]
    assert comes_true(lambda: made.asked() == (False, False))
    files.ask(STOP)
    assert comes_true(lambda: made.asked() == (False, True))
    store.pin(key(10).point_name, "ada@desk", "figure 3", claim.run_id)
    assert comes_true(lambda: "point pinned" in [e.kind for e in read_journal(store.storage).events])
    made.finished(key(10), "stopped")
    events = [e.fields for e in read_journal(store.storage).events if e.kind == "request answered"]
    assert [(e["request"], e["what"], e["outcome"], e["point"]) for e in events] == [
        (1, "stop now", "refused", ""),
        (2, "save", "done", key(10).point_name),
        (3, "stop", "done", ""),
    ]
    asks = [f"{asker()} asks for: {what}" for what in (STOP_NOW, SAVE, STOP)]
    assert [text.split(" · ")[0] for text in said if " asks for: " in text] == asks
    (end,) = [e.fields for e in read_journal(store.storage).events if e.kind == EventKind.END]
    stored = store.read_end(1)
    assert stored is not None
    assert end["by"] == stored.by == asker()


def test_saves_that_fail_for_longer_than_the_limit_of_storage_do_not_end_the_group(
    runner: Runner,
) -> None:
    now, store = [0.0], runner.store
    made = RankZeroRecorder(store, runner.begin(), runner.config(), lambda text: None, clock=lambda: now[0])
    made.begin(2)

    def fails(step: int) -> Future[bool]:
        made.save_failed(key(step), 1, 2, "No space left on device")
        return made.vote(write_vote(store.storage, key(step), 0))

    assert save(made, store, key(4)) == [True, True]
    for step, at in ((5, 0.0), (6, 299.0), (7, 301.0), (8, 100_000.0)):
        now[0] = at
        assert fails(step).result(LIMIT_S) is False
    assert store.point_names() == [key(4).point_name]
    assert save(made, store, key(10)) == [True, True]
    made.finished(key(10), "stopped")


def test_when_saves_begin_to_fail_it_is_told_once_that_they_are_tried_again_and_what_that_may_cost(
    runner: Runner,
) -> None:
    said = list[str]()
    made, store = on_disk(runner, OsDisk(), said.append)
    made.begin(2)

    def fails(step: int) -> None:
        made.save_failed(key(step), 1, 2, "No space left on device")
        assert made.vote(write_vote(store.storage, key(step), 0)).result(LIMIT_S) is False

    for step in (5, 6, 7):
        fails(step)
    assert save(made, store, key(10)) == [True, True]
    fails(11)
    made.finished(key(10), "stopped")
    told = (
        "a save that fails does not stop training: another one is tried in 5 s, then ever later (at least "
        "every 320 s), and after the last step at once"
    )
    order = [text for text in said if "was given up" in text or told in text]
    assert [told in text for text in order] == [False, True, False, False, False, True], said


def test_after_the_last_step_the_recorder_says_how_long_that_state_is_tried(tiny_config: Any) -> None:
    said, runner = list[str](), Runner(tiny_config({"train.max_steps": 1}))
    made, store = on_disk(runner, OsDisk(), said.append)
    made.begin(2)
    made.records([replace(record(key(1)), consumed_tokens=1 << 40)])
    made.save_failed(key(1), 1, 2, "No space left on device")
    assert made.vote(write_vote(store.storage, key(1), 0)).result(LIMIT_S) is False
    assert f"tried for {STORAGE_LIMIT_S:.0f} s" in said[-1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_is_told_of_a_failed_write_does_not_say_that_the_run_has_ended(number: int) -> None:
    told = str(storage_error("write", "/runs/r/x", OSError(number, "no")))
    assert "has room" in told
    assert "run again" not in told, "the run tries it again by itself"


class HangsAtDeletion(OsDisk):
    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def unlink(self, path: str) -> None:
        if path.endswith("/COMMIT"):
            self.goes_on.wait(LIMIT_S)
        super().unlink(path)


def test_a_deletion_that_hangs_keeps_a_finished_run_only_up_to_its_limit(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "SETTLE_LIMIT_S", 0.2)
    disk, said = HangsAtDeletion(), list[str]()
    made, store = on_disk(runner, disk, said.append)
    made.begin(2)
    for step in (10, 20, 30, 40):
        assert save(made, store, key(step)) == [True, True]
    made.finished(key(40), "done")
    assert any("storage has not verified or deleted older points for 0 s" in text for text in said)
    assert store.read_end(1) is not None
    disk.goes_on.set()
