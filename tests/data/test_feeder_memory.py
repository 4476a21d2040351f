"""The feeder and its tokenizers within `data.memory_bytes`, through Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.data_memory import Case, run_case, words
from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.feed.memory import MemoryShares, memory_of
from orchestrator.data.feed.remote_feed import RayFeed
from orchestrator.data.packing.samples import open_samples
from orchestrator.data.sample_corpus import train_tokenizer
from orchestrator.data.spec import DataSpec
from orchestrator.errors import FeedError
from orchestrator.records.cursor import Cursor
from tests.conftest import TinyConfig
from tests.data.feeding import assert_stream, feeder, train, view
from tests.raising import raises

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("cluster"), pytest.mark.xdist_group("ray")]
SEQ_LEN = 32


@pytest.fixture(scope="module")
def made(tiny_config: TinyConfig) -> tuple[DataSpec, MemoryShares]:
    """The tiny job's data in chunks of a document each, and the shares of its memory."""
    config = parse_config(tiny_config({"data.window_bytes": 1 << 16, "data.fragment_bytes": 1 << 14}))
    spec = prepare_data(config)
    return replace(spec, settings=replace(spec.settings, chunk_tokens=1000)), memory_of(config, spec)


def with_room(memory: MemoryShares, num_bytes: int) -> MemoryShares:
    """The shares with so many bytes for tokens on their way."""
    return replace(memory, flight_bytes=memory.flight_bytes - memory.flight_limit + num_bytes)


@pytest.mark.chaos
def test_chunks_that_wait_for_room_are_the_same_and_in_the_same_order(
    made: tuple[DataSpec, MemoryShares],
) -> None:
    spec, memory = made
    with feeder(spec, memory=with_room(memory, 400_000)) as (actor, launch):
        feed = RayFeed(actor, launch)
        feed.open(view(1, launch), Cursor())
        taken, _ = train([feed], Cursor(), None, 32, SEQ_LEN)
    assert len(taken) > 1000
    assert_stream(taken, list(open_samples(spec, Cursor(), SEQ_LEN)))


def test_a_step_that_needs_more_than_the_share_is_an_error_with_both_values(
    made: tuple[DataSpec, MemoryShares],
) -> None:
    spec, memory = made
    with feeder(spec, memory=with_room(memory, 100_000)) as (actor, launch):
        feed = RayFeed(actor, launch)
        feed.open(view(1, launch), Cursor())
        values = (f"data.memory_bytes={memory.memory_bytes} is 100,000", f"e.g. {2 * memory.memory_bytes}")
        with raises(FeedError, "feed.too_little_memory", *values):
            train([feed], Cursor(), 1, 8192, SEQ_LEN)


@pytest.mark.chaos
def test_distinct_words_leave_the_feed_within_its_bound(tmp_path: Path) -> None:
    train_tokenizer(["some text to begin with"], 300, tmp_path / "tokenizer")
    found = run_case(
        "words",
        Case(make=words, megabytes=12, steps=10_000, pause_s=0.0),
        tmp_path,
        tmp_path / "tokenizer",
        2000 << 20,
    )
    assert found["tokens"] > 2_000_000
    assert 200 < found["peak_mb"] < found["bound_mb"] < 2100
