"""A run with many points in a bucket: what a look, a plan and a start ask for is counted, and what they say
is what they say of the same run in a folder.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.checkpoint.commit.store_actions import note_committed
from orchestrator.checkpoint.points.points import COMMIT
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import point_path
from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.errors import StorageError
from orchestrator.inspect.status.integrity import Verifying
from orchestrator.inspect.status.point_rows import point_rows, standing
from orchestrator.inspect.status.status_reader import look_at
from orchestrator.inspect.status.view import not_watched
from orchestrator.launch.start import attempt_claim, preview
from orchestrator.storage.files import Storage
from orchestrator.storage.parallel import ASKED_AT_A_TIME, at_once
from tests.checkpoint.samples import key, record, start, write_vote
from tests.launch.runner import Runner, newest_attempt
from tests.raising import raises
from tests.storage.model_store import FACTS, LIST, READ, FarModelStore, Fate, ModelBucket

NUM_POINTS = 40
PREFIX = "run/"
LIMIT_S = 60.0
# what a look asks besides, of whatever: lists, claims, the journal, the newest point's files
FEW = 40


class Counted(FarModelStore):
    """Counts the requests that read, by kind and by the last part of the name, and how many wait at once."""

    def __init__(self, bucket: ModelBucket) -> None:
        super().__init__(bucket, turn=self._count)
        self.asked: Counter[tuple[str, str]] = Counter()
        self.now = self.most = 0
        self._counting = threading.Lock()

    def _count(self, what: str, path: str) -> Fate:
        with self._counting:
            self.asked[what, path.rpartition("/")[2] if what != LIST else ""] += 1
        return Fate.ANSWERED

    def _find(self, what: str, path: str) -> Any:
        with self._counting:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            return super()._find(what, path)
        finally:
            with self._counting:
                self.now -= 1

    @property
    def commits(self) -> int:
        """How often a COMMIT was asked for."""
        return self.asked[FACTS, COMMIT] + self.asked[READ, COMMIT]

    @property
    def others(self) -> int:
        """All other requests."""
        return self.asked.total() - self.commits


@pytest.fixture
def many(runner: Runner) -> Runner:
    """A run in a folder whose one attempt has left so many points."""
    attempt = runner.begin()
    journal, flat = runner.journal(attempt), runner.config().flat()
    note_beginning(journal, attempt, flat)
    journal.generation(start(1, attempt.parent, attempt.number))
    for step in range(1, NUM_POINTS + 1):
        at = key(step, attempt=attempt.number)
        journal.step(record(at))
        votes = [write_vote(runner.store.storage, at, rank) for rank in range(2)]
        note_committed(
            journal, runner.store.commit_point(votes, flat, {"rule": "none"}, None, run_id=attempt.run_id)
        )
    journal.close()
    runner.store.write_end(attempt.number, "stopped", "asked to", attempt.run_id)
    return runner


def contents(runner: Runner) -> dict[str, bytes]:
    """The run's objects, as they would lie in a bucket."""
    files = [path for path in runner.folder.rglob("*") if path.is_file()]
    return {f"{PREFIX}{path.relative_to(runner.folder)}": path.read_bytes() for path in files}


def in_a_bucket(runner: Runner) -> tuple[RunStore, Counted]:
    store = Counted(ModelBucket.of(contents(runner)))
    return RunStore(Storage.on(store)), store


def test_status_asks_once_for_each_commit(many: Runner) -> None:
    there, asked = in_a_bucket(many)
    found = look_at(there, "run", 0.0, not_watched)
    now = {"last_step_age_s": found.last_step_age_s, "newest_point_age_s": found.newest_point_age_s}
    assert found == replace(look_at(many.store, "run", 0.0, not_watched), **now)
    assert found.newest_point == key(NUM_POINTS).point_name
    assert asked.commits <= NUM_POINTS + 3, "the newest point's is read, too"
    assert asked.others <= FEW
    assert asked.most <= ASKED_AT_A_TIME


def test_a_survey_asks_once_for_each_commit(many: Runner) -> None:
    there, asked = in_a_bucket(many)
    assert survey(there) == survey(many.store)
    assert (asked.commits, asked.most <= ASKED_AT_A_TIME) == (NUM_POINTS, True)
    assert asked.others <= FEW


def test_a_plan_asks_once_for_each_commit_and_a_start_three_times(many: Runner) -> None:
    there, asked = in_a_bucket(many)
    job, spec = many.config(), many.prepared()
    plan = preview.look_ahead(there, job, spec)
    said = replace(plan, notes=())
    assert said == replace(preview.look_ahead(many.store, job, spec), notes=())
    assert plan.point == key(NUM_POINTS).point_name
    assert asked.commits <= NUM_POINTS + 6
    assert asked.others <= 2 * FEW
    asked.asked.clear()
    with attempt_claim.claimed(there, job, spec, newest_attempt(there)) as (attempt, _):
        assert attempt.inherited == tuple(many.store.point_names())
    # before anything is deleted as left over it asks for each by its name
    assert asked.commits <= 2 * NUM_POINTS + 8
    assert asked.others <= 3 * FEW
    assert asked.most <= ASKED_AT_A_TIME


def test_the_rows_of_points_are_those_of_a_folder_damaged_ones_too(many: Runner) -> None:
    weights = many.folder / "points" / key(7).point_name / "state" / "00001-of-00002.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    there, asked = in_a_bucket(many)
    rows = standing(there, lambda seen: [row.to_json() for row in point_rows(there, seen)])
    expected = standing(many.store, lambda seen: [row.to_json() for row in point_rows(many.store, seen)])
    assert rows == expected
    assert [row["step"] for row in rows] == [*range(1, NUM_POINTS + 1)]
    assert [row["step"] for row in rows if row["healthy"] is False] == [7]
    assert asked.most <= ASKED_AT_A_TIME
    verified = Verifying(store=there).rows([row["name"] for row in rows])
    assert verified == Verifying(store=many.store).rows([row["name"] for row in rows])


def test_an_error_of_storage_is_that_of_the_oldest_point_that_is_not_read(many: Runner) -> None:
    failing = {f"{PREFIX}{point_path(key(step).point_name, COMMIT)}" for step in (9, 11, 31)}

    def turn(what: str, path: str) -> Fate:
        return Fate.REFUSED if path in failing else Fate.ANSWERED

    for _ in range(5):
        store = RunStore(Storage.on(FarModelStore(ModelBucket.of(contents(many)), turn=turn)))
        for look in (store.point_names, store.names_and_foreign):
            with raises(StorageError, "storage.failed", f"{key(9).point_name}/COMMIT"):
                look()


class Moves(FarModelStore):
    """While points are looked for, the newest is committed and the one before it deleted: after the question
    for the newest was answered, and before the other one is.
    """

    def __init__(self, bucket: ModelBucket, older: str, newer: str) -> None:
        super().__init__(bucket)
        self._older, self._newer = older, newer
        self._commit = bucket.objects.pop(self._key(newer))
        self._missed = threading.Event()

    def _find(self, what: str, path: str) -> Any:
        if path == self._older and self._key(path) in self.bucket.objects:
            assert self._missed.wait(LIMIT_S)
            self.bucket.objects[self._key(self._newer)] = self._commit
            del self.bucket.objects[self._key(path)]
        try:
            return super()._find(what, path)
        finally:
            if path == self._newer:
                self._missed.set()


def test_the_newest_point_is_named_although_it_came_while_the_one_before_it_went(many: Runner) -> None:
    names = many.store.point_names()
    older, newer = (point_path(name, COMMIT) for name in names[-2:])
    gone = {f"{PREFIX}{point_path(name, COMMIT)}" for name in names[:-2]}
    objects = {path: data for path, data in contents(many).items() if path not in gone}

    def moving() -> RunStore:
        return RunStore(Storage.on(Moves(ModelBucket.of(objects), older, newer)))

    assert moving().point_names() == names[-1:]
    assert moving().names_and_foreign() == (names[-1:], ())
    # who asks for all at once, and for none once more, sees a run without a point
    store = moving()
    has = at_once(store.storage, lambda name: store.storage.exists(point_path(name, COMMIT)), names)
    assert not any(has)
