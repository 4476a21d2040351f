"""The model of a bucket, and the search over what can become of requests to it: it finds what truly happens,
and no more. Real claims are searched with it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.errors import BusyError, StorageError
from orchestrator.history.claims.claim_files import START, ClaimFiles
from orchestrator.storage.files import Storage
from orchestrator.storage.store import Store
from tests.storage.interleaved_buckets import DIED, Act, Faults, interleavings
from tests.storage.model_store import ModelBucket, ModelStore

X = "run/x"
Ends = set[tuple[object, ...]]


def put(store: Store, path: str, data: bytes, *, exclusive: bool = False) -> bool:
    return store.put(path, lambda: (data,), len(data), exclusive=exclusive)


def ends(*programs: Act, before: bytes | None = None, **faults: int | bool) -> Ends:
    """What stands in `x`, and what the programs returned, for each order."""
    contents = {} if before is None else {X: before}
    return {
        (bucket.contents().get(X), *(type(each) if isinstance(each, Exception) else each for each in results))
        for bucket, results in interleavings(contents, programs, X.__eq__, Faults(**faults))  # type: ignore[arg-type]
    }


def creating(data: bytes) -> Act:
    return lambda store: put(store, "x", data, exclusive=True)


def putting(*contents: bytes) -> Act:
    def program(store: Store) -> None:
        for data in contents:
            put(store, "x", data)

    return program


def test_of_two_that_create_either_wins() -> None:
    assert ends(creating(b"a"), creating(b"b")) == {(b"a", True, False), (b"b", False, True)}


def test_who_dies_while_it_creates_has_won_or_not_now_or_later() -> None:
    assert ends(creating(b"a"), deaths=1) == {(b"a", True), (None, DIED), (b"a", DIED)}
    assert ends(creating(b"a"), creating(b"b"), deaths=1) == {
        (b"a", True, False),
        (b"b", False, True),
        (b"b", DIED, True),
        (b"a", True, DIED),
        (b"a", DIED, False),
        (b"b", False, DIED),
    }


def test_an_error_says_nothing_of_the_effect() -> None:
    assert ends(creating(b"a"), errors=1) == {(b"a", True), (b"a", StorageError), (None, StorageError)}
    assert ends(lambda store: store.facts("x").size, before=b"abc", errors=1) == {
        (b"abc", 3),
        (b"abc", StorageError),
    }


def test_a_put_that_comes_again_takes_a_newer_one_back() -> None:
    """Why a growing object cannot hold a journal."""
    assert ends(putting(b"old", b"new")) == {(b"new", None)}
    assert ends(putting(b"old", b"new"), repeats=1) == {(b"new", None), (b"old", None)}


def test_a_deletion_that_comes_again_takes_what_was_created_since() -> None:
    """Why no name is deleted and made again."""

    def renewing(store: Store) -> bool:
        store.delete(["x"])
        return put(store, "x", b"new", exclusive=True)

    assert ends(renewing, before=b"old") == {(b"new", True)}
    assert ends(renewing, before=b"old", repeats=1) == {(b"new", True), (None, True)}


def test_a_create_that_comes_again_is_refused_unless_the_object_is_gone() -> None:
    def passing(store: Store) -> bool:
        made = put(store, "x", b"a", exclusive=True)
        store.delete(["x"])
        return made

    assert ends(creating(b"a"), repeats=1, late_creates=True) == {(b"a", True)}
    assert ends(passing, repeats=1) == {(None, True)}
    assert ends(passing, repeats=1, late_creates=True) == {(None, True), (b"a", True)}


def test_a_dead_process_does_nothing_more_whatever_it_would_do_while_it_unwinds() -> None:
    def tidy(store: Store) -> None:
        try:
            put(store, "x", b"a")
        finally:
            put(store, "y", b"left")

    found = [
        (bucket.contents(), results)
        for bucket, results in interleavings({}, [tidy], X.__eq__, Faults(deaths=1))
    ]
    assert ({}, [DIED]) in found
    assert all("run/y" not in contents for contents, (result,) in found if result is DIED)


def test_moments_to_die_at_are_those_after_each_change_and_with_an_earlier_one_once_more() -> None:
    bucket = ModelBucket()
    store = ModelStore(bucket)
    put(store, "x", b"1")
    put(store, "y", b"a", exclusive=True)
    put(store, "x", b"2")
    store.delete(["y"])
    found = [(number, sorted(objects.values())) for number, _, objects in bucket.crashes()]
    assert found == [
        (1, [b"1"]),
        (2, [b"1", b"a"]),
        (3, [b"2", b"a"]),
        (3, [b"1", b"a"]),
        (4, [b"2"]),
        (4, [b"1"]),
    ]
    assert (4, [b"2", b"a"]) in [
        (number, sorted(objects.values())) for number, _, objects in bucket.crashes(late_creates=True)
    ]


# ------------------------------------------------------------------ real claims
def claiming(launch: str, files: type[ClaimFiles] = ClaimFiles) -> Act:
    def program(store: Store) -> str:
        try:
            return files(Storage.on(store)).claim(1, launch, START, "host").launch
        except BusyError:
            return "busy"

    return program


class LooksThenPuts(Storage):
    """Planted mistake: looks whether the name is there, and then writes it."""

    def create(self, path: str, data: bytes) -> bool:
        if self.exists(path):
            return False
        self.write(path, data)
        return True


class Careless(ClaimFiles):
    def __init__(self, storage: Storage) -> None:
        super().__init__(LooksThenPuts.on(storage._store))


ONE_OF_EACH = Faults(deaths=1, errors=1, repeats=1)


def holders(make: Callable[[str], Act]) -> tuple[int, set[str]]:
    """The number of ends, and what was wrong in any of them."""
    count, wrong = 0, set()
    programs = [make("aaaa"), make("bbbb")]
    for bucket, results in interleavings({}, programs, _of_claims, ONE_OF_EACH):
        count += 1
        claims = ClaimFiles(Storage.on(ModelStore(bucket)))
        claim = claims.newest_claim()
        winners = [result for result in results if result in ("aaaa", "bbbb")]
        if len(winners) > 1:
            wrong.add("two hold one attempt")
        if winners and (claim is None or claim.launch != winners[0]):
            wrong.add("who was told that it holds the attempt does not")
        if claim is not None and claim.launch == "":
            wrong.add("a claim is torn")
    return count, wrong


def _of_claims(key: str) -> bool:
    return key in ("run/attempts", "run/attempts/0001.json")


def test_no_order_of_requests_gives_an_attempt_to_two() -> None:
    count, wrong = holders(claiming)
    assert wrong == set()
    assert count > 50, "the search must be one"


@pytest.mark.parametrize("what", ["two hold one attempt", "who was told that it holds the attempt does not"])
def test_the_search_catches_who_looks_and_then_puts(what: str) -> None:
    assert what in holders(lambda launch: claiming(launch, Careless))[1]
