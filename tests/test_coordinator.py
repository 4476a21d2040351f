"""The coordinator's own class in this process, without Ray: what it tells whom."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.attempt import Attempt
from orchestrator.coordinator import Coordinator, CoordinatorStart
from orchestrator.monitor.journal import GROUP_FORMED
from orchestrator.monitor.reader import read_journal
from orchestrator.plan.claims import ClaimParent
from orchestrator.plan.schedule import Budgets
from orchestrator.progress import Progress
from orchestrator.records import GenerationView, GroupMember, JoinRequest, RunStatus
from orchestrator.resume.claims import START
from orchestrator.resume.store import RunStore
from orchestrator.storage import Storage
from tests.resume.samples import CONFIG, key, write_vote

LIMIT_S = 30.0
LAUNCH = "aaaa"


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """A run whose first attempt is claimed and has not begun."""
    store = RunStore(Storage(str(tmp_path / "run")))
    store.claim(1, LAUNCH, START, "host")
    store.write_parent(ClaimParent(attempt=1, parent=None))
    return store


def coordinator(store: RunStore) -> Coordinator:
    """Of a launch with one worker."""
    attempt = Attempt(
        number=1,
        launch=LAUNCH,
        why=START,
        point=None,
        inherited=(),
        step_label=0,
        budgets=Budgets(),
        encoders=(),
    )
    return Coordinator(
        CoordinatorStart(
            attempt=attempt,
            storage=store.storage.root,
            min_workers=1,
            max_workers=1,
            expected=1,
            keep_latest=3,
            run="tiny",
            global_batch_size=8,
            seq_len=32,
            flat_config=CONFIG,
            rng={"rule": "none"},
        )
    )


JOIN = JoinRequest(
    member="m",
    launch=LAUNCH,
    actor_id="",
    node_id="n",
    host="127.0.0.1",
    port=1,
    key=None,
    leaves=None,
    prepared=None,
    cursor=None,
)


def test_a_generation_is_told_once_and_journalled_with_who_was_lost_before_it(store: RunStore) -> None:
    async def launch() -> tuple[RunStatus, RunStatus, RunStatus]:
        actor = coordinator(store)
        await actor.join(replace(JOIN, pid=11))
        first = await actor.status(-1, 0.0)
        await actor.failed(LAUNCH, "m", "ValueError", "ValueError: no such thing", False)
        failed = await actor.status(first.version, 0.0)
        leaves, other = (1, 1), replace(JOIN, pid=12, key=None, leaves=(1, 1), idle_s=0.5)
        assert isinstance(await actor.join(replace(other, leaves=leaves)), GenerationView)
        last = await actor.status(failed.version, 0.0)
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
    assert again.paused_s >= 0.5
    events = [event for event in read_journal(store.storage).events if event.kind == GROUP_FORMED]
    assert [(event.attempt, event.fields["generation"]) for event in events] == [(1, 1), (1, 2)]


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
        first = await actor.status(-1, 0.0)
        await actor.end("stopped", "enough")
        return committed, first, await actor.status(first.version, 0.0)

    committed, first, second = asyncio.run(asyncio.wait_for(launch(), LIMIT_S))
    assert not committed
    name = key(1).point_name
    assert len(first.warnings) == 1
    assert first.warnings[0].startswith(f"the save of {name} was given up: resume point {name}: ")
    assert second.warnings == ()
    kinds = [event.kind for event in read_journal(store.storage).events]
    assert "save given up" in kinds
    progress = Progress(1000.0)
    progress.show(first)
    progress.show(second)
    assert capsys.readouterr().err.count(f"warning: the save of {name} was given up: ") == 1
