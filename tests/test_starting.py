"""What every start does before there is a cluster: one row of starts after another, on the real store and the
real data.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator import starting
from orchestrator.attempt import Attempt, continue_launch, note_beginning
from orchestrator.config import JobConfig, parse_config
from orchestrator.data.spec import DataSpec
from orchestrator.errors import BusyError, OrchestratorError, RefusedError, ResumePointError
from orchestrator.faults import no_fault
from orchestrator.monitor.journal import JournalWriter
from orchestrator.monitor.reader import read_journal
from orchestrator.plan.resume import ResumePlan
from orchestrator.records import StateKey
from orchestrator.resume.claims import RESUME
from orchestrator.resume.committer import note_committed
from orchestrator.resume.leftovers import Leftover, remove_leftovers
from orchestrator.resume.store import RunStore
from orchestrator.storage import Storage
from tests.resume.samples import key, no_sleep, record, start, write_vote
from tests.resume.test_storage import Failing


class Runner:
    """A run that is started again and again; each launch trains ten steps and saves, without a model."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._mapping = dict(mapping)
        self.folder = starting.run_folder(self.config())
        self.store = RunStore(Storage(str(self.folder)))

    def config(self, **data: Any) -> JobConfig:
        return parse_config({**self._mapping, "data": {**self._mapping["data"], **data}})

    def plan(self, **data: Any) -> ResumePlan:
        job = self.config(**data)
        return starting.look_ahead(self.store, job, starting.prepare(job, self.folder, freeze=False))

    def prepared(self, **data: Any) -> DataSpec:
        return starting.prepare(self.config(**data), self.folder, freeze=False)

    def begin(self, **data: Any) -> Attempt:
        job = self.config(**data)
        spec = starting.prepare(job, self.folder, freeze=True)
        return starting.claim(self.store, job, spec)[0]

    def launch(self, **data: Any) -> StateKey:
        """A whole launch; the key of the point that it leaves."""
        attempt = self.begin(**data)
        journal = JournalWriter(self.store.storage, attempt.number)
        note_beginning(journal, attempt, self.config(**data).flat())
        journal.generation(start(1, attempt.parent, attempt.number))
        first = attempt.parent.step if attempt.parent else 0
        for step in range(first + 1, first + 11):
            journal.step(record(key(step, attempt=attempt.number)))
        at = key(first + 10, attempt=attempt.number)
        votes = [write_vote(self.store.storage, at, rank) for rank in range(2)]
        flat = self.config(**data).flat()
        note_committed(journal, self.store.commit_point(votes, flat, {"rule": "none"}, attempt.parent))
        journal.close()
        self.store.write_end(attempt.number, "stopped", "asked to")
        return at


@pytest.fixture
def runner(tiny_config: Any) -> Runner:
    return Runner(tiny_config({"train.max_steps": 1000}))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize(("first", "other"), [("tokenizers", "gigatoken"), ("gigatoken", "tokenizers")])
def test_another_encoder_is_told_and_stays_at_every_later_start(
    runner: Runner, first: str, other: str
) -> None:
    newest = runner.launch(encoder=first)
    before = files(runner.folder)
    plan = runner.plan(encoder=other)
    assert (plan.action, plan.point) == ("resume", newest.point_name)
    (told,) = [d for d in plan.differences if d.field == "data.encoder"]
    assert (told.old.split()[0], told.new.split()[0], told.rule) == (first, other, "may_change")
    assert files(runner.folder) == before
    attempt = runner.begin(encoder=other)
    said: list[str] = []
    starting.announce(said.append, runner.config(encoder=other), attempt, plan)
    assert [text for text in said if "encodes from the next whole document on: source" in text]
    for wanted in (other, "auto", other):
        runner.launch(encoder=wanted)
        assert runner.begin(encoder="auto").encoders == attempt.encoders


def test_a_rewind_goes_back_to_who_encoded_then(runner: Runner) -> None:
    first = runner.launch(encoder="gigatoken")
    assert len(runner.begin(encoder="tokenizers").encoders) == 2
    runner.launch(encoder="tokenizers")
    job = runner.config()
    job = job.model_copy(update={"resume": job.resume.model_copy(update={"from_": first.point_name})})
    spec = starting.prepare(job, runner.folder, freeze=True)
    attempt, plan = starting.claim(runner.store, job, spec)
    assert attempt.encoders == plan.encoders
    assert [span.encoder.name for span in attempt.encoders] == ["gigatoken"]


def test_before_anything_is_trained_another_encoder_takes_the_place_of_the_first(runner: Runner) -> None:
    runner.begin(encoder="gigatoken")
    attempt = runner.begin(encoder="tokenizers")
    assert [(span.encoder.name, span.begins) for span in attempt.encoders] == [("tokenizers", {})]


def test_points_that_vanished_are_told_and_none_is_passed_in_silence(runner: Runner) -> None:
    older, newer = runner.launch(), runner.launch()
    shutil.rmtree(runner.folder / "points" / newer.point_name)
    told = f"warning: resume point {newer.point_name}"
    assert [note for note in runner.plan().notes if note.startswith(told)]
    attempt = runner.begin()
    assert (attempt.parent, [damage.point for damage in attempt.damages]) == (older, [newer.point_name])
    shutil.rmtree(runner.folder / "points")
    for look in (runner.begin, runner.plan):
        with pytest.raises(ResumePointError, match="none of the 1 resume points of this run is healthy"):
            look()


def test_a_restarted_coordinator_goes_on_although_no_point_is_whole(runner: Runner) -> None:
    runner.launch()
    attempt = runner.begin()
    journal = JournalWriter(runner.store.storage, attempt.number)
    note_beginning(journal, attempt, runner.config().flat())
    journal.close()
    shutil.rmtree(runner.folder / "points")
    again = continue_launch(runner.store, attempt, "host", no_fault)
    assert (again.number, again.point) == (attempt.number + 1, attempt.point), "members hold a newer state"


@pytest.mark.parametrize(
    ("folder", "text"),
    [("manifest", "its frozen data are gone"), ("attempts", r"attempt 1 has a journal but no claim")],
)
def test_a_run_that_lost_a_part_of_its_folder_is_refused_by_all_and_changed_by_none(
    runner: Runner, folder: str, text: str
) -> None:
    runner.launch()
    shutil.rmtree(runner.folder / folder)
    before = files(runner.folder)
    for read in (runner.plan, orchestrator.open(runner.folder).audit):
        with pytest.raises(OrchestratorError, match=text):
            read()
    assert files(runner.folder) == before
    with pytest.raises(OrchestratorError, match=text):
        starting.look_ahead(runner.store, runner.config(), runner.prepared())


def test_the_processes_of_a_killed_driver_are_waited_for_and_a_live_one_is_not(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "BUSY_WATCH_S", 0.5)
    driver = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(os, "getpid", lambda: driver.pid)
    number = runner.begin().number
    monkeypatch.undo()
    monkeypatch.setattr(starting, "BUSY_WATCH_S", 0.5)
    heart, over = runner.store.heartbeat(number), threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            heart.beat()

    orphan = threading.Thread(target=beat)
    orphan.start()
    said: list[str] = []
    try:
        with pytest.raises(BusyError, match="attempt 1 of launch"):
            starting.refuse_busy(runner.store, said.append)
        driver.kill()
        driver.wait()
        threading.Timer(2.0, over.set).start()
        starting.refuse_busy(runner.store, said.append)
        assert over.is_set(), "it waited for the orphan"
        assert "attempt 1 has no end record: checking for 0 s whether it still runs" in said
    finally:
        over.set()
        orphan.join()


def test_a_new_launch_removes_what_older_ones_left_and_says_so(runner: Runner) -> None:
    first = runner.launch()
    storage = runner.store.storage
    given_up, unfinished, later = (key(step, attempt=n) for step, n in ((14, 1), (17, 1), (5, 3)))
    for at in (given_up, unfinished, later):
        write_vote(storage, at, rank=0)
    attempt = runner.begin()
    assert attempt.number == 2
    assert attempt.leftovers == (Leftover(point=given_up.point_name), Leftover(point=unfinished.point_name))
    assert runner.store.leftovers() == [later.point_name], "what is not older stays"
    assert runner.store.point_names() == [first.point_name]
    assert runner.store.verify_point(first.point_name) == []
    journal = JournalWriter(storage, attempt.number)
    note_beginning(journal, attempt, {})
    journal.close()
    events = [event for event in read_journal(storage).events if event.kind == "leftover removed"]
    assert [event.fields["point"] for event in events] == [given_up.point_name, unfinished.point_name]
    said: list[str] = []
    starting.announce(said.append, runner.config(), attempt, runner.plan())
    assert [text for text in said if given_up.point_name in text] == [
        f"note: points/{given_up.point_name} was left of a save that was given up; it is removed"
    ]


def test_a_launch_that_did_not_say_its_end_keeps_its_saves_for_one_more_launch(runner: Runner) -> None:
    runner.launch()
    crashed = runner.begin()
    write_vote(runner.store.storage, key(14), rank=0)
    write_vote(runner.store.storage, key(12, attempt=crashed.number), rank=0)
    assert runner.begin().leftovers == (Leftover(point=key(14).point_name),)
    assert runner.begin().leftovers == (Leftover(point=key(12, attempt=crashed.number).point_name),)
    assert runner.store.leftovers() == []


def test_nothing_is_removed_once_a_newer_claim_exists(runner: Runner) -> None:
    runner.launch()
    write_vote(runner.store.storage, key(14), rank=0)
    runner.store.claim(2, "aaaa", RESUME, "host")
    runner.store.claim(3, "bbbb", RESUME, "host")
    assert remove_leftovers(runner.store, 2) == ()
    assert runner.store.leftovers() == [key(14).point_name]
    assert remove_leftovers(runner.store, 3) == (Leftover(point=key(14).point_name),)


def test_a_refused_start_removes_nothing(runner: Runner) -> None:
    runner.launch()
    write_vote(runner.store.storage, key(14), rank=0)
    with pytest.raises(RefusedError):
        runner.begin(seed=1)
    assert runner.store.leftovers() == [key(14).point_name]


def test_what_cannot_be_removed_is_told_and_stops_no_start(runner: Runner) -> None:
    runner.launch()
    write_vote(runner.store.storage, key(14), rank=0)
    stuck = RunStore(Storage(str(runner.folder), Failing("remove_folder", errno.EBUSY), no_sleep))
    (left,) = remove_leftovers(stuck, 2)
    assert left.point == key(14).point_name
    assert "EBUSY" in left.kept
    assert "could not be removed" in str(left)
    assert remove_leftovers(runner.store, 2) == (Leftover(point=key(14).point_name),)


@pytest.mark.parametrize("file", ["attempts/0002.json", "attempts/0002.parent.json"])
def test_a_file_of_an_attempt_that_cannot_be_read_is_told_to_user_and_journal(
    runner: Runner, file: str
) -> None:
    runner.launch()
    runner.launch()
    path = runner.folder / file
    path.write_bytes(path.read_bytes()[:40])
    attempt = runner.begin()
    assert [unreadable.path for unreadable in attempt.unreadable] == [file]
    said: list[str] = []
    starting.announce(said.append, runner.config(), attempt, runner.plan())
    assert [text for text in said if text.startswith(f"warning: {file} is not as it was written: ")]
    journal = JournalWriter(runner.store.storage, attempt.number)
    note_beginning(journal, attempt, {})
    journal.close()
    (event,) = [e for e in read_journal(runner.store.storage).events if e.kind == "unreadable file"]
    assert event.fields["file"] == file
