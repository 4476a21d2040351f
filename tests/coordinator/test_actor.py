"""The coordinator's own class in this process, without Ray: what it tells whom, and what it does when
storage fails.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from orchestrator.checkpoint.commit import commit_driver, commit_machine, pending_save, retention
from orchestrator.checkpoint.commit.commit_events import DeletePoints, Tick
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator import actor as coordinator_module
from orchestrator.coordinator import journal_notes, launch_driver
from orchestrator.coordinator.actor import Coordinator
from orchestrator.data.feed.feed_reports import BadDocument, FeedNotes
from orchestrator.errors import StorageError, UnsavedError, report_of
from orchestrator.history.claims.claim_files import START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import STOP_NOW, Request
from orchestrator.inspect.status.status_reader import look_at
from orchestrator.inspect.status.view import not_watched
from orchestrator.launch.process.progress import Progress
from orchestrator.records.membership import GenerationView, Refusal, RunOver, StillWaiting
from orchestrator.records.run_status import GroupMember, MemberInfo, RunStatus
from orchestrator.records.steps import EvalRecord
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from orchestrator.storage.tries import Backoff
from tests.checkpoint.samples import cursor, key, no_sleep, record, write_vote
from tests.coordinator.builders import (
    JOIN,
    LAUNCH,
    LIMIT_S,
    coordinator,
    ended,
    flushed,
    on_failing_disk,
    run,
    status,
    what_it_needs,
    with_disk,
)
from tests.raising import raises
from tests.storage.model_store import DELETE, Fate, ModelBucket, ModelStore

pytestmark = pytest.mark.usefixtures("patient")

GONE = key(7).point_name


def test_a_generation_is_told_once_and_journalled_with_who_was_lost_before_it(store: RunStore) -> None:
    async def launch() -> tuple[RunStatus, RunStatus, RunStatus]:
        actor = coordinator(store)
        await actor.join(replace(JOIN, pid=11))
        first = await status(actor)
        await actor.failed(LAUNCH, "m", "ValueError", "ValueError: no such thing", False)
        failed = await actor.status((1, first.version), 0.0)
        leaves, other = (1, 1), replace(JOIN, pid=12, key=None, leaves=(1, 1))
        assert isinstance(await actor.join(replace(other, leaves=leaves)), GenerationView)
        last = await actor.status((1, failed.version), 0.0)
        await actor.end("stopped", "enough")
        return first, failed, last

    first, failed, last = asyncio.run(asyncio.wait_for(launch(), LIMIT_S))
    (ready,) = first.changes
    assert (ready.joined, ready.wanted) == ((GroupMember(rank=0, host="127.0.0.1", pid=11),), 1)
    assert [info.host for info in first.members] == ["127.0.0.1"]
    assert failed.changes == ()
    assert [loss.reason for loss in failed.lost] == ["ValueError: no such thing"]
    (again,) = last.changes
    assert again.paused_s is not None
    assert again.paused_s > 0.0
    events = [event for event in read_journal(store.storage).events if event.kind == EventKind.GROUP_FORMED]
    assert [(event.attempt, event.fields["generation"]) for event in events] == [(1, 1), (1, 2)]
    generations = read_journal(store.storage).generations
    assert [(start.cause, start.copies) for start in generations] == [("start", 1), ("re-formed", 1)]


def test_a_member_hears_of_the_end_of_its_generation_at_once_and_of_nothing_else(store: RunStore) -> None:
    async def launch() -> object:
        actor = coordinator(store, max_workers=2)
        both = [asyncio.create_task(actor.join(replace(JOIN, member=name))) for name in ("a", "b")]
        for joined in both:
            assert isinstance(await joined, GenerationView)
        watch = asyncio.create_task(actor.ended(LAUNCH, 1, 1))
        await actor.report(LAUNCH, "a", 1, 1, (record(key(1)),))
        await actor.warned("something else")
        await status(actor)
        assert not watch.done()
        leaving = asyncio.create_task(actor.join(replace(JOIN, member="a", leaves=(1, 1))))
        assert await watch is None
        assert await actor.ended(LAUNCH, 1, 1) is None, "it is over for whoever asks later, too"
        await actor.end("stopped", "enough")
        return await leaving

    assert isinstance(asyncio.run(asyncio.wait_for(launch(), LIMIT_S)), RunOver)


def test_how_the_model_is_computed_is_journalled_when_it_changes_and_kernels_are_for_those_who_come(
    store: RunStore,
) -> None:
    async def launch() -> None:
        actor = coordinator(store)
        await actor.join(JOIN)
        assert await actor.offered_kernels(LAUNCH) is None
        for _ in range(2):
            assert await actor.computed_with(LAUNCH, "compiled", "sdpa"), "they are wanted"
        await actor.offer_kernels(LAUNCH, b"code")
        assert not await actor.computed_with(LAUNCH, "eager", "sdpa")
        assert await actor.offered_kernels(LAUNCH) == b"code"
        await actor.end("stopped", "enough")

    asyncio.run(asyncio.wait_for(launch(), LIMIT_S))
    events = [event for event in read_journal(store.storage).events if event.kind == EventKind.KERNELS]
    assert [event.fields["blocks"] for event in events] == ["compiled", "eager"]


def test_each_evaluated_part_is_told_once_when_it_is_done(store: RunStore) -> None:
    part = EvalRecord(
        part="holdout", attempt=1, generation=1, step=50, loss=3.21, perplexity=24.779, targets=9, samples=64,
        seconds=1.24,
    )  # fmt: skip
    other = replace(part, part="code", loss=None, perplexity=None, samples=1)

    async def launch() -> tuple[str, ...]:
        actor = coordinator(store)
        await actor.join(JOIN)
        for each in (part, part, other):  # the rank asks again
            while await actor.evaluated(LAUNCH, each, False) is not True:
                pass
        told = (await status(actor)).notices
        await actor.end("stopped", "enough")
        return told

    assert asyncio.run(asyncio.wait_for(launch(), LIMIT_S)) == (
        "eval holdout at step 50: loss 3.2100, perplexity 24.78, 64 samples, 1.2 s",
        "eval code at step 50: loss none, 1 sample, 1.2 s",
    )


def test_a_save_that_is_given_up_is_told_once_to_the_user(
    store: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    async def launch() -> tuple[bool, RunStatus, RunStatus]:
        actor = coordinator(store)
        view = await actor.join(JOIN)
        assert isinstance(view, GenerationView)
        vote = write_vote(store.storage, key(1), rank=0, world_size=1)
        store.storage.delete(f"points/{key(1).point_name}/{vote.files[0].path}")  # as on another storage
        committed = await actor.vote(LAUNCH, vote)
        first = await actor.status((-1, -1), 0.0)
        await actor.end("stopped", "enough")
        return committed, first, await actor.status((first.attempt, first.version), 0.0)

    committed, first, second = asyncio.run(asyncio.wait_for(launch(), LIMIT_S))
    assert not committed
    name = key(1).point_name
    assert sum("was given up" in text for text in first.warnings) == 1
    assert first.warnings[0].startswith(f"the save of {name} was given up: resume point {name}: ")
    assert second.warnings == ()
    kinds = [event.kind for event in read_journal(store.storage).events]
    assert "save given up" in kinds
    progress = Progress(1000.0)
    progress.show(first)
    progress.show(second)
    assert capsys.readouterr().err.count(f"warning: the save of {name} was given up: ") == 1


def test_a_save_that_is_given_up_is_told_once_however_many_ranks_vote_for_it_afterwards(
    store: RunStore,
) -> None:
    async def launch() -> None:
        actor = coordinator(store, min_workers=8, max_workers=8)
        joins = (actor.join(replace(JOIN, member=f"m{n}", port=n + 1)) for n in range(8))
        await asyncio.gather(*joins)
        await actor.save_failed(LAUNCH, key(1), 0, 8, "No space left on device")
        for rank in range(1, 8):
            vote = write_vote(store.storage, key(1), rank=rank, world_size=8)
            assert await actor.vote(LAUNCH, vote) is False
        told = (await status(actor)).warnings
        assert sum("was given up" in text for text in told) == 1
        await actor.end("stopped", "enough")

    run(launch)
    kinds = [event.kind for event in read_journal(store.storage).events]
    assert kinds.count("save given up") == 1


def test_a_commit_that_a_newer_one_overtook_is_journalled_too(store: RunStore) -> None:
    async def launch() -> None:
        actor = coordinator(store, min_workers=2, max_workers=2)
        await asyncio.gather(actor.join(JOIN), actor.join(replace(JOIN, member="n", port=2)))
        votes = [write_vote(store.storage, key(step), rank) for step in (1, 2) for rank in (0, 1)]
        await actor.report(LAUNCH, "m", 1, 1, votes[0].records)
        assert await asyncio.gather(*(actor.vote(LAUNCH, vote) for vote in votes[2:])) == [True, True]
        assert await asyncio.gather(*(actor.vote(LAUNCH, vote) for vote in votes[:2])) == [True, True]
        assert (await status(actor)).newest_point == key(2).point_name
        await actor.end("stopped", "enough")

    run(launch)
    events = [e for e in read_journal(store.storage).events if e.kind == EventKind.POINT_COMMITTED]
    assert [event.fields["point"] for event in events] == [key(2).point_name, key(1).point_name]


def test_a_save_whose_votes_are_there_waits_for_an_older_one_that_lacks_one(store: RunStore) -> None:
    async def launch() -> None:
        actor = coordinator(store, min_workers=2, max_workers=2)
        await asyncio.gather(actor.join(JOIN), actor.join(replace(JOIN, member="n", port=2)))
        votes = [write_vote(store.storage, key(step), rank) for step in (1, 2) for rank in (0, 1)]
        early = [asyncio.create_task(actor.vote(LAUNCH, vote)) for vote in (votes[0], *votes[2:])]
        assert await actor.vote(LAUNCH, votes[1]) is True
        assert await asyncio.gather(*early) == [True, True, True]
        await actor.end("stopped", "enough")

    run(launch)
    events = [e for e in read_journal(store.storage).events if e.kind == EventKind.POINT_COMMITTED]
    assert [event.fields["point"] for event in events] == [key(1).point_name, key(2).point_name]


def test_members_that_end_because_the_last_state_is_not_saved_are_not_lost(store: RunStore) -> None:
    async def launch() -> RunStatus:
        actor = coordinator(store, min_workers=2, max_workers=2)
        await asyncio.gather(actor.join(JOIN), actor.join(replace(JOIN, member="n", port=2)))
        for member in ("m", "n"):
            await actor.failed(LAUNCH, member, *report_of(UnsavedError("not saved for 300 s")))
        return await ended(actor)

    over = asyncio.run(asyncio.wait_for(launch(), LIMIT_S))
    assert (over.ended, over.reason, over.lost) == ("failed", "not saved for 300 s", ())
    assert over.code == UnsavedError.code


class BuggyDisk(OsDisk):
    """While `broken`, what it is asked to write ends with an error that no storage raises."""

    broken = False

    def write(self, handle: int, data: memoryview) -> int:
        if self.broken:
            raise RuntimeError("not foreseen")
        return super().write(handle, data)


def test_an_unforeseen_error_in_a_save_or_in_a_deletion_is_told_and_leaves_nobody_waiting(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_driver, "FLUSH_EVERY_S", 1000.0)  # the save's flush is to meet it
    disk = BuggyDisk()
    buggy = RunStore(Storage(store.storage.root, disk, no_sleep))

    async def launch() -> None:
        actor = with_disk(coordinator(store), buggy)
        await actor.join(JOIN)
        await flushed(actor)
        vote = write_vote(store.storage, key(1), rank=0, world_size=1)
        disk.broken = True
        assert await actor.vote(LAUNCH, vote) is False
        assert any(
            "FlushJournal failed: RuntimeError: not foreseen" in w for w in (await status(actor)).warnings
        )
        actor._commits._in_background(partial(actor._commits._perform_aside, DeletePoints(names=(GONE,))))
        assert await actor._commits.settle(LIMIT_S)
        assert any("DeletePoints failed: RuntimeError" in w for w in (await status(actor)).warnings)
        disk.broken = False
        vote = write_vote(store.storage, key(2), rank=0, world_size=1)
        await actor.report(LAUNCH, "m", 1, 1, (record(key(1)),))
        assert await actor.vote(LAUNCH, vote) is True
        await actor.end("stopped", "enough")

    run(launch)
    assert [r.step for r in read_journal(store.storage).records] == [1, 2]


async def until(actor: Coordinator, holds: Callable[[Coordinator], Awaitable[bool]]) -> None:
    """Returns when it holds; looked at whenever the coordinator has something new to say."""
    seen = (-1, -1)
    while not await holds(actor):
        news = await actor.status(seen, 0.5)
        seen = (news.attempt, news.version)


def test_a_journal_that_fails_for_a_while_costs_no_step_and_the_user_is_told(store: RunStore) -> None:
    failing, disk = on_failing_disk(store)

    async def launch() -> None:
        actor = with_disk(coordinator(store), failing)
        await actor.join(JOIN)
        disk.broken = True
        await actor.report(LAUNCH, "m", 1, 1, (record(key(1)),))
        await until(actor, lambda a: warned(a, "No space left on device"))
        assert (await status(actor)).ended is None
        wanted = await actor.watch(LAUNCH, 1, 1, None)
        assert (wanted.ended, wanted.acknowledged_step) == (False, 0)
        disk.broken = False
        await until(actor, lambda a: warned(a, "storage works again"))
        await until(actor, lambda a: acknowledged(a, 1))
        await actor.end("stopped", "enough")

    async def warned(actor: Coordinator, text: str) -> bool:
        return any(text in warning for warning in (await status(actor)).warnings)

    async def acknowledged(actor: Coordinator, step: int) -> bool:
        return (await actor.watch(LAUNCH, 1, 1, None)).acknowledged_step == step

    run(launch)
    assert [r.step for r in read_journal(store.storage).records] == [1]
    end = store.read_end(1)
    assert end is not None
    assert end.outcome == "stopped"


@pytest.mark.parametrize("hangs", [False, True])
def test_storage_that_fails_beyond_its_limit_ends_the_run_with_the_reason(
    store: RunStore, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, disk = on_failing_disk(store)

    async def launch() -> None:
        actor = with_disk(coordinator(store, max_workers=2, limit_s=0.5), failing)
        await actor.expect(1)
        await actor.join(JOIN)
        disk.broken = True
        if hangs:
            disk.hanging.clear()
        # the first one's death or coming needs a generation to be journalled: nobody waits for ever
        waiting = asyncio.create_task(actor.join(replace(JOIN, member="n", port=2)))
        back = replace(JOIN, key=key(0), leaves=(1, 1), cursor=cursor(key(0)))
        answers = await asyncio.gather(waiting, actor.join(back))
        assert all(isinstance(answer, RunOver) for answer in answers)
        await until(actor, is_over)
        disk.hanging.set()

    async def is_over(actor: Coordinator) -> bool:
        found = await status(actor)
        return (found.ended, found.code) == ("failed", "storage.outage")

    monkeypatch.setattr(launch_driver, "END_WRITTEN_S", 0.1)
    monkeypatch.setattr(launch_driver, "LAST_TRY_S", 0.0)
    run(launch)


def test_while_storage_hangs_beyond_its_limit_nothing_else_waits_as_long_again(store: RunStore) -> None:
    """What waited one after the other, each for the limit, held up the run's own end."""
    goes_on, ran = threading.Event(), list[str]()

    async def launch() -> None:
        actor = coordinator(store, limit_s=0.1)
        commits, began = actor._commits, time.monotonic()
        while commits.hangs_since is None:  # the thread may have had no time to begin it
            with raises(StorageError, "storage.timeout", "0.1 s"):
                await commits.on_disk(lambda: goes_on.wait(LIMIT_S))
        since = commits.hangs_since
        assert began <= since
        commits._storage_limit_s = 2 * LIMIT_S  # who waited for it would come too late
        with raises(StorageError, "storage.timeout"):
            await commits.on_disk(lambda: ran.append("while it hangs"))
        assert not await actor._driver.flush()
        assert actor._launch._trouble._since == since, "the limit counts from who met it first"
        goes_on.set()
        await commits.on_disk(lambda: ran.append("the end, which has a limit of its own"), LIMIT_S)
        assert commits.hangs_since is None
        await commits.on_disk(lambda: ran.append("afterwards"))
        await actor.end("stopped", "enough")

    run(launch)
    assert ran == ["the end, which has a limit of its own", "afterwards"]


def test_storage_that_does_not_answer_is_told_of_long_before_the_run_stops(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_driver, "TELL_S", 0.1)
    goes_on, told = threading.Event(), list[str]()

    async def launch() -> None:
        actor = coordinator(store)

        async def is_told(text: str) -> bool:
            told.extend((await status(actor)).warnings)
            return any(text in each for each in told)

        waiting = asyncio.create_task(actor._commits.on_disk(lambda: goes_on.wait(LIMIT_S)))
        await until(actor, lambda _: is_told("storage has not answered for 0.1 s"))
        goes_on.set()
        assert await waiting
        await until(actor, lambda _: is_told("storage answers again"))
        await actor.end("stopped", "enough")

    run(launch)


@pytest.mark.parametrize("lasts", [False, True])
def test_the_end_is_written_down_although_the_journal_fails_once_or_for_good(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    monkeypatch.setattr(launch_driver, "END_WRITTEN_S", 0.0 if lasts else 15.0)
    monkeypatch.setattr(launch_driver, "FLUSH_EVERY_S", 1000.0)  # the end's flush is to meet it

    class JournalFails(OsDisk):
        """While `times` are left, no sync of a journal's segment works."""

        times = 0

        def __init__(self) -> None:
            self.journal = set[int]()

        def create(self, path: str) -> int:
            handle = super().create(path)
            self.journal.discard(handle)
            if "/journal/" in path:
                self.journal.add(handle)
            return handle

        def fsync(self, handle: int) -> None:
            if self.times and handle in self.journal:
                self.times -= 1
                raise OSError(errno.EIO, "Input/output error")
            super().fsync(handle)

    disk = JournalFails()
    failing = RunStore(Storage(store.storage.root, disk, no_sleep))

    async def launch() -> None:
        actor = with_disk(coordinator(store), failing)
        await actor.join(JOIN)
        await flushed(actor)
        disk.times = 10**9 if lasts else 1
        await actor.end("done", "done at step 10")
        assert (await status(actor)).ended == "done"
        told = (await status(actor)).warnings
        assert any("the end of the run could not be written down" in warning for warning in told) == lasts
        assert any("Input/output error" in warning for warning in told) == lasts
        await flushed(actor)

    run(launch)
    end = store.read_end(1)
    assert end is not None
    assert (end.outcome, end.reason) == ("done", "done at step 10")
    if not lasts:
        assert read_journal(store.storage).events[-1].kind == "end"


class DeletesNoPoint:
    """What becomes of requests to a bucket that refuses, while `refuses`, to delete points."""

    def __init__(self) -> None:
        self.refuses = True
        self.tried = 0

    def __call__(self, what: str, path: str) -> Fate:
        if what != DELETE or "/points/" not in path:
            return Fate.ANSWERED
        self.tried += 1
        return Fate.REFUSED if self.refuses else Fate.ANSWERED


def test_a_bucket_that_deletes_nothing_is_told_of_once_and_when_it_deletes_again(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_machine, "CHECK_EVERY_S", 0.0)  # it looks at its clock at each tick
    monkeypatch.setattr(retention, "STORAGE_BACKOFF", Backoff(first_s=0.01, most_s=320.0))
    turn = DeletesNoPoint()
    bucket = RunStore(Storage.on(ModelStore(ModelBucket(), turn=turn)))
    bucket.claim(1, LAUNCH, START, "host")
    bucket.write_parent(ClaimParent(attempt=1, parent=None))
    names = [key(step).point_name for step in range(1, 6)]

    async def warned(actor: Coordinator) -> tuple[str, ...]:
        await actor._commits.notify(Tick(now_s=time.monotonic()))
        return (await status(actor)).warnings

    async def launch() -> None:
        actor = Coordinator(what_it_needs(store), lambda info: None, store=bucket)
        await actor.join(JOIN)
        for step in range(1, 6):
            await actor.report(LAUNCH, "m", 1, 1, (record(key(step)),))
            assert await actor.vote(LAUNCH, write_vote(bucket.storage, key(step), 0, world_size=1)) is True

        async def is_tried_again(actor: Coordinator) -> bool:
            return bool(await warned(actor)) and turn.tried > 3

        async def are_gone(actor: Coordinator) -> bool:
            return len(await warned(actor)) == 2 and bucket.point_names() == names[2:]

        await until(actor, is_tried_again)
        (text,) = (await status(actor)).warnings
        assert text.startswith(
            f"resume point {names[0]} is no longer needed and cannot be deleted: cannot"
        )
        assert "storage fills up. Allow this process to delete in run.storage" in text
        assert bucket.point_names() == names
        assert (look_at(bucket, "run", 0.0, not_watched).last_fault or "").startswith(
            f"point not deleted {names[0]}: cannot delete"
        )
        turn.refuses = False
        await until(actor, are_gone)
        assert (await status(actor)).warnings == (
            text,
            f"old resume points are deleted again: {names[0]} was the first",
        )
        await actor.end("stopped", "enough")

    run(launch)


def test_the_journal_of_an_attempt_that_ended_is_whole_segments_in_a_bucket_too(store: RunStore) -> None:
    bucket = RunStore(Storage.on(ModelStore(ModelBucket())))
    bucket.claim(1, LAUNCH, START, "host")
    bucket.write_parent(ClaimParent(attempt=1, parent=None))

    async def launch() -> None:
        actor = Coordinator(what_it_needs(store), lambda info: None, store=bucket)
        await actor.join(JOIN)
        await flushed(actor)
        pieces = bucket.storage.list("journal/a0001")
        assert pieces
        assert all(name.startswith("000001.p") for name in pieces)
        await actor.end("done", "done at step 10")
        assert (await status(actor)).ended == "done"

    run(launch)
    assert bucket.storage.list("journal/a0001") == ["000001.jsonl"]
    assert read_journal(bucket.storage).events[-1].kind == "end"


def test_a_launch_that_ends_before_its_background_work_has_begun_leaves_no_coroutine_behind(
    store: RunStore,
) -> None:
    async def launch() -> None:
        actor = coordinator(store)
        actor._driver.ensure_running()
        actor._commits.notify_soon(Tick(now_s=0.0))

    with warnings.catch_warnings(record=True) as caught:
        run(launch)
        gc.collect()
    assert not [str(warning.message) for warning in caught]


def test_saves_that_fail_for_longer_than_the_limit_of_storage_stop_nobody_while_the_journal_works(
    store: RunStore,
) -> None:
    async def launch() -> None:
        actor = coordinator(store, limit_s=0.0)  # any failure is too long
        actor._commits._storage_limit_s = LIMIT_S  # the journal works, however slow its disk is
        await actor.join(JOIN)
        for step in (1, 2, 3):
            await actor.report(LAUNCH, "m", 1, 1, (record(key(step)),))
            if step == 2:
                await actor.save_failed(LAUNCH, key(step), 0, 1, "No space left on device")
            else:
                assert await actor.vote(LAUNCH, write_vote(store.storage, key(step), 0, 1)) is True
        told = (await status(actor)).warnings
        assert sum("rank 0 could not save its part: No space left on device" in text for text in told) == 1
        assert (await status(actor)).ended is None
        await actor.end("stopped", "enough")

    run(launch)
    assert store.point_names() == [key(1).point_name, key(3).point_name]


def test_a_save_that_storage_failed_is_asked_for_again_until_one_is_committed(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_save, "STORAGE_BACKOFF", Backoff(first_s=0.0, most_s=320.0))

    async def launch() -> None:
        actor = coordinator(store)
        await actor.join(JOIN)
        wanted = await actor.watch(LAUNCH, 1, 1, None)
        assert not wanted.save
        await actor.save_failed(LAUNCH, key(1), 0, 1, "No space left on device")
        while not wanted.save:
            wanted = await actor.watch(LAUNCH, 1, 1, wanted)
        vote = write_vote(store.storage, key(2), rank=0, world_size=1)
        await actor.report(LAUNCH, "m", 1, 1, (record(key(1)), record(key(2))))
        assert await actor.vote(LAUNCH, vote) is True
        while wanted.save:
            wanted = await actor.watch(LAUNCH, 1, 1, wanted)
        await actor.end("stopped", "enough")

    run(launch)
    (given_up,) = [event for event in read_journal(store.storage).events if event.kind == "save given up"]
    assert given_up.fields["retry_s"] == 0.0


def test_a_save_that_can_never_be_committed_is_known_before_any_vote_for_it_came(store: RunStore) -> None:
    async def launch() -> None:
        actor = coordinator(store, min_workers=2, max_workers=2)
        await asyncio.gather(actor.join(JOIN), actor.join(replace(JOIN, member="n", port=2)))
        assert not await actor.is_given_up(LAUNCH, key(1), 1, 2, False)
        assert await actor.is_given_up(LAUNCH, key(1, generation=2), 1, 2, False), (
            "that generation was not formed"
        )
        assert await actor.is_given_up(LAUNCH, key(1, attempt=2), 1, 2, False)
        await actor.save_failed(LAUNCH, key(1), 1, 2, "No space left on device")
        while not await actor.is_given_up(LAUNCH, key(1), 1, 2, False):
            await asyncio.sleep(0)
        assert not await actor.is_given_up(LAUNCH, key(2), 1, 2, False)
        await actor.end("stopped", "enough")

    run(launch)


def test_what_the_supervisor_must_hear_is_said_again_until_it_has_heard(store: RunStore) -> None:
    async def launch() -> None:
        actor = coordinator(store)
        first = await status(actor)
        await actor.warned("a save was given up")
        lost = await actor.status((first.attempt, first.version), 0.0)
        again = await actor.status((first.attempt, first.version), 0.0)
        assert lost.warnings == again.warnings == ("a save was given up",)
        assert (await actor.status((again.attempt, again.version), 0.0)).warnings == ()
        await actor.stop("a signal")
        assert (await status(actor)).stopping
        await actor.end("stopped", "enough")

    run(launch)


def test_all_that_the_feeder_noted_stands_before_the_end_also_what_it_was_asked_for_just_before(
    store: RunStore,
) -> None:
    async def launch() -> None:
        asked, answered = asyncio.Event(), asyncio.Event()

        async def notes(consumed_samples: int) -> FeedNotes:
            asked.set()
            await answered.wait()
            text = f"line {next(lines)}"
            return FeedNotes(bad_documents=(bad(text),), encoder_differences=(), cursors=())

        actor = coordinator(store, notes=notes)
        actor._driver._feeder_notes.soon(8)
        await asked.wait()
        ending = asyncio.create_task(actor.end("done", "done at step 10"))
        await until(actor, is_ending)
        answered.set()
        await ending

    async def is_ending(actor: Coordinator) -> bool:
        return actor._launch.ended is not None and (await status(actor)).ended is None

    lines = count(1)
    run(launch)
    events = read_journal(store.storage).events
    told = [e.fields.get("text", e.kind) for e in events if e.kind in ("bad document", "end")]
    assert told == ["line 1", "line 2", "end"]


def bad(text: str) -> BadDocument:
    return BadDocument(source="made", text=text)


@pytest.mark.parametrize(
    ("at_a_time", "told"),
    [
        ([1, 2], []),
        ([1, 3], [4]),
        ([1, 3, 2], [4, 6]),  # the last one at the end only
        ([1, 3, 3, 1, 0], [4, 8]),
        ([90, 10], [90, 100]),
        ([0, 0], []),
    ],
)
def test_the_first_documents_that_are_skipped_are_told_by_name_and_of_the_others_how_many(
    store: RunStore, at_a_time: list[int], told: list[int]
) -> None:
    async def launch() -> None:
        left = iter(at_a_time)

        async def notes(consumed_samples: int) -> FeedNotes:
            texts = tuple(bad(f"a.jsonl line {next(lines)}") for _ in range(next(left)))
            return FeedNotes(bad_documents=texts, encoder_differences=(), cursors=())

        actor = coordinator(store, notes=notes)
        for _ in at_a_time[:-1]:
            actor._driver._feeder_notes.soon(8)
            await actor._driver._feeder_notes._taking
        await actor.end("done", "done at step 10")
        warnings.extend((await status(actor)).warnings)

    lines, warnings = count(1), list[str]()
    run(launch)
    num_named = min(sum(at_a_time), journal_notes.NAMED)
    named = [f"a document was skipped: a.jsonl line {number}" for number in range(1, num_named + 1)]
    journal = f"{store.storage.root}/journal/a0001"
    counted = [
        f"{number} documents were skipped in attempt 1 so far; the journal names each (kind "
        f'"bad document" in {journal}), and `orchestrator audit {store.storage.root}` counts those of the '
        "whole run"
        for number in told
    ]
    assert warnings == [*named, *counted]
    events = read_journal(store.storage).events
    assert sum(event.kind == "bad document" for event in events) == sum(at_a_time)


@pytest.mark.parametrize("how", ["hangs", "is gone"])
def test_a_feeder_that_does_not_say_its_notes_keeps_no_end_from_being_written(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(journal_notes, "NOTES_LIMIT_S", 0.1)

    async def notes(consumed_samples: int) -> None:
        if how == "hangs":
            await asyncio.Event().wait()

    async def launch() -> None:
        actor = coordinator(store, notes=notes)
        await actor.end("done", "done at step 10")
        found = await status(actor)
        assert found.ended == "done"
        assert found.warnings == (journal_notes.NOT_SAID,)

    run(launch)
    assert store.read_end(1) is not None


def test_a_member_of_another_launch_leaves_no_trace(store: RunStore) -> None:
    async def launch() -> None:
        actor = coordinator(store)
        answer = await actor.join(replace(JOIN, launch="bbbb"))
        assert isinstance(answer, Refusal)
        assert "launch bbbb" in answer.reason
        assert not actor._launch.infos
        await actor.end("stopped", "enough")

    run(launch)
    assert "join" not in {event.kind for event in read_journal(store.storage).events}


def test_a_call_that_cannot_be_answered_says_that_the_coordinator_lives(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def launch() -> None:
        actor = coordinator(store, min_workers=2, max_workers=2)
        monkeypatch.setattr(coordinator_module, "ANSWER_S", 0.1)
        assert isinstance(await actor.join(JOIN), StillWaiting)
        monkeypatch.setattr(coordinator_module, "ANSWER_S", LIMIT_S)
        first = asyncio.create_task(actor.join(JOIN))
        second = await actor.join(replace(JOIN, member="n", port=2))
        assert isinstance(second, GenerationView)
        assert isinstance(await first, GenerationView)
        monkeypatch.setattr(coordinator_module, "ANSWER_S", 0.1)
        vote = write_vote(store.storage, key(1), rank=0, world_size=2)
        assert isinstance(await actor.vote(LAUNCH, vote), StillWaiting)
        await actor.end("stopped", "enough")

    run(launch)
    assert [e.kind for e in read_journal(store.storage).events].count("join") == 2


def test_a_gcs_that_says_nothing_knows_of_nobodys_death(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[str, dict[str, str]] = {"lives": {"State": "ALIVE"}, "died": {"State": "DEAD"}, "unknown": {}}
    monkeypatch.setattr("ray._private.state.state.actor_table", lambda actor: rows[actor])
    found = {
        actor: coordinator_module.ray_says(MemberInfo(member="m", actor_id=actor, node_id="n", pid=1))
        for actor in rows
    }
    assert found["died"]
    assert (found["lives"], found["unknown"]) == (None, None)


def test_what_is_asked_from_outside_is_told_with_the_next_status_and_who_stopped_stands_in_the_end(
    store: RunStore,
) -> None:
    async def launch() -> None:
        actor = coordinator(store)
        first = await status(actor)
        await actor._driver.carry_out(actor._launch.asked(ask))
        heard = await actor.status((first.attempt, first.version), 0.0)
        assert heard.notices == ("ann@desk asks for: stop now · stopping at once, without a save",)
        assert (await actor.status((heard.attempt, heard.version), 0.0)).notices == ()

    ask = Request(number=1, launch=LAUNCH, what=STOP_NOW, by="ann@desk", created="")
    run(launch)
    (end,) = [event.fields for event in read_journal(store.storage).events if event.kind == EventKind.END]
    written = store.read_end(1)
    assert written is not None
    assert (end["outcome"], end["by"], written.by) == ("stopped", "ann@desk", "ann@desk")
