"""A point that somebody has pinned is deleted by nobody, whatever happens at the same moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from orchestrator.errors import RefusedError
from orchestrator.history.claim_files import START
from orchestrator.history.journal import JournalWriter
from orchestrator.history.journal_reader import read_journal
from orchestrator.resume.commit_events import ClaimChecked, DeletePoints
from orchestrator.resume.pin_watch import PinWatch, note_pins
from orchestrator.resume.pins import Hold
from orchestrator.resume.store import RunStore
from orchestrator.storage.disk import Disk
from orchestrator.storage.files import Storage
from tests.monitor.live_run import Paused
from tests.resume.driver import Coordinator
from tests.resume.samples import key, no_sleep
from tests.storage.crashfs import ModelDisk

POINT = key(10).point_name
CALLS = tuple(name for name in vars(Disk) if not name.startswith("_"))


@pytest.fixture
def disk() -> ModelDisk:
    return ModelDisk()


@pytest.fixture
def store(disk: ModelDisk) -> RunStore:
    """A run whose attempt 1 is claimed."""
    store = RunStore(Storage("/run", disk, no_sleep))
    store.claim(1, "aaaa", START, "host")
    return store


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
    assert store.storage.list("pins") == []


def test_a_pin_stays_what_it_was_when_another_one_pins_the_point(store: RunStore) -> None:
    saved(store, 10)
    first = pin(store)
    assert store.pin(POINT, "bob@desk", "me, too", "") == first


def test_there_must_be_a_point_to_pin(store: RunStore) -> None:
    saved(store, 10)
    with pytest.raises(RefusedError, match="there is no resume point 00000099-a0001-g0001"):
        pin(store, key(99).point_name)
    for name in ("../../etc", "x", ""):
        with pytest.raises(RefusedError, match="no name of a resume point"):
            pin(store, name)
    assert store.storage.list("pins") == []
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
    with pytest.raises(RefusedError, match="attempt 1 has begun to delete it"):
        pin(store)
    coordinator.committer.perform(DeletePoints(names=(POINT,)))
    assert store.point_names() == [key(20).point_name]
    assert store.storage.list("pins") == []


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
