"""Whoever asks a launch for something hears what became of it, or that nobody will do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.machine.requests import RequestAnswer
from orchestrator.errors import RefusedError
from orchestrator.history.claims.claim_files import RESTARTED, RESUME, START
from orchestrator.history.journal.journal_lines import JournalLines
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind, line_bytes, parse_line
from orchestrator.history.numbered_files import SAVE, STOP
from orchestrator.inspect import run_control
from orchestrator.inspect.run_control import SentRequest
from orchestrator.storage.files import Storage
from tests.raising import raises

DONE = RequestAnswer(request=1, what=SAVE, outcome="done", text="saved as p", point="p")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at again at once; and whether the run lives, at every look."""
    monkeypatch.setattr(run_control, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(run_control, "QUIET_S", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """A run that launch `aa` works on."""
    store = RunStore(Storage(str(tmp_path / "run")))
    store.claim(1, "aa", START, "host")
    return store


def journal(store: RunStore, attempt: int = 1, segment_bytes: int = 1 << 20) -> JournalWriter:
    return JournalWriter(store.storage, attempt, segment_bytes=segment_bytes)


def answers(writer: JournalWriter, *answered: RequestAnswer) -> None:
    for each in answered:
        writer.event(EventKind.REQUEST_ANSWERED, **each.fields)
    writer.flush()


def after(looks: int, act: Callable[[], object]) -> Callable[[], bool]:
    """A sign of life at every look; at one of them something happens."""
    seen = iter(range(1000))

    def look() -> bool:
        if next(seen) == looks:
            act()
        return True

    return look


def test_the_answer_comes_from_whichever_coordinator_of_the_launch_gives_it(store: RunStore) -> None:
    writer = journal(store)
    answers(writer, DONE)  # of a request with this number to an older launch

    def restart() -> None:
        store.claim(2, "aa", RESTARTED, "host")
        other = RequestAnswer(request=2, what=SAVE, outcome="failed", text="another's")
        answers(journal(store, 2), other, DONE)

    reply = SentRequest(store, SAVE).answer(after(3, restart))
    assert (reply.outcome, reply.text, reply.point) == ("done", "saved as p", "p")


def test_an_answer_that_stands_before_the_end_is_heard_although_the_run_has_ended(store: RunStore) -> None:
    def end() -> None:
        stopped = RequestAnswer(request=1, what=STOP, outcome="done", text="stopped at step 4")
        answers(journal(store), stopped)
        store.write_end(1, "stopped", "stopped at step 4", "")

    assert SentRequest(store, STOP).answer(after(2, end)).text == "stopped at step 4"


def test_who_waits_hears_once_why_a_save_was_given_up_since_it_was_asked_for(store: RunStore) -> None:
    writer, told = journal(store), list[str]()

    def give_up(point: str) -> None:
        writer.event(EventKind.SAVE_GIVEN_UP, point=point, reason="no space", retry_s=5.0)
        writer.flush()

    give_up("p0")  # before anybody asked
    looks = iter([lambda: give_up("p1"), lambda: give_up("p2"), lambda: answers(writer, DONE)])

    def look() -> bool:
        next(looks)()
        return True

    assert SentRequest(store, SAVE).answer(look, told.append).outcome == "done"
    (text,) = told
    assert text.startswith("save: not yet, the save of p1 was given up: no space. The run tries again")


def test_nobody_is_asked_where_nobody_works(store: RunStore, tmp_path: Path) -> None:
    with raises(RefusedError, "run.not_begun", tmp_path / "other"):
        SentRequest(RunStore(Storage(str(tmp_path / "other"))), SAVE)
    store.write_end(1, "done", "done at step 4", "")
    with raises(RefusedError, "run.not_running", "attempt 1", "(done: done at step 4)"):
        SentRequest(store, SAVE)


def test_who_waits_hears_that_the_launch_is_gone(store: RunStore) -> None:
    with raises(RefusedError, "run.no_sign_of_life", "(save)"):
        SentRequest(store, SAVE).answer(lambda: False)
    with raises(RefusedError, "run.not_running", "(save)", "(failed: no space)"):
        SentRequest(store, SAVE).answer(after(2, lambda: store.write_end(1, "failed", "no space", "")))


def test_who_waits_hears_that_another_launch_has_taken_over(store: RunStore) -> None:
    with raises(RefusedError, "run.taken_over", "(save)", "(attempt 2, host)"):
        SentRequest(store, SAVE).answer(after(2, lambda: store.claim(2, "bb", RESUME, "host")))


class Follower:
    """Everything that comes after it was made."""

    def __init__(self, storage: Storage) -> None:
        self._lines = JournalLines(storage, first=1)
        self.lines()

    def lines(self) -> list[dict[str, Any]]:
        return [line for chunk in self._lines.new() for _, line in chunk.lines]


def test_a_follower_gives_each_new_line_once_over_segments_and_attempts(store: RunStore) -> None:
    writer = journal(store, segment_bytes=400)
    answers(writer, *[DONE] * 5)
    follower = Follower(store.storage)
    assert follower.lines() == []
    seen = []
    for _ in range(10):
        answers(writer, DONE, DONE)
        seen += [line["seq"] for line in follower.lines()]
    assert seen == list(range(6, 26))
    assert len(store.storage.list("journal/a0001")) > 5
    answers(journal(store, 2), DONE)
    assert [(line["attempt"], line["seq"]) for line in follower.lines()] == [(2, 1)]


def test_a_follower_waits_for_the_rest_of_a_line_and_takes_a_line_that_was_written_twice_once(
    store: RunStore, tmp_path: Path
) -> None:
    answers(journal(store), DONE)
    path = tmp_path / "run" / "journal" / "a0001" / "000001.jsonl"
    follower = Follower(store.storage)
    line = parse_line(path.read_bytes()[:-1])
    second, after = line_bytes(line.fields | {"seq": 2}, line.sum)
    third, _ = line_bytes(line.fields | {"seq": 3}, after)
    with path.open("ab") as file:
        file.write(second[:30])
    assert follower.lines() == []
    with path.open("ab") as file:
        file.write(second[30:])
    assert [each["seq"] for each in follower.lines()] == [2]
    with path.open("ab") as file:
        file.write(third[:30])  # the write fails, and comes again in another segment
    (path.parent / "000002.jsonl").write_bytes(second + third)
    assert [each["seq"] for each in follower.lines()] == [3]
