"""What the coordinator does besides answering, without Ray: whom it has killed, whose calls it heeds, and
what is durable before it says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator import actor as coordinator_module
from orchestrator.coordinator import launch_driver
from orchestrator.coordinator.actor import Coordinator
from orchestrator.elastic.formation import RendezvousSettings
from orchestrator.errors import FencedError
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.membership import GenerationView, MachineProof, StillWaiting
from orchestrator.records.run_status import Doing
from orchestrator.records.steps import StateKey
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import cursor, key, no_sleep, record, write_vote
from tests.coordinator.builders import (
    JOIN,
    LAUNCH,
    LIMIT_S,
    coordinator,
    flushed,
    on_failing_disk,
    run,
    status,
    what_it_needs,
    with_disk,
)
from tests.raising import raises

pytestmark = pytest.mark.usefixtures("patient")

OTHER = "bbbb"  # another launch
Call = Callable[[Coordinator, RunStore], Awaitable[object]]


def test_the_supervisor_hears_once_whom_to_kill_because_he_did_not_come_back(store: RunStore) -> None:
    async def launch() -> None:
        start = what_it_needs(store, max_workers=2)
        settings = RendezvousSettings(missing_grace_s=0.0)
        actor = Coordinator(replace(start, rendezvous=settings), lambda info: None)
        unresponsive = replace(JOIN, member="n", port=2, pid=22)
        await asyncio.gather(actor.join(JOIN), actor.join(unresponsive))
        assert (await status(actor)).left_out == ()
        view = await actor.join(replace(JOIN, leaves=(1, 1)))
        assert isinstance(view, GenerationView)
        assert view.members == ("m",)
        news = await status(actor)
        assert [(info.member, info.pid) for info in news.left_out] == [("n", 22)]
        assert (await actor.status((news.attempt, news.version), 0.0)).left_out == ()
        await actor.end("stopped", "enough")

    run(launch)


PROOF = MachineProof(probe=".probe-1/probe", token="1", unix_s=0.0)
CALLS: dict[str, Call] = {
    "check_machine": lambda actor, _: actor.check_machine(OTHER, PROOF),
    "watch": lambda actor, _: actor.watch(OTHER, 1, 1, None),
    "ended": lambda actor, _: actor.ended(OTHER, 1, 7),
    "report": lambda actor, _: actor.report(OTHER, "m", 1, 1, (record(key(1)),)),
    "doing": lambda actor, _: actor.doing(OTHER, "m", Doing(kind="code", place="", since_s=5.0)),
    "phase": lambda actor, _: actor.phase(OTHER, "m", 1.0),
    "loading": lambda actor, _: actor.loading(OTHER, "m", 1, 2),
    "vote": lambda actor, store: actor.vote(OTHER, write_vote(store.storage, key(1), 0, 1)),
    "save_failed": lambda actor, _: actor.save_failed(OTHER, key(1), 0, 1, "No space left on device"),
    "is_given_up": lambda actor, _: actor.is_given_up(OTHER, key(1), 0, 1, False),
    "finished": lambda actor, _: actor.finished(OTHER, "m", key(1), "done"),
    "failed": lambda actor, _: actor.failed(OTHER, "m", "ValueError", "no such thing", False),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_another_launch_is_refused_with_both_names_and_changes_nothing(
    store: RunStore, call: str
) -> None:
    async def launch() -> None:
        actor = coordinator(store)
        assert isinstance(await actor.join(JOIN), GenerationView)
        before = await status(actor)
        with raises(FencedError, "run.fenced", f"launch {OTHER}", f"launch {LAUNCH}"):
            await CALLS[call](actor, store)
        after = await status(actor)
        assert (after.ended, after.failures, after.last_step) == (None, (), before.last_step)
        await actor.end("stopped", "enough")

    run(launch)
    journal = read_journal(store.storage)
    assert not journal.records
    of_members = (EventKind.MEMBER_FINISHED, EventKind.MEMBER_FAILED, EventKind.SAVE_GIVEN_UP)
    assert not [event for event in journal.events if event.kind in of_members]


@pytest.mark.parametrize("durable", [key(3, generation=2), key(3, attempt=2)])
def test_what_is_durable_of_another_generation_is_not_acknowledged_to_the_one_that_trains(
    store: RunStore, durable: StateKey
) -> None:
    async def launch() -> None:
        actor = coordinator(store)
        await actor.join(JOIN)
        await actor.report(LAUNCH, "m", 1, 1, tuple(record(key(step)) for step in (1, 2)))
        assert await actor._driver.flush()
        actor._driver._acknowledge(durable)
        assert (await actor.watch(LAUNCH, 1, 1, None)).acknowledged_step == 2
        await actor.end("stopped", "enough")

    run(launch)


def test_a_vote_of_an_older_attempt_is_no_part_of_a_save_and_brings_no_records(store: RunStore) -> None:
    coordinator(store)  # attempt 1, whose coordinator was killed

    async def launch() -> None:
        actor = coordinator(store)
        view = await actor.join(JOIN)
        assert isinstance(view, GenerationView)
        assert view.attempt == 2
        assert await actor.vote(LAUNCH, write_vote(store.storage, key(1), 0, 1)) is False
        assert (await status(actor)).last_step is None
        await actor.end("stopped", "enough")

    run(launch)
    assert not read_journal(store.storage).records


def test_a_point_that_was_just_committed_is_what_members_without_a_state_are_given(store: RunStore) -> None:
    async def launch() -> None:
        actor = coordinator(store)
        await actor.join(JOIN)
        assert await actor.vote(LAUNCH, write_vote(store.storage, key(1), 0, 1)) is True
        view = await actor.join(replace(JOIN, leaves=(1, 1)))
        assert isinstance(view, GenerationView)
        assert (view.parent, view.point, view.cursor) == (key(1), key(1).point_name, cursor(key(1)))
        await actor.end("stopped", "enough")

    run(launch)


def test_a_member_may_go_only_when_it_is_durable_that_it_finished(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_driver, "FLUSH_EVERY_S", 0.01)
    failing, disk = on_failing_disk(store)

    async def launch() -> None:
        actor = with_disk(coordinator(store, min_workers=2, max_workers=2), failing)
        await asyncio.gather(actor.join(JOIN), actor.join(replace(JOIN, member="n", port=2)))
        await flushed(actor)
        disk.hanging.clear()
        monkeypatch.setattr(coordinator_module, "ANSWER_S", 0.1)
        assert isinstance(await actor.finished(LAUNCH, "m", key(1), "done"), StillWaiting)
        assert not who_finished()
        disk.hanging.set()
        while await actor.finished(LAUNCH, "m", key(1), "done") is not None:
            pass
        assert who_finished() == ["m"]
        await actor.end("stopped", "enough")

    def who_finished() -> list[object]:
        events = read_journal(store.storage).events
        return [event.fields["member"] for event in events if event.kind == EventKind.MEMBER_FINISHED]

    run(launch)


class HangingDeletion(OsDisk):
    """No COMMIT is deleted until it is `free`; `began` is set once that was asked for."""

    def __init__(self, began: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
        self.free = threading.Event()
        self._tell = partial(loop.call_soon_threadsafe, began.set)

    def unlink(self, path: str) -> None:
        if path.endswith("/COMMIT"):
            self._tell()
            self.free.wait(LIMIT_S)
        super().unlink(path)


def test_a_point_whose_deletion_hangs_keeps_no_save_from_being_committed_and_no_generation_from_forming(
    store: RunStore,
) -> None:
    names = [key(step).point_name for step in (1, 2, 3)]

    async def launch() -> None:
        began = asyncio.Event()
        disk = HangingDeletion(began, asyncio.get_running_loop())
        hanging = RunStore(Storage(store.storage.root, disk, no_sleep))
        start = replace(what_it_needs(store), keep_latest=1)
        actor = Coordinator(start, lambda info: None, store=hanging)
        await actor.join(JOIN)
        for step in (1, 2):
            assert await actor.vote(LAUNCH, write_vote(store.storage, key(step), 0, 1)) is True
        await began.wait()
        assert await actor.vote(LAUNCH, write_vote(store.storage, key(3), 0, 1)) is True
        back = replace(JOIN, key=key(3), leaves=(1, 1), cursor=cursor(key(3)))
        view = await actor.join(back)
        assert isinstance(view, GenerationView)
        assert (view.generation, view.parent) == (2, key(3))
        assert store.point_names() == names, "all that is to be deleted is still there"
        assert not await actor.settle(0.1), "it is not waited for longer"
        disk.free.set()
        assert await actor.settle(LIMIT_S)
        await actor.end("stopped", "enough")

    run(launch)
    assert store.point_names() == names[-1:]
