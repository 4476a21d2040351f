"""The stream through Ray: what the feeder gives out is the canonical stream, whatever dies on the way."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import actors  # the public state API needs a dashboard

from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.feed.feed_reports import FeederStats
from orchestrator.data.feed.feeder import Feeder, pinned
from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.data.feed.pipeline_thread import PipelineThreads, Taker
from orchestrator.data.feed.remote_feed import RayFeed, Reopen
from orchestrator.data.feed.stream_session import source_windows
from orchestrator.data.feed.window_scheduler import SLOTS_AHEAD
from orchestrator.data.frozen import Found, Listed
from orchestrator.data.packing.samples import open_samples
from orchestrator.data.sources.lists.file_rows import FileRow, Files
from orchestrator.data.spec import DataSpec
from orchestrator.errors import BadDocumentError, ConfigError, DataIdentityError, FeedError, FencedError
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.tokens import WindowTask
from orchestrator.storage.files import Storage
from tests.conftest import TinyConfig
from tests.data.feeding import (
    MICRO,
    SEQ_LEN,
    STEP_TOKENS,
    assert_stream,
    coming,
    feeder,
    following,
    generations,
    pool,
    train,
    view,
)
from tests.data.making import job, some_texts, write_corpus
from tests.raising import check_error, raises

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("cluster"), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def spec(tiny_config: TinyConfig) -> DataSpec:
    """As large as with a tokenizer of many tokens: Ray hands over what is small in another way."""
    return replace(prepare_data(parse_config(tiny_config())), notes=("x" * 1_000_000,))


@pytest.fixture(scope="module")
def samples(spec: DataSpec) -> list[Any]:
    return list(open_samples(spec, Cursor(), SEQ_LEN))


def stats_of(actor: Any) -> FeederStats:
    return ray.get(actor.stats.remote())


def tokenizer_pids(of_feeder: Any) -> list[int]:
    owner = stats_of(of_feeder).pid
    return [
        actor["Pid"]
        for actor in actors().values()
        if "Tokenizer" in actor["ActorClassName"]
        and actor["State"] == "ALIVE"
        and parent_feeder(actor) == owner
    ]


def parent_feeder(actor: dict[str, Any]) -> int | None:
    port = actor["OwnerAddress"]["Port"]
    owners = (a["Pid"] for a in actors().values() if a["Address"]["Port"] == port and a["State"] == "ALIVE")
    return next(owners, None)


def eventually(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"


@pytest.fixture(scope="module")
def shared(cluster: Any, spec: DataSpec) -> Iterator[tuple[Any, str]]:
    """A feeder for all tests that leave it whole; each begins a generation of its own."""
    with feeder(spec, replay_bytes=8 << 20) as (actor, launch):
        yield actor, launch


def open_feeds(shared: tuple[Any, str], cursor: Cursor, world_size: int = 1) -> list[RayFeed]:
    """Feeds of all ranks, open in a new generation."""
    actor, launch = shared
    generation = next(generations)
    feeds = [RayFeed(actor, launch) for _ in range(world_size)]
    for rank, feed in enumerate(feeds):
        feed.open(view(generation, launch, rank, world_size), cursor)
    return feeds


# the second is served from memory; the third, of another shape, is drawn again
@pytest.mark.quick("3-511")
@pytest.mark.parametrize(("world_size", "num_samples"), [(1, 256), (2, 256), (3, 511)])
def test_ranks_together_get_the_canonical_stream_to_its_end(
    shared: tuple[Any, str], samples: list[Any], world_size: int, num_samples: int
) -> None:
    feeds = open_feeds(shared, Cursor(), world_size)
    taken, cursor = train(feeds, Cursor(), None, num_samples)
    assert_stream(taken, samples)
    assert cursor == samples[-1].cursor
    beyond = feeds[0].get(following(cursor, num_samples), 0, world_size, MICRO, cursor)
    assert beyond.end_of_data
    assert beyond.step.num_samples == 0


def test_several_sources_reach_the_ranks_in_the_mixtures_order_with_their_masks(
    cluster: Any, tiny_config: TinyConfig, tmp_path: Path
) -> None:
    """Of very different sizes, one of them compressed and in many windows, one with loss masks; a tokenizer
    and the feeder are killed on the way.
    """
    del cluster
    write_corpus(tmp_path / "big", some_texts(600), "jsonl.gz", num_files=2)
    write_corpus(tmp_path / "small", some_texts(60), "parquet")
    asked = [{"prompt": f"{i}?", "completion": text} for i, text in enumerate(some_texts(80, 20))]
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps(each) for each in asked))
    sources = [
        {"name": "big", "path": str(tmp_path / "big"), "format": "jsonl", "weight": 0.6},
        {"name": "small", "path": str(tmp_path / "small"), "format": "parquet", "weight": 0.3},
        {"name": "asked", "path": str(tmp_path / "asked.jsonl"), "format": "jsonl", "content": "prompt"}
        | {"weight": 0.1, "max_epochs": 3},
    ]
    small = {"data.fragment_bytes": 4000, "data.window_bytes": 9000, "data.on_end": "drop"}
    mixed = prepare_data(parse_config(tiny_config({"data.sources": sources, **small})))
    canonical = list(open_samples(mixed, Cursor(), SEQ_LEN))
    assert {sample.source for sample in canonical} == {"big", "small", "asked"}
    assert any((s.labels[s.document_ids >= 0] < 0).any() for s in canonical), "some tokens are masked"
    with feeder(mixed) as shared:

        def kill(step: int) -> None:
            if step == 3:
                eventually(lambda: bool(tokenizer_pids(shared[0])))
                os.kill(tokenizer_pids(shared[0])[0], signal.SIGKILL)
            if step == 8:
                os.kill(stats_of(shared[0]).pid, signal.SIGKILL)

        taken, cursor = train(open_feeds(shared, Cursor(), 2), Cursor(), None, 64, after_step=kill)
        assert_stream(taken, canonical)
        assert cursor == canonical[-1].cursor
        middle = canonical[len(canonical) // 2].cursor
        taken, _ = train(open_feeds(shared, middle, 3), middle, None, 50)
        assert_stream(taken, canonical[middle.consumed_samples :])


def test_a_killed_feeder_costs_no_sample(shared: tuple[Any, str], samples: list[Any]) -> None:
    def kill(step: int) -> None:
        if step == 2:
            os.kill(stats_of(shared[0]).pid, signal.SIGKILL)

    taken, _ = train(open_feeds(shared, Cursor(), 2), Cursor(), 12, after_step=kill)
    assert_stream(taken, samples[: len(taken)])
    assert len(taken) == 12 * STEP_TOKENS // SEQ_LEN


@pytest.mark.chaos
def test_a_killed_tokenizer_costs_no_sample(shared: tuple[Any, str], samples: list[Any]) -> None:
    killed: list[int] = []

    def kill(step: int) -> None:
        if step in (1, 6):
            eventually(lambda: bool(set(tokenizer_pids(shared[0])) - set(killed)))
            killed.append(min(set(tokenizer_pids(shared[0])) - set(killed)))
            os.kill(killed[-1], signal.SIGKILL)

    ray.get(shared[0].close.remote())  # so that the stream is read, not remembered
    taken, _ = train(open_feeds(shared, Cursor()), Cursor(), None, after_step=kill)
    assert len(killed) == 2
    assert_stream(taken, samples)


def test_any_cursor_is_opened_at_exactly_its_place_and_no_thread_is_left_behind(
    shared: tuple[Any, str], spec: DataSpec, samples: list[Any]
) -> None:
    cursor = samples[len(samples) // 2 + 1].cursor
    taken, _ = train(open_feeds(shared, cursor), cursor, 1, num_samples=10)
    assert_stream(taken, samples[cursor.consumed_samples : cursor.consumed_samples + 10])
    # and at another seq_len: the tokens go on where they were
    cursor = samples[99].cursor
    taken, _ = train(open_feeds(shared, cursor), cursor, 2, num_samples=16, seq_len=48)
    other = [sample for sample, _ in zip(open_samples(spec, cursor, 48), taken, strict=False)]
    assert_stream(taken, other)
    eventually(lambda: stats_of(shared[0]).pipeline_threads <= 2)


@pytest.mark.chaos
def test_another_place_is_read_by_the_tokenizers_that_are_there(
    shared: tuple[Any, str], samples: list[Any]
) -> None:
    ray.get(shared[0].close.remote())
    train(open_feeds(shared, Cursor()), Cursor(), 2)
    eventually(lambda: len(tokenizer_pids(shared[0])) == 2)
    tokenizers, opens = tokenizer_pids(shared[0]), stats_of(shared[0]).opens
    for number, at in enumerate((5000, 3000, 4000)):
        if number == 2:
            os.kill(min(tokenizers), signal.SIGKILL)
        cursor = samples[at].cursor
        taken, _ = train(open_feeds(shared, cursor), cursor, 2, num_samples=300)
        assert_stream(taken, samples[at + 1 : at + 601])
    assert stats_of(shared[0]).opens == opens + 3
    assert max(tokenizers) in tokenizer_pids(shared[0]), "of all that were there one was killed"


def test_what_ranks_ask_for_next_is_taken_from_the_pipeline_before_its_turn(
    shared: tuple[Any, str],
) -> None:
    ray.get(shared[0].close.remote())
    train(open_feeds(shared, Cursor()), Cursor(), 1, num_samples=512)  # it asks for four steps more
    eventually(lambda: stats_of(shared[0]).buffered_tokens >= 4 * 512 * SEQ_LEN)


def test_the_tokenizers_do_not_read_further_ahead_than_their_credit(shared: tuple[Any, str]) -> None:
    def check(_: int) -> None:
        now = stats_of(shared[0])
        assert (
            now.slots_given <= now.slots_taken + 2 + SLOTS_AHEAD + 1
        )  # two tokenizers, and the slot being taken

    ray.get(shared[0].close.remote())
    train(open_feeds(shared, Cursor()), Cursor(), 8, after_step=check)
    eventually(lambda: stats_of(shared[0]).slots_given > stats_of(shared[0]).slots_taken + 2)
    check(0)


def test_a_feeder_opened_before_the_workers_is_not_opened_again(
    shared: tuple[Any, str], samples: list[Any]
) -> None:
    actor, launch = shared
    cursor = samples[500].cursor
    ray.get(actor.open.remote(launch, (1, next(generations)), cursor))
    opens = stats_of(actor).opens
    feeds = open_feeds(shared, cursor, 2)
    taken, after = train(feeds, cursor, 3, num_samples=8)
    # a new generation goes on one step back: from memory
    for rank, feed in enumerate(feeds):
        feed.open(view(next(generations), launch, rank, 2), samples[516].cursor)
    again, _ = train(feeds, samples[516].cursor, 1, num_samples=8)
    assert_stream(taken + again, [*samples[501:525], *samples[517:525]])
    assert after == samples[524].cursor
    assert stats_of(actor).opens == opens


def test_committed_steps_are_forgotten_and_what_lies_behind_is_answered_by_reopen(
    shared: tuple[Any, str], samples: list[Any]
) -> None:
    actor, launch = shared
    cursor = samples[500].cursor
    (feed,) = open_feeds(shared, cursor)
    train([feed], cursor, 9, num_samples=8)
    ray.get(actor.committed.remote(525))
    assert stats_of(actor).first_sample_held == 525
    answer = ray.get(
        actor.get.remote(launch, stats_of(actor).generation, (following(cursor, 8),), 0, 1, MICRO)
    )
    assert isinstance(answer, Reopen)
    taken, _ = train([feed], cursor, 1, num_samples=8)
    assert_stream(taken, samples[501:509])


def test_a_rank_that_was_left_behind_and_one_of_another_launch_are_told(
    shared: tuple[Any, str], samples: list[Any]
) -> None:
    cursor = samples[500].cursor
    (old,) = open_feeds(shared, cursor)
    (new,) = open_feeds(shared, cursor)
    train([new], cursor, 1, num_samples=8)
    newest = re.escape(f"generation {stats_of(shared[0]).generation} ")
    with pytest.raises(RuntimeError, match=newest):
        old.get(following(Cursor(), 8), 0, 1, MICRO, Cursor())
    with raises(FencedError, "run.fenced"):
        RayFeed(shared[0], "another").get(following(Cursor(), 8), 0, 1, MICRO, Cursor())


class HangsWhenItIsBack:
    """An actor that dies over a slice, is started again, and does not answer any more."""

    def get(self, *_: Any) -> None:
        os._exit(1)

    def stats(self) -> None:
        threading.Event().wait()


@pytest.mark.chaos
def test_a_feeder_that_hangs_after_its_restart_is_waited_for_no_longer_than_one_that_stays_away() -> None:
    actor: Any = ray.remote(HangsWhenItIsBack).options(max_restarts=-1, num_cpus=0).remote()
    try:
        with raises(FeedError, "feed.feeder_silent", "launch x ", "3 s"):
            RayFeed(actor, "x", away_limit_s=3.0).get(following(Cursor(), 8), 0, 1, MICRO, Cursor())
    finally:
        ray.kill(actor)


def test_a_place_that_the_data_do_not_reproduce_is_refused_by_type(
    spec: DataSpec, samples: list[Any]
) -> None:
    source = samples[10].cursor.sources["stdlib"]
    assert source.token > 0
    wrong = replace(samples[10].cursor, sources={"stdlib": replace(source, prefix_digest="0" * 16)})
    with feeder(spec, tokenizers=pool(1)) as (actor, launch):
        (feed,) = open_feeds((actor, launch), wrong)
        with raises(DataIdentityError, "resume.cursor_mismatch", "0000000000000000"):
            feed.get(following(wrong, 8), 0, 1, MICRO, wrong)


def test_a_bad_document_reaches_every_rank_as_the_error_it_is(
    tiny_config: TinyConfig, tmp_path: Path
) -> None:
    good = json.dumps({"text": "all good " * 500})
    (tmp_path / "part.jsonl").write_text(
        "\n".join([good] * 200 + ['{"text": 7}'] + [good] * 200), encoding="utf-8"
    )
    source = {"name": "bad", "path": str(tmp_path / "*.jsonl"), "format": "jsonl", "text_field": "text"}
    spec = prepare_data(parse_config(tiny_config({"data.sources": [source], "data.shuffle": "none"})))
    with feeder(spec) as (actor, launch):
        feeds = open_feeds((actor, launch), Cursor(), 2)
        with raises(BadDocumentError, "data.bad_document", "part.jsonl", "line 201"):
            train(feeds, Cursor(), None, num_samples=64)
        for feed in feeds:
            with pytest.raises(BadDocumentError):
                feed.get(following(Cursor(), 8), 0, 2, MICRO, Cursor())


@pytest.mark.chaos
def test_skipped_documents_are_noted_once(tiny_config: TinyConfig, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {number} " * 40}) for number in range(300)]
    lines[100] = lines[200] = "no json"
    (tmp_path / "part.jsonl").write_text("\n".join(lines), encoding="utf-8")
    source = {"name": "bad", "path": str(tmp_path / "*.jsonl"), "format": "jsonl", "text_field": "text"}
    changes = {"data.sources": [source], "data.on_bad_document": "skip", "data.fragment_bytes": 1 << 12}
    spec = prepare_data(parse_config(tiny_config({**changes, "data.window_bytes": 1 << 13})))
    # few slots per dataset: the stream goes on over the border between two datasets
    with feeder(spec, tokenizers=pool(slots_per_dataset=30)) as (actor, launch):
        taken, cursor = train(open_feeds((actor, launch), Cursor()), Cursor(), None, num_samples=64)
        assert_stream(taken, list(open_samples(spec, Cursor(), SEQ_LEN)))
        assert cursor.sources["bad"].bad_documents == 2
        noted = ray.get(actor.notes.remote(cursor.consumed_samples)).bad_documents
        assert sorted(re.findall(r"line \d+", each.text)[0] for each in noted) == ["line 101", "line 201"]
        assert {each.source for each in noted} == {"bad"}
        assert {each.parts[0] for each in noted} == {str(tmp_path / "part.jsonl")}
        assert ray.get(actor.notes.remote(cursor.consumed_samples)).bad_documents == ()


def test_a_pipeline_that_gets_no_cpu_ends_in_a_stated_error(spec: DataSpec, shared: tuple[Any, str]) -> None:
    ray.get(shared[0].close.remote())
    hog = holding_cpus(leaving=0)
    with feeder(spec, stall_s=2.0) as (actor, launch):
        (feed,) = open_feeds((actor, launch), Cursor())
        with raises(FeedError, "feed.stalled", "data.num_tokenizers"):
            feed.get(following(Cursor(), 8), 0, 1, MICRO, Cursor())
    ray.kill(hog)


class NoThreads(PipelineThreads):
    """Nobody reads."""

    def start(self, pipeline: int, taker: Taker) -> None: ...


class FeederWithoutPipeline(Feeder):
    """Its tokenizers are the test, and so is its clock."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._threads = NoThreads(self._threads._settings)


def test_who_decodes_up_to_a_cursor_for_hours_does_not_stand_still_until_nothing_is_heard(
    spec: DataSpec,
) -> None:
    async def hours() -> object:
        now = 0.0
        feeder = FeederWithoutPipeline("launch", pinned(spec), pool(1), 0, stall_s=600.0, now=lambda: now)

        async def wake() -> None:
            await feeder.open("launch", (1, 1), Cursor())
            for _ in range(20):  # turns of the loop: who was woken looks at the clock
                await asyncio.sleep(0)

        await wake()
        waiting = asyncio.create_task(
            feeder.get("launch", (1, 1), (following(Cursor(), 8),), 0, 1, MICRO)  # type: ignore[arg-type]
        )
        for _ in range(100):
            now += 599.0
            assert await feeder.working(1, 0, 16 << 20)
            await wake()
            assert not waiting.done()
        assert (await feeder.stats()).bytes_passed == 100 * (16 << 20)
        assert not await feeder.working(2, 0, 1), "a tokenizer of another pipeline is sent home"
        now += 601.0
        await wake()
        return await asyncio.wait_for(waiting, 30.0)

    stalled = asyncio.run(hours())
    assert isinstance(stalled, FeedError)
    check_error(stalled, "feed.stalled", "600 s")


def test_readings_that_contradict_each_other_and_a_place_that_is_not_there_are_errors_of_the_data(
    spec: DataSpec,
) -> None:
    async def read_twice() -> object:
        feeder = FeederWithoutPipeline("launch", pinned(spec), pool(1), 0)
        await feeder.open("launch", (1, 1), Cursor())
        task = await feeder.slot(1, 0)
        assert task is not None
        assert await feeder.read(1, 0, task, None)
        assert not await feeder.read(1, 0, task, 1)
        assert await feeder.slot(1, 1) is None, "the run is over"
        return await feeder.get("launch", (1, 1), (following(Cursor(), 8),), 0, 1, MICRO)

    async def open_behind_the_data() -> object:
        feeder = FeederWithoutPipeline("launch", pinned(spec), pool(1), 0)
        await feeder.open("launch", (1, 1), Cursor(sources={"stdlib": SourceCursor(block=999)}))
        return await feeder.get("launch", (1, 1), (following(Cursor(), 8),), 0, 1, MICRO)

    for what in (read_twice, open_behind_the_data):
        assert isinstance(asyncio.run(what()), DataIdentityError)


@pytest.mark.parametrize("urgent", [True, False])
def test_an_answer_that_is_not_urgent_waits_for_more_steps_and_never_for_what_cannot_come(
    spec: DataSpec, urgent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.data.feed.feeder.LINGER_S", 600.0)

    async def answers(replay_bytes: int, num_chunks: int) -> tuple[Any, bool]:
        """What comes of two steps, and whether it came before the last of so many chunks."""
        feeder = FeederWithoutPipeline("launch", pinned(spec), pool(1), replay_bytes)
        await feeder.open("launch", (1, 1), Cursor())
        chunks = spec.chunks(Cursor(), "stdlib")
        first, second = next(chunks), next(chunks)
        size = len(first.tokens) * 3 // 4 // SEQ_LEN
        steps = tuple(coming(Cursor(), size, SEQ_LEN)[:2])
        asked = asyncio.create_task(feeder.get("launch", (1, 1), steps, 0, 1, MICRO, urgent))
        slot, given, early = 0, -1, False
        for chunk in (first, second)[:num_chunks]:
            early = asked.done()
            if slot > given:
                assert await feeder.slot(1, slot) is not None
                given = slot
            await feeder.take(1, slot, chunk)
            slot += chunk.ends_window
            for _ in range(20):
                await asyncio.sleep(0)
        return await asked, early

    found, early = asyncio.run(answers(1 << 30, 2))
    assert early == urgent
    assert len(found) == (1 if urgent else 2)
    found, _ = asyncio.run(answers(0, 1))
    assert len(found) == 1, "there is no room for a second step"


def test_what_becomes_of_a_slot_of_a_place_that_was_left_is_nobodys_concern(
    spec: DataSpec, samples: list[Any]
) -> None:
    async def leave() -> object:
        feeder = FeederWithoutPipeline("launch", pinned(spec), pool(1), 0)
        await feeder.open("launch", (1, 1), Cursor())
        left = await feeder.slot(1, 0)
        assert left is not None
        waiting = asyncio.create_task(feeder.slot(1, 4))  # there is no room yet
        await feeder.open("launch", (1, 2), samples[99].cursor)
        assert not await feeder.working(1, 0, 1)
        assert not await feeder.read(1, 0, left, 1)
        assert not await feeder.failed(1, 0, FeedError("of the place that was left"))
        assert await feeder.slot(1, 0) is None
        given = [await feeder.slot(1, slot) for slot in (1, 2, 3)]
        assert given[0] == next(spec.tasks_from(samples[99].cursor, "stdlib"))
        assert not waiting.done()
        assert await feeder.failed(1, 1, FeedError("of this one"))
        assert await waiting is None
        return await feeder.get("launch", (1, 2), (following(samples[99].cursor, 8),), 0, 1, MICRO)

    assert "of this one" in str(asyncio.run(leave()))


@pytest.mark.parametrize("says_so", [True, False])
def test_a_pipeline_that_does_not_get_over_the_place_before_is_begun_anew_once(
    spec: DataSpec, samples: list[Any], says_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose() -> object:
        feeder, cursor = FeederWithoutPipeline("launch", pinned(spec), pool(1), 0), samples[99].cursor
        await feeder.open("launch", (1, 1), Cursor())
        assert await feeder.slot(1, 0) is not None
        await feeder.open("launch", (1, 2), cursor)
        waiting = [asyncio.create_task(feeder.slot(1, slot)) for slot in range(1, 6)]
        if says_so:
            await feeder.pipeline_failed(1, RuntimeError("its chunks are lost"))
        assert None in await asyncio.gather(*waiting)
        assert await feeder.slot(1, 1) is None, "that pipeline is over"
        assert await feeder.slot(2, 0) == next(spec.tasks_from(cursor, "stdlib"))
        await feeder.pipeline_failed(1, RuntimeError("it comes late"))
        await feeder.pipeline_failed(2, RuntimeError("not because of a place before"))
        return await feeder.get("launch", (1, 2), (following(cursor, 8),), 0, 1, MICRO)

    monkeypatch.setattr("orchestrator.data.feed.feeder.ARRIVAL_S", 600.0 if says_so else 0.0)
    assert "not because of a place before" in str(asyncio.run(lose()))


@pytest.mark.parametrize("goes_well", [True, False])
def test_while_the_list_of_the_next_epoch_is_made_ranks_get_what_is_there(
    tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_well: bool
) -> None:
    write_corpus(tmp_path / "data", some_texts(60), "jsonl", num_files=1)
    settings = {"refresh": "epoch", "num_epochs": 2, "fragment_bytes": 2 << 20, "window_bytes": 16 << 20}
    of_run = prepare_data(job(tiny_config, tmp_path / "data", **settings), Storage(str(tmp_path / "run")))
    asked, may_list, now = threading.Event(), threading.Event(), Listed.now

    def slowly(listed: Listed) -> Found:
        asked.set()
        assert may_list.wait(60)
        if not goes_well:
            raise ConfigError("its files are gone")
        return now(listed)

    monkeypatch.setattr(Listed, "now", slowly)

    async def take() -> object:
        feeder = FeederWithoutPipeline("launch", pinned(of_run), pool(1), 0)
        await feeder.open("launch", (1, 1), Cursor())
        task = await feeder.slot(1, 0)
        assert task == WindowTask(source="made", epoch=0, block=0)
        after = asyncio.create_task(feeder.slot(1, 1))
        assert await asyncio.to_thread(asked.wait, 60)
        for chunk in of_run.chunks(Cursor()):
            if chunk.epoch:
                break
            assert await feeder.take(1, 0, chunk)
            if chunk.ends_block:
                break
        shares = await feeder.get("launch", (1, 1), (following(Cursor(), 8),), 0, 1, MICRO)
        assert isinstance(shares, tuple)
        assert not after.done(), "which needs the list"
        may_list.set()
        found = await after
        if found is None:
            return await feeder.get("launch", (1, 1), (following(Cursor(), 9999),), 0, 1, MICRO)
        return found

    if goes_well:
        assert asyncio.run(take()) == WindowTask(source="made", epoch=1, block=0)
    else:
        assert "its files are gone" in str(asyncio.run(take()))


def test_what_is_decoded_on_the_way_to_a_cursor_is_told(tiny_config: TinyConfig, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"document {number} " * 20}) + "\n" for number in range(900))
    (tmp_path / "part.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    source = {"name": "packed", "path": str(tmp_path / "*.gz"), "format": "jsonl", "text_field": "text"}
    small = {"data.fragment_bytes": 1 << 13, "data.window_bytes": 1 << 14}
    spec = prepare_data(parse_config(tiny_config({"data.sources": [source], **small})))
    stream = list(open_samples(spec, Cursor(), SEQ_LEN))
    cursor = stream[-40].cursor
    assert cursor.sources["packed"].window > 3
    with feeder(spec, tokenizers=pool(1)) as (actor, launch):
        feeds = open_feeds((actor, launch), cursor)
        taken, _ = train(feeds, cursor, 1, num_samples=8)
        assert_stream(taken, stream[-39:-31])
        assert (1 << 13) < stats_of(actor).bytes_passed < len(lines)


@pytest.mark.chaos
def test_a_tokenizer_killed_in_the_middle_of_a_large_compressed_file_costs_no_sample(
    tiny_config: TinyConfig, tmp_path: Path
) -> None:
    lines = "".join(json.dumps({"text": f"document {n}: " + "some words " * 30}) + "\n" for n in range(3000))
    (tmp_path / "part.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 1))
    source = {"name": "packed", "path": str(tmp_path / "*.gz"), "format": "jsonl", "text_field": "text"}
    small = {"data.fragment_bytes": 1 << 14, "data.window_bytes": 1 << 15}
    spec = prepare_data(parse_config(tiny_config({"data.sources": [source], **small})))
    (first,) = source_windows(spec, Cursor())
    assert first.expected(0, 0) < len(lines) >> 15, "more windows turn up than the file's size lets expect"

    def watch(step: int) -> None:
        if step == 2:
            killed = min(tokenizer_pids(actor))
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: killed not in tokenizer_pids(actor))

    with feeder(spec, tokenizers=pool(slots_per_dataset=24)) as (actor, launch):
        taken, cursor = train(open_feeds((actor, launch), Cursor()), Cursor(), None, after_step=watch)
        assert cursor.sources["packed"].window > 24, "a second dataset was begun, in the middle of the file"
    assert_stream(taken, list(open_samples(spec, Cursor(), SEQ_LEN)))


@pytest.mark.chaos
def test_a_specification_beyond_the_limit_of_what_a_class_may_hold_reaches_feeder_and_tokenizers(
    spec: DataSpec, samples: list[Any], shared: tuple[Any, str]
) -> None:
    ray.get(shared[0].close.remote())
    plan = spec.plans[0]
    rows = tuple(FileRow(path="x" * 1_000_000, bytes=n, mtime_ns=0, probe="") for n in range(105))
    manifest = replace(plan.manifest, files=Files.of([*plan.manifest.files, *rows]))  # no block reaches these
    large = replace(spec, plans=(replace(plan, manifest=manifest),))
    with feeder(large, tokenizers=pool(1)) as (actor, launch):
        feeds = open_feeds((actor, launch), Cursor())
        taken, cursor = train(feeds, Cursor(), 1)
        os.kill(stats_of(actor).pid, signal.SIGKILL)
        again, _ = train(feeds, cursor, 1)
    assert_stream(taken + again, samples[: len(taken + again)])


@pytest.mark.chaos
def test_reading_takes_no_cpu_beside_the_tokenizers(
    spec: DataSpec, samples: list[Any], shared: tuple[Any, str]
) -> None:
    ray.get(shared[0].close.remote())
    hog = holding_cpus(leaving=1)
    here = ray.get_runtime_context().get_node_id()
    # few slots per dataset: the next ones are read when all other CPUs have been taken for long
    with feeder(spec, tokenizers=pool(1, node_id=here, slots_per_dataset=3), stall_s=100.0) as pair:
        taken, _ = train(open_feeds(pair, Cursor()), Cursor(), 36)
        assert stats_of(pair[0]).slots_taken > 2 * 3, "a third dataset was begun"
    assert_stream(taken, samples[: len(taken)])
    ray.kill(hog)


@pytest.mark.chaos
def test_tokenizers_without_cpus_of_their_own_read_beside_workers_that_hold_all(
    spec: DataSpec, samples: list[Any], shared: tuple[Any, str]
) -> None:
    ray.get(shared[0].close.remote())
    hog = holding_cpus(leaving=0)
    here = ray.get_runtime_context().get_node_id()
    beside = pool(node_id=here, cpus=0.0, slots_per_dataset=30)
    with feeder(spec, tokenizers=beside, stall_s=100.0) as pair:
        taken, _ = train(open_feeds(pair, Cursor()), Cursor(), None)
    assert_stream(taken, samples)
    ray.kill(hog)


class Hog:
    """Holds CPUs of the cluster."""

    def holds(self) -> None: ...


def holding_cpus(leaving: int) -> Any:
    """An actor that holds all but so many."""
    hog = ray.remote(num_cpus=int(ray.cluster_resources()["CPU"]) - leaving)(Hog).remote()
    ray.get(hog.holds.remote())
    return hog


def test_the_feed_without_ray_gives_the_same_slices_and_errors(
    spec: DataSpec, samples: list[Any], tiny_config: TinyConfig, tmp_path: Path
) -> None:
    feeds = [InProcessFeed(spec) for _ in range(2)]
    for rank, feed in enumerate(feeds):
        feed.open(view(1, "", rank, 2), Cursor())
    taken, _ = train(feeds, Cursor(), None, num_samples=100)
    assert_stream(taken, samples)
    back = samples[299].cursor
    for rank, feed in enumerate(feeds):
        feed.open(view(2, "", rank, 2), back)
    again, _ = train(feeds, back, 3, num_samples=7)
    assert_stream(again, samples[300:321])
    for feed in feeds:
        feed.close()
    (tmp_path / "part.jsonl").write_text('{"text": "good"}\n{"text": null}\n', encoding="utf-8")
    source = {"name": "bad", "path": str(tmp_path / "*.jsonl"), "format": "jsonl", "text_field": "text"}
    bad = InProcessFeed(prepare_data(parse_config(tiny_config({"data.sources": [source]}))))
    with raises(BadDocumentError, "data.bad_document", "line 2"):
        bad.get(following(Cursor(), 8), 0, 1, MICRO, Cursor())
    bad.close()


def test_a_request_that_does_not_begin_where_its_cursor_stands_is_refused(spec: DataSpec) -> None:
    feed = InProcessFeed(spec)
    with raises(FeedError, "feed.step_order", "samples from 7 ", "sample 0;"):
        feed.get(following(replace(Cursor(), consumed_samples=7), 8), 0, 1, MICRO, Cursor())
    feed.close()
