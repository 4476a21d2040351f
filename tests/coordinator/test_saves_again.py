"""A save that did not become a point is asked for again, whatever kept it from that: storage, a worker that
was lost, a coordinator that was. The coordinator's own class in this process, without Ray.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orchestrator.checkpoint.commit import pending_save
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.actor import Coordinator
from orchestrator.elastic.failure import STORAGE_LIMIT_S
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.planning.schedule import Budgets, Length
from orchestrator.records.membership import ControlRequests, GenerationView
from orchestrator.storage.tries import Backoff
from tests.checkpoint.samples import key, record, write_vote
from tests.coordinator.builders import JOIN, LAUNCH, coordinator, run, status, what_it_needs

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save is tried without a wait."""
    monkeypatch.setattr(pending_save, "STORAGE_BACKOFF", Backoff(first_s=0.0, most_s=320.0))


async def asked_to_save(actor: Coordinator, attempt: int = 1, generation: int = 1) -> ControlRequests:
    """Returns when the generation is asked for a save."""
    wanted = await actor.watch(LAUNCH, attempt, generation, None)
    while not wanted.save:
        wanted = await actor.watch(LAUNCH, attempt, generation, wanted)
    return wanted


async def two(actor: Coordinator) -> None:
    await asyncio.gather(actor.join(JOIN), actor.join(replace(JOIN, member="n", port=2)))


def given_up(store: RunStore) -> list[tuple[str, float]]:
    events = [event for event in read_journal(store.storage).events if event.kind == "save given up"]
    return [(event.fields["point"], event.fields["retry_s"]) for event in events]


def test_a_report_that_comes_late_is_not_taken_for_the_begin_of_the_save_that_is_asked_for(
    store: RunStore,
) -> None:
    async def launch() -> None:
        actor = coordinator(store, min_workers=2, max_workers=2)
        await two(actor)
        await actor.report(LAUNCH, "m", 1, 1, (record(key(1)),))
        await actor.save_failed(LAUNCH, key(1), 0, 2, "No space left on device")
        wanted = await asked_to_save(actor)
        # this rank has just heard that nobody wants its part, and has stopped writing it
        await actor.save_failed(LAUNCH, key(1), 1, 2, "the save was given up")
        assert await actor.vote(LAUNCH, write_vote(store.storage, key(1), rank=0, world_size=2)) is False
        assert (await asked_to_save(actor)) == wanted
        await actor.report(LAUNCH, "m", 1, 1, (record(key(2)),))
        votes = (write_vote(store.storage, key(2), rank=rank, world_size=2) for rank in range(2))
        assert await asyncio.gather(*(actor.vote(LAUNCH, vote) for vote in votes)) == [True, True]
        assert not (await actor.watch(LAUNCH, 1, 1, wanted)).save, "it was made"
        await actor.end("stopped", "enough")

    run(launch)
    assert given_up(store) == [(key(1).point_name, 0.0)]


def test_who_read_what_a_failed_save_may_cost_reads_once_that_one_succeeded(
    store: RunStore,
) -> None:
    async def launch() -> None:
        actor = coordinator(store)
        await actor.join(JOIN)
        await actor.report(LAUNCH, "m", 1, 1, tuple(record(key(step)) for step in (1, 2, 3)))
        await actor.save_failed(LAUNCH, key(1), 0, 1, "No space left on device")
        for step in (2, 3):
            assert await actor.vote(LAUNCH, write_vote(store.storage, key(step), 0, 1)) is True
        told = [text for text in (await status(actor)).warnings if "works again" in text or "costs" in text]
        assert len(told) == 2, told
        assert told[0].startswith("a failed save does not stop training. The next save is tried in 0 s")
        assert told[1] == f"storage works again: {key(2).point_name} is saved"
        await actor.end("stopped", "enough")

    run(launch)


def test_after_the_last_step_nobody_is_told_that_training_goes_on_but_what_is_not_saved(
    store: RunStore,
) -> None:
    two_steps = Length(given=16, unit="samples", global_batch_size=8, seq_len=32, tokens=512)
    begin = what_it_needs(store)
    budgets = Budgets(max_samples=two_steps)

    async def launch() -> None:
        attempt = replace(begin.attempt, budgets=budgets)
        actor = Coordinator(replace(begin, attempt=attempt), lambda info: None)
        await actor.join(JOIN)
        told = list[str]()
        for at in (key(1), key(2), replace(key(2), generation=2)):
            await actor.report(LAUNCH, "m", 1, 1, (record(at),) if at.generation == 1 else ())
            await actor.save_failed(LAUNCH, at, 0, 1, "No space left on device")
            vote = write_vote(store.storage, at, 0, 1)
            assert await actor.vote(LAUNCH, vote) is False
            told = [text for text in (await status(actor)).warnings if "was given up" not in text]
            assert ("does not stop training" in told[-1]) == (at == key(1)), told
        assert len(told) == 2, "once each"
        limit = f"{STORAGE_LIMIT_S:g} s"
        assert told[1].startswith(
            f"the last state of the run is not saved yet. Saving is tried for {limit}, then"
        )
        await actor.end("stopped", "enough")

    run(launch)


def test_a_save_that_lost_a_worker_is_made_again_before_the_next_one_is_due(store: RunStore) -> None:
    async def launch() -> None:
        actor = coordinator(store, min_workers=2, max_workers=2)
        await two(actor)
        vote = asyncio.create_task(actor.vote(LAUNCH, write_vote(store.storage, key(1), 0, 2)))
        rejoins = [replace(JOIN, member="n", port=3, leaves=(1, 1)), replace(JOIN, port=4, leaves=(1, 1))]
        views = await asyncio.gather(*(actor.join(request) for request in rejoins))
        assert await vote is False, "n never voted"
        (generation,) = {view.generation for view in views if isinstance(view, GenerationView)}
        await asked_to_save(actor, generation=generation)
        told = (await status(actor)).warnings
        assert sum("rank 1 ended before it had saved its part" in text for text in told) == 1
        await actor.end("stopped", "enough")

    run(launch)
    assert given_up(store) == [(key(1).point_name, 0.0)]


def test_a_save_that_lost_its_coordinator_is_given_up_by_the_next_one_once_and_made_again(
    store: RunStore,
) -> None:
    async def launch() -> None:
        old = coordinator(store, min_workers=2, max_workers=2)
        await two(old)
        votes = [write_vote(store.storage, key(1), rank=rank, world_size=2) for rank in range(2)]
        await old.report(LAUNCH, "m", 1, 1, (record(key(1)), record(key(2))))
        assert await asyncio.gather(*(old.vote(LAUNCH, vote) for vote in votes)) == [True, True]
        for task in old._driver._tasks:
            task.cancel()
        new = coordinator(store, min_workers=2, max_workers=2)
        assert await new.vote(LAUNCH, votes[0]) is False
        assert await new.vote(LAUNCH, write_vote(store.storage, key(2), 0, 2)) is False, "key(1) is a point"
        await new.save_failed(LAUNCH, key(2), 1, 2, "its part is cancelled")
        joins = [replace(JOIN, leaves=(1, 1)), replace(JOIN, member="n", port=2, leaves=(1, 1))]
        await asyncio.gather(*(new.join(request) for request in joins))
        await asked_to_save(new, attempt=2)
        told = (await status(new)).warnings
        assert sum("another one has taken over" in text for text in told) == 1
        await new.end("stopped", "enough")

    run(launch)
    assert given_up(store) == [(key(2).point_name, 0.0)]
