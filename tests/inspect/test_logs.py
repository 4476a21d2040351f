"""Reading a run's log files while launches write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import RefusedError
from orchestrator.history.claims.claim_files import START
from orchestrator.inspect import logs
from orchestrator.inspect.logs import LogFollower, follow
from orchestrator.launch.process.progress import FOLDER, RunLog
from orchestrator.storage.files import Storage
from tests.raising import raises


def write(folder: Path, attempt: int, *lines: str) -> None:
    """As a launch does."""
    log = RunLog(pytest.fail)
    log.open(Storage(str(folder)), attempt)
    for line in lines:
        log.write(line)
    log.close()


def texts(output: str) -> list[str]:
    return [line.split(maxsplit=2)[2] for line in output.splitlines()]


def test_the_folder_is_the_one_that_launches_write_to() -> None:
    assert logs.FOLDER == FOLDER


def test_the_newest_log_is_read_whole_and_then_what_comes_also_of_later_starts(tmp_path: Path) -> None:
    write(tmp_path, 2, "old")
    write(tmp_path, 9_999, "a", "b")
    follower = LogFollower(Storage(str(tmp_path)))
    assert texts(follower.read()) == ["a", "b"]
    assert follower.read() == ""
    write(tmp_path, 9_999, "c")
    write(tmp_path, 10_000, "d")
    assert texts(follower.read()) == ["c", "d"]


def test_a_letter_that_is_half_written_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    file = tmp_path / FOLDER / "0001-host.log"
    euro = "€".encode()
    file.write_bytes(b"1 " + euro[:2])
    follower = LogFollower(Storage(str(tmp_path)))
    assert follower.read() == "1 "
    file.write_bytes(b"1 " + euro)
    assert follower.read() == "€"


def test_a_run_without_a_log_is_refused_with_where_to_look(tmp_path: Path) -> None:
    with raises(RefusedError, "run.no_log", tmp_path, "orchestrator status"):
        LogFollower(Storage(str(tmp_path)))


def test_following_ends_with_the_run_and_has_what_was_said_after_its_end(tmp_path: Path) -> None:
    store = RunStore(Storage(str(tmp_path)))
    claim = store.claim(1, "launch", START, "host", "id")
    write(tmp_path, 1, "begins")
    events = [
        lambda: write(tmp_path, 1, "trains"),
        lambda: store.write_end(claim.number, "done", "all is trained", "id"),
        lambda: write(tmp_path, 1, "last words"),
    ]

    def wait(_: float) -> None:
        if events:
            events.pop(0)()

    assert texts("".join(follow(store, wait))) == ["begins", "trains", "last words"]
    assert not events
