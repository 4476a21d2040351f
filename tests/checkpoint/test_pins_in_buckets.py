"""Pins where a deletion may be repeated late: what was given back can be pinned again, and stays pinned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.checkpoint.points.pins import FOLDER, PinFiles
from orchestrator.checkpoint.points.verify import POINTS
from orchestrator.errors import RefusedError, StorageError, WantedPointError
from orchestrator.storage.files import Storage
from orchestrator.storage.store import Store
from tests.checkpoint.samples import key
from tests.raising import raises
from tests.storage.interleaved_buckets import Act, Faults, interleavings
from tests.storage.model_store import ModelBucket, ModelStore

POINT = key(10).point_name
COMMIT = {f"run/{POINTS}/{POINT}/COMMIT": b"{}"}


class NotNumbered(PinFiles):
    """Planted: as on a disk."""

    _is_numbered = False


@pytest.fixture
def bucket() -> ModelBucket:
    return ModelBucket.of(COMMIT)


def pins_in(store: Store, kind: type[PinFiles] = PinFiles) -> PinFiles:
    return kind(Storage.on(store))


def names(bucket: ModelBucket) -> list[str]:
    return sorted(name.rpartition("/")[2].partition(".")[2] for name in bucket.contents() if FOLDER in name)


def test_a_pin_that_is_given_back_and_made_again_has_the_next_number(bucket: ModelBucket) -> None:
    pins = pins_in(ModelStore(bucket))
    for reason in ("first", "second", "third"):
        assert pins.pin(POINT, "ada", reason, "").reason == reason
        assert pins.pin(POINT, "bob", "me, too", "").reason == reason
        assert pins.read_hold(POINT) == pins.pins()[POINT]
        held = pins.unpin(POINT)
        assert held is not None
        assert held.reason == reason
        assert pins.unpin(POINT) is None
        assert pins.pins() == {}
        assert pins.read_hold(POINT) is None
    numbers = ("", "0001.", "0002.")
    assert names(bucket) == sorted(f"{n}{mark}json" for n in numbers for mark in ("", "released."))


def test_a_deletion_that_is_given_back_can_be_pinned_and_one_that_is_done_leaves_nothing(
    bucket: ModelBucket,
) -> None:
    pins = pins_in(ModelStore(bucket))
    pins.pin(POINT, "ada", "", "")
    assert not pins.may_delete(POINT, "attempt 3", "keep_latest", "")
    pins.unpin(POINT)
    assert pins.may_delete(POINT, "attempt 3", "keep_latest", "")
    assert pins.deletions() == {POINT}
    with raises(RefusedError, "point.being_deleted", POINT, "attempt 3", "keep_latest"):
        pins.pin(POINT, "ada", "", "")
    with raises(WantedPointError, "point.being_deleted", f"s3://model/run/pins/{POINT}.0001.json"):
        pins.require_kept(POINT)
    pins.deleted(POINT)  # it stays after all
    assert pins.deletions() == frozenset()
    pins.require_kept(POINT)
    pins.pin(POINT, "ada", "again", "")
    pins.deleted(POINT)  # of one who was slow: the pin is not his
    assert pins.pins().keys() == {POINT}
    pins.unpin(POINT)
    assert pins.may_delete(POINT, "attempt 3", "keep_latest", "")
    pins.storage.delete(f"{POINTS}/{POINT}/COMMIT")
    pins.deleted(POINT)
    assert names(bucket) == []


def test_no_moment_of_forgetting_a_points_holds_makes_an_old_pin_count_again(bucket: ModelBucket) -> None:
    pins = pins_in(ModelStore(bucket))
    for _ in range(2):
        pins.pin(POINT, "ada", "", "")
        pins.unpin(POINT)
    pins.may_delete(POINT, "attempt 3", "keep_latest", "")
    pins.storage.delete(f"{POINTS}/{POINT}/COMMIT")
    left = ModelBucket.of(bucket.contents())
    pins_in(ModelStore(left)).deleted(POINT)
    looks = [pins_in(ModelStore(ModelBucket.of(objects))).pins() for _, _, objects in left.crashes()]
    assert len(looks) >= 7, "six files go, one after the other"
    assert looks == [{}] * len(looks)


def again(kind: type[PinFiles]) -> Act:
    """Gives the pin back, and pins the point once more."""

    def act(store: Store) -> Any:
        pins = pins_in(store, kind)
        pins.unpin(POINT)
        return pins.pin(POINT, "ada", "second", "").reason

    return act


def deleting(kind: type[PinFiles]) -> Act:
    """As retention does."""

    def act(store: Store) -> Any:
        pins = pins_in(store, kind)
        if not pins.may_delete(POINT, "attempt 3", "keep_latest", ""):
            return "pinned"
        pins.storage.delete(f"{POINTS}/{POINT}/COMMIT")
        pins.deleted(POINT)
        return "deleted"

    return act


def lost(kind: type[PinFiles], **faults: Any) -> Iterator[str]:
    """What was wrong in any order of somebody who pins a point again and somebody who would delete it."""
    first = ModelBucket.of(COMMIT)
    pins_in(ModelStore(first), kind).pin(POINT, "ada", "first", "")
    programs = [again(kind), deleting(kind)]
    for bucket, (pinned, fate) in interleavings(first.contents(), programs, shared, Faults(**faults)):
        pins = pins_in(ModelStore(bucket), kind)
        there = f"run/{POINTS}/{POINT}/COMMIT" in bucket.contents()
        if isinstance(pinned, str):
            if not there:
                yield "a pinned point was deleted"
            elif POINT not in pins.pins():
                yield "a pin is gone that nobody gave back"
        elif isinstance(pinned, RefusedError | StorageError) and fate == "pinned" and not there:
            yield "deleted by nobody"


def shared(name: str) -> bool:
    return FOLDER in name or name.endswith("COMMIT")


@pytest.mark.chaos
def test_no_order_loses_a_pin_that_was_made_again() -> None:
    assert set(lost(PinFiles)) == set()


@pytest.mark.chaos
@pytest.mark.parametrize("faults", [{"repeats": 1}, {"errors": 1}, {"deaths": 1}])
def test_no_order_with_faults_loses_a_pin_that_was_made_again(faults: dict[str, int]) -> None:
    assert set(lost(PinFiles, **faults)) == set()


def test_a_late_repeat_of_giving_back_does_not_take_away_what_was_pinned_after_it() -> None:
    first = ModelBucket.of(COMMIT)
    pins_in(ModelStore(first)).pin(POINT, "ada", "first", "")
    found = list(
        interleavings(first.contents(), [again(PinFiles)], shared, Faults(repeats=1, late_creates=True))
    )
    assert len(found) > 1
    for bucket, _ in found:
        assert pins_in(ModelStore(bucket)).pins()[POINT].reason == "second"


def test_the_search_catches_holds_that_take_one_name_again() -> None:
    assert any(lost(NotNumbered, repeats=1))
