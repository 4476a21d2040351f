"""What every start does before there is a cluster: one row of starts after another, on the real store and the
real data.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.checkpoint.points.store import Leftover, PointStatus, RunStore, remove_leftovers
from orchestrator.config.loading import parse_config
from orchestrator.coordinator.attempt.attempt import Attempt, note_beginning
from orchestrator.coordinator.attempt.launch_attempts import continue_launch
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.errors import OrchestratorError, RefusedError, ResumePointError
from orchestrator.faults import no_fault
from orchestrator.history.claims.claim_files import RESUME
from orchestrator.history.journal import journal_reader as reader
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.run import Run
from orchestrator.launch.process import launch_report
from orchestrator.launch.start import attempt_claim, preview
from orchestrator.launch.start import run_preparation as starting
from orchestrator.planning.schedule import Budgets
from orchestrator.records.steps import StepRecord
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, no_sleep, record, write_vote
from tests.folders import files
from tests.launch.coordinated import Coordinated
from tests.launch.runner import Runner, begun, newest_attempt, nobody, rewind
from tests.raising import raises
from tests.storage.failing import FailingDisk

NO_FATES = PointStatus(kept=frozenset(), deleted=frozenset())


def test_a_rewind_keeps_its_parent_and_counts_nothing_that_it_left_behind(runner: Runner) -> None:
    parent, orphan = runner.launch(), runner.launch()
    attempt, _, job = rewind(runner, parent, keep_latest=2)
    assert attempt.inherited == (parent.point_name,), "what is newer than the parent is off the history"
    with Coordinated(runner.store, attempt, job) as group:
        left = [parent.point_name, orphan.point_name]
        for step in (20, 30):
            at = key(step, attempt=attempt.number)
            group.report([record(replace(at, step=n)) for n in range(step - 9, step + 1)])
            assert group.save(at) == [True, True]
            left.append(at.point_name)
            if step == 20:
                assert runner.store.point_names() == left
        group.finished(at, "stopped")
        assert group.settle()
    # two newer points of the history are verified: the parent is one of many now
    assert runner.store.point_names() == left[1:]
    assert [row["on_lineage"] for row in orchestrator.open(runner.folder).list_points()] == [
        False,
        True,
        True,
    ]


def test_a_rewind_says_what_leaves_the_history_and_is_not_done_again_by_the_same_command(
    runner: Runner,
) -> None:
    first, second, third = runner.launch(), runner.launch(), runner.launch()
    back = {"resume": {"from": first.point_name}}
    points = f"2 resume points, {second.point_name} to {third.point_name}"
    assert f"20 steps after it, 11 to 30 and {points}, leave" in runner.plan(**back).rewind
    fourth = runner.launch(**back)
    assert (fourth.attempt, fourth.step) == (4, 20), "from the named point on"
    # the same command, also with another number of workers or points, goes on from where that has come
    again = {"resume": {**back["resume"], "keep_latest": 7}}
    plan = runner.plan(**again)
    assert (plan.point, "the attempt before has done that" in plan.rewind) == (fourth.point_name, True)
    said: list[str] = []
    spec = runner.prepared(**again)
    newest = newest_attempt(runner.store)
    with attempt_claim.claimed(runner.store, runner.config(**again), spec, newest) as begun:
        launch_report.announce(said.append, runner.config(**again), *begun)
    assert begun[0].point is not None
    assert begun[0].point.name == fourth.point_name
    assert any("the attempt before has done that" in line for line in said)
    # what trains something else rewinds once more
    other = runner.plan(**back, train={"lr": 0.5})
    assert other.point == first.point_name
    assert re.search(r"10 steps after it, 11 to 20 and resume point \S+, leave", other.rewind)
    assert runner.plan().rewind == ""


def test_a_start_that_has_nothing_left_to_train_verifies_the_point_that_says_so(runner: Runner) -> None:
    older, newest = runner.launch(), runner.launch()
    job = runner.config()
    done = runner.store.read_point(newest.point_name).cursor.consumed_samples
    stop = {"max_steps": None, "max_samples": done}
    job = job.model_copy(update={"train": job.train.model_copy(update=stop)})
    plan = preview.look_before_start(runner.store, job, runner.prepared(), nobody)
    assert (plan.point, preview.reached(plan)) == (newest.point_name, True)
    weights = max((runner.folder / "points" / newest.point_name / "state").iterdir())
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    plan = preview.look_before_start(runner.store, job, runner.prepared(), nobody)
    assert (plan.point, preview.reached(plan)) == (older.point_name, False)
    assert any(weights.name in note and "falling back" in note for note in plan.notes)


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
    launch_report.announce(said.append, runner.config(encoder=other), attempt, plan)
    assert [text for text in said if "encodes from the next whole document on: source" in text]
    for wanted in (other, "auto", other):
        runner.launch(encoder=wanted)
        assert runner.begin(encoder="auto").encoders == attempt.encoders


def test_a_rewind_goes_back_to_who_encoded_then(runner: Runner) -> None:
    first = runner.launch(encoder="gigatoken")
    assert len(runner.begin(encoder="tokenizers").encoders) == 2
    runner.launch(encoder="tokenizers")
    attempt, plan, _ = rewind(runner, first)
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
    assert (attempt.parent, [damage.point for damage in attempt.found.damages]) == (older, [newer.point_name])
    shutil.rmtree(runner.folder / "points")
    for look in (runner.begin, runner.plan):
        with raises(ResumePointError, "point.none_healthy", " 1 "):
            look()


def test_a_survey_without_steps_finds_the_same_points_generations_and_newest_records(runner: Runner) -> None:
    names = [runner.launch() for _ in range(4)]
    rewind(runner, names[1])
    runner.launch()
    shutil.rmtree(runner.folder / "points" / names[0].point_name)
    whole, quick = survey(runner.store), survey(runner.store, with_steps=False)
    same = ("points", "missing", "lost", "foreign", "fates", "encoders", "unreadable")
    assert [getattr(whole, name) for name in same] == [getattr(quick, name) for name in same]
    assert (whole.lost, len(whole.points)) == ((names[0].point_name,), 2)
    assert (whole.journal.generations, whole.journal.events) == (
        quick.journal.generations,
        quick.journal.events,
    )
    ids = {(r.attempt, r.generation) for r in whole.journal.records}
    newest = {max(r.key for r in whole.journal.records if (r.attempt, r.generation) == id_) for id_ in ids}
    assert {r.key for r in quick.journal.records} == newest
    keys = [record.key for record in whole.journal.records]
    assert [whole.lineage.on_lineage(at) for at in keys] == [quick.lineage.on_lineage(at) for at in keys]


def test_a_restarted_coordinator_reads_only_the_newest_step_records(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.launch()
    attempt = begun(runner)
    decoded: list[Any] = []
    real = reader.decode
    monkeypatch.setattr(reader, "decode", lambda kind, *rest: decoded.append(kind) or real(kind, *rest))
    again = continue_launch(runner.store, attempt, "host", no_fault)
    assert again.number == attempt.number + 1
    assert decoded.count(StepRecord) == 1, "one generation of ten steps"


def test_a_restarted_coordinator_goes_on_although_no_point_is_whole(runner: Runner) -> None:
    runner.launch()
    attempt = runner.begin()
    journal = runner.journal(attempt)
    note_beginning(journal, attempt, runner.config().flat())
    journal.close()
    shutil.rmtree(runner.folder / "points")
    again = continue_launch(runner.store, attempt, "host", no_fault)
    assert (again.number, again.point) == (attempt.number + 1, attempt.point), "members hold a newer state"


@pytest.mark.parametrize(
    ("folder", "code", "value"),
    [
        ("manifest", "data.frozen_gone", "manifest/data.json"),
        ("attempts", "history.inconsistent", "attempts/0001.json"),
    ],
)
def test_a_run_that_lost_a_part_of_its_folder_is_refused_by_all_and_changed_by_none(
    runner: Runner, folder: str, code: str, value: str
) -> None:
    runner.launch()
    shutil.rmtree(runner.folder / folder)
    before = files(runner.folder)
    for read in (runner.plan, orchestrator.open(runner.folder).audit):
        with raises(OrchestratorError, code, value):
            read()
    assert files(runner.folder) == before
    with raises(OrchestratorError, code, value):
        preview.look_ahead(runner.store, runner.config(), runner.prepared())


def test_a_run_of_a_version_that_stored_model_dtype_is_read_and_continued(runner: Runner) -> None:
    def older(flat: dict[str, Any]) -> dict[str, Any]:
        return {**{name: flat[name] for name in flat if name != "train.precision"}, "model.dtype": "float32"}

    runner.as_stored = older
    newest = runner.launch()
    assert orchestrator.open(runner.folder).config() == runner.config()
    plan = runner.plan()
    assert (plan.action, plan.point, plan.differences) == ("resume", newest.point_name, ())
    assert runner.begin().parent == newest


def test_a_new_launch_removes_what_older_ones_left_and_says_so(runner: Runner) -> None:
    first = runner.launch()
    storage = runner.store.storage
    given_up, unfinished, later = (key(step, attempt=n) for step, n in ((14, 1), (17, 1), (5, 3)))
    for at in (given_up, unfinished, later):
        write_vote(storage, at, rank=0)
    attempt = runner.begin()
    assert attempt.number == 2
    removed = (given_up.point_name, unfinished.point_name)
    assert attempt.found.leftovers == tuple(Leftover(point=name) for name in removed)
    assert runner.store.leftovers() == [later.point_name], "what is not older stays"
    assert runner.store.point_names() == [first.point_name]
    assert runner.store.verify_point(first.point_name) == []
    journal = runner.journal(attempt)
    note_beginning(journal, attempt, {})
    journal.close()
    events = [event for event in read_journal(storage).events if event.kind == "leftover removed"]
    assert [event.fields["point"] for event in events] == [given_up.point_name, unfinished.point_name]
    said: list[str] = []
    launch_report.announce(said.append, runner.config(), attempt, runner.plan())
    assert [text for text in said if given_up.point_name in text] == [
        f"note: points/{given_up.point_name} was left of a save that was given up; it is removed"
    ]


def test_a_launch_that_did_not_say_its_end_keeps_its_saves_for_one_more_launch(runner: Runner) -> None:
    runner.launch()
    crashed = runner.begin()
    write_vote(runner.store.storage, key(14), rank=0)
    write_vote(runner.store.storage, key(12, attempt=crashed.number), rank=0)
    assert runner.begin().found.leftovers == (Leftover(point=key(14).point_name),)
    assert runner.begin().found.leftovers == (Leftover(point=key(12, attempt=crashed.number).point_name),)
    assert runner.store.leftovers() == []


def test_the_rest_of_a_deleted_point_goes_although_its_launch_did_not_say_its_end(runner: Runner) -> None:
    runner.launch()
    crashed = runner.begin()
    deleted, unfinished = key(12, attempt=crashed.number), key(14, attempt=crashed.number)
    for at in (deleted, unfinished):
        write_vote(runner.store.storage, at, rank=0)
    journal = runner.journal(crashed)
    journal.event(EventKind.DELETING_POINTS, points=[deleted.point_name])
    journal.close()
    assert runner.begin().found.leftovers == (Leftover(point=deleted.point_name),)
    assert runner.store.leftovers() == [unfinished.point_name]


def test_nothing_is_removed_once_a_newer_claim_exists(runner: Runner) -> None:
    runner.launch()
    write_vote(runner.store.storage, key(14), rank=0)
    run = runner.store.read_run()
    assert run is not None
    runner.store.claim(2, "aaaa", RESUME, "host", run.id)
    runner.store.claim(3, "bbbb", RESUME, "host", run.id)
    assert remove_leftovers(runner.store, 2, NO_FATES) == ()
    assert runner.store.leftovers() == [key(14).point_name]
    assert remove_leftovers(runner.store, 3, NO_FATES) == (Leftover(point=key(14).point_name),)


def test_a_refused_start_removes_nothing(runner: Runner) -> None:
    runner.launch()
    write_vote(runner.store.storage, key(14), rank=0)
    with pytest.raises(RefusedError):
        runner.begin(seed=1)
    assert runner.store.leftovers() == [key(14).point_name]


def test_a_start_that_fails_before_anything_could_write_for_it_says_its_end_and_is_not_watched(
    runner: Runner,
) -> None:
    runner.launch()
    with raises(RefusedError, "resume.changed_setting", "data.seed"):
        runner.begin(seed=1)
    end = runner.store.read_end(2)
    assert end is not None
    assert end.outcome == "failed"
    assert "data.seed" in end.reason
    assert attempt_claim.refuse_busy(runner.store, pytest.fail) == 2


def test_a_start_whose_coordinator_has_begun_or_that_was_overtaken_says_no_end(runner: Runner) -> None:
    job, store = runner.config(), runner.store
    spec = starting.prepare(job, runner.store.storage, freeze=True)

    def fail(watched: int, meanwhile: Callable[[Attempt], None]) -> None:
        with attempt_claim.claimed(store, job, spec, watched) as (attempt, _):
            meanwhile(attempt)
            raise KeyboardInterrupt

    def begin(attempt: Attempt) -> None:
        journal = runner.journal(attempt)
        note_beginning(journal, attempt, {})
        journal.close()

    def overtake(attempt: Attempt) -> None:
        store.claim(attempt.number + 1, "bbbb", RESUME, "host", attempt.run_id)

    for watched, meanwhile in enumerate((begin, overtake)):
        with pytest.raises(KeyboardInterrupt):
            fail(watched, meanwhile)
        assert store.read_end(watched + 1) is None


def test_what_cannot_be_removed_is_told_and_stops_no_start(runner: Runner) -> None:
    runner.launch()
    write_vote(runner.store.storage, key(14), rank=0)
    stuck = RunStore(Storage(str(runner.folder), FailingDisk("remove_folder", errno.EBUSY), no_sleep))
    (left,) = remove_leftovers(stuck, 2, NO_FATES)
    assert left.point == key(14).point_name
    assert "EBUSY" in left.kept
    assert "could not be removed" in str(left)
    assert remove_leftovers(runner.store, 2, NO_FATES) == (Leftover(point=key(14).point_name),)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.quick(
    "attempts/{:04d}.parent.json-attempts/{:04d}.parent.json-emptied-1",
    "attempts/{:04d}.parent.json-attempts/{:04d}.parent.json-unlink-2",
)
@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("damage", [Path.unlink, emptied])
@pytest.mark.parametrize(
    ("file", "named"), [("attempts/{:04d}.parent.json", "attempts/{:04d}.parent.json")]
)
def test_a_piece_without_which_what_was_trained_has_no_history_ends_no_run_in_silence(
    runner: Runner, launches: int, damage: Callable[[Path], None], file: str, named: str
) -> None:
    for _ in range(launches):
        runner.launch()
    damage(runner.folder / file.format(launches))
    for ask in (runner.plan, runner.begin):
        with raises(OrchestratorError, "history.inconsistent", named.format(launches)):
            ask()
    status = Run(runner.folder).status(0)
    assert status.is_broken
    assert any(named.format(launches) in piece for piece in status.missing)
    assert "continues" not in status.verdict


def test_a_plan_says_that_the_journal_lacks_steps_before_the_point(runner: Runner) -> None:
    runner.launch()
    assert not [note for note in runner.plan().notes if "lacks records" in note]
    path = runner.folder / "journal/a0001/000001.jsonl"
    *before, last, end = path.read_bytes().split(b'{"format"')
    assert b'"kind":"step"' in last
    path.write_bytes(b'{"format"'.join(before))
    plan = runner.plan()
    assert plan.action == "resume"
    assert [note for note in plan.notes if "the journal lacks records of steps before" in note]


def test_a_start_that_found_the_data_at_their_end_says_so_and_what_leads_further(tiny_config: Any) -> None:
    def why(last: StepRecord | None = None, **data: Any) -> str:
        job = parse_config(tiny_config({f"data.{name}": value for name, value in data.items()}))
        return launch_report.why_done(job, Budgets(), last)

    assert why(record(key(4))) == "the data have ended (data.num_epochs=1); to go on, raise data.num_epochs"
    assert why() == (
        "the data had ended before, at the resume point that it continued (data.num_epochs=1): to train on, "
        "raise data.num_epochs"
    )
    two = [
        {"name": name, "path": name, "format": "jsonl", "weight": 1, "max_epochs": 2} for name in ("a", "b")
    ]
    assert why(sources=two).endswith(
        "(data.num_epochs=1, a: max_epochs=2, b: max_epochs=2, data.on_end=stop: with the first source that "
        "cannot fill a sample): to train on, raise data.num_epochs or the source's max_epochs, or set "
        "data.on_end=drop (go on with the others) or repeat (begin the source anew)"
    )
    assert "on_end" not in why(sources=two, on_end="drop")


@pytest.mark.parametrize("file", ["attempts/0002.json", "attempts/0002.parent.json"])
def test_a_file_of_an_attempt_that_cannot_be_read_is_told_to_user_and_journal(
    runner: Runner, file: str
) -> None:
    runner.launch()
    runner.begin()  # it dies before its journal
    path = runner.folder / file
    path.write_bytes(path.read_bytes()[:40])
    attempt = runner.begin()
    assert [unreadable.path for unreadable in attempt.found.unreadable] == [file]
    said: list[str] = []
    launch_report.announce(said.append, runner.config(), attempt, runner.plan())
    assert [text for text in said if text.startswith(f"warning: {file} is not as it was written: ")]
    journal = runner.journal(attempt)
    note_beginning(journal, attempt, {})
    journal.close()
    (event,) = [e for e in read_journal(runner.store.storage).events if e.kind == "unreadable file"]
    assert event.fields["file"] == file


def test_a_function_that_does_not_exist_is_told_before_its_resume_is_refused(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("class Leon:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    runner.launch()
    changed = "resume.changed_optimizer"
    for optimizer, codes, values in (
        ("mine:Lion", ["optimizer.not_callable"], ["train.optimizer=mine:Lion", "mine:Leon"]),
        ("mien:Leon", ["optimizer.not_callable"], ["train.optimizer=mien:Leon", "mine:Leon"]),
        ("mine:Leon", [changed], ["adamw", "mine:Leon", "resume.optimizer=reset"]),
    ):
        job = runner.config(train={"optimizer": optimizer})
        assert list(runner.plan(train={"optimizer": optimizer}).codes) == [changed]
        plan = preview.with_missing_functions(job, runner.plan(train={"optimizer": optimizer}))
        assert (plan.action, list(plan.codes)) == ("refuse", codes)
        assert all(value in plan.refusals[0] for value in values), plan.refusals[0]
        spec = starting.prepare(job, runner.store.storage, freeze=False)
        with raises(RefusedError, codes[0], *values):
            preview.reached(preview.look_before_start(runner.store, job, spec, lambda: 0))
