"""The committer over a real store and journal: votes in, a durable point and answers out."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from orchestrator.checkpoint.commit.commit_events import CheckNewerClaim, DeletePoints, VerifyPoint
from orchestrator.checkpoint.commit.store_actions import COMMIT_SENT, VOTES_COMPLETE
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import StorageError
from orchestrator.history.claims.claim_files import RESUME, START, read_starts, sealed_ids
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.storage.files import Storage
from tests.checkpoint.driver import Coordinator
from tests.checkpoint.samples import CONFIG, entry_of, key, no_sleep, record, start, write_vote
from tests.raising import raises
from tests.storage.crashfs import ModelDisk


@pytest.fixture
def store() -> RunStore:
    store = RunStore(Storage("/run", ModelDisk(), no_sleep))
    store.claim(1, "aaaa", START, "host")
    return store


def test_a_save_becomes_a_point_is_acknowledged_and_old_ones_go(store) -> None:
    coordinator = Coordinator(store)
    for step in (10, 20, 30):
        coordinator.save(key(step))
    assert coordinator.answers == [(key(step), rank, True) for step in (10, 20, 30) for rank in range(2)]
    assert store.point_names() == [key(20).point_name, key(30).point_name]
    assert coordinator.committer.last_point == store.read_point(key(30).point_name)
    assert store.leftovers() == []
    journal = read_journal(store.storage)
    assert {r.step for r in journal.records} >= set(range(1, 31)), "the journal was durable before COMMIT"
    coordinator.journal.flush()
    deleted = [e.fields["points"] for e in read_journal(store.storage).events if e.kind == "points deleted"]
    assert deleted == [[key(10).point_name]]


def test_a_point_says_what_it_is(store) -> None:
    Coordinator(store).save(key(10))
    point = store.read_point(key(10).point_name)
    assert point.config == CONFIG
    assert point.commit.save_s == 1.5
    assert point.commit.weights_digest == f"s1:{point.commit.state_sums['model']}"
    assert entry_of(point, "state/00000-of-00002.safetensors").bytes > 200
    assert store.verify_point(point.name) == []
    assert store.verify_point(point.name, fast=True) == []


def test_a_save_without_its_step_records_is_given_up(store) -> None:
    coordinator = Coordinator(store, num_records=5)
    coordinator.save(key(10))
    assert coordinator.answers == [(key(10), 0, False), (key(10), 1, False)]
    assert store.point_names() == []
    assert store.leftovers() == []


def test_a_newer_claim_fences_before_anything_is_acknowledged_or_deleted(store) -> None:
    coordinator = Coordinator(store, keep_latest=1)
    coordinator.save(key(10))
    coordinator.take_answers()
    coordinator.save(key(20), ranks=(0,))
    store.claim(2, "bbbb", RESUME, "host")
    coordinator.save(key(20), ranks=(1,))
    assert coordinator.fenced
    coordinator.save(key(30))
    assert coordinator.answers == []
    assert store.point_names() == [key(10).point_name]


def test_a_claim_that_appears_between_commit_and_answer_leaves_the_point_unacknowledged(store) -> None:
    def claim_when_sent(place: str, step: int, rank: int) -> None:
        places.append((place, step))
        if (place, step) == (COMMIT_SENT, 20):
            store.claim(2, "bbbb", RESUME, "host")

    places: list[tuple[str, int]] = []
    coordinator = Coordinator(store, keep_latest=1, fault=claim_when_sent)
    coordinator.save(key(10))
    coordinator.take_answers()
    coordinator.save(key(20))
    assert coordinator.fenced
    assert coordinator.answers == []
    assert store.point_names() == [key(10).point_name, key(20).point_name], (
        "committed, but nothing was deleted"
    )
    assert places == [(VOTES_COMPLETE, 10), (COMMIT_SENT, 10), (VOTES_COMPLETE, 20), (COMMIT_SENT, 20)]


def test_generations_that_follow_one_another_share_the_points_of_their_path(store) -> None:
    coordinator = Coordinator(store)
    coordinator.save(key(10))
    coordinator.journal.generation(start(2, key(12)))
    coordinator.journal.step(record(key(13, generation=2)))
    coordinator.form(2, key(12))
    coordinator.save(key(13, generation=2))
    assert [committed for _, _, committed in coordinator.answers] == [True] * 4
    assert store.read_point(key(13, generation=2).point_name).commit.parent == key(12)


def test_every_point_has_the_starts_of_its_generations_sealed(store) -> None:
    driver = Coordinator(store)
    driver.save(key(10))
    assert sealed_ids(store.storage) == {(1, 1)}
    for generation, parent in ((2, key(20)), (3, key(20)), (4, key(30, generation=3))):
        driver.journal.generation(start(generation, parent))
        driver.form(generation, parent)
    for step in range(21, 41):
        driver.journal.step(record(key(step, generation=3 if step <= 30 else 4)))
    driver.save(key(40, generation=4))
    assert sealed_ids(store.storage) == {(1, 1), (1, 3), (1, 4)}, "generation 2 leads to no point"
    assert read_starts(store.storage, {(1, 3)}, "") == (start(3, key(20)),)


def test_a_damaged_point_is_reported_once(store) -> None:
    coordinator = Coordinator(store)
    coordinator.save(key(10))
    store.storage.delete(f"points/{key(10).point_name}/cursor.json")
    answer = coordinator.committer.perform(VerifyPoint(name=key(10).point_name))
    assert answer is not None
    assert not answer.healthy  # type: ignore[union-attr]
    assert [d.file for d in coordinator.committer.take_damages()] == ["cursor.json"]
    assert coordinator.committer.take_damages() == ()


def test_a_file_that_the_coordinator_does_not_see_names_the_storage(store) -> None:
    elsewhere = Storage("/other", ModelDisk(), no_sleep)
    votes = [write_vote(elsewhere, key(10), rank) for rank in range(2)]
    with raises(StorageError, "machine.storage", "run.storage", store.storage.root):
        store.commit_point(votes, CONFIG, {}, None)
    assert store.point_names() == []


class FailsAt(ModelDisk):
    """A disk whose calls fail from number `first` on, `times` times."""

    first, times, calls = 10**9, 0, 0

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in (
            "create",
            "write",
            "fsync",
            "link",
            "unlink",
            "make_folder",
            "fsync_folder",
            "size",
            "list",
        ):
            return value

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.first <= self.calls < self.first + self.times:
                raise OSError(5, os.strerror(5))
            return value(*arguments)

        return call


def run_on_failing_disk(first: int, times: int) -> tuple[RunStore, set[int], int]:
    """Three saves on it. The store without the failure, the steps acknowledged, the number of calls."""
    disk = FailsAt()
    store = RunStore(Storage("/run", disk, no_sleep))
    store.claim(1, "aaaa", START, "host")
    coordinator = Coordinator(store, keep_latest=1)
    disk.calls, disk.first, disk.times = 0, first, times
    for step in (10, 20, 30):
        try:
            coordinator.save(key(step))
        except StorageError:
            continue  # a rank that could not write does not vote
    calls, disk.times = disk.calls, 0
    return store, {at.step for at, _, committed in coordinator.answers if committed}, calls


def check_promises(store: RunStore, acknowledged: set[int]) -> None:
    names = store.point_names()
    assert all(store.verify_point(name) == [] for name in names)
    assert not acknowledged or names[-1] >= key(max(acknowledged)).point_name


@pytest.mark.quick("9")
@pytest.mark.parametrize("every", [3, 9])
def test_a_single_disk_failure_anywhere_is_tried_again_or_gives_the_save_up(every: int) -> None:
    calls, undisturbed, runs = run_on_failing_disk(10**9, 0)[2], 0, 0
    assert calls > 200
    for first in range(1, calls + 1, every):
        store, acknowledged, _ = run_on_failing_disk(first, 1)
        check_promises(store, acknowledged)
        undisturbed, runs = undisturbed + (acknowledged == {10, 20, 30}), runs + 1
    # what is not tried again is the journal's open file: after a failed sync its attempt ends
    assert undisturbed > 0.9 * runs


@pytest.mark.quick("15")
@pytest.mark.parametrize("every", [5, 15])
def test_a_disk_that_fails_for_good_anywhere_leaves_every_acknowledged_point_whole(every: int) -> None:
    calls = run_on_failing_disk(10**9, 0)[2]
    for first in range(1, calls + 1, every):
        store, acknowledged, _ = run_on_failing_disk(first, 10**9)
        check_promises(store, acknowledged)


def test_a_check_or_deletion_that_fails_for_good_is_an_answer_and_no_exception() -> None:
    disk = FailsAt()
    store = RunStore(Storage("/run", disk, no_sleep))
    coordinator = Coordinator(store)
    coordinator.save(key(10))
    disk.calls, disk.first, disk.times = 0, 1, 10**9
    assert coordinator.committer.perform(CheckNewerClaim(key=None)) is None
    deleted = coordinator.committer.perform(DeletePoints(names=(key(10).point_name,)))
    assert deleted is not None
    assert deleted.failed == (key(10).point_name,)  # type: ignore[union-attr]


def test_a_save_becomes_a_point_although_the_marks_of_damage_cannot_be_listed() -> None:
    class ListsNoMarks(ModelDisk):
        refuses = True

        def list(self, path: str) -> list[str]:
            if self.refuses and path.endswith("/quarantine"):
                raise OSError(errno.EIO, "Input/output error")
            return super().list(path)

    disk = ListsNoMarks()
    store = RunStore(Storage("/run", disk, no_sleep))
    store.claim(1, "aaaa", START, "host")
    coordinator = Coordinator(store)
    for step in (10, 20, 30):
        coordinator.save(key(step))
    assert all(committed for _, _, committed in coordinator.answers)
    assert len(store.point_names()) == 3, "nothing is deleted meanwhile"
    disk.refuses = False
    coordinator.save(key(40))
    assert store.point_names() == [key(30).point_name, key(40).point_name]
