"""What `status` says is gone of a run's folder is said by the API in the same words, wherever the run is
shown.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.inspect.run import Run
from orchestrator.inspect.status.snapshot import missing_text
from orchestrator.inspect.views.run_views import PIECES_S, RunViews
from orchestrator.inspect.views.summary import sentence
from orchestrator.storage.files import Storage
from tests.inspect.dashboard.serving import Served, client

NEWEST = "points/{point}/COMMIT"


def remove(folder: Path, path: str) -> None:
    found = folder / path
    shutil.rmtree(found) if found.is_dir() else found.unlink()


@pytest.fixture
def damaged(run: Served, tmp_path: Path) -> Path:
    """A copy of the run, which the test damages."""
    shutil.copytree(run.storage / "made", tmp_path / "made")
    return tmp_path / "made"


def said(folder: Path) -> tuple[str, Any]:
    """What the API says is missing, and the run's summary, or why there is none."""
    document = client(folder.parent).get("/api/runs/made").json()
    if "error" in document:
        return document["error"]["missing_text"], document["error"]
    return document["missing_text"], document


@pytest.mark.quick(
    "points/{point}/COMMIT",
    "attempts/0006.json",
    "tokenizer/tokenizer.json",
    "points",
    "manifest",
    "journal",
)
@pytest.mark.parametrize(
    "gone",
    [
        NEWEST,
        "points/{point}/state",
        "points/{point}/cursor.json",
        "points/{point}",
        "points",
        "journal",
        "journal/a0002",
        "attempts",
        "attempts/0002.json",
        "attempts/0006.json",
        "attempts/0006.parent.json",
        "manifest",
        "tokenizer/tokenizer.json",
    ],
)
def test_what_is_gone_is_said_as_the_command_says_it(run: Served, damaged: Path, gone: str) -> None:
    assert said(damaged)[0] == ""
    remove(damaged, gone.format(point=run.point))
    view = Run(damaged).status(0)
    assert view.missing, "the command sees it"
    text, document = said(damaged)
    assert text == sentence(missing_text(view.missing))
    if "verdict" in document:
        assert document["missing"] == list(view.missing)
        assert document["verdict"]["level"] == "bad"
        assert missing_text(view.missing) in document["verdict"]["text"]
        (row,) = client(damaged.parent).get("/api/runs").json()["runs"]
        assert row["missing"] == list(view.missing)


def test_a_piece_that_goes_and_comes_back_is_seen_by_who_follows_the_run(damaged: Path) -> None:
    at = [0.0]
    views = RunViews(RunStore(Storage(str(damaged))), monotonic=lambda: at[0])

    def missing_then() -> list[str]:
        at[0] += PIECES_S
        views.refresh()
        found: list[str] = views.summary()["missing"]
        return found

    assert missing_then() == []
    (damaged / "attempts" / "0002.json").rename(damaged / "aside")
    assert missing_then() == ["attempts/0002.json"]
    (damaged / "aside").rename(damaged / "attempts" / "0002.json")
    assert missing_then() == []
