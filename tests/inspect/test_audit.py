"""An audit shows what was trained, says what it cannot show, and finds planted faults, whole or in parts.

Runs are made here by taking batches from the real feed and journalling them, without a model.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from orchestrator.cli.commands import main
from orchestrator.config.loading import parse_config
from orchestrator.coordinator.attempt import survey as survey_module
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data import frozen
from orchestrator.data.feed import feed_reports
from orchestrator.data.feed.feed_reports import FeedLog
from orchestrator.data.packing.packer import Packer
from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.data.sources import windows as sources
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.records import line_records
from orchestrator.data.tokens import chunk_writer
from orchestrator.errors import DataIdentityError, RefusedError
from orchestrator.history.step_names import find_step, find_steps, step_name
from orchestrator.inspect.audit.audit import audit_history
from orchestrator.inspect.audit.reference.reference_packing import ReferencePacker, Samples
from orchestrator.json_form import decode
from orchestrator.launch.start import run_preparation as starting
from orchestrator.planning.encoders import EncoderSpan, with_encoder
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import StateKey, StepRange
from tests.checkpoint.samples import write_vote
from tests.data.encoders import FAST, SLOW, save_tokenizer
from tests.data.making import some_texts, write_corpus
from tests.inspect.trained_run import (
    Make,
    TrainedRun,
    a_block_twice,
    made_in,
    one_lost_one_repeated,
    one_token_later,
)
from tests.raising import raises


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make) -> TrainedRun:
    """A run that has trained nothing, only to be copied."""
    return TrainedRun(made_in(tmp_path_factory.mktemp("made"), tiny_config))


@pytest.fixture
def run(prepared: TrainedRun, tmp_path: Path) -> TrainedRun:
    """A new run on files that nobody changes."""
    return prepared.copied(tmp_path / "runs")


@pytest.fixture(scope="module")
def label_twice(prepared: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Steps 1 to 6, then 4 to 9, only to be read."""
    run = prepared.copied(tmp_path_factory.mktemp("twice"))
    run.attempt(6)
    run.attempt(6, label=3)
    return run


def test_a_run_that_was_trained_to_its_end_is_shown_whole(run: TrainedRun) -> None:
    run.attempt(7)
    run.attempt(1000, batch=16, seq_len=50)
    report = run.audit()
    assert report["exactly_once"], report["first_difference"]
    assert report["not_shown"] == [], "the last epoch is compared, too"
    assert (report["samples"], report["tokens"]) == (run.cursor.consumed_samples, run.cursor.consumed_tokens)
    assert (report["attempts"], report["first_step"]) == (2, "1")
    assert report["last_step"] == str(report["steps"])


def test_what_an_audit_leaves_open_it_says(run: TrainedRun) -> None:
    run.attempt(12)
    (text,) = run.audit()["not_shown"]
    assert text == "completeness of epoch 0 (the audited steps end inside it); no duplicates found"
    (text,) = run.audit("7:9")["not_shown"]
    assert text == "completeness of epoch 0 (the audited steps begin inside it); no duplicates found"


def test_parts_begin_at_the_nearest_cursor_and_join(run: TrainedRun) -> None:
    run.attempt(21, wrong=2)
    assert run.audit()["first_difference"]["step"] == "2"
    for steps, exactly_once in (
        ("3:", True),
        ("2:", False),
        ("1:1", True),
        ("5:9", True),
        (":1", True),
        ("9:21", True),
    ):
        report = run.audit(steps)
        assert report["exactly_once"] is exactly_once, (steps, report)
    report = run.audit("6:9")
    assert (report["steps"], report["samples"], report["tokens"]) == (4, 32, 4 * 8 * 64)
    assert (report["first_step"], report["last_step"]) == ("6", "9")


def test_a_wrong_step_right_before_a_cursor_is_found_by_an_audit_that_begins_with_it(
    run: TrainedRun,
) -> None:
    run.attempt(9, wrong=4)  # a cursor stands behind step 4
    assert run.audit("4:5")["first_difference"]["step"] == "4"
    assert run.audit("5:")["exactly_once"]


def test_a_cursor_that_is_not_the_streams_is_found_by_whoever_passes_it_or_begins_there(
    run: TrainedRun,
) -> None:
    run.attempt(6, noted=one_token_later)
    found = run.audit()["first_difference"]
    assert (found["step"], "the journal's cursor after it" in found["reason"]) == ("4", True)
    with raises(DataIdentityError, "resume.cursor_mismatch", "tokens before it"):
        run.audit("5:6")


def test_a_label_that_occurs_twice_is_written_with_its_attempt(run: TrainedRun) -> None:
    run.attempt(6)
    run.attempt(6, batch=16, label=3, wrong=9)
    report = run.audit("a1:2:a2:8")
    assert (report["first_step"], report["last_step"], report["steps"]) == ("2", "8", 10)
    assert run.audit("a1:5:a2:5")["first_step"] == "a1:5"
    assert (run.audit(" 7 ")["steps"], run.audit("a2:5")["last_step"]) == (1, "a2:5")
    assert run.audit("8:")["first_difference"]["step"] == "9"
    records = run.records()
    assert [step_name(records, i) for i in range(len(records))] == [
        *("1", "2", "3", "a1:4", "a1:5", "a1:6", "a2:4", "a2:5", "a2:6", "7", "8", "9")
    ]
    assert (find_step(records, "a2:4"), find_steps(records, ":3")) == (6, range(3))


@pytest.mark.parametrize(
    ("steps", "code", "values"),
    [
        ("5:8", "command.ambiguous_step", ("step 5 ", "2 times", "a1:5 or a2:5")),
        ("7:99", "command.unknown_step", ("step 99;", "step 1 ", "step 9")),
        ("a1:9:", "command.unknown_step", ("step a1:9;",)),
        ("8:7", "command.empty_range", ("8:7: 7 ", "before 8")),
        ("a2:5:a1:6", "command.empty_range", (": a1:6 ", "before a2:5")),
        ("5", "command.ambiguous_step", ("step 5 ", "2 times")),
        ("a3:5", "command.unknown_step", ("step a3:5;", "step 1 ", "step 9", "a1, a2")),
        ("7-8", "command.step_range", ("'7-8'", "A:B")),
        ("٣:5", "command.step_range", ("'٣:5'",)),
        ("-1:5", "command.step_range", ("'-1:5'",)),
    ],
)
def test_steps_that_are_not_there_or_not_one_are_refused(
    label_twice: TrainedRun, steps: str, code: str, values: tuple[str, ...]
) -> None:
    with raises(RefusedError, code, *values):
        label_twice.audit(steps)


def test_the_command_audits_steps_and_says_what_it_leaves_open(
    run: TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.attempt(8, wrong=8)
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder), "--steps", "2:4"])
    said = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert said.startswith("steps 2 to 4: 24 samples, 1,536 tokens, 3 steps, 1 attempt, exactly once")
    assert "not verified: completeness of epoch 0 (the audited steps end inside it)" in said
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder), "--steps", "5:", "--json"])
    assert ended.value.code == 1
    assert orjson.loads(capsys.readouterr().out)["first_difference"]["step"] == "8"
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder), "--steps", "9:"])
    assert (ended.value.code, "no step 9" in capsys.readouterr().err) == (2, True)


# ---------------------------------------------------------------------------------------- planted faults
def test_where_nothing_is_trained_no_proof_is_claimed(
    run: TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.attempt(0)
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder)])
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out == "nothing is trained yet, so there is nothing to compare\n"
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder), "--json"])
    assert ended.value.code in (0, None)
    report = orjson.loads(capsys.readouterr().out)
    assert (report["exactly_once"], report["first_difference"], report["steps"]) == (None, None, 0)
    assert report["not_shown"] == ["anything: nothing is trained yet, so there is nothing to compare"]


def a_line_lost_at_each_border(file: Any, start: int, stop: int, size: int) -> tuple[int, bytes]:
    """Begins at `start` instead of the byte before it (data rule 10)."""
    begin, data = readers_range(file, start, stop, size)
    cut = data.find(b"\n") + 1 if start else 0
    return begin + cut, data[cut:]


def the_last_id_is_not_eos(ids: Any, lengths: Any, first: Any, last: Any, settings: Any) -> Any:
    """Each document ends with the id that begins it."""
    tokens, wrapped = chunks_wrap(ids, lengths, first, last, settings)
    ends = np.cumsum(wrapped)
    tokens[ends - 1] = tokens[ends - wrapped]
    return tokens, wrapped


readers_range, chunks_wrap = line_records.read_range, chunk_writer._wrap
WRONG = [
    (sources, "block_at", a_block_twice, "epoch 0 held the record at"),
    (line_records, "read_range", a_line_lost_at_each_border, "the files hold"),
    (chunk_writer, "_wrap", the_last_id_is_not_eos, "the files hold"),
]


@pytest.mark.parametrize(("module", "name", "wrong", "text"), WRONG)
def test_a_fault_that_the_recomputed_stream_has_too_is_found_in_the_files(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch, module: Any, name: str, wrong: Any, text: str
) -> None:
    monkeypatch.setattr(module, name, wrong)
    run = TrainedRun(mapping)
    run.attempt(1000)
    found = run.audit()["first_difference"]
    assert found is not None
    assert (found["step"], text in found["reason"]) == (None, True)


def labels_are_inputs(inputs: Any, labels: Any, documents: Any) -> None:
    np.copyto(labels, inputs, where=labels >= 0)


def labels_one_too_far(inputs: Any, labels: Any, documents: Any) -> None:
    labels[:, 1:-1] = labels[:, 2:]


def one_document_per_sample(inputs: Any, labels: Any, documents: Any) -> None:
    documents[documents > 0] = 0


def documents_from_one(inputs: Any, labels: Any, documents: Any) -> None:
    documents[documents >= 0] += 1


def a_document_too_many(inputs: Any, labels: Any, documents: Any) -> None:
    documents[:, 30:][documents[:, 30:] >= 0] += 1


def padding_is_trained(inputs: Any, labels: Any, documents: Any) -> None:
    labels[labels < 0] = 0


def padding_is_a_document(inputs: Any, labels: Any, documents: Any) -> None:
    documents[documents < 0] = 0


def padding_has_tokens(inputs: Any, labels: Any, documents: Any) -> None:
    inputs[documents < 0] = 7


PACKED_WRONG = [
    (one_lost_one_repeated, "one after the other"),
    (labels_are_inputs, "labels are not its inputs one token further"),
    (labels_one_too_far, "labels are not its inputs one token further"),
    (one_document_per_sample, "document ids do not change where documents begin"),
    (a_document_too_many, "document ids"),
    (documents_from_one, "document ids do not count"),
    (padding_is_trained, "targets, it counted"),
    (padding_is_a_document, "padding is not all"),
    (padding_has_tokens, "padding is not all"),
]
Change = Callable[[Any, Any, Any], None]


def plant_in_the_trainers_packer(monkeypatch: pytest.MonkeyPatch, wrong: Change) -> None:
    """What the ranks are handed, and so what they train and digest, is changed by `wrong`."""
    right = StepSamples.rows

    def rows(self: StepSamples, start: int, stop: int) -> Any:
        numbers, *samples = (array.copy() for array in right(self, start, stop))
        wrong(*samples)
        return numbers, *samples

    monkeypatch.setattr(StepSamples, "rows", rows)


def plant_in_both_packers(monkeypatch: pytest.MonkeyPatch, wrong: Change) -> None:
    """The audit's own packer makes the same fault."""
    right = ReferencePacker.samples

    def samples(self: ReferencePacker, num_tokens: int, seq_len: int) -> Samples:
        found = right(self, num_tokens, seq_len)
        wrong(found.input_ids, found.labels, found.document_ids)
        return found

    plant_in_the_trainers_packer(monkeypatch, wrong)
    monkeypatch.setattr(ReferencePacker, "samples", samples)


@pytest.mark.quick(
    "one_lost_one_repeated",
    "labels_one_too_far",
    "documents_from_one",
    "one_document_per_sample",
    "labels_are_inputs",
)
@pytest.mark.parametrize("wrong", [wrong for wrong, _ in PACKED_WRONG])
def test_what_the_trainers_packer_does_wrong_is_found_in_the_step_that_trained_it(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch, wrong: Change
) -> None:
    plant_in_the_trainers_packer(monkeypatch, wrong)
    run.attempt(1000)
    found = run.audit()["first_difference"]
    assert found is not None
    last = str(len(run.records()))
    assert found["step"] == (last if "padding" in wrong.__name__ else "1")
    assert "trained samples have digest" in found["reason"]


def test_a_packer_that_loses_a_token_at_each_step_and_repeats_one_is_found(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Packer._gather

    def gather(self: Packer, start: int, stop: int) -> Any:
        run = right(self, start, stop)
        tokens = np.concatenate([run.tokens[:9], run.tokens[8:9], run.tokens[10:]])
        return replace(run, tokens=tokens)

    monkeypatch.setattr(Packer, "_gather", gather)
    run.attempt(1000)
    found = run.audit()["first_difference"]
    assert found is not None
    assert (found["step"], "trained samples have digest" in found["reason"]) == ("1", True)


@pytest.mark.quick(
    "6-a_document_too_many-document ids",
    "1000-documents_from_one-document ids do not count",
    "6-labels_are_inputs-labels are not its inputs one token further",
    "6-one_lost_one_repeated-one after the other",
    "6-one_document_per_sample-document ids do not change where documents begin",
    "1000-padding_is_trained-targets, it counted",
    "1000-padding_is_a_document-padding is not all",
    "6-labels_one_too_far-labels are not its inputs one token further",
    "1000-padding_has_tokens-padding is not all",
)
@pytest.mark.parametrize(
    ("num_steps", "wrong", "text"),
    [(1000, *planted) for planted in PACKED_WRONG]
    # where no epoch is finished; only the last sample of all has padding
    + [(6, *planted) for planted in PACKED_WRONG if "padding" not in planted[0].__name__],
)
def test_what_both_packers_do_wrong_is_found_in_the_samples_own_tokens(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch, num_steps: int, wrong: Change, text: str
) -> None:
    plant_in_both_packers(monkeypatch, wrong)
    run.attempt(num_steps)
    found = run.audit()["first_difference"]
    assert found is not None
    assert text in found["reason"]


# ---------------------------------------------------------------------------------------- later pieces
def in_small_pieces(run: TrainedRun, noted: Callable[[Cursor], Cursor] = lambda cursor: cursor) -> None:
    """The run trains documents of up to a dozen pieces, some of which are cut into several chunks."""
    small = replace(run.spec.settings, piece_bytes=64, chunk_tokens=20, num_epochs=None)
    run.spec = replace(run.spec, settings=small)
    run.attempt(240, batch=1, seq_len=47, noted=noted)


def inside_later_pieces(run: TrainedRun) -> list[tuple[str, SourceCursor]]:
    """The steps behind those cursors of the journal that lie in a later piece of a document, and these."""
    events = [event for event in survey(run.store).journal.events if event.kind == "cursor"]
    at = [decode(Cursor, event.fields["cursor"]) for event in events]
    steps = {record.consumed_tokens: record.step for record in run.records()}
    found = [(str(steps[c.consumed_tokens] + 1), c.sources["made"]) for c in at]
    return [(step, source) for step, source in found if source.piece and int(step) < len(steps)]


def as_older_versions_noted(cursor: Cursor) -> Cursor:
    """Without the earlier pieces' tokens."""
    source = replace(cursor.sources["made"], earlier_tokens=0, earlier_digest="")
    return replace(cursor, sources={"made": source})


@pytest.mark.parametrize("noted", [lambda cursor: cursor, as_older_versions_noted])
def test_an_audit_begins_inside_any_later_piece_of_a_document(
    run: TrainedRun, noted: Callable[[Cursor], Cursor]
) -> None:
    in_small_pieces(run, noted)
    seen, places = survey(run.store), inside_later_pieces(run)
    assert len(places) > 20
    assert {bool(source.token) for _, source in places} == {True, False}
    if noted is not as_older_versions_noted:
        assert max(source.earlier_tokens for _, source in places) > 60, "they are several chunks"
    for step, source in places:
        report = audit_history(run.spec, seen, f"{step}:{int(step) + 1}")
        assert report["exactly_once"], (step, source, report["first_difference"])


@pytest.mark.quick(
    "labels_one_too_far-labels are not its inputs one token further",
    "documents_from_one-document ids do not count",
    "a_document_too_many-document ids",
)
@pytest.mark.parametrize(
    ("wrong", "text"), [planted for planted in PACKED_WRONG if "padding" not in planted[0].__name__]
)
def test_what_both_packers_do_wrong_is_found_where_the_audit_begins_inside_a_later_piece(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch, wrong: Change, text: str
) -> None:
    plant_in_both_packers(monkeypatch, wrong)
    in_small_pieces(run)
    seen = survey(run.store)
    for step, _ in inside_later_pieces(run)[:8]:
        found = audit_history(run.spec, seen, f"{step}:{int(step) + 12}")["first_difference"]
        assert found is not None, step
        assert text in found["reason"]


@pytest.mark.parametrize("change", [{"earlier_tokens": 1}, {"earlier_digest": "0" * 16}, {"piece": 1}])
def test_a_cursor_whose_earlier_pieces_are_not_the_documents_is_refused(
    run: TrainedRun, change: dict[str, Any]
) -> None:
    def wrong(cursor: Cursor) -> Cursor:
        source = cursor.sources["made"]
        if not source.earlier_digest:
            return cursor
        return replace(cursor, sources={"made": replace(source, **change)})

    in_small_pieces(run, noted=wrong)
    places = inside_later_pieces(run)
    for step, _ in places[:3]:
        with raises(DataIdentityError, "resume.cursor_mismatch", "earlier pieces"):
            audit_history(run.spec, survey(run.store), step)


def test_a_step_that_says_to_have_taken_what_makes_no_samples_is_found(run: TrainedRun) -> None:
    run.attempt(5)
    seen = survey(run.store)
    records = [*seen.lineage.records]
    records[2] = replace(records[2], consumed_samples=records[2].consumed_samples + 1)
    wrong = replace(seen, lineage=replace(seen.lineage, records=tuple(records)))
    found = audit_history(run.spec, wrong)["first_difference"]
    assert (found["step"], found["reason"]) == ("3", "the step took 9 samples of 64 for 512 tokens")


def test_a_cursor_of_steps_that_the_history_left_is_not_taken_for_one_of_its_own(
    run: TrainedRun,
) -> None:
    cursors: list[Cursor] = []

    def noted(cursor: Cursor) -> Cursor:
        cursors.append(cursor)
        return cursor if len(cursors) == 1 else one_token_later(cursor)

    run.attempt(9, noted=noted)  # the cursor after step 4, and after step 8 one of another stream
    run.key, run.cursor = run.records()[3].key, cursors[0]
    run.attempt(6, label=3)  # the history leaves attempt 1 after step 4, and notes none after its 8th step
    assert len(run.records()) == 10
    report = run.audit()
    assert report["exactly_once"], report["first_difference"]
    assert run.audit("a2:8:")["exactly_once"], "nor does an audit begin there"


# ---------------------------------------------------------------------------------------- lost records
def commit_point(run: TrainedRun) -> str:
    """Commits a point of where the run stands."""
    assert run.key is not None
    votes = [write_vote(run.store.storage, run.key, rank) for rank in range(2)]
    run.store.commit_point(votes, run.job.flat(), {"rule": "none"}, None, run_id=run.run_id)
    return run.key.point_name


def cut_the_journal(run: TrainedRun, kind: str, step: int) -> None:
    """The newest attempt's journal ends before this line, as if a crash had lost the rest."""
    segment = sorted((run.folder / "journal" / f"a{run.number:04d}").iterdir())[-1]
    kept: list[bytes] = []
    for line in segment.read_bytes().splitlines(keepends=True):
        found = orjson.loads(line)
        if (found["kind"], found.get("step")) == (kind, step):
            break
        kept.append(line)
    else:
        raise AssertionError("no such line")
    segment.write_bytes(b"".join(kept))


def test_records_that_are_missing_before_a_committed_point_are_a_gap_and_no_proof(
    run: TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.attempt(8)
    point = commit_point(run)
    assert run.audit()["exactly_once"]
    cut_the_journal(run, "step", 6)
    for steps in (None, "3:", "4:8", "5:7", "6", "7:8"):
        report = run.audit(steps)
        assert report["exactly_once"] is None, steps
        assert f"{point} was committed at step 8" in report["first_difference"]["reason"]
        assert report["first_difference"]["step"] is None
    assert run.audit("7:8")["samples"] == 0
    for steps in (":5", "2:4"):
        assert run.audit(steps)["exactly_once"], "it reaches no step whose record is missing"
    with raises(RefusedError, "command.unknown_step", "step 9;", "step 1 ", "step 8"):
        run.audit("3:9")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder)])
    told = capsys.readouterr().out
    assert ended.value.code == 1
    assert "the journal's last record before it is that of step 5: the records of 3 steps are missing" in told
    assert "NOT PROVEN" in told


def test_one_record_that_is_missing_before_a_committed_point_is_a_gap(run: TrainedRun) -> None:
    run.attempt(4)
    commit_point(run)
    cut_the_journal(run, "step", 4)
    found = run.audit()["first_difference"]
    assert found is not None
    assert "that of step 3: the records of 1 step are missing" in found["reason"]


def test_a_step_that_differs_is_named_before_the_records_that_are_missing_behind_it(
    run: TrainedRun,
) -> None:
    run.attempt(8, wrong=2)
    commit_point(run)
    cut_the_journal(run, "step", 6)
    assert run.audit()["first_difference"]["step"] == "2"


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_committed_point_of_a_generation_that_the_journal_lost_is_a_gap(
    run: TrainedRun, capsys: pytest.CaptureFixture[str], attempts: int
) -> None:
    for _ in range(attempts):
        run.attempt(4)
        point = commit_point(run)
    cut_the_journal(run, "generation", 4 * (attempts - 1))
    report = run.audit()
    assert (report["exactly_once"], report["steps"]) == (None, 4 * (attempts - 1))
    assert f"{point} was committed" in report["first_difference"]["reason"]
    assert f"the journal does not know generation 1 of attempt {attempts}" in str(report["first_difference"])
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder)])
    assert ended.value.code == 1
    assert "nothing is trained yet" not in capsys.readouterr().out


def test_points_off_the_history_or_of_another_run_are_no_gap(run: TrainedRun) -> None:
    run.attempt(4)
    commit_point(run)
    key, cursor = run.key, run.cursor
    run.attempt(4)
    commit_point(run)  # attempt 3 leaves it
    run.key, run.cursor = key, cursor
    run.attempt(2)
    for attempt, run_id in ((3, "another"), (2, run.run_id)):
        strange = StateKey(attempt=attempt, generation=9, step=40)  # a generation that no journal knows
        votes = [write_vote(run.store.storage, strange, rank) for rank in range(2)]
        run.store.commit_point(votes, run.job.flat(), {"rule": "none"}, None, run_id=run_id)
    report = run.audit()
    assert report["exactly_once"], report["first_difference"]
    assert (report["last_step"], report["final_up_to_step"], report["all_final"]) == ("6", 4, False)
    assert run.audit("1:4")["all_final"]


def test_a_point_that_is_committed_while_an_audit_reads_the_journal_is_no_gap(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.attempt(8)
    journal = run.folder / "journal" / "a0001"
    whole = {path: path.read_bytes() for path in journal.iterdir()}
    cut_the_journal(run, "step", 6)
    right = survey_module.read_journal

    def read_and_then_the_run_goes_on(*arguments: Any) -> Any:
        """What the writer does between an audit's looks at journal and points."""
        found = right(*arguments)
        if not run.store.point_names():
            for path, data in whole.items():
                path.write_bytes(data)
            commit_point(run)
        return found

    monkeypatch.setattr(survey_module, "read_journal", read_and_then_the_run_goes_on)
    report = run.audit()
    assert report["exactly_once"], report["first_difference"]
    assert (report["last_step"], report["final_up_to_step"]) == ("5", None)
    monkeypatch.undo()
    whole_report = run.audit()
    assert (whole_report["final_up_to_step"], whole_report["all_final"]) == (8, True)


def test_changed_files_mean_that_nothing_can_be_said(mapping: dict[str, Any], tmp_path: Path) -> None:
    run = TrainedRun(mapping)
    run.attempt(3)
    (tmp_path / "data" / "part-0.jsonl").write_text('{"text": "another"}\n')
    with raises(DataIdentityError, "data.changed_files", "part-0.jsonl"):
        run.audit()


def change_the_first_trained_document(run: TrainedRun) -> Callable[[], None]:
    """Four characters of it are others, so that the file keeps its size. Returns what puts them back."""
    chunk = next(iter(run.spec.chunks(Cursor())))
    entry = int((chunk.num_tokens > 0).argmax())
    path = Path(run.spec.plans[0].manifest.path(int(chunk.file[entry])))
    before, times = path.read_bytes(), path.stat()
    at = before.index(b'"text": "', int(chunk.place[entry])) + 12
    path.write_bytes((before[:at] + b"ZZZZ" + before[at + 4 :]).replace(b'"n": 1', b'"n": 2', 1))

    def put_back() -> None:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return put_back


def go_on_with_changed_files(run: TrainedRun, num_steps: int) -> None:
    flat = run.job.to_json()
    run.job = parse_config({**flat, "resume": {**flat["resume"], "accept_changed": True}})
    run.spec = starting.prepare(run.job, run.store.storage, freeze=True)
    assert any("going on with a changed file" in note for note in run.spec.notes)
    run.attempt(num_steps)


def test_files_that_changed_and_were_accepted_mean_that_nothing_can_be_said(
    mapping: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = TrainedRun(mapping)
    run.attempt(6)
    change_the_first_trained_document(run)
    go_on_with_changed_files(run, 3)
    for steps in (None, "1:2", "8:"):
        values = "Attempt 2 ", "resume.accept_changed", "--steps :6"
        with raises(DataIdentityError, "data.changed_files", "part-", *values) as caught:
            run.audit(steps)
        assert len(set(re.findall(r"\b[0-9a-f]{16}\b", str(caught.value)))) == 2, "both digests"
        assert "resume.accept_changed=true" not in str(caught.value), "an audit cannot accept them"
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder)])
    assert ended.value.code == 2
    assert "NOT exactly once" not in capsys.readouterr().out


def test_with_the_files_put_back_an_audit_shows_what_came_before_the_change_and_of_the_rest_it_cannot(
    mapping: dict[str, Any],
) -> None:
    mapping["data"] |= {"num_epochs": 3, "on_bad_document": "skip"}
    run = TrainedRun(mapping)
    run.attempt(6)
    put_back = change_the_first_trained_document(run)
    go_on_with_changed_files(run, 1000)  # the second epoch holds the document again, as it is changed
    put_back()
    last = run.records()[-1].step
    for steps in (":6", f"{last}:"):  # the last steps hold other documents
        report = run.audit(steps)
        assert report["exactly_once"], report["first_difference"]
    for steps in (None, "7:"):
        values = "trained samples have digest", "Attempt 2", "resume.accept_changed", "--steps :6"
        with raises(DataIdentityError, "audit.accepted_change", *values):
            run.audit(steps)


def test_the_documents_that_the_audited_steps_skipped_are_counted(
    mapping: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    mapping["data"] |= {"num_epochs": 2, "on_bad_document": "skip", "max_bad_share": 0.5}
    with next(Path(mapping["data"]["sources"][0]["path"]).iterdir()).open("ab") as file:
        file.write(b"{no JSON\n" * 3)
    run = TrainedRun(mapping)
    run.attempt(6)
    before = run.cursor.sources["made"].bad_documents
    run.attempt(1000)
    assert run.cursor.sources["made"].bad_documents == 6, "three in each epoch"
    counts = [run.audit(steps)["skipped_documents"] for steps in (None, ":6", "7:")]
    assert counts == [{"made": 6}, {"made": before}, {"made": 6 - before}]
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder)])
    assert not ended.value.code
    line = "6 documents of source made were skipped (data.on_bad_document=skip)"
    assert line in capsys.readouterr().out.splitlines()
    run = TrainedRun({**mapping, "run": {**mapping["run"], "name": "wrong"}})
    run.attempt(3, wrong=2)
    assert run.audit()["skipped_documents"] is None, "where there is a difference, nothing is shown"


def test_steps_of_an_attempt_that_accepted_changes_but_met_none_are_shown(mapping: dict[str, Any]) -> None:
    mapping["resume"] = {**mapping.get("resume", {}), "accept_changed": True}
    run = TrainedRun(mapping)
    run.attempt(6)
    assert run.audit()["exactly_once"]


def test_what_no_changed_file_can_cause_is_a_difference_also_where_changes_were_accepted(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_both_packers(monkeypatch, labels_are_inputs)
    mapping["resume"] = {**mapping.get("resume", {}), "accept_changed": True}
    run = TrainedRun(mapping)
    run.attempt(3)
    found = run.audit()["first_difference"]
    assert found is not None
    assert (found["step"], found["reason"]) == ("1", "its labels are not its inputs one token further")


# ---------------------------------------------------------------------------------------- where files lie
def test_an_audit_finds_the_files_from_another_folder_than_the_run_was_started_in(
    mapping: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mapping["data"]["sources"][0]["path"] = "data/*.jsonl"
    run = TrainedRun(mapping)
    run.attempt(3)
    elsewhere = tmp_path / "elsewhere"
    write_corpus(elsewhere / "data", ["another"] * 9, "jsonl")
    for folder in (tmp_path, Path("/"), elsewhere):  # in the last the path means other files
        monkeypatch.chdir(folder)
        assert run.audit()["exactly_once"], folder
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "data").rename(moved / "data")
    monkeypatch.chdir(moved)
    assert run.audit()["exactly_once"], "the same files elsewhere, where the path means them"
    monkeypatch.chdir("/")
    num_bytes = (moved / "data" / "part-0.jsonl").stat().st_size
    with raises(DataIdentityError, "data.missing_files", "part-0.jsonl", f"{num_bytes} bytes"):
        run.audit()


def test_an_audit_looks_for_no_tokenizer_but_the_runs_own(
    mapping: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping["data"]["tokenizer"] = save_tokenizer(tmp_path / "tokenizer", some_texts(60, longest=200))
    run = TrainedRun(mapping)
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "same")
    mapping["data"]["tokenizer"] = str(tmp_path / "same")
    run.job = parse_config(mapping)
    run.attempt(3)
    shutil.rmtree(tmp_path / "same")
    assert run.audit()["exactly_once"]


# ---------------------------------------------------------------------------------------- files twice
def test_of_files_that_an_older_version_listed_twice_no_document_is_said_to_be_trained_once(
    mapping: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "data" / "self").symlink_to(".")
    names = tuple(f"{folder}part-{i}.jsonl" for folder in ("", "self/") for i in range(3))
    with monkeypatch.context() as older:
        listed = replace(list_files("made", str(tmp_path / "data"), "jsonl"), names=names)
        older.setattr(frozen, "list_files", lambda *_: listed)
        run = TrainedRun(mapping)
    run.attempt(1000)
    report = run.audit()
    assert report["exactly_once"], "the stream as it was frozen was"
    assert report["repeated_files"] == 3
    (text,) = report["not_shown"]
    assert "each document was trained once" in text
    assert "3 paths of source made lead to files that the run has under another path, too" in text
    assert "e.g. self/part-0.jsonl and part-0.jsonl" in text
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder)])
    assert ended.value.code in (0, None)
    told = capsys.readouterr().out
    assert "each token of its stream exactly once, but 3 files stand in that more than once\n" in told
    assert f"not verified: {text}" in told


def test_of_files_with_one_name_each_nothing_is_said_to_be_repeated(run: TrainedRun) -> None:
    run.attempt(3)
    assert run.audit()["repeated_files"] == 0


# ---------------------------------------------------------------------------------------- encoders, cursors
def test_an_audit_follows_a_change_of_the_encoder(mapping: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", some_texts(60, longest=200))
    mapping["data"] |= {"tokenizer": tokenizer, "encoder": "tokenizers"}
    run = TrainedRun(mapping)
    run.encoders = (EncoderSpan(encoder=FAST),)
    run.attempt(5)
    spec = run.spec.made_by(run.encoders)
    run.encoders = with_encoder(run.encoders, SLOW, spec.next_documents(run.cursor))
    run.attempt(1000)
    report = run.audit()
    assert report["exactly_once"], report["first_difference"]
    assert report["not_shown"] == ["tokens of epoch 0 (two encoders made them)"]
    seen = survey(run.store)
    for spans in ((EncoderSpan(encoder=FAST),), (EncoderSpan(encoder=SLOW),)):
        assert audit_history(run.spec.made_by(spans), seen)["first_difference"] is not None


def test_the_feeder_notes_a_cursor_every_so_many_tokens_and_gives_it_once_it_is_committed(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_reports, "CURSOR_TOKENS", 1000)
    spec, feed_log, cursors = TrainedRun(mapping).spec, FeedLog(), [Cursor()]
    packer = spec.stream(Cursor())
    for chunk in spec.chunks(Cursor()):
        packer.feed(chunk)
    for first in range(0, 48, 8):  # steps of 512 tokens: 1000, 2000 and 3000 lie in the 2nd, 4th and 6th
        drawn = packer.draw(StepRange(first_sample=first, num_samples=8, num_tokens=512, seq_len=64))
        assert drawn is not None
        feed_log.add(drawn)
        cursors.append(drawn.cursor)
    assert feed_log.give(24).cursors == (cursors[2],)
    assert feed_log.give(48).cursors == (cursors[4], cursors[6])
    assert feed_log.give(48).cursors == ()
