"""A point that somebody has pinned is deleted by nobody, whatever happens at the same moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from orchestrator.checkpoint.commit.commit_events import ClaimChecked, DeletePoints
from orchestrator.checkpoint.points.pins import Hold, PinWatch, note_pins
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import RefusedError, WantedPointError
from orchestrator.history.claims.claim_files import START
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.storage.disk import Disk
from orchestrator.storage.files import Storage
from tests.checkpoint.driver import Coordinator
from tests.checkpoint.samples import key, no_sleep
from tests.inspect.live_run import Paused
from tests.raising import raises
from tests.storage.crashfs import ModelDisk
from tests.storage.interleaved_buckets import Act, Faults, interleavings
from tests.storage.model_store import ModelBucket, ModelStore

POINT = key(10).point_name
CALLS = tuple(name for name in vars(Disk) if not name.startswith("_"))


@pytest.fixture(params=["disk", "bucket"])
def store(request: pytest.FixtureRequest) -> RunStore:
    """A run whose attempt 1 is claimed."""
    on_disk = request.param == "disk"
    storage = Storage("/run", ModelDisk(), no_sleep) if on_disk else Storage.on(ModelStore(ModelBucket()))
    store = RunStore(storage)
    store.claim(1, "aaaa", START, "host")
    return store


def is_free(store: RunStore, point: str = POINT) -> bool:
    """Nobody holds the point, and a folder has nothing that says who did."""
    left = store.storage.list("pins") if store.storage.traits.frees_names else []
    return store.read_hold(point) is None and store.pins() == {} and not store.deletions() and left == []


def pin(store: RunStore, point: str = POINT) -> Hold:
    return store.pin(point, "ada@desk", "the paper's figure 3", "")


def saved(store: RunStore, *steps: int) -> Coordinator:
    coordinator = Coordinator(store, keep_latest=2)
    for step in steps:
        coordinator.save(key(step))
    return coordinator


def test_retention_keeps_what_is_pinned_and_deletes_it_once_that_is_given_back(store: RunStore) -> None:
    coordinator = saved(store, 10)
    held = pin(store)
    for step in (20, 30, 40):
        coordinator.save(key(step))
    assert store.point_names() == [POINT, key(30).point_name, key(40).point_name]
    assert store.pins() == {POINT: held}
    assert store.unpin(POINT) == held
    coordinator.tell(ClaimChecked(key=None, newer=False))
    assert store.point_names() == [key(30).point_name, key(40).point_name]
    coordinator.journal.flush()
    events = [e for e in read_journal(store.storage).events if e.kind == "deleting points"]
    assert [e.fields["points"] for e in events] == [[key(20).point_name], [POINT]], "none of a pinned one"
    assert is_free(store)


def test_a_pin_stays_what_it_was_when_another_one_pins_the_point(store: RunStore) -> None:
    saved(store, 10)
    first = pin(store)
    assert store.pin(POINT, "bob@desk", "me, too", "") == first


def test_there_must_be_a_point_to_pin(store: RunStore) -> None:
    saved(store, 10)
    with raises(RefusedError, "point.unknown", "00000099-a0001-g0001"):
        pin(store, key(99).point_name)
    for name in ("../../etc", "x", ""):
        with raises(RefusedError, "command.point_name", repr(name)):
            pin(store, name)
    assert is_free(store)
    assert store.unpin(POINT) is None


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"content": 1, "digest": 2}'])
def test_a_pin_that_cannot_be_read_still_keeps_its_point(store: RunStore, damage: bytes) -> None:
    coordinator = saved(store, 10)
    store.storage.write(f"pins/{POINT}.json", damage)
    for step in (20, 30):
        coordinator.save(key(step))
    assert POINT in store.point_names()
    assert "not as it was written" in store.pins()[POINT].reason
    assert store.unpin(POINT) is not None


def test_a_point_is_pinned_and_given_back_as_often_as_anybody_likes(store: RunStore) -> None:
    saved(store, 10)
    for _ in range(3):
        held = pin(store)
        assert (store.read_hold(POINT), store.pins()) == (held, {POINT: held})
        assert store.unpin(POINT) == held
        assert store.unpin(POINT) is None
        assert is_free(store)
    assert store.may_delete(POINT, "attempt 1", "resume.keep_latest", "")
    assert store.deletions() == {POINT}
    kept = f"delete {store.storage.root}/pins/{POINT}."  # a bucket's have a number
    with raises(WantedPointError, "point.being_deleted", POINT, "attempt 1", "resume.keep_latest", kept):
        store.require_kept(POINT)
    store.deleted(POINT)
    assert is_free(store)
    store.require_kept(POINT)


def test_a_runs_pins_hold_when_its_files_are_copied_to_a_bucket_and_back() -> None:
    disk, bucket = Storage("/run", ModelDisk(), no_sleep), Storage.on(ModelStore(ModelBucket()))
    here, there = RunStore(disk), RunStore(bucket)
    here.claim(1, "aaaa", START, "host")
    saved(here, 10)
    held = pin(here)
    copied(disk, bucket)
    assert there.pins() == {POINT: held}
    assert there.unpin(POINT) == held
    assert is_free(there)
    again = there.pin(POINT, "bob@head", "once more", "")
    back = RunStore(Storage("/back", ModelDisk(), no_sleep))
    copied(bucket, back.storage)
    assert (back.read_hold(POINT), back.pins()) == (again, {POINT: again})
    assert not back.may_delete(POINT, "attempt 2", "resume.keep_latest", "")
    assert back.unpin(POINT) == again
    assert back.pins() == {}
    assert back.may_delete(POINT, "attempt 2", "resume.keep_latest", "")


def copied(source: Storage, to: Storage, folder: str = "") -> None:
    for name in source.list(folder):
        path = f"{folder}/{name}".lstrip("/")
        try:
            to.write(path, source.read(path))
        except FileNotFoundError:
            copied(source, to, path)


# ------------------------------------------------------------------ at the same moment
def in_a_bucket(act: Callable[[RunStore], Any]) -> Act:
    return lambda store: act(RunStore(Storage.on(store)))


def renewing(store: RunStore) -> Hold:
    pin(store)
    store.unpin(POINT)
    return pin(store)


def with_a_point() -> dict[str, bytes]:
    bucket = ModelBucket()
    store = RunStore(Storage.on(ModelStore(bucket)))
    store.claim(1, "aaaa", START, "host")
    saved(store, 10, 20)
    return bucket.contents()


def pins_of(bucket: ModelBucket, pinning: Callable[[RunStore], Any], faults: Faults) -> Iterator[Any]:
    """(is pinned and there, what who pins and who deletes were told), for each order of their requests."""

    def shared(key: str) -> bool:
        return key.startswith("run/pins") or key == f"run/points/{POINT}/COMMIT"

    programs = [in_a_bucket(pinning), in_a_bucket(deletion)]
    for after, (pinned, deleted) in interleavings(bucket.contents(), programs, shared, faults):
        store = RunStore(Storage.on(ModelStore(after)))
        yield list(store.pins()) == [POINT], POINT in store.point_names(), pinned, deleted


@pytest.mark.quick("pin-faults0")
@pytest.mark.parametrize(
    ("pinning", "faults"),
    [
        (pin, Faults()),
        pytest.param(renewing, Faults(), marks=pytest.mark.chaos),
        (pin, Faults(repeats=1)),
        pytest.param(renewing, Faults(repeats=1), marks=pytest.mark.chaos),
    ],
)
def test_in_no_order_of_requests_to_a_bucket_is_a_pinned_point_deleted(
    pinning: Callable[[RunStore], Any], faults: Faults
) -> None:
    seen = set()
    for is_pinned, is_there, pinned, deleted in pins_of(ModelBucket.of(with_a_point()), pinning, faults):
        assert deleted is not is_there
        assert isinstance(pinned, Hold) == is_there, "who was told that it is pinned has it"
        # a late repeat of what is forgotten with a point may leave a pin on nothing
        assert is_pinned == is_there or (faults.repeats and not is_there)
        seen.add(is_pinned)
    assert seen == {True, False}


@pytest.mark.chaos
def test_with_one_name_that_is_used_again_a_late_deletion_would_lose_a_pin() -> None:
    def as_in_a_folder(store: RunStore) -> Hold:
        bucket = store.storage._store  # noqa: SLF001
        assert isinstance(bucket, ModelStore)
        bucket.traits = replace(bucket.traits, frees_names=True)  # type: ignore[misc]
        return renewing(store)

    found = pins_of(ModelBucket.of(with_a_point()), as_in_a_folder, Faults(repeats=1))
    assert any(isinstance(pinned, Hold) and not is_pinned for is_pinned, _, pinned, _ in found)


def moments(
    act: Callable[[RunStore], Any], beside: Callable[[RunStore], Any]
) -> Iterator[tuple[RunStore, Any, Any]]:
    """A run with a point for each call of the disk that `act` makes: just before that call `beside` happens,
    as a whole. And what the two gave: a value, or the error.
    """
    number = 0
    while (found := at_moment(number, act, beside)) is not None:
        yield found
        number += 1


def at_moment(
    number: int, act: Callable[[RunStore], Any], beside: Callable[[RunStore], Any]
) -> tuple[RunStore, Any, Any] | None:
    disk, given, calls = ModelDisk(), [], count()
    store = RunStore(Storage("/run", disk, no_sleep))
    store.claim(1, "aaaa", START, "host")
    saved(store, 10, 20)

    def before(call: str, path: str) -> None:
        if next(calls) == number:
            given.append(tried(beside, store))

    done = tried(act, RunStore(Storage("/run", Paused(disk, CALLS, before), no_sleep)))
    return (store, done, given[0]) if given else None


def tried(act: Callable[[RunStore], Any], store: RunStore) -> Any:
    try:
        return act(store)
    except RefusedError as error:
        return error


def deletion(store: RunStore) -> bool:
    """What a coordinator does with a point that retention lets go."""
    if not store.may_delete(POINT, "attempt 1", "resume.keep_latest", ""):
        return False
    store.delete_point(POINT)
    store.deleted(POINT)
    return True


@pytest.mark.parametrize("first", ["pin", "delete"])
def test_of_a_pin_and_a_deletion_at_the_same_moment_one_comes_first(first: str) -> None:
    seen = set()
    pair = (pin, deletion) if first == "pin" else (deletion, pin)
    for store, done, beside in moments(*pair):
        pinned, deleted = (done, beside) if first == "pin" else (beside, done)
        is_pinned = isinstance(pinned, Hold)
        assert is_pinned != deleted, "one of them did what it was asked for, and only one"
        assert (POINT in store.point_names()) == is_pinned
        assert list(store.pins()) == ([POINT] if is_pinned else [])
        if is_pinned:
            assert store.verify_point(POINT) == []
        seen.add(is_pinned)
    assert seen == {True, False}


def test_a_deletion_that_a_kill_cut_off_is_ended_by_the_next_one(store: RunStore) -> None:
    coordinator = saved(store, 10, 20)
    assert store.may_delete(POINT, "attempt 1", "resume.keep_latest", "")
    with raises(RefusedError, "point.being_deleted", POINT, "attempt 1", "resume.keep_latest"):
        pin(store)
    coordinator.committer.perform(DeletePoints(names=(POINT,)))
    assert store.point_names() == [key(20).point_name]
    assert is_free(store)


def test_pins_that_are_made_and_given_back_are_journalled_once_each(store: RunStore) -> None:
    saved(store, 10, 20)
    journal, watch = JournalWriter(store.storage, 2), PinWatch(store)

    def look() -> None:
        note_pins(journal, watch.look())

    look()
    pin(store)
    look()
    look()
    store.pin(key(20).point_name, "bob@head", "", "")
    store.may_delete(key(30).point_name, "the run", "", "")  # whose hold is no pin
    look()
    store.unpin(POINT)
    look()
    look()
    journal.close()
    events = [event for event in read_journal(store.storage).events if event.attempt == 2]
    assert [(event.kind, *event.fields.values()) for event in events] == [
        ("point pinned", POINT, "ada@desk", "the paper's figure 3"),
        ("point pinned", key(20).point_name, "bob@head", ""),
        ("point unpinned", POINT, "ada@desk", "the paper's figure 3"),
    ]
