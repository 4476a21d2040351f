"""Requests lie in storage, numbered without gaps, each written once; only their own launch reads them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.errors import StorageError
from orchestrator.history.numbered_files import SAVE, STOP, RequestFiles
from orchestrator.storage.files import Storage


@pytest.fixture
def storage(new_storage: Callable[[str], Storage]) -> Storage:
    return new_storage("run")


def test_requests_are_read_as_they_were_asked_and_only_by_their_launch(storage: Storage) -> None:
    files = RequestFiles(storage, "aa", "run")
    assert files.read(1) is None
    first, second = files.ask(SAVE), files.ask(STOP)
    assert (first.number, second.number) == (1, 2)
    assert (files.read(1), files.read(2), files.read(3)) == (first, second, None)
    assert first.by.count("@") == 1
    assert RequestFiles(storage, "bb", "run").read(1) is None


@pytest.mark.quick("local")
def test_many_who_ask_at_once_get_a_number_each(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda _: RequestFiles(storage, "aa", "run").ask(SAVE).number, range(40)))
    assert sorted(asked) == list(range(1, 41))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:50], lambda data: data.replace(b"save", b"stop"), lambda data: b""]
)
def test_a_damaged_request_asks_for_nothing_and_says_why(storage: Storage, tmp_path: Path, damage) -> None:
    files = RequestFiles(storage, "aa", "run")
    files.ask(SAVE)
    path = tmp_path / "run" / "requests" / "aa" / "000001.json"
    path.write_bytes(damage(path.read_bytes()))
    found = files.read(1)
    assert found is not None
    assert (found.number, found.what) == (1, "")
    assert "requests/aa/000001.json cannot be read" in found.unreadable


def test_a_request_of_another_run_asks_for_nothing(storage: Storage) -> None:
    RequestFiles(storage, "aa", "another").ask(STOP)
    found = RequestFiles(storage, "aa", "run").read(1)
    assert found is not None
    assert (found.what, bool(found.unreadable)) == ("", True)


def test_storage_that_cannot_be_read_is_no_answer(storage: Storage, tmp_path: Path) -> None:
    RequestFiles(storage, "aa", "run").ask(STOP)
    path = tmp_path / "run" / "requests" / "aa" / "000001.json"
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(StorageError):
        RequestFiles(storage, "aa", "run").read(1)
