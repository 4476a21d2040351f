"""Every disk that a power cut could leave while a run is rewound, forked or pruned: nothing is lost, and the
same command goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.schema import JobConfig, ResumeConfig
from orchestrator.coordinator.attempt.forking import describe, found_run
from orchestrator.coordinator.attempt.resume_point_choice import choose_point
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.spec import DataSpec
from orchestrator.errors import OrchestratorError
from orchestrator.inspect.status.lineage import prune, release
from orchestrator.launch.branch import fork as forks
from orchestrator.launch.branch import rewind as rewinding
from orchestrator.launch.branch.point_query import PointQuery
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep
from tests.inspect.live_run import ROOT, LiveRun
from tests.storage.crashfs import Files, ModelDisk

BLOCK = 4000  # bytes that one write takes at most


@pytest.fixture
def trained(job: JobConfig, data: DataSpec) -> tuple[Files, list[str]]:
    """A run of three points that has ended, as it lies on a disk, and the names of the points."""
    disk = ModelDisk()
    run = LiveRun(disk, job, data, keep_latest=3)
    for _ in range(3):
        run.launch()
        run.save(run.live)
        run.end()
    return disk.files(), run.on_lineage


def store_of(disk: ModelDisk, root: str = ROOT) -> RunStore:
    return RunStore(Storage(root, disk, no_sleep))


def cuts(files: Files, act: Callable[[ModelDisk], None]) -> Iterator[tuple[int, Files]]:
    """Every different disk that a power cut during `act` could leave, with the number of calls before it."""
    disk = ModelDisk.of(files)
    disk.durable, disk.block = dict(disk.live), BLOCK
    act(disk)
    seen = set()
    for number, _, left in disk.crashes():
        state = frozenset((path, data) for path, data in left.items() if ".tmp-" not in path)
        if state not in seen:
            seen.add(state)
            yield number, left


def whole_points(store: RunStore) -> list[str]:
    return [name for name in store.point_names() if not store.verify_point(name)]


def newest(store: RunStore) -> str:
    point, damages = choose_point(store, survey(store), "latest")
    assert point is not None
    assert not damages
    return point.name


def test_no_power_cut_during_a_rewind_loses_a_point_or_leaves_it_half_done(
    trained: tuple[Files, list[str]],
) -> None:
    files, points = trained

    def rewind(disk: ModelDisk) -> None:
        store = store_of(disk)
        plan = rewinding.look(store, PointQuery(point=points[0]))
        if not plan.stands_there:
            rewinding.carry_out(store, plan, max(store.claim_numbers()), "me")

    ends, count = list[str](), 0
    for _, left in cuts(files, rewind):
        count += 1
        disk = ModelDisk.of(left)
        store = store_of(disk)
        assert whole_points(store) == points
        ends.append(newest(store))
        assert ends[-1] in (points[0], points[-1]), "it is rewound, or as it was"
        rewind(disk)
        again = store_of(disk)
        assert (newest(again), whole_points(again)) == (points[0], points)
        newest_claim = again.newest_claim()
        assert newest_claim is not None
        end = again.read_end(newest_claim.number)
        assert end is not None
        assert end.outcome == "stopped"
    assert {*ends} == {points[0], points[-1]}
    assert count > 10, "the exploration must be one"


FORK = "/forks/mine"


def unharmed(files: Files, left: Files) -> bool:
    """Whether the run has every file as before, and no other but pins."""
    more = [path for path in left if path.startswith(f"{ROOT}/") and path not in files]
    return files.items() <= left.items() and all(path.startswith(f"{ROOT}/pins") for path in more)


def explore_forks(files: Files, points: list[str], job: JobConfig) -> tuple[list[bool], int]:
    """Whether each fork that was cut off had begun, and how many there were; fails for one that is wrong."""
    config = {**job.flat(), "run.name": "mine", "run.storage": "/forks"}

    def fork(disk: ModelDisk) -> None:
        new = store_of(disk, FORK)
        run = starting.find_run(new)
        if run is None:
            run = found_run(new, "mine", describe(store_of(disk), points[1]), "me")
        if not new.parents()[0]:
            forks.take_over_and_end(new, run, max(new.claim_numbers(), default=0), config, "me")

    begun, count = list[bool](), 0
    for _, left in cuts(files, fork):
        count += 1
        disk = ModelDisk.of(left)
        new, old = store_of(disk, FORK), store_of(disk)
        assert unharmed(files, left)
        run = starting.find_run(new)
        begun.append(run is not None and bool(new.parents()[0]))
        if run is not None:
            assert [*old.pins()] == [points[1]], "pinned before anybody needs it"
        if begun[-1]:
            assert newest(new) == "00000006-a0000-g0001", "it exists whole"
        fork(disk)
        again = store_of(disk, FORK)
        assert newest(again) in ("00000006-a0000-g0001", "00000006-a0000-g0002")
        assert survey(again).fork is not None
        assert unharmed(files, disk.files())
    return begun, count


def test_no_power_cut_during_a_fork_harms_the_run_or_leaves_a_fork_that_cannot_go_on(
    trained: tuple[Files, list[str]], job: JobConfig
) -> None:
    begun, count = explore_forks(*trained, job)
    assert {*begun} == {True, False}
    assert count > 50, "the exploration must be one"


def pins_nothing(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: the other run may delete the point before the fork has it."""
    patch.setattr(RunStore, "pin", lambda *arguments: None)


def takes_over_after_the_parent_file(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: the history begins before the point is there."""
    take, later = RunStore.take_point, list[Any]()
    write = RunStore.write_parent

    def promise(store: RunStore, other: Any, point: Any, key: Any, run_id: str) -> Any:
        later.append((store, other, point, key, run_id))
        return replace(point, name=key.point_name, commit=replace(point.commit, key=key))

    def write_first(store: RunStore, parent: Any) -> None:
        write(store, parent)
        take(*later.pop())

    patch.setattr(RunStore, "take_point", promise)
    patch.setattr(RunStore, "write_parent", write_first)


@pytest.mark.parametrize("mistake", [pins_nothing, takes_over_after_the_parent_file])
def test_the_exploration_catches_a_planted_mistake(
    trained: tuple[Files, list[str]],
    job: JobConfig,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, OrchestratorError)):
        explore_forks(*trained, job)


@pytest.mark.chaos
def test_no_power_cut_during_a_prune_loses_a_point_of_the_history(trained: tuple[Files, list[str]]) -> None:
    files, points = trained
    disk = ModelDisk.of(files)
    store = store_of(disk)
    rewinding.carry_out(store, rewinding.look(store, PointQuery(point=points[0])), 3, "me")

    def prune_all(disk: ModelDisk) -> None:
        prune(store_of(disk), dict.fromkeys(points[1:], "orphan"), "me", "", False)

    numbers = set()
    for _, left in cuts(disk.files(), prune_all):
        cut = ModelDisk.of(left)
        names = store_of(cut).point_names()
        assert names == whole_points(store_of(cut))
        assert names[0] == newest(store_of(cut)) == points[0]
        numbers.add(len(names))
        prune_all(cut)
        assert store_of(cut).point_names() == points[:1]
        assert store_of(cut).leftovers() == []
    assert numbers == {1, 2, 3}


@pytest.mark.chaos
def test_no_power_cut_while_retention_is_carried_out_loses_or_misses_a_point(
    trained: tuple[Files, list[str]],
) -> None:
    files, points = trained

    def let_go(disk: ModelDisk) -> None:
        store = store_of(disk)
        release(store, survey(store), ResumeConfig(keep_latest=1), "me", "", False)

    numbers = set()
    for _, left in cuts(files, let_go):
        cut = ModelDisk.of(left)
        names = store_of(cut).point_names()
        assert names == whole_points(store_of(cut))
        assert names[-2:] == points[1:], "the newest, and the newest attempt's parent"
        assert newest(store_of(cut)) == points[-1], "and nothing is reported as damaged"
        numbers.add(len(names))
        let_go(cut)
        assert (store_of(cut).point_names(), store_of(cut).leftovers()) == (points[1:], [])
        assert newest(store_of(cut)) == points[-1]
    assert numbers == {2, 3}
