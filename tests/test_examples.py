"""Runs that older versions wrote are read for ever: tests/examples has one of every format."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import orchestrator
from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal_reader import read_journal
from orchestrator.storage.files import Storage
from tests.torchrun.ranks import Ranks

ROOT = Path(__file__).resolve().parents[1]
FORMATS = [1, 2]
LIMIT_S = 240.0
REWOUND_TO, ORPHAN, NEWEST = "00000006-a0002-g0001", "00000008-a0002-g0001", "00000010-a0003-g0001"
POINTS = [REWOUND_TO, ORPHAN, "00000008-a0003-g0001", NEWEST]


@pytest.fixture(params=FORMATS)
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy in the current folder: `example` is the run, `job.yaml` what it was started with."""
    folder = tmp_path / "copy"
    shutil.copytree(ROOT / "tests" / "examples" / f"format{request.param}", folder)
    monkeypatch.chdir(folder)
    return folder


def is_of_format_1(example: Path) -> bool:
    """Whether this is the copy of the oldest one."""
    return not (example / "example" / "points" / NEWEST / "state").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_old_run_is_read_whole_and_changed_by_no_reading(example: Path) -> None:
    before = contents(example)
    run = orchestrator.open("example")
    rows = run.list_points()
    assert [(row["name"], row["healthy"], row["on_lineage"]) for row in rows] == [
        (name, True, name != ORPHAN) for name in POINTS
    ]
    assert [row["consumed_tokens"] for row in rows] == [576, 768, 768, 960]
    assert [(row["name"], row["healthy"]) for row in run.verify()] == [(name, True) for name in POINTS]
    if is_of_format_1(example):
        assert {record.ended for record in run.records()} == {None}, "what it does not say is not known"
    report = run.audit()
    assert report["exactly_once"], report
    assert (report["tokens"], report["steps"], report["attempts"]) == (960, 12, 3)
    plan = orchestrator.plan("job.yaml", ["train.max_steps=20", "resume.keep_latest=4"])
    assert (plan.action, plan.point, plan.consumed_tokens) == ("resume", NEWEST, 960)
    assert contents(example) == before


def test_an_old_run_trains_on_and_loses_nothing_that_it_had(example: Path, tmp_path: Path) -> None:
    before = contents(example)
    changes = ["train.global_batch_size=6", "train.max_steps=14", "resume.keep_latest=9"]
    rank = Ranks(example, tmp_path, 1, ["job.yaml", *changes])
    try:
        assert rank.end(LIMIT_S) == [0], rank.said()
    finally:
        rank.kill()
    after = contents(example)
    assert {path: after.get(path) for path in before} == before
    run = orchestrator.open("example")
    names = [*POINTS, "00000012-a0004-g0001", "00000014-a0004-g0001"]
    assert [(row["name"], row["healthy"], row["on_lineage"]) for row in run.list_points()] == [
        (name, True, name != ORPHAN) for name in names
    ]
    assert run.audit()["exactly_once"]
    assert run.records()[-1].consumed_tokens == 14 * 6 * 16


def test_kinds_and_fields_of_old_events_have_kept_their_names(example: Path) -> None:
    events = read_journal(Storage(str(example / "example"))).events
    assert len({event.kind for event in events}) == (5 if is_of_format_1(example) else 9)
    for event in events:
        assert event.fields.keys() <= EventKind(event.kind).fields


def test_one_changed_byte_of_an_old_point_is_named(example: Path) -> None:
    parts = example / "example" / "points" / NEWEST / "parts.json"
    word = b'"chunks"' if is_of_format_1(example) else b'"items"'
    assert word in parts.read_bytes()
    parts.write_bytes(parts.read_bytes().replace(word, word.upper(), 1))
    rows = orchestrator.open("example").verify()
    assert [(row["name"], [damage["file"] for damage in row["damaged"]]) for row in rows][-1] == (
        NEWEST,
        ["parts.json"],
    )
