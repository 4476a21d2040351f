"""A start, a rewind and a restarted coordinator over storage that lists a point later than it exists: the
real code, with each number of listings that do not show the newest point yet. What they write is one history,
which the next start reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt import resume_point_choice
from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.coordinator.attempt.launch_attempts import continue_launch
from orchestrator.coordinator.attempt.survey import LOOKS, Survey, survey
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claims.claims import INCONSISTENT
from orchestrator.launch.branch import rewind as rewinding
from orchestrator.launch.branch.point_query import PointQuery
from orchestrator.launch.start import attempt_claim
from orchestrator.storage.files import Storage
from orchestrator.storage.store import Listed
from tests.checkpoint.samples import key, record, start
from tests.launch.runner import Runner, begun, newest_attempt

MOST_LISTINGS = 4 * LOOKS  # more than any of them takes


class ListsLate(Storage):
    """The folder of the points as it is listed before its newest point `late`, `listings` times. A point is
    there for all who ask by its name, and nothing else is late.
    """

    late = ""
    listings = 0

    def listed(self, folder: str) -> Sequence[Listed]:
        found = super().listed(folder)
        if folder != "points" or self.listings == 0:
            return found
        self.listings -= 1
        return [each for each in found if each.name != self.late]


def late_store(folder: Path, late: str, listings: int) -> tuple[RunStore, ListsLate]:
    storage = ListsLate(str(folder))
    storage.late, storage.listings = late, listings
    return RunStore(storage), storage


Act = Callable[[Runner, RunStore, str], None]


def starts(runner: Runner, store: RunStore, newest: str) -> None:
    """A start command's claim."""
    spec = runner.prepared()
    with attempt_claim.claimed(store, runner.config(), spec, newest_attempt(runner.store)) as (attempt, _):
        assert attempt.point is not None
        assert attempt.point.name == newest, "an acknowledged point is passed over"


def rewinds(runner: Runner, store: RunStore, newest: str) -> None:
    """A rewind to the newest point, from behind which steps were trained."""
    attempt = runner.begin()
    journal = runner.journal(attempt)
    note_beginning(journal, attempt, runner.config().flat())
    journal.generation(start(1, attempt.parent, attempt.number))
    journal.step(record(key(21, attempt=attempt.number)))
    journal.close()
    runner.store.write_end(attempt.number, "stopped", "asked to", attempt.run_id)
    rewinding.rewind(store, PointQuery(point=newest), "somebody", lambda plan: True)


def restarts(runner: Runner, store: RunStore, newest: str) -> None:
    """A coordinator's restart, whose launch began with the newest point."""
    again = continue_launch(store, begun(runner), "host", lambda *place: None)
    assert again.point is not None
    assert again.point.name == newest


def wrong_with(runner: Runner, act: Act, newest: str, listings: int) -> str:
    """What is wrong after the act; empty if nothing is."""
    store, storage = late_store(runner.folder, newest, listings)
    try:
        act(runner, store, newest)
    except StorageError:
        if storage.listings == 0 and listings < LOOKS:
            return "it gives up although the point is listed"
    except OrchestratorError as error:
        return error.code or str(error)
    try:
        seen = survey(runner.store)
    except OrchestratorError as error:
        return f"the next start refuses the run: {error}"
    return "" if newest in seen.points else "an acknowledged point is an orphan"


def search(runner: Runner, tmp_path: Path, act: Act) -> set[str]:
    """All that goes wrong, over each number of listings that come too early."""
    runner.launch()
    newest = runner.launch().point_name
    wrong = set()
    for listings in range(MOST_LISTINGS):
        world = runner.copied(tmp_path / f"{act.__name__}{listings}")
        wrong.add(wrong_with(world, act, newest, listings))
    return wrong - {""}


@pytest.fixture
def runner(tiny_config: Any) -> Runner:
    return Runner(tiny_config({"train.max_steps": 1000}))


@pytest.mark.quick("rewinds")
@pytest.mark.parametrize("act", [starts, rewinds, restarts])
def test_a_point_that_is_listed_late_is_continued_and_inherited(
    runner: Runner, tmp_path: Path, act: Act
) -> None:
    assert search(runner, tmp_path, act) == set()


def mixes(seen: Survey, point: Point | None) -> None:
    """Planted mistake: continues what was verified, and inherits what was listed before."""


def test_the_search_catches_a_start_that_mixes_two_looks(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_point_choice, "require_listed", mixes)
    assert INCONSISTENT in search(runner, tmp_path, starts)


@pytest.mark.chaos
def test_the_search_catches_a_rewind_that_mixes_two_looks(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewinding, "require_listed", mixes)
    assert INCONSISTENT in search(runner, tmp_path, rewinds)
