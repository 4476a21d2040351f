"""Decoding up to a cursor is reported window by window, by sums and not too often; silence alone is a stall.

The journal names a skipped document in parts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.data.feed.feed_reports import BadDocument, SignsOfWork, WorkReports
from orchestrator.data.sources.windows import read_windows
from orchestrator.data.tokens.chunks import tokenize_block
from orchestrator.errors import DataIdentityError
from orchestrator.records.cursor import Cursor
from tests.conftest import TinyConfig
from tests.data.making import job, some_texts, spec_of, write_corpus
from tests.raising import raises


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_limit_counts_from_the_last_sign_of_work_or_from_the_wait_if_that_began_later() -> None:
    clock = Clock()
    work = SignsOfWork(600.0, clock)
    assert work.left_s(since=1000.0) == 600.0
    clock.now_s = 1500.0
    assert (work.left_s(since=900.0), work.left_s(since=1400.0)) == (100.0, 500.0)
    work.note()
    for _ in range(100):
        clock.now_s += 599.0
        assert work.left_s(since=1000.0) == 1.0
        work.note(7)
        assert work.left_s(since=1000.0) == 600.0
    clock.now_s += 600.0
    assert work.left_s(since=1000.0) == 0.0
    assert work.bytes_passed == 700


def test_reports_are_sums_the_first_at_once_and_then_no_more_often_than_asked_for() -> None:
    clock, told = Clock(), list[int]()

    def tell(num_bytes: int) -> bool:
        told.append(num_bytes)
        return len(told) < 4

    report = WorkReports(tell, every_s=5.0, now=clock)
    answers = []
    for _ in range(16):
        answers.append(report(10))
        clock.now_s += 1.0
    assert told == [10, 50, 50, 50]
    assert answers == [True] * 15 + [False], "the last: the work is not wanted any more"


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst"])
def test_every_window_before_the_cursors_is_told_with_its_decoded_bytes(
    tmp_path: Path, tiny_config: TinyConfig, kind: str
) -> None:
    write_corpus(tmp_path, some_texts(200), kind, num_files=1)
    spec = spec_of(job(tiny_config, tmp_path, kind))
    plan, encoders = spec.plans[0], spec.build_encoders()
    windows = list(read_windows(plan, spec.settings, 0, 0))
    sizes = [sum(int(part.records.sizes.sum()) for part in window.parts) for window in windows]
    assert len(sizes) > 8
    first = next(iter(spec.tasks_from(Cursor())))
    task = replace(first, window=6)
    told: list[int] = []

    def passed(num_bytes: int) -> bool:
        told.append(num_bytes)
        return True

    chunks = list(tokenize_block(task, plan, encoders, spec.settings, passed))
    assert told == sizes[:6]
    assert {chunk.window for chunk in chunks} == set(range(6, len(sizes)))
    assert chunks[-1].ends_block
    told.clear()
    assert len(list(tokenize_block(first, plan, encoders, spec.settings, passed))) >= len(sizes)
    assert told == [], "nothing lies before the first window"


def test_nothing_follows_when_the_work_is_not_wanted_any_more(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    write_corpus(tmp_path, some_texts(200), "jsonl.gz", num_files=1)
    spec = spec_of(job(tiny_config, tmp_path, "jsonl.gz"))
    plan, encoders = spec.plans[0], spec.build_encoders()
    task = replace(next(iter(spec.tasks_from(Cursor()))), window=6)
    told: list[int] = []

    def passed(num_bytes: int) -> bool:
        told.append(num_bytes)
        return len(told) < 3

    assert list(tokenize_block(task, plan, encoders, spec.settings, passed)) == []
    assert len(told) == 3, "the rest is not even decoded"
    with raises(DataIdentityError, "resume.cursor_mismatch", "window 999"):
        list(tokenize_block(replace(task, window=999), plan, encoders, spec.settings))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("/c/a.jsonl: byte 40, line 17: no 'text'", ("/c/a.jsonl", "byte 40, line 17", "no 'text'")),
        ("a: b.jsonl: byte 40, line not counted: x: y", ("a: b.jsonl", "byte 40, line not counted", "x: y")),
        ("a.parquet: row 2: not UTF-8:\nat 2", ("a.parquet", "row 2", "not UTF-8:\nat 2")),
        ("a.jsonl: byte 1, line 2: says b: row 3: z", ("a.jsonl", "byte 1, line 2", "says b: row 3: z")),
        ("something else", ("", "", "something else")),
    ],
)
def test_a_skipped_document_is_named_by_file_place_and_reason(text: str, parts: tuple[str, str, str]) -> None:
    assert BadDocument(source="made", text=text).parts == parts
