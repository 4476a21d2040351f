"""Pieces of a run that are gone: a quick look names what it sees, and promises nothing that it has not looked
at.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.checkpoint.commit.commit_events import DeletePoints
from orchestrator.checkpoint.commit.store_actions import PointCommitter
from orchestrator.cli import commands as cli
from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.claim_files import RESUME
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.inspect import run as history
from orchestrator.inspect.run import Run
from orchestrator.inspect.status import tail
from orchestrator.records.cursor import SourceCursor
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import cursor, key, write_vote
from tests.conftest import TinyConfig
from tests.inspect.watched_attempt import Attempt
from tests.launch.runner import Runner
from tests.raising import exits

SHORT_S = 0.05


@pytest.fixture(scope="module")
def died(tiny_config: TinyConfig) -> Runner:
    """Three launches that ended, and a fourth that died after two steps. It is only to be copied."""
    runner = Runner(tiny_config({"train.max_steps": 1000}))
    for _ in range(3):
        runner.launch()
    attempt = Attempt(runner)
    attempt.begin()
    attempt.steps(31, 32)
    return runner


@pytest.fixture
def dead(died: Runner, tmp_path: Path) -> Runner:
    """A copy, which the test damages."""
    return died.copied(tmp_path / "runs")


def remove(runner: Runner, path: str) -> None:
    found = runner.folder / path
    shutil.rmtree(found) if found.is_dir() else found.unlink()


@pytest.mark.quick(
    "attempts-attempts/",
    "attempts/0004.json-attempts/0004.json",
    "attempts/0004.parent.json-attempts/0004.parent.json",
    "tokenizer/tokenizer.json-tokenizer/tokenizer.json",
    "points/00000030-a0003-g0001/COMMIT-points/00000030-a0003-g0001/COMMIT",
)
@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("points", "points/00000030-a0003-g0001, points/00000020-a0002-g0001, points/00000010-a0001-g0001"),
        ("points/00000030-a0003-g0001/COMMIT", "points/00000030-a0003-g0001/COMMIT"),
        ("journal", "journal/"),
        ("journal/a0002", "journal/a0002"),
        ("attempts", "attempts/"),
        ("attempts/0004.json", "attempts/0004.json"),
        ("attempts/0002.json", "attempts/0002.json"),
        ("attempts/0004.parent.json", "attempts/0004.parent.json"),
        ("manifest", "manifest/data.json"),
        ("tokenizer/tokenizer.json", "tokenizer/tokenizer.json"),
    ],
)
def test_what_is_gone_is_named_and_no_continuation_is_promised(dead: Runner, gone: str, told: str) -> None:
    run = Run(dead.folder)
    assert run.status(SHORT_S).missing == ()
    remove(dead, gone)
    view = run.status(SHORT_S)
    says = f"missing or damaged in its folder: {told}; `orchestrator plan CONFIG` says what a start would do"
    assert view.verdict.endswith(says)
    assert "continues" not in view.verdict
    assert view.is_broken
    assert "no attempt of this run has begun yet" not in view.verdict
    if gone.startswith("journal"):
        assert dead.plan().point == "00000030-a0003-g0001", "it needs no journal"
    elif not gone.endswith(("COMMIT", "parent.json")):  # `plan` takes the point before it, or says the same
        with pytest.raises(OrchestratorError):
            dead.plan()


def test_a_newest_point_that_lacks_a_file_or_the_end_of_one_is_none_to_continue_from(
    runner: Runner,
) -> None:
    names = [runner.launch().point_name for _ in range(3)]
    run = Run(runner.folder)
    for name, older in zip(names[:0:-1], names[-2::-1], strict=True):
        part = next((runner.folder / "points" / name / "state").iterdir())
        os.truncate(part, part.stat().st_size - 1)
        view = run.status(SHORT_S)
        assert view.newest_point == older
        assert f"points/{name}/state/{part.name}" in view.verdict
        assert runner.plan().point == older
    part.unlink()
    assert run.status(SHORT_S).verdict == view.verdict, "a file that is gone is as one that is too short"


def test_a_look_asks_no_more_of_a_run_with_more_points(
    dead: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[str]()
    monkeypatch.setattr(
        Storage, "size", lambda self, path: sizes.append(path) or os.path.getsize(f"{self.root}/{path}")
    )
    assert Run(dead.folder).status(SHORT_S).newest_point == dead.store.point_names()[-1]
    assert {path.split("/")[1] for path in sizes if "/state/" in path} == {dead.store.point_names()[-1]}


def test_a_stopped_run_without_its_commits_says_which_points_it_has_lost(
    runner: Runner,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [runner.launch().point_name for _ in range(4)]
    for commit in (runner.folder / "points").glob("*/COMMIT"):
        commit.unlink()
    with exits(1):
        cli.main(["status", str(runner.folder)])
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{runner.folder}: stopped: asked to; missing or damaged in its folder: ")
    assert [f"points/{name}/COMMIT" in first for name in names] == [False, True, True, True]
    assert "and 1 more like it" in first


def test_points_that_the_run_deleted_and_an_attempt_that_never_began_are_not_missing(
    runner: Runner,
) -> None:
    first, second = runner.launch(), runner.launch()
    attempt = Attempt(runner)
    attempt.begin()
    committer = PointCommitter(
        attempt.store, attempt.journal, attempt.number, {}, {}, lambda: 0.0, run_id=attempt.run_id
    )
    committer.perform(DeletePoints(names=(first.point_name,)))
    store = runner.store  # the next one was killed before its journal
    store.claim(4, "launch", RESUME, "host", attempt.run_id)
    store.write_parent(ClaimParent(attempt=4, parent=second, inherited=(second.point_name,)))
    store.heartbeat(4).beat()
    view = Run(runner.folder).status(SHORT_S)
    assert (view.missing, view.newest_point) == ((), second.point_name)
    assert view.verdict.endswith(f"start the same command again: it continues from {second.point_name}")


def test_a_missing_segment_is_named(runner: Runner) -> None:
    attempt = Attempt(runner, segment_bytes=1 << 14)
    attempt.begin()
    attempt.steps(1, 200)
    remove(runner, "journal/a0001/000002.jsonl")
    assert Run(runner.folder).status(SHORT_S).missing == ("journal/a0001/000002.jsonl",)


def test_a_look_that_does_not_reach_back_to_the_beginning_promises_no_beginning(
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(history, "WATCH_S", SHORT_S)
    monkeypatch.setattr(tail, "LEAST_BYTES", 1 << 14)
    attempt = Attempt(runner, segment_bytes=1 << 14)
    attempt.begin()
    attempt.steps(1, 10)
    begun = Run(runner.folder).status(SHORT_S).verdict
    assert begun.endswith("start the same command again: it continues from the beginning")
    attempt.steps(11, 200)
    with exits(1):
        cli.main(["status", str(runner.folder), "--json"])
    view = json.loads(capsys.readouterr().out)
    assert view["verdict"].endswith(
        "last at step 200; no resume point is seen; `orchestrator plan CONFIG` says what a start would do"
    )
    assert view["missing"] == []


def test_the_documents_skipped_up_to_the_newest_point_are_counted_by_source(
    runner: Runner,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def done(*options: str) -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main(["status", str(runner.folder), *options])
        return int(ended.value.code or 0)

    def skipped() -> tuple[object, list[str]]:
        assert done("--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert done() == 0
        lines = capsys.readouterr().out.splitlines()
        return document["skipped_documents"], [line for line in lines if "skipped" in line]

    runner.launch()
    assert skipped() == ({"s": 0}, [])
    at = key(20, attempt=1)
    sources = {"s": SourceCursor(bad_documents=1204), "t": SourceCursor(bad_documents=1)}
    place = replace(cursor(at), sources=sources)
    votes = [replace(write_vote(runner.store.storage, at, rank), cursor=place) for rank in range(2)]
    run_id = runner.store.read_claim(1).run_id
    runner.store.commit_point(votes, runner.config().flat(), {"rule": "none"}, None, run_id=run_id)
    assert skipped() == (
        {"s": 1204, "t": 1},
        [
            "  skipped     1,204 documents of source s were skipped (data.on_bad_document=skip)",
            "  skipped     1 document of source t was skipped (data.on_bad_document=skip)",
        ],
    )
