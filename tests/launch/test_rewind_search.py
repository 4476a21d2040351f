"""Who deletes a point and stands still in the middle of it, and who goes back to that very point, or forks
it, meanwhile: every order of their calls to the disk, of the real code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.checkpoint.commit.commit_events import DeletePoints
from orchestrator.checkpoint.commit.store_actions import PointCommitter
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.schema import JobConfig, ResumeConfig
from orchestrator.coordinator.attempt.forking import describe, found_run, take_over
from orchestrator.coordinator.attempt.launch_attempts import begin_launch
from orchestrator.coordinator.attempt.survey import Survey, survey
from orchestrator.data.spec import DataSpec
from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.claim_files import REWIND
from orchestrator.history.claims.claims import ClaimParent, ForkedFrom
from orchestrator.history.claims.segments import SEGMENT_BYTES, GrowingSegments, SegmentLog
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.inspect.status.lineage import release
from orchestrator.launch.branch import rewind as rewinding
from orchestrator.launch.branch.point_query import PointQuery
from orchestrator.launch.branch.rewind import RewindPlan
from orchestrator.storage.disk import Disk
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep
from tests.inspect.live_run import ROOT, LiveRun
from tests.storage.crashfs import Files, ModelDisk
from tests.storage.interleaved import interleavings

FORK = "/forks/mine"


@dataclass
class Scene:
    """A run of three points whose launch lives or has ended, the oldest of them, and how it looked before:
    to who prunes (`seen`), and to who goes back to the point (`plan`) or forks it (`forked`).
    """

    run: LiveRun
    files: Files
    point: str
    journals: bool
    seen: Survey
    plan: RewindPlan
    forked: ForkedFrom
    makes: type[RunStore] = field(default=RunStore)

    def store(self, disk: Disk) -> RunStore:
        return self.makes(Storage(ROOT, disk, no_sleep))

    def shared(self, path: str) -> bool:
        """Where one that deletes and one that claims can notice each other: a point without COMMIT is none,
        whatever else is left of it, and who prunes writes no journal.
        """
        names = ("attempts/0002.json", f"points/{self.point}/COMMIT", "pins", f"pins/{self.point}.json")
        in_journal = self.journals and path.startswith(f"{ROOT}/journal")
        return in_journal or path in [f"{ROOT}/{name}" for name in names]


def scene(job: JobConfig, data: DataSpec, *, ended: bool) -> Scene:
    disk = ModelDisk()
    run = LiveRun(disk, job, data, keep_latest=3)
    run.launch()
    for _ in range(3):
        run.save(run.live)
    live = run.live
    if ended:
        run.end()
    run.live = live
    point, seen = run.on_lineage[0], survey(run.store)
    plan = rewinding.look(run.store, PointQuery(point=point))
    return Scene(run, disk.files(), point, not ended, seen, plan, describe(run.store, point))


def going_on(log: SegmentLog, storage: Storage) -> SegmentLog:
    """It goes on with the next segment."""
    assert isinstance(log, GrowingSegments)
    after = GrowingSegments(storage, 1, SEGMENT_BYTES)
    after.num_segments = log.num_segments
    return after


# ------------------------------------------------------------------ who deletes: whether it has
def retention(scene: Scene, disk: Disk) -> bool:
    """The coordinator of attempt 1, which asked for a newer claim a moment ago."""
    store, old = scene.store(disk), scene.run.live.journal
    journal = JournalWriter(store.storage, 1, run="run", run_id=scene.run.run.id)
    journal._seq, journal._log = old._seq, going_on(old._log, store.storage)
    committer = PointCommitter(store, journal, 1, {}, {}, lambda: 0.0, run_id=scene.run.run.id)
    return bool(committer.perform(DeletePoints(names=(scene.point,))).names)


def prune(scene: Scene, disk: Disk) -> bool:
    """`orchestrator points --prune` of a run that has ended."""
    keep = ResumeConfig(keep_latest=2)
    (pruned,) = release(scene.store(disk), scene.seen, keep, "me", scene.run.run.id, False)
    return pruned.deleted


# ------------------------------------------------------------------ who goes back: why not, or None
def rewind(scene: Scene, disk: Disk) -> OrchestratorError | None:
    """`orchestrator rewind --to POINT`, once it has found nobody at work."""
    store = scene.store(disk)
    claim = store.claim(2, "other", REWIND, "host", scene.run.run.id)
    return refusal(lambda: rewinding._begin(store, claim, scene.run.run, scene.plan))


def start(scene: Scene, disk: Disk) -> OrchestratorError | None:
    """`orchestrator train resume.from=POINT`, likewise."""
    store, run = scene.store(disk), scene.run
    resume = run.job.resume.model_copy(update={"from_": scene.point})
    wanted = run.job.model_copy(update={"resume": resume})
    claim = store.claim(2, "other", REWIND, "host", run.run.id)
    return refusal(lambda: begin_launch(store, wanted, claim, run.run, run.data))


def fork(scene: Scene, disk: Disk, pinned: bool = True) -> OrchestratorError | None:
    """`orchestrator fork`, until the point is its own."""
    new = RunStore(Storage(FORK, disk, no_sleep))
    return refusal(lambda: take_over(new, found_run(new, "mine", scene.forked, "me", pinned), 1))


def scratch_fork(scene: Scene, disk: Disk) -> OrchestratorError | None:
    """That of a replay, which pins nothing."""
    return fork(scene, disk, pinned=False)


def refusal(act: Callable[[], Any]) -> OrchestratorError | None:
    try:
        act()
    except OrchestratorError as error:
        return error
    return None


Deleting, GoingBack = Callable[[Scene, Disk], bool], Callable[[Scene, Disk], OrchestratorError | None]


def search(scene: Scene, deleting: Deleting, going_back: GoingBack) -> Counter[tuple[bool, bool]]:
    """How often it ended so: (deleted, gone back). Fails where the claim's parent is gone."""
    programs = [lambda disk: deleting(scene, disk), lambda disk: going_back(scene, disk)]
    ends: Counter[tuple[bool, bool]] = Counter()
    for disk, (deleted, refused) in interleavings(scene.files, programs, scene.shared):
        store = RunStore(Storage(ROOT, disk, no_sleep))
        parent = store.read_parent(2)
        assert isinstance(parent, ClaimParent) == (refused is None), "either it goes back, or it says why not"
        if refused is None:
            assert store.verify_point(scene.point) == [], "the claim's parent is lost"
        ends[deleted, refused is None] += 1
    return ends


@pytest.mark.parametrize(
    ("deleting", "going_back"), [(retention, rewind), (retention, start), (prune, rewind)]
)
@pytest.mark.quick("retention-rewind")
def test_no_order_deletes_the_point_that_a_claim_goes_back_to(
    job: JobConfig, data: DataSpec, deleting: Deleting, going_back: GoingBack
) -> None:
    ends = search(scene(job, data, ended=deleting is prune), deleting, going_back)
    assert ends[True, False], "somebody deletes it first"
    assert ends[False, True], "somebody goes back to it first"


@pytest.mark.quick("fork")
@pytest.mark.parametrize("forking", [fork, scratch_fork])
def test_no_order_leaves_a_fork_with_half_a_point(
    job: JobConfig, data: DataSpec, forking: GoingBack
) -> None:
    forked = scene(job, data, ended=False)
    files = ("COMMIT", "rng.json", "state/00001-of-00002.safetensors")  # one of each kind
    shared = {f"{ROOT}/points/{forked.point}/{file}" for file in files} | {f"{ROOT}/pins/{forked.point}.json"}
    programs = [lambda disk: retention(forked, disk), lambda disk: forking(forked, disk)]
    ends: Counter[tuple[bool, bool]] = Counter()
    for disk, (deleted, refused) in interleavings(forked.files, programs, shared.__contains__):
        new = RunStore(Storage(FORK, disk, no_sleep))
        assert [new.verify_point(name) for name in new.point_names()] == ([[]] if refused is None else [])
        ends[deleted, refused is None] += 1
    assert ends.keys() == {(True, False), (forking is scratch_fork, True)}, "a pin comes first, or a deletion"


class NeverAsksForHolds(RunStore):
    """Planted mistake: who goes back takes a point that is being deleted."""

    def require_kept(self, point: str) -> None:
        pass


class AsksForHoldsLast(RunStore):
    """Planted mistake: who goes back looks at the point first, and then whether somebody deletes it."""

    wanted = ""

    def require_kept(self, point: str) -> None:
        self.wanted = point

    def write_parent(self, parent: ClaimParent) -> None:
        super().require_kept(self.wanted)
        super().write_parent(parent)


class AsksForClaimsFirst(RunStore):
    """Planted mistake: who deletes takes hold of the point after it has looked for a newer claim."""

    def next_claim_exists(self, number: int) -> bool:
        return False


@pytest.mark.quick("AsksForHoldsLast")
@pytest.mark.parametrize("mistake", [NeverAsksForHolds, AsksForHoldsLast, AsksForClaimsFirst])
def test_the_search_catches_a_planted_mistake(
    job: JobConfig, data: DataSpec, mistake: type[RunStore]
) -> None:
    wrong = scene(job, data, ended=False)
    wrong.makes = mistake
    with pytest.raises(AssertionError, match="the claim's parent is lost"):
        search(wrong, retention, rewind)
