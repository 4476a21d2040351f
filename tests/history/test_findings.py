"""Findings lie in storage, numbered without gaps, each written once by whoever looked."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.history.numbered_files import (
    AUDIT,
    VERIFY,
    FindingFiles,
    newest_audit,
    verified_points,
    verify_result,
)
from orchestrator.storage.files import Storage


@pytest.fixture
def files(new_storage: Callable[[str], Storage]) -> FindingFiles:
    return FindingFiles(new_storage("run"), "run")


def row(name: str, healthy: bool) -> dict[str, object]:
    return {"name": name, "healthy": healthy, "damaged": []}


def test_the_newest_finding_of_each_kind_and_point_counts(files: FindingFiles) -> None:
    assert (files.all(), newest_audit(files.all()), verified_points(files.all())) == ((), None, {})
    files.add(AUDIT, 1, 0.5, {"exactly_once": False})
    files.add(VERIFY, 1, 0.5, verify_result([row("a", True), row("b", True)], every=True))
    last = files.add(AUDIT, 2, 0.5, {"exactly_once": True})
    files.add(VERIFY, 2, 0.5, verify_result([row("b", False)], every=False))
    found = files.all()
    assert [each.number for each in found] == [1, 2, 3, 4]
    assert newest_audit(found) == last
    assert {name: (f.number, healthy) for name, (f, healthy) in verified_points(found).items()} == {
        "a": (2, True),
        "b": (4, False),
    }
    assert last.by.count("@") == 1


@pytest.mark.quick("local")
def test_many_who_look_at_once_get_a_number_each(files: FindingFiles) -> None:
    with ThreadPoolExecutor(8) as pool:
        added = list(pool.map(lambda _: files.add(AUDIT, 1, 0.0, {}).number, range(40)))
    assert sorted(added) == list(range(1, 41))


@pytest.mark.parametrize("damage", [lambda data: data[:50], lambda data: data.replace(b"true", b"null")])
def test_a_damaged_finding_says_so_and_nothing_else(files: FindingFiles, tmp_path: Path, damage) -> None:
    files.add(AUDIT, 1, 0.0, {"exactly_once": True})
    path = tmp_path / "run" / "findings" / "000001.json"
    path.write_bytes(damage(path.read_bytes()))
    (found,) = files.all()
    assert (found.what, found.result) == ("", {})
    assert "findings/000001.json cannot be read" in found.unreadable
    assert newest_audit(files.all()) is None


def test_a_finding_of_another_run_is_none_of_this_one(files: FindingFiles, tmp_path: Path) -> None:
    FindingFiles(Storage(str(tmp_path / "run")), "another").add(AUDIT, 1, 0.0, {"exactly_once": True})
    (found,) = files.all()
    assert "it is finding 1 of run another" in found.unreadable
