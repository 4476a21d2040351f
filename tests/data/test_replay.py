"""What the feeder keeps for being asked again, and what it allows the tokenizers: plain state, no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.loading import parse_config
from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.dataset import prepare_data
from orchestrator.data.feed.buffers import MIN_STEPS, ReplayBuffer
from orchestrator.data.feed.pipeline import OpenBlocks
from orchestrator.data.feed.stream_session import Opening, expected_windows
from orchestrator.data.feed.window_scheduler import SLOTS_AHEAD, NoTask
from orchestrator.data.sources.lists.file_rows import FileRow, Files
from orchestrator.data.sources.lists.fragments import DECODED_RATIO, plan_source
from orchestrator.data.sources.lists.manifest import Manifest
from orchestrator.data.sources.windows import Window
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.chunks import tokenize_block, tokenize_window
from orchestrator.errors import DataIdentityError, FeedError
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import StepRange
from orchestrator.records.tokens import WindowTask
from tests.conftest import TinyConfig
from tests.raising import raises

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
    opening = Opening(spec, Cursor(), 80, 1 << 20)
    slots = range(80)
    first = [opening.begin(slot) for slot in slots]
    tasks = list(spec.tasks_from(Cursor()))
    assert first[: len(tasks)] == tasks
    assert set(first[len(tasks) :]) == {NoTask.NOT_YET}, "whether a block has another window is not known yet"
    assert [opening.begin(slot) for slot in slots] == first


def test_slots_are_given_as_chunks_are_taken_and_their_windows_are_the_stream(spec: DataSpec) -> None:
    opening = Opening(spec, Cursor(), 2, 1 << 20)
    encoders, expected = spec.build_encoders(), spec.stream(Cursor())
    blocks, settings = OpenBlocks(), spec.settings
    given = 0
    for slot in range(256):
        while isinstance(opening.begin(given), WindowTask):
            given += 1
            assert given <= slot + 2 + SLOTS_AHEAD + 1
        task = opening.begin(slot)
        if opening.over:
            assert task is NoTask.OVER
            break
        assert isinstance(task, WindowTask)
        plan = spec.source_plan(task.source)
        window = blocks.read(task, plan, settings)
        assert isinstance(window, Window)
        opening.slots.read(slot, task, task.window + 1 if window.last else None)
        for chunk in tokenize_window(task, window, plan, encoders, settings):
            opening.take(slot, chunk)
    # the last chunk of the last slot ended the stream: a step beyond the data is answered
    assert opening.over
    for chunk in spec.chunks(Cursor()):
        expected.feed(chunk)
    expected.finish(spec.only_source)
    step = StepRange(first_sample=0, num_samples=10**6, num_tokens=10**6 * SEQ_LEN, seq_len=SEQ_LEN)
    drawn, due = opening.stream.draw(step), expected.draw(step)
    assert drawn is not None
    assert due is not None
    assert drawn.end_of_data
    assert (drawn.digest, drawn.cursor) == (due.digest, due.cursor)


def test_a_chunk_that_comes_out_of_turn_is_caught(spec: DataSpec) -> None:
    opening = Opening(spec, Cursor(), 2, 1 << 20)
    encoders = spec.build_encoders()
    opening.begin(0)
    task = opening.begin(1)
    assert isinstance(task, WindowTask)
    late = next(tokenize_block(task, spec.source_plan(task.source), encoders, spec.settings))
    for slot in (1, 0):  # under a wrong number, too
        with raises(FeedError, "feed.chunk_order", f"slot {slot} ", "slot 0 "):
            opening.take(slot, late)


def test_a_cursor_behind_the_last_block_is_refused_when_it_is_opened(spec: DataSpec) -> None:
    cursor = Cursor(sources={"stdlib": SourceCursor(block=999)})
    with raises(DataIdentityError, "resume.cursor_mismatch", "block 999", "source stdlib"):
        Opening(spec, cursor, 2, 1 << 20)


def test_the_windows_that_a_block_will_have_are_estimated_from_sizes(tmp_path: Path) -> None:
    settings = StreamSettings(window_bytes=1000, fragment_bytes=500, shuffle="none")

    def estimates(*files: FileRow) -> list[int]:
        manifest = Manifest(source="s", base=str(tmp_path), format="jsonl", files=Files.of(files))
        plan = plan_source(manifest, 500, 1000)
        return [expected_windows(plan, settings, 0, block) for block in range(plan.num_blocks)]

    def row(path: str, size: int) -> FileRow:
        return FileRow(path=path, bytes=size, mtime_ns=0, probe="")

    assert estimates(row("a.jsonl", 4000)) == [1] * 8
    assert estimates(row("a.jsonl.gz", 4000)) == [4000 * DECODED_RATIO // 1000]
    assert estimates(row("empty.jsonl", 0)) == [1]
