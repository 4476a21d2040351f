"""The stream through Ray: what the feeder gives out is the canonical stream, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.state import actors  # the public state API needs a dashboard

from orchestrator.config import parse_config
from orchestrator.data.feeder import FeederStats, RayFeed, Reopen, start_feeder
from orchestrator.data.local_feed import InProcessFeed
from orchestrator.data.spec import DataSpec, prepare_data
from orchestrator.data.stream import open_samples
from orchestrator.errors import BadDocumentError, DataIdentityError, FeedError, FencedError
from orchestrator.records import BatchSlice, Cursor, GenerationView, StepRange
from tests.conftest import TinyConfig

pytestmark = pytest.mark.system

SEQ_LEN, MICRO = 32, 2
STEP_TOKENS = 8192  # large steps: the tests pass through many slots in few steps
launches = count()


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def spec(tiny_config: TinyConfig) -> DataSpec:
    return prepare_data(parse_config(tiny_config()))


@pytest.fixture(scope="module")
def samples(spec: DataSpec) -> list[Any]:
    return list(open_samples(spec, Cursor(), SEQ_LEN))


@contextmanager
def feeder(spec: DataSpec, **changes: Any) -> Iterator[tuple[Any, str]]:
    launch = f"launch-{next(launches)}"
    options = {"num_tokenizers": 2, "replay_bytes": 1 << 20, **changes}
    actor = start_feeder(launch, spec, **options)
    try:
        yield actor, launch
    finally:
        ray.kill(actor)


def view(generation: int, launch: str = "", rank: int = 0, world_size: int = 1) -> GenerationView:
    return GenerationView(
        attempt=1, generation=generation, rank=rank, world_size=world_size, members=(), host="", port=0,
        parent=None, source_rank=None, point=None, cursor=None, step=0, launch=launch,
    )  # fmt: skip


def following(cursor: Cursor, num_samples: int, seq_len: int = SEQ_LEN) -> StepRange:
    return StepRange(
        first_sample=cursor.consumed_samples, num_samples=num_samples, num_tokens=num_samples * seq_len, seq_len=seq_len
    )


def train(
    feeds: Sequence[Any],
    cursor: Cursor,
    num_steps: int | None,
    num_samples: int = STEP_TOKENS // SEQ_LEN,
    seq_len: int = SEQ_LEN,
    after_step: Callable[[int], None] | None = None,
) -> tuple[list[np.ndarray], Cursor]:
    """All ranks in turn take their shares of the coming steps, as the loop does; the samples in order, and the cursor behind them."""
    taken: list[np.ndarray] = []
    for number in count():
        if number == num_steps:
            return taken, cursor
        step = following(cursor, num_samples, seq_len)
        parts = [feed.get(step, rank, len(feeds), MICRO, cursor) for rank, feed in enumerate(feeds)]
        for rank, feed in enumerate(feeds):
            feed.prefetch(following(parts[0].cursor, num_samples, seq_len), rank, len(feeds), MICRO)
        taken += [sample for part in parts for sample in stacked(part)]
        assert len({(part.step, part.step_digest, part.step_targets, part.end_of_data) for part in parts}) == 1
        cursor = parts[0].cursor
        if after_step is not None:
            after_step(number)
        if parts[0].end_of_data:
            return taken, cursor
    raise AssertionError("unreachable")


def stacked(part: BatchSlice) -> np.ndarray:
    return np.stack([part.input_ids, part.labels, part.document_ids], axis=1)


def assert_stream(taken: list[np.ndarray], samples: Sequence[Any]) -> None:
    """Exactly these samples, one by one."""
    assert len(taken) == len(samples)
    for found, sample in zip(taken, samples, strict=True):
        assert np.array_equal(found, np.stack([sample.input_ids, sample.labels, sample.document_ids])), sample.index


def stats_of(actor: Any) -> FeederStats:
    return ray.get(actor.stats.remote())


def tokenizer_pids(of_feeder: Any) -> list[int]:
    owner = stats_of(of_feeder).pid
    return [
        actor["Pid"]
        for actor in actors().values()
        if "Tokenizer" in actor["ActorClassName"] and actor["State"] == "ALIVE" and parent_feeder(actor) == owner
    ]


def parent_feeder(actor: dict[str, Any]) -> int | None:
    port = actor["OwnerAddress"]["Port"]
    owners = (a["Pid"] for a in actors().values() if a["Address"]["Port"] == port and a["State"] == "ALIVE")
    return next(owners, None)


def eventually(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"


@pytest.mark.parametrize(("world_size", "num_samples"), [(1, 256), (2, 100), (3, 511)])
def test_ranks_together_get_the_canonical_stream_to_its_end(
    spec: DataSpec, samples: list[Any], world_size: int, num_samples: int
) -> None:
    with feeder(spec) as (actor, launch):
        feeds = [RayFeed(actor, launch) for _ in range(world_size)]
        for rank, feed in enumerate(feeds):
            feed.open(view(1, launch, rank, world_size), Cursor())
        taken, cursor = train(feeds, Cursor(), None, num_samples)
        assert_stream(taken, samples)
        assert cursor == samples[-1].cursor
        beyond = feeds[0].get(following(cursor, num_samples), 0, world_size, MICRO, cursor)
        assert beyond.end_of_data and beyond.step.num_samples == 0
