"""The actor that Ray starts, in this process: it begins although storage fails, answers everybody meanwhile,
and says the true reason where it cannot begin.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator import actor as coordinator_module
from orchestrator.coordinator import process as process_module
from orchestrator.coordinator.process import CoordinatorProcess
from orchestrator.history.claims.claim_files import RESTARTED, START
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.membership import GenerationView, Refusal, RunOver, StillWaiting
from orchestrator.records.run_status import RunStatus
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, no_sleep, record, write_vote
from tests.coordinator.builders import (
    JOIN,
    LAUNCH,
    LIMIT_S,
    FailingDisk,
    coordinator,
    ended,
    run,
    what_it_needs,
)


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "ANSWER_S", 0.1)
    monkeypatch.setattr(process_module, "STATUS_S", 0.1)


def process(store: RunStore, disk: OsDisk, limit_s: float = 60.0) -> CoordinatorProcess:
    """Whose storage is on `disk`."""
    failing = RunStore(Storage(store.storage.root, disk, no_sleep))
    return CoordinatorProcess(
        what_it_needs(store, limit_s=limit_s), why_dead=lambda info: None, store=failing
    )


async def first_status(actor: CoordinatorProcess) -> RunStatus:
    """Of the attempt, or that it has ended."""
    news = await actor.status((-1, -1), 0.1)
    while not news.attempt:
        news = await actor.status((news.attempt, news.version), 0.1)
    return news


def files(store: RunStore) -> dict[Path, bytes]:
    root = Path(store.storage.root)
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


class FailsOnce(OsDisk):
    """The sync of the attempt's journal fails once."""

    left = 0

    def create(self, path: str) -> int:
        self.left += "/journal/" in path and not self.failed
        return super().create(path)

    def fsync(self, handle: int) -> None:
        if self.left and not self.failed:
            self.failed = True
            raise OSError(errno.EIO, "Input/output error")
        super().fsync(handle)

    failed = False


def test_one_failure_of_the_first_sync_costs_no_launch(store: RunStore) -> None:
    async def launch() -> None:
        disk = FailsOnce()
        actor = process(store, disk)
        while not isinstance(view := await actor.join(JOIN), GenerationView):
            assert isinstance(view, StillWaiting)
        assert disk.failed
        news = await first_status(actor)
        assert any("Input/output error" in warning for warning in news.warnings)
        assert "storage works again" in news.warnings
        await actor.end("stopped", "enough")

    run(launch)
    assert read_journal(store.storage).events[-1].kind == "end"


def test_an_outage_while_a_coordinator_restarts_is_waited_for_and_nothing_said_is_lost(
    store: RunStore,
) -> None:
    coordinator(store)
    disk = FailingDisk()
    disk.broken = True

    async def launch() -> None:
        actor = process(store, disk)
        assert isinstance(await actor.join(JOIN), StillWaiting)
        vote = write_vote(store.storage, key(1), rank=0, world_size=1)
        for answer in (
            await actor.watch(LAUNCH, 1, 1, None),
            await actor.report(LAUNCH, "m", 1, 1, (record(key(1)),)),
            await actor.vote(LAUNCH, vote),
            await actor.finished(LAUNCH, "m", key(1), "done"),
        ):
            assert isinstance(answer, StillWaiting)
        for _ in range(3):
            await actor.stop("a signal")  # as the supervisor does until it hears that it is known
        await actor.note(EventKind.GROUP_STARTED, {"node": "n", "num_workers": 1})
        news = await actor.status((-1, -1), 0.1)
        while not news.warnings:
            news = await actor.status((news.attempt, news.version), 0.1)
        assert (news.attempt, news.ended, news.stopping) == (0, None, True)
        assert "No space left on device" in news.warnings[0]
        assert "The coordinator waits for it" in news.warnings[0]
        disk.broken = False
        news = await first_status(actor)
        assert (news.attempt, news.stopping) == (2, True)
        await actor.end("stopped", "enough")
        await ended(actor)

    run(launch)
    kinds = [event.kind for event in read_journal(store.storage).events if event.attempt == 2]
    assert kinds.count("wish") == kinds.count("group started") == 1


def test_the_journal_of_a_coordinator_that_took_anothers_place_begins_with_that_ones_death(
    store: RunStore,
) -> None:
    coordinator(store)
    coordinator(store)
    store.claim(3, LAUNCH, RESTARTED, "host-3")  # which died before it wrote anything
    coordinator(store)
    told = [e for e in read_journal(store.storage).events if e.kind == EventKind.COORDINATOR_DIED]
    found = [(e.attempt, e.fields["pid"], e.fields["host"]) for e in told]
    assert found == [(2, os.getpid(), socket.gethostname()), (4, 0, "host-3")]


class NoParentFile(OsDisk):
    """While `broken`, no parent file is written."""

    broken = True

    def link(self, old: str, new: str) -> None:
        if self.broken and new.endswith(".parent.json"):
            self.tried()
            raise OSError(errno.EIO, "Input/output error")
        super().link(old, new)

    def __init__(self, tried: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
        self.tried = lambda: loop.call_soon_threadsafe(tried.set)


def test_a_restarted_coordinator_that_tries_again_goes_on_with_the_claim_that_it_made(
    store: RunStore,
) -> None:
    coordinator(store)

    async def launch() -> None:
        tried = asyncio.Event()
        disk = NoParentFile(tried, asyncio.get_running_loop())
        actor = process(store, disk)
        for _ in range(2):
            await actor.status((-1, -1), 0.0)
            await asyncio.wait_for(tried.wait(), LIMIT_S)
            tried.clear()
        disk.broken = False
        assert (await first_status(actor)).attempt == 2
        await actor.end("stopped", "enough")

    run(launch)
    assert store.claim_numbers() == [1, 2]


@pytest.mark.parametrize("hangs", [False, True])
def test_storage_that_fails_beyond_its_limit_ends_the_launch_with_the_reason(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    disk = FailingDisk()
    disk.broken = True
    if hangs:
        disk.hanging.clear()
    else:  # a slow try is not taken for one that hangs
        monkeypatch.setattr(process_module, "AGAIN_S", LIMIT_S)

    async def launch() -> None:
        actor = process(store, disk, limit_s=0.5)
        news = await first_status(actor)
        assert (news.attempt, news.ended) == (1, "failed")
        assert ("storage has not answered for" if hangs else "storage has failed for") in news.reason
        assert isinstance(await actor.join(JOIN), RunOver)
        wanted = await actor.watch(LAUNCH, 1, 1, None)
        assert not isinstance(wanted, StillWaiting)
        assert wanted.ended
        assert await actor.finished(LAUNCH, "m", key(1), "done") is None
        disk.hanging.set()

    run(launch)


def test_a_coordinator_that_is_fenced_says_so_at_once(store: RunStore) -> None:
    coordinator(store)
    store.claim(2, "bbbb", START, "host")

    async def launch() -> None:
        actor = process(store, OsDisk())
        news = await first_status(actor)
        assert (news.ended, news.code) == ("failed", "run.fenced")
        assert "another launch has taken the run over" in news.reason
        assert isinstance(await actor.join(JOIN), Refusal)

    run(launch)
    assert store.claim_numbers() == [1, 2]


def test_a_coordinator_that_restarts_after_the_end_was_written_answers_and_writes_nothing(
    store: RunStore,
) -> None:
    async def end() -> None:
        actor = coordinator(store)
        await actor.join(JOIN)
        await actor.end("done", "done at step 1")
        actor._driver._pulse.close()  # nothing is written any more

    run(end)
    before = files(store)

    async def launch() -> None:
        actor = process(store, OsDisk())
        news = await first_status(actor)
        assert (news.attempt, news.ended, news.reason) == (1, "done", "done at step 1")
        assert isinstance(await actor.join(JOIN), RunOver)
        assert await actor.finished(LAUNCH, "m", key(1), "done") is None
        assert await actor.vote(LAUNCH, write_vote(store.storage, key(1), 0)) is False
        await actor.note(EventKind.GROUP_ENDED, {"node": "n", "reason": ""})

    run(launch)
    after = {path: data for path, data in files(store).items() if "/points/" not in str(path)}
    assert after == before
    assert store.claim_numbers() == [1]
    assert store.newest_claim().why != RESTARTED  # type: ignore[union-attr]
