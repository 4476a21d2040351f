"""What the feeder keeps for being asked again, and what it allows the tokenizers: plain state, no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.config.schema import parse_config
from orchestrator.data.feed.opening import SLOTS_AHEAD, WINDOWS_AHEAD, Opening
from orchestrator.data.feed.replay import MIN_STEPS, ReplayBuffer
from orchestrator.data.spec import DataSpec, prepare_data
from orchestrator.data.tokens.chunks import tokenize_block
from orchestrator.errors import FeedError
from orchestrator.records import Cursor, StepRange
from tests.conftest import TinyConfig

SEQ_LEN, BATCH = 32, 8


@pytest.fixture(scope="module")
def spec(tiny_config: TinyConfig) -> DataSpec:
    return prepare_data(
        parse_config(tiny_config({"data.window_bytes": 1 << 17, "data.fragment_bytes": 1 << 16}))
    )


def drawn_steps(spec: DataSpec, num_steps: int) -> Iterator[tuple[StepRange, Any]]:
    """The first steps of the stream, as (asked, drawn)."""
    packer, chunks, cursor = spec.stream(Cursor()), spec.chunks(Cursor()), Cursor()
    for _ in range(num_steps):
        step = StepRange(
            first_sample=cursor.consumed_samples,
            num_samples=BATCH,
            num_tokens=BATCH * SEQ_LEN,
            seq_len=SEQ_LEN,
        )
        while (drawn := packer.draw(step)) is None:
            packer.feed(next(chunks))
        cursor = drawn.cursor
        yield step, drawn


def filled(spec: DataSpec, limit_bytes: int, num_steps: int = 10) -> tuple[ReplayBuffer, list[Any]]:
    buffer, steps = ReplayBuffer(Cursor(), limit_bytes), list(drawn_steps(spec, num_steps))
    for asked, drawn in steps:
        buffer.append(asked, drawn)
    return buffer, [drawn for _, drawn in steps]


def test_a_held_step_is_given_again_as_the_same_object(spec: DataSpec) -> None:
    buffer, steps = filled(spec, 1 << 20)
    assert buffer.first_sample == 0
    for number, drawn in enumerate(steps):
        held = buffer.find(number * BATCH)
        assert held is not None
        assert held.samples is drawn
    assert buffer.find(3) is None
    assert buffer.find(10 * BATCH) is None
    assert buffer.next_cursor == steps[-1].cursor


def test_the_oldest_steps_go_first_and_the_bytes_stay_below_the_limit(spec: DataSpec) -> None:
    limit = 4 * filled(spec, 1 << 20, 1)[0].held_bytes
    buffer, steps = filled(spec, limit)
    assert buffer.held_bytes == sum(drawn.nbytes for drawn in steps[-len(buffer) :]) <= limit
    assert buffer.find(0) is None
    assert len(filled(spec, 0)[0]) == MIN_STEPS


def test_a_committed_point_drops_what_ends_at_or_before_it_and_nothing_else(spec: DataSpec) -> None:
    buffer, _ = filled(spec, 1 << 20)
    buffer.committed(3 * BATCH - 1)
    assert buffer.first_sample == 2 * BATCH
    buffer.committed(3 * BATCH)
    assert buffer.first_sample == 3 * BATCH
    buffer.committed(100 * BATCH)
    assert len(buffer) == MIN_STEPS


def test_only_the_cursor_of_exactly_a_held_place_is_served(spec: DataSpec) -> None:
    buffer, steps = filled(spec, 1 << 20)
    for drawn in steps:
        assert buffer.serves(drawn.cursor)
    # the same number of samples of another history is another place: comparing the number alone would serve
    # foreign tokens
    other = replace(steps[4].cursor, consumed_tokens=steps[4].cursor.consumed_tokens - 1)
    assert buffer.find(other.consumed_samples) is not None
    assert not buffer.serves(other)
    assert not buffer.serves(replace(steps[-1].cursor, consumed_samples=10**6))


def test_a_slot_is_the_same_task_whoever_executes_it_again(spec: DataSpec) -> None:
    opening = Opening(1, spec, Cursor(), 2, 1 << 20)
    slots = opening.list_slots(256)
    assert [opening.begin(slot)[0] for slot in slots] == list(spec.tasks_from(Cursor()))
    assert [opening.begin(slot) for slot in slots] == [(task, 2) for task in spec.tasks_from(Cursor())]
    assert not opening.list_slots(256)


def test_credits_follow_what_was_taken_and_never_stop_the_slot_that_is_due(spec: DataSpec) -> None:
    opening = Opening(1, spec, Cursor(), 2, 1 << 20)
    encoders = spec.build_encoders()
    for slot in opening.list_slots(256):
        assert [s for s in range(40) if opening.may_begin(s)] == list(range(slot + 2 + SLOTS_AHEAD + 1))
        task, _ = opening.begin(slot)
        for chunk in tokenize_block(task, spec.source_plan(task.source), encoders, spec.settings):
            assert opening.may_bring(slot, chunk.window)
            assert not opening.may_bring(slot, chunk.window + WINDOWS_AHEAD + 1)
            opening.take(slot, chunk)
    # the last chunk of the last slot ended the stream: a step beyond the data is answered
    step = StepRange(first_sample=0, num_samples=10**6, num_tokens=10**6 * SEQ_LEN, seq_len=SEQ_LEN)
    drawn = opening.stream.draw(step)
    assert drawn is not None
    assert drawn.end_of_data


def test_a_chunk_that_comes_out_of_turn_is_caught(spec: DataSpec) -> None:
    opening = Opening(1, spec, Cursor(), 2, 1 << 20)
    opening.list_slots(256)
    encoders = spec.build_encoders()
    task, _ = opening.begin(1)
    late = next(tokenize_block(task, spec.source_plan(task.source), encoders, spec.settings))
    with pytest.raises(AssertionError, match="slot 0 was being taken"):
        opening.take(1, late)
    with pytest.raises(
        FeedError, match="was due"
    ):  # and a wrong slot number does not get past the packer either
        opening.take(0, late)
