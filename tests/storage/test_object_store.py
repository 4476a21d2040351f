"""A store in a bucket, when requests are refused, connections break and answers are lost: what was published
is whole, and who won a name knows it.

The same faults meet a version that lets the store's own "exists" decide, which must be caught.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest

from orchestrator.errors import NoConditionalCreateError, StorageError
from orchestrator.storage.buckets import bucket_of, forget_buckets
from orchestrator.storage.object_store import PART_BYTES, TOKEN, ObjectStore
from orchestrator.storage.tries import TRIES
from tests.checkpoint.samples import no_sleep
from tests.raising import raises
from tests.storage.servers import FAULTS, Fault, Proxy, new_bucket, no_fault

LARGE = os.urandom(1 << 20) * 17  # three parts


@pytest.fixture
def store(proxy: Proxy) -> ObjectStore:
    store = ObjectStore(f"{new_bucket(proxy.url)}/run", no_sleep)
    tried_once(store)  # so that no test counts these requests
    return store


def tried_once(store: ObjectStore) -> None:
    """This process has found out that the server refuses a name that is taken."""
    assert put(store, "first", b"", exclusive=True)
    store.delete(["first"])


def put(store: ObjectStore, path: str, data: bytes, *, exclusive: bool = False) -> bool:
    return store.put(path, lambda: (data,), len(data), exclusive=exclusive)


def content(store: ObjectStore, path: str, num_bytes: int = 32 << 20) -> bytes:
    into = bytearray(num_bytes)
    return bytes(into[: store.read(path, 0, memoryview(into))])


# ------------------------------------------------------------------------------ one fault
@pytest.mark.parametrize("fault", FAULTS)
def test_a_create_that_meets_a_fault_has_won_and_a_second_one_has_not(
    proxy: Proxy, store: ObjectStore, fault: Fault
) -> None:
    proxy.one_in(fault, "PUT")
    assert put(store, "claim", b"mine", exclusive=True)
    assert len(proxy.asked) > 1, "the fault came"
    proxy.one_in(fault, "PUT")
    assert not put(store, "claim", b"mine", exclusive=True)
    assert content(store, "claim") == b"mine"


@pytest.mark.quick(
    "False-reset-2",
    "True-500 after-1",
    "False-reset after-2",
    "False-503-2",
    "True-500-1",
    "True-501-1",
)
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("fault", [*FAULTS, "501"])
@pytest.mark.parametrize("refuses", [True, False])
def test_a_fault_is_no_sign_that_a_server_refuses_a_second_create_nor_that_it_does_not(
    proxy: Proxy, store: ObjectStore, refuses: bool, fault: Fault, first: int
) -> None:
    forget_buckets()  # what the fixture found out
    proxy.forgets = () if refuses else ("if-none-match",)
    proxy.one_in(fault, "PUT", first=first)
    if refuses:
        assert put(store, "claim", b"mine", exclusive=True)
    else:
        with pytest.raises(NoConditionalCreateError):
            put(store, "claim", b"mine", exclusive=True)
    assert [listed.name for listed in store.list("")] == ["claim"] * refuses


def test_a_server_without_conditional_create_is_refused_by_name_and_gets_no_object(
    proxy: Proxy, store: ObjectStore
) -> None:
    for forgets, unknown in ((("if-none-match",), ()), ((), ("if-none-match",))):
        forget_buckets()
        proxy.forgets, proxy.unknown = forgets, unknown
        with pytest.raises(NoConditionalCreateError) as refused:
            put(store, "attempts/0001.json", b"mine", exclusive=True)
        assert (refused.value.code, refused.value.exit_code) == ("storage.no_conditional_create", 2)
        assert store.root.rpartition("/")[0] in str(refused.value)
        assert proxy.url.partition("://")[2] in str(refused.value)
        proxy.forgets, proxy.unknown = (), ()
        assert store.list("") == []
        assert put(store, "attempts/0001.json", b"mine", exclusive=True), "the server is tried again"
        store.delete_folder("attempts")


@pytest.mark.chaos
def test_two_processes_that_are_answered_differently_never_both_create_one_name(
    proxy: Proxy, store: ObjectStore
) -> None:
    """A part of the servers behind one address does not know the condition, and answers 501."""
    asked, won = itertools.count(), list[tuple[bool, bool]]()
    for number in range(6):
        forget_buckets()
        proxy.rule = lambda method, path: "501" if method == "PUT" and next(asked) % 5 < 3 else None
        told = []
        for data in (b"first", b"other"):
            try:
                told.append(put(store, f"claims/{number}", data, exclusive=True))
            except StorageError:
                told.append(False)
        proxy.rule = no_fault
        won.append((told[0], told[1]))
        names = [listed.name for listed in store.list("claims")]
        holder = content(store, f"claims/{number}") if str(number) in names else None
        assert holder == (b"first" if told[0] else b"other" if told[1] else None)
    assert (True, True) not in won
    assert (True, False) in won, "some are created"


@pytest.mark.quick("HEAD-reset after", "GET-500 after", "HEAD-500", "GET-503", "HEAD-reset")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_fault_while_the_owner_of_a_name_is_read_is_no_answer(
    proxy: Proxy, store: ObjectStore, fault: Fault, method: str
) -> None:
    put(store, "claim", b"other", exclusive=True)
    proxy.one_in(fault, method)
    assert not put(store, "claim", b"mine", exclusive=True)
    assert content(store, "claim") == b"other"


@pytest.mark.quick("POST-uploads-reset", "PUT-partNumber=2-reset after", "POST-uploadId-500")
@pytest.mark.parametrize("fault", ["500", "reset", "reset after"])
@pytest.mark.parametrize(
    ("method", "part"), [("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId")]
)
def test_an_upload_in_parts_that_meets_a_fault_is_published_whole(
    proxy: Proxy, store: ObjectStore, fault: Fault, method: str, part: str
) -> None:
    proxy.one_in(fault, method, part)
    pieces = [LARGE[begin : begin + 3_000_000] for begin in range(0, len(LARGE), 3_000_000)]
    assert store.put("large", lambda: iter(pieces), len(LARGE))
    assert sum(asked == method and part in path for asked, path in proxy.asked) > 1, "the fault came"
    assert content(store, "large") == LARGE


@pytest.mark.quick("POST-reset after", "PUT-500", "GET-reset after", "HEAD-500")
@pytest.mark.parametrize("fault", ["500", "reset after"])
@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD", "POST"])
def test_every_other_call_outlives_a_fault(
    proxy: Proxy, store: ObjectStore, fault: Fault, method: str
) -> None:
    other = store.beside(f"{store.root}-other")
    calls: tuple[Callable[[], object], ...] = (
        lambda: put(store, "a/x", b"x" * 1000),
        lambda: store.copy(store, "a/x", "a/y"),
        lambda: other.copy(store, "a/x", "z"),
        lambda: content(store, "a/y"),
        lambda: store.facts("a/x"),
        lambda: store.list("a"),
        lambda: store.delete(["a/x", "a/none"]),
        lambda: store.delete_folder("a"),
    )
    for call in calls:
        proxy.one_in(fault, method)
        call()
    proxy.rule = no_fault
    assert store.list("") == []
    assert content(other, "z") == b"x" * 1000


@pytest.mark.parametrize("size", [1000, 5_000_000])
def test_an_answer_that_breaks_off_is_asked_for_again(proxy: Proxy, store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    put(store, "x", data)
    proxy.one_in("cut", "GET", "/x")
    assert content(store, "x") == data
    assert len(proxy.asked) > 1


def test_a_server_that_deletes_one_object_at_a_time_and_minds_an_absent_one_is_enough(
    proxy: Proxy, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        put(store, f"a/{number}", b"x")
    monkeypatch.setenv("AWS_DISABLE_BULK_DELETE", "true")
    forget_buckets()
    tried_once(store)
    proxy.rule = lambda method, path: "404" if method == "DELETE" and path.endswith(("none", "/a")) else None
    proxy.asked.clear()
    store.delete(["a/none", "a/0"])
    assert {method for method, _ in proxy.asked} == {"DELETE"}
    assert [listed.name for listed in store.list("a")] == ["1", "2"]
    store.delete_folder("a")
    store.delete(["a/none"])
    assert store.list("a") == []


@pytest.mark.parametrize("answer", ["501", "405"])
def test_a_server_that_says_that_it_deletes_none_in_bulk_is_asked_one_by_one(
    proxy: Proxy, store: ObjectStore, answer: Fault
) -> None:
    proxy.rule = lambda method, path: answer if method == "POST" and "delete" in path else None
    for number in range(3):
        put(store, f"a/{number}", b"x")
    store.delete(["a/none", "a/0", "a/1"])
    assert [listed.name for listed in store.list("a")] == ["2"]
    proxy.asked.clear()
    store.delete_folder("a")
    assert {method for method, _ in proxy.asked} == {"GET", "DELETE"}, "it is asked once for all"
    assert store.list("a") == []


@pytest.mark.chaos
@pytest.mark.parametrize("num_names", [1001, pytest.param(10_000, marks=pytest.mark.chaos)])
def test_a_folder_of_many_names_is_listed_and_deleted_a_thousand_a_request(
    proxy: Proxy, store: ObjectStore, num_names: int
) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: put(store, f"a/{number:05d}", b"x"), range(num_names)))
    proxy.asked.clear()
    found = store.list("a")
    assert [listed.name for listed in found] == [f"{number:05d}" for number in range(num_names)]
    assert all(listed.facts is not None and listed.facts.size == 1 for listed in found)
    assert len(proxy.asked) == -(-num_names // 1000)
    store.delete_folder("a")
    deletions = -(-(num_names + 1) // 1000)  # what is called as the folder is, too
    assert len(proxy.asked) == 2 * -(-num_names // 1000) + deletions, "listed again, and deleted"
    assert store.list("a") == []


# ------------------------------------------------------------------------------ faults that stay
def test_a_fault_that_stays_is_an_error_after_some_tries_and_never_absence(
    proxy: Proxy, store: ObjectStore
) -> None:
    put(store, "x", b"x")
    waits: list[float] = []
    patient = ObjectStore(store.root, waits.append)
    proxy.rule = lambda *_: "400"  # the library repeats none of it, and does not wait
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: put(patient, "x", b"y", exclusive=True),
        "write": lambda: put(patient, "new", b"x"),
        "read": lambda: content(patient, "x", 10),
        "look at": lambda: patient.facts("x"),
        "copy": lambda: patient.copy(patient, "x", "y"),
        "list": lambda: patient.list(""),
        "delete in": lambda: patient.delete(["x"]),
        "delete folder": lambda: patient.delete_folder("a"),
    }
    for what, call in calls.items():
        waits.clear()
        with raises(StorageError, "storage.failed", "status code: 400", store.root) as caught:
            call()
        assert re.match(f"cannot ({what}|look at) {store.root}", str(caught.value))
        assert len(waits) >= TRIES - 1, what
        assert sum(waits) < 10, what
    proxy.rule = no_fault
    assert content(store, "x") == b"x"


def test_a_create_of_which_nothing_is_known_is_an_error(proxy: Proxy, store: ObjectStore) -> None:
    proxy.rule = lambda method, _: "reset" if method == "PUT" else None
    with raises(StorageError, "storage.failed", f"{store.root}/claim", "error sending request"):
        put(store, "claim", b"x", exclusive=True)
    proxy.rule = lambda method, _: "409" if method == "PUT" else None  # as S3 where two creates meet
    with raises(StorageError, "storage.failed", f"{store.root}/claim", "no such object"):
        put(store, "claim", b"x", exclusive=True)
    proxy.one_in("409", "PUT")
    assert put(store, "claim", b"x", exclusive=True)


def test_a_bucket_that_is_not_there_is_an_error_and_never_absence(proxy: Proxy) -> None:
    nobodys = ObjectStore("s3://nobodys-bucket/run", no_sleep)
    for call in (
        lambda: put(nobodys, "x", b"x"),
        lambda: put(nobodys, "x", b"x", exclusive=True),
        lambda: content(nobodys, "x"),
        lambda: nobodys.list(""),
        lambda: nobodys.delete_folder("x"),
    ):
        with raises(StorageError, "storage.not_found", "s3://nobodys-bucket", "no such bucket"):
            call()


def test_denied_access_is_told_with_what_to_set(proxy: Proxy, store: ObjectStore) -> None:
    proxy.rule = lambda *_: "403"
    bucket = store.root.removesuffix("/run")
    rights = ("list, read, write and delete", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    with raises(StorageError, "storage.denied", f"create {store.root}/claim", f"access to {bucket}", *rights):
        put(store, "claim", b"x", exclusive=True)


# ------------------------------------------------------------------------------ races
def some_faults(seed: int) -> Callable[[str, str], Fault | None]:
    """A quarter of all requests fails, before it takes effect or after; of every third name surely the
    answer to who creates it.
    """
    numbers, lock, seen = random.Random(seed), threading.Lock(), set[str]()

    def rule(method: str, path: str) -> Fault | None:
        with lock:
            if method == "PUT" and path not in seen and len(seen) % 3 == 0:
                seen.add(path)
                return "reset after"
            seen.add(path)
            return numbers.choice(FAULTS) if numbers.random() < 0.25 else None

    return rule


@pytest.mark.chaos
def test_of_300_that_race_for_a_claim_exactly_one_wins(proxy: Proxy, store: ObjectStore) -> None:
    with ThreadPoolExecutor(50) as pool:
        won = list(pool.map(lambda number: put(store, "claim", b"%d" % number, exclusive=True), range(300)))
    assert won.count(True) == 1
    assert content(store, "claim") == b"%d" % won.index(True)


class BelievesExists(ObjectStore):
    """Broken on purpose: who is told "exists" has lost, whoever made what exists."""

    def _token(self, path: str) -> str | None:
        found = super()._token(path)
        return None if found is None else "another's"


@pytest.mark.quick("True")
@pytest.mark.parametrize("broken", [False, True])
def test_of_many_that_race_through_faults_exactly_one_knows_that_it_won(
    proxy: Proxy, store: ObjectStore, broken: bool
) -> None:
    racing = BelievesExists(store.root, no_sleep) if broken else store
    claims, starters = 20, 8
    proxy.rule = some_faults(seed=1)

    def start(number: int) -> bool | None:
        try:
            return put(racing, f"claims/{number // starters}", b"%d" % number, exclusive=True)
        except StorageError:
            return None  # not known, and told as an error: its launch ends, and starts anew

    with ThreadPoolExecutor(20) as pool:
        told = list(pool.map(start, range(claims * starters)))
    proxy.rule = no_fault
    wrong = []
    for claim in range(claims):
        holder = int(content(store, f"claims/{claim}"))
        mine = range(claim * starters, (claim + 1) * starters)
        winners = [number for number in mine if told[number]]
        if not (winners == [holder] or (winners == [] and told[holder] is None)):
            wrong.append((claim, holder, winners))
    assert bool(wrong) is broken, wrong


def test_two_that_write_the_same_content_are_still_two(proxy: Proxy, store: ObjectStore) -> None:
    assert put(store, "claim", b"same", exclusive=True)
    proxy.one_in("reset after", "PUT")
    assert not put(pickle.loads(pickle.dumps(store)), "claim", b"same", exclusive=True)


def test_a_token_is_another_one_for_every_create_and_nothing_of_the_content(
    proxy: Proxy, store: ObjectStore
) -> None:
    for name in ("a", "b"):
        put(store, name, b"same", exclusive=True)
    found = [
        obstore.get(bucket_of(store.root[: store.root.rindex("/")]), f"run/{name}") for name in ("a", "b")
    ]
    tokens = [answer.attributes[TOKEN] for answer in found]
    assert tokens[0] != tokens[1]
    assert [bytes(answer.bytes()) for answer in found] == [b"same", b"same"]


def test_an_upload_that_is_abandoned_is_seen_by_nobody(proxy: Proxy, store: ObjectStore) -> None:
    class AbandonedError(Exception):
        pass

    def pieces() -> Iterator[bytes]:
        yield b"x" * (2 * PART_BYTES + 1)
        proxy.rule = lambda method, _: "reset" if method == "DELETE" else None
        raise AbandonedError

    with pytest.raises(AbandonedError):
        store.put("x", pieces, 4 * PART_BYTES)
    proxy.rule = no_fault
    assert store.list("") == []
    assert put(store, "x", b"whole")
    assert content(store, "x") == b"whole"
