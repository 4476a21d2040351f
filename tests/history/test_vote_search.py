"""A save of which every rank has left its vote in storage, and who may make a point of it or delete it: the
coordinator that was cut off, and two starts. Every order of their calls to the disk, of the real code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from orchestrator.checkpoint.commit.commit_events import (
    CheckNewerClaim,
    ClaimChecked,
    CommitWritten,
    WriteCommit,
)
from orchestrator.checkpoint.commit.store_actions import PointCommitter
from orchestrator.checkpoint.points import point_files, sealed_votes
from orchestrator.checkpoint.points.points import random_numbers
from orchestrator.checkpoint.points.sealed_votes import keep_vote
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt import launch_attempts as beginning
from orchestrator.coordinator.attempt.launch_attempts import begin_launch
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.spec import DataSpec
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claims.claim_files import RESUME
from orchestrator.history.claims.lineage import Lineage
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.launch.start import run_preparation
from orchestrator.records.points import ReplicaDigests, Vote
from orchestrator.records.steps import StateKey
from orchestrator.storage.disk import Disk
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep, record, write_vote
from tests.inspect.live_run import ROOT, LiveRun
from tests.storage.crashfs import Files, ModelDisk
from tests.storage.interleaved import interleavings

Program = Callable[["Scene", Disk], Any]


@dataclass
class Scene:
    """A run with one point whose launch was cut off after its members had left their votes for `save`."""

    run: LiveRun
    files: Files
    votes: tuple[Vote, ...]
    older: str

    @property
    def save(self) -> StateKey:
        return self.votes[0].key

    def store(self, disk: Disk) -> RunStore:
        return RunStore(Storage(ROOT, disk, no_sleep))

    def shared(self, path: str) -> bool:
        """Where one of them can notice another; one part stands for all."""
        point = f"points/{self.save.point_name}"
        files = ("COMMIT", "DECIDED", self.votes[1].files[0].path, "votes/00001.json")
        names = (*(f"attempts/{n:04d}.json" for n in (2, 3)), *(f"{point}/{file}" for file in files))
        return path in [f"{ROOT}/{name}" for name in names]


def scene(
    job: JobConfig,
    data: DataSpec,
    *,
    ranks: tuple[int, ...] = (0, 1),
    durable: int = 1,
    forgotten: int | None = None,
    replicas: str = "",
) -> Scene:
    """Of three steps after the older point `durable` are journalled; the votes bring the others, but for the
    one that is `forgotten`. Votes of `ranks` are there; those of both ranks say of all rows that they hold
    these digests, a letter each.
    """
    disk = ModelDisk()
    run = LiveRun(disk, job, data, keep_latest=3)
    run.launch()
    run.save(run.live)
    live, store = run.live, run.store
    run.train(live, durable)
    run.train(live, 3 - durable, flush=False)
    unflushed = [key for key in live.unflushed if key.step != forgotten]
    records = tuple(record(key) for key in unflushed)
    votes = tuple(replace(write_vote(store.storage, live.newest, r), records=records) for r in range(2))
    votes = tuple(
        replace(vote, replicas=ReplicaDigests(of_all=digest))
        for vote, digest in zip(votes, replicas or ("", ""), strict=True)
    )
    for rank in ranks:
        keep_vote(store.storage, votes[rank], run.run.id)
    return Scene(run, disk.files(), votes, run.on_lineage[-1])


Make = Callable[..., Scene]


@pytest.fixture(scope="module")
def job(tiny_config: Any) -> JobConfig:
    return parse_config(tiny_config({"train.max_steps": 100_000}))


@pytest.fixture(scope="module")
def data(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return run_preparation.prepare(job, Storage(str(tmp_path_factory.mktemp("frozen"))), freeze=True)


@pytest.fixture
def make(job: JobConfig, data: DataSpec) -> Make:
    return partial(scene, job, data)


def committer(scene: Scene, disk: Disk) -> PointCommitter:
    flat, seed = scene.run.job.flat(), scene.run.job.train.seed
    journal = JournalWriter(Storage("/elsewhere", ModelDisk(), no_sleep), 1)
    numbers, run_id = random_numbers(seed), scene.run.run.id
    return PointCommitter(scene.store(disk), journal, 1, flat, numbers, lambda: 0.0, run_id=run_id)


def commits(scene: Scene, disk: Disk) -> bool:
    """The coordinator of attempt 1, which goes on; whether it acknowledges the save."""
    old = committer(scene, disk)
    check = CheckNewerClaim(key=scene.save)
    write = WriteCommit(key=scene.save, votes=scene.votes, parent=scene.run.live.attempt.parent, started_s=0)
    for action, expected in ((check, ClaimChecked), (write, CommitWritten), (check, ClaimChecked)):
        answer = old.perform(action)
        if not isinstance(answer, expected) or getattr(answer, "newer", False):
            return False
    return True


def gives_up(scene: Scene, disk: Disk) -> bool:
    """The same, which had given the save up."""
    with suppress(StorageError):  # the folder is written to meanwhile: the next start takes it away
        scene.store(disk).discard(scene.save.point_name)
    return False


def starts(scene: Scene, disk: Disk) -> str | None:
    """`orchestrator train`, once it has found nobody at work: the point that it continues, "" where it
    begins anew; None: it is refused.
    """
    store, run = scene.store(disk), scene.run
    try:
        claim = store.claim(max(store.claim_numbers()) + 1, "new", RESUME, "host", run.run.id)
        attempt, _ = begin_launch(store, run.job, claim, run.run, run.data)
    except OrchestratorError:
        return None
    return attempt.point.name if attempt.point else ""


def search(scene: Scene, *programs: Program) -> Counter[tuple[Any, ...]]:
    """How often the programs ended so. Fails where a promise is broken."""
    ends: Counter[tuple[Any, ...]] = Counter()
    acts = [lambda disk, program=program: program(scene, disk) for program in programs]
    for disk, found in interleavings(scene.files, acts, scene.shared):
        store = scene.store(disk)
        for name in filter(None, (point for point in found if isinstance(point, str))):
            assert store.verify_point(name) == [], "the point that a start continues is lost"
        seen = survey(store)
        for acknowledged in (scene.save.point_name for answer in found if answer is True):
            assert acknowledged in seen.points, "an acknowledged point is an orphan"
        ends[tuple(found)] += 1
    return ends


def brought(scene: Scene) -> set[StateKey]:
    """The steps after the older point of which a record is known once a start has begun."""
    disk = ModelDisk.of(scene.files)
    store, run = scene.store(disk), scene.run
    claim = store.claim(2, "new", RESUME, "host", run.run.id)
    attempt, _ = begin_launch(store, run.job, claim, run.run, run.data)
    if attempt.point is None or attempt.point.name != scene.save.point_name:
        return set()
    known = {r.key for r in survey(store).journal.records} | {r.key for r in attempt.found.brought}
    return {key for key in known if key.attempt == 1 and key.step > 3}


def steps(scene: Scene) -> set[StateKey]:
    return {replace(scene.save, step=step) for step in range(4, scene.save.step + 1)}


def test_a_start_commits_what_all_have_voted_for_and_brings_every_record(make: Make) -> None:
    for durable in range(4):
        here = make(durable=durable, replicas="aa")
        assert brought(here) == steps(here)


@pytest.mark.parametrize(
    "what", [{"ranks": (0,)}, {"ranks": ()}, {"durable": 0, "forgotten": 5}, {"replicas": "ab"}]
)
def test_votes_or_records_that_are_missing_or_replicas_that_differ_make_no_point(
    make: Make, what: dict[str, Any]
) -> None:
    here = make(**what)
    assert search(here, starts).keys() == {(here.older,)}


@pytest.mark.chaos
def test_no_order_of_the_old_coordinator_and_a_start_loses_or_doubles_the_point(make: Make) -> None:
    here = make()
    ends = search(here, commits, starts)
    assert ends.keys() == {(True, here.save.point_name), (False, here.save.point_name)}


@pytest.mark.chaos
def test_no_order_deletes_a_save_under_the_start_that_commits_it(make: Make) -> None:
    here = make()
    ends = search(here, gives_up, starts)
    assert ends.keys() == {(False, here.older), (False, here.save.point_name)}


def test_no_order_of_two_starts_makes_two_points_of_it(make: Make) -> None:
    here = make()
    for found in search(here, starts, starts):
        assert here.save.point_name in found, "one of them commits it, whatever becomes of the other"
        assert {*found} <= {here.save.point_name, here.older, None}


@pytest.fixture
def later(make: Make) -> Scene:
    """The votes became complete when another launch had continued the older point, and trained."""
    here = make(ranks=(0,))
    run = LiveRun.__new__(LiveRun)
    run.__dict__ |= here.run.__dict__
    run.launch()
    run.train(run.live, 2)
    keep_vote(run.store.storage, here.votes[1], run.run.id)
    disk = run.disk
    assert isinstance(disk, ModelDisk)
    return replace(here, run=run, files=disk.files())


def test_votes_of_a_fenced_attempt_make_no_point(later: Scene) -> None:
    assert search(later, starts).keys() == {(later.older,)}


@pytest.fixture
def mistake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plants one in the real code."""
    if request.param == "nothing is decided":
        for module in (sealed_votes, point_files):
            monkeypatch.setattr(module, "decides", lambda *_: True)
    elif request.param == "records are not asked for":
        monkeypatch.setattr(
            beginning,
            "committable",
            lambda votes, generations, _: sealed_votes.committable(votes, generations, lambda key: True),
        )
    else:
        monkeypatch.setattr(Lineage, "on_lineage", lambda self, key: True)
    return str(request.param)


@pytest.mark.chaos
@pytest.mark.parametrize("mistake", ["nothing is decided"], indirect=True)
@pytest.mark.usefixtures("mistake")
def test_the_search_catches_a_save_that_is_deleted_and_committed(make: Make) -> None:
    with pytest.raises(AssertionError, match="the point that a start continues is lost"):
        search(make(), gives_up, starts)


@pytest.mark.parametrize("mistake", ["records are not asked for"], indirect=True)
@pytest.mark.usefixtures("mistake")
def test_the_search_catches_a_point_whose_steps_have_no_record(make: Make) -> None:
    here = make(durable=0, forgotten=5)
    assert brought(here) not in (set(), steps(here))


@pytest.mark.parametrize("mistake", ["the history is not asked"], indirect=True)
@pytest.mark.usefixtures("mistake")
def test_the_search_catches_a_point_of_a_fenced_attempt(later: Scene) -> None:
    assert search(later, starts).keys() == {(later.save.point_name,)}, "what was trained since is lost"
