"""Feeders on Ray, and ranks that take their steps from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import ray

from orchestrator.data.feed.feeder import start_feeder
from orchestrator.data.feed.pipeline_thread import TokenizerPool
from orchestrator.data.spec import DataSpec
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.records.steps import BatchSlice, StepRange

SEQ_LEN, MICRO = 32, 2
STEP_TOKENS = 8192  # large steps: the tests pass through many slots in few steps
launches, generations = count(), count(1)


def pool(num: int = 2, **settings: Any) -> TokenizerPool:
    return TokenizerPool(num=num, **settings)


@contextmanager
def feeder(spec: DataSpec, **changes: Any) -> Iterator[tuple[Any, str]]:
    launch = f"launch-{next(launches)}"
    options = {"tokenizers": pool(), "replay_bytes": 1 << 20, **changes}
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
        first_sample=cursor.consumed_samples,
        num_samples=num_samples,
        num_tokens=num_samples * seq_len,
        seq_len=seq_len,
    )


def coming(cursor: Cursor, num_samples: int, seq_len: int) -> list[StepRange]:
    after = following(cursor, num_samples, seq_len)
    return [replace(after, first_sample=after.first_sample + n * num_samples) for n in range(4)]


def train(
    feeds: Sequence[Any],
    cursor: Cursor,
    num_steps: int | None,
    num_samples: int = STEP_TOKENS // SEQ_LEN,
    seq_len: int = SEQ_LEN,
    after_step: Callable[[int], None] | None = None,
) -> tuple[list[np.ndarray], Cursor]:
    """All ranks in turn take their shares of the coming steps, as the loop does; the samples in order, and
    the cursor behind them.
    """
    taken: list[np.ndarray] = []
    for number in count():
        if number == num_steps:
            return taken, cursor
        step = following(cursor, num_samples, seq_len)
        parts = [feed.get(step, rank, len(feeds), MICRO, cursor) for rank, feed in enumerate(feeds)]
        for rank, feed in enumerate(feeds):
            feed.prefetch(coming(parts[0].cursor, num_samples, seq_len), rank, len(feeds), MICRO)
        taken += [sample for part in parts for sample in stacked(part)]
        assert (
            len({(part.step, part.step_digest, part.step_targets, part.end_of_data) for part in parts}) == 1
        )
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
        assert np.array_equal(found, np.stack([sample.input_ids, sample.labels, sample.document_ids])), (
            sample.index
        )
