"""A tokenizer process reads on where it was in a large file, and begins anew where it must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.data.feed.pipeline import NotWantedError, OpenBlocks
from orchestrator.data.sources.windows import Window, read_windows
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.records.tokens import WindowTask
from tests.conftest import TinyConfig
from tests.data.making import job, some_texts, spec_of, write_corpus


class Reading:
    """Open blocks of a source, and what they pass over."""

    def __init__(self, spec: DataSpec, max_open: int = 8) -> None:
        self.spec, self.blocks, self.passed = spec, OpenBlocks(max_open), list[int]()

    def read(self, window: int, block: int = 0, source: str = "made") -> Any:
        task = WindowTask(source=source, epoch=0, block=block, window=window)
        found = self.blocks.read(task, self.spec.plans[0], self.spec.settings, self.note)
        if isinstance(found, Window):
            assert found.number == window
            return [record for part in found.parts for record in part.records]
        return found

    def note(self, num_bytes: int) -> bool:
        self.passed.append(num_bytes)
        return True


@pytest.fixture(params=["jsonl.gz", "jsonl.zst", "parquet"])
def spec(request: Any, tiny_config: TinyConfig, tmp_path: Path) -> DataSpec:
    write_corpus(tmp_path / "data", some_texts(120), request.param, num_files=2)
    return spec_of(
        job(
            tiny_config,
            tmp_path / "data",
            request.param,
            fragment_bytes=600,
            window_bytes=600,
            shuffle="none",
        )
    )


def windows_of(spec: DataSpec, block: int = 0) -> list[Any]:
    windows = read_windows(spec.plans[0], spec.settings, 0, block)
    return [[record for part in window.parts for record in part.records] for window in windows]


def test_a_later_window_is_read_on_from_the_last_one_and_an_earlier_one_from_the_beginning(
    spec: DataSpec,
) -> None:
    windows, reading = windows_of(spec), Reading(spec)
    assert len(windows) > 1
    last = len(windows) - 1
    for number in range(len(windows)):
        assert reading.read(number) == windows[number]
        assert not reading.passed, "nothing is decoded twice"
    assert [reading.read(last + 1), reading.read(last + 9)] == [last + 1] * 2, "the block has no such window"
    assert not reading.passed
    assert reading.read(last) == windows[last]
    assert len(reading.passed) == last, "that one is in the past"
    assert reading.read(0) == windows[0]
    assert reading.read(last + 9) == last + 1
    assert len(reading.passed) == last + last


def test_another_block_of_the_source_takes_the_place_of_the_one_that_is_open(spec: DataSpec) -> None:
    reading, other = Reading(spec), windows_of(spec, 1)
    reading.read(0)
    assert reading.read(0, block=1) == other[0]
    reading.read(1)
    assert len(reading.passed) == 1


def test_blocks_of_several_sources_stay_open_as_far_as_the_limit_goes(spec: DataSpec) -> None:
    for max_open, passed in ((2, 0), (1, 2)):
        reading = Reading(spec, max_open)
        for window in range(2):
            for source in ("a", "b"):
                reading.read(window, source=source)
        assert len(reading.passed) == passed


def test_a_reading_that_is_not_wanted_ends_and_one_that_failed_begins_anew(spec: DataSpec) -> None:
    task = WindowTask(source="made", epoch=0, block=0, window=1)
    blocks, plan = OpenBlocks(), spec.plans[0]
    with pytest.raises(NotWantedError):
        blocks.read(task, plan, spec.settings, lambda _: False)
    gone = replace(plan, manifest=replace(plan.manifest, base="/nowhere"))
    with pytest.raises((DataError, DataIdentityError)):
        blocks.read(task, gone, spec.settings)
    reading = Reading(spec)
    reading.blocks = blocks
    assert reading.read(1) == windows_of(spec)[1]
