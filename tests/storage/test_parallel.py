"""Many small questions at a time: in order, bounded, and with the error that comes first in the order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import StorageError
from orchestrator.storage.files import Storage
from orchestrator.storage.parallel import ASKED_AT_A_TIME, answers_at_once, at_once, entries_at_once
from orchestrator.storage.store import ObjectFacts
from tests.raising import raises
from tests.storage.model_store import FarModelStore, ModelBucket

LIMIT_S = 60.0
FAR = Storage.on(FarModelStore(ModelBucket()))
NAMES = [f"n{number}" for number in range(3 * ASKED_AT_A_TIME)]


class InFlight:
    """What asks and is asked: how many at once now, and at most."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        self.now = self.most = 0
        self.asked: list[str] = []
        self._ask, self._lock = ask, threading.Lock()

    def __call__(self, name: str) -> str:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.asked.append(name)
        try:
            return self._ask(name)
        finally:
            with self._lock:
                self.now -= 1


def test_so_many_are_under_way_at_a_time_and_no_more() -> None:
    together = threading.Barrier(ASKED_AT_A_TIME)

    def ask(name: str) -> str:
        together.wait(LIMIT_S)  # each waits for all others of its sixteen
        return name.upper()

    asking = InFlight(ask)
    assert at_once(FAR, asking, NAMES) == [name.upper() for name in NAMES]
    assert (asking.most, sorted(asking.asked)) == (ASKED_AT_A_TIME, sorted(NAMES))


def test_answers_come_in_the_order_of_the_questions_whichever_is_first() -> None:
    second = threading.Event()

    def ask(name: str) -> str:
        if name == "a":
            assert second.wait(LIMIT_S)
        second.set()
        return name

    assert at_once(FAR, ask, ["a", "b"]) == ["a", "b"]


def test_of_several_errors_that_of_the_first_question_is_raised() -> None:
    later = threading.Event()

    def ask(name: str) -> str:
        if name == NAMES[3]:
            assert later.wait(LIMIT_S)
            raise StorageError("the first one", code="test.first")
        if name == NAMES[7]:
            later.set()
            raise StorageError("a later one, which comes before", code="test.later")
        return name

    asking = InFlight(ask)
    with raises(StorageError, "test.first"):
        at_once(FAR, asking, NAMES)
    assert asking.now == 0, "nothing is under way any more"


def test_who_stops_before_the_end_leaves_nothing_under_way() -> None:
    asking = InFlight(lambda name: name)
    with closing(answers_at_once(FAR, asking, NAMES)) as answers:
        assert next(answers) == NAMES[0]
    before = [*asking.asked]
    assert asking.now == 0
    assert asking.asked == before


def test_a_folder_is_asked_one_after_the_other_by_the_thread_that_asks(tmp_path: Path) -> None:
    threads = at_once(Storage(str(tmp_path)), lambda name: threading.current_thread(), NAMES)  # noqa: ARG005
    assert {*threads} == {threading.current_thread()}


def test_one_question_needs_no_thread() -> None:
    assert at_once(FAR, lambda name: threading.current_thread(), ["a"]) == [threading.current_thread()]  # noqa: ARG005
    assert at_once(FAR, lambda name: name, list[str]()) == []


STRETCH = 4  # bytes
SIZES = (0, 1, STRETCH - 1, STRETCH, STRETCH + 1, 3 * STRETCH, 40 * STRETCH + 1, 7, 0, 90)


@pytest.fixture
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.storage.parallel.READ_BYTES", STRETCH)


def content_of(size: int) -> bytes:
    return bytes(number % 251 for number in range(size))


@pytest.mark.usefixtures("small_stretches")
@pytest.mark.parametrize("far", [True, False], ids=["bucket", "folder"])
def test_entries_at_once_are_those_of_one_reading_after_the_other(far: bool, tmp_path: Path) -> None:
    bucket = ModelBucket()
    storage = Storage.on(FarModelStore(bucket)) if far else Storage(str(tmp_path))
    names = [f"{number}.bin" for number in range(len(SIZES))]
    for name, size in zip(names, SIZES, strict=True):
        storage.write(name, content_of(size))
    expected, read = list[int](), list[int]()
    found = entries_at_once(storage, names, expected.append, read.append)
    assert found == [storage.entry(name) for name in names]
    assert (expected, sum(read)) == ([sum(SIZES)], sum(SIZES))
    assert entries_at_once(storage, []) == []
    with pytest.raises(FileNotFoundError):
        entries_at_once(storage, [*names, "absent"])


class Counting(FarModelStore):
    """Reads wait for each other, `ASKED_AT_A_TIME` together. Counts the stretches that are held."""

    together = threading.Barrier(ASKED_AT_A_TIME)
    lock = threading.Lock()
    held = most_held = 0

    def read(self, path: str, start: int, into: memoryview) -> int:
        with Counting.lock:
            Counting.held += 1
            Counting.most_held = max(Counting.most_held, Counting.held)
        self.together.wait(LIMIT_S)
        return super().read(path, start, into)

    @classmethod
    def was_read(cls, num_bytes: int) -> None:
        assert num_bytes == STRETCH
        with cls.lock:
            cls.held -= 1


@pytest.mark.usefixtures("small_stretches")
def test_so_many_stretches_of_one_file_are_under_way_and_no_more_are_held() -> None:
    bucket = ModelBucket()
    plain = Storage.on(FarModelStore(bucket))
    plain.write("a", content_of(4 * ASKED_AT_A_TIME * STRETCH))
    found = entries_at_once(Storage.on(Counting(bucket)), ["a"], was_read=Counting.was_read)
    assert found == [plain.entry("a")]
    assert (Counting.held, Counting.most_held) == (0, ASKED_AT_A_TIME)


class Shrinking(FarModelStore):
    """Says more of its files than they hold, as of one that somebody has cut since."""

    def facts(self, path: str) -> ObjectFacts:
        found = super().facts(path)
        return replace(found, size=found.size + 1)


@pytest.mark.usefixtures("small_stretches")
def test_a_file_that_became_shorter_has_no_entry() -> None:
    bucket = ModelBucket()
    Storage.on(FarModelStore(bucket)).write("a", content_of(9))
    with raises(StorageError, "storage.changed_while_read", "/a ", "byte 9,", "10 bytes"):
        entries_at_once(Storage.on(Shrinking(bucket)), ["a"])
