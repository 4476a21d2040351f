"""An audit shows what was trained, says what it cannot show, and finds planted faults, whole or in parts.

Runs are made here by taking batches from the real feed and journalling them, without a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.config.schema import parse_config
from orchestrator.coordinator.attempt import survey
from orchestrator.data.feed import feed_notes
from orchestrator.data.feed.feed_notes import FeedLog
from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.data.packing.stream import Packer
from orchestrator.data.sources import readers
from orchestrator.data.sources import windows as sources
from orchestrator.data.tokens import chunks
from orchestrator.errors import DataIdentityError, RefusedError
from orchestrator.history.claim_files import RESUME, START
from orchestrator.history.claims import ClaimParent, GenerationStart
from orchestrator.history.journal import JournalWriter
from orchestrator.history.step_names import find_step, find_steps, step_name
from orchestrator.launch import start as starting
from orchestrator.monitor.audit import audit_history
from orchestrator.monitor.reference_packing import ReferencePacker, Samples
from orchestrator.planning.encoders import EncoderSpan, with_encoder
from orchestrator.planning.order import block_at
from orchestrator.records import Cursor, StateKey, StepRange, StepRecord, encode
from orchestrator.resume.store import RunStore
from orchestrator.storage.files import Storage
from tests.data.making import some_texts, write_corpus
from tests.data.test_encoder_change import FAST, SLOW, save_tokenizer

Make = Callable[..., dict[str, Any]]


class TrainedRun:
    """A run of attempts, each of which goes on where the one before ended; one generation each."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.job = parse_config(dict(mapping))
        self.folder = starting.run_folder(self.job)
        self.store = RunStore(Storage(str(self.folder)))
        self.spec = starting.prepare(self.job, self.folder, freeze=True)
        self.run_id = self.store.create_run(self.job.run.name, self.spec.identity()).id
        self.cursor, self.number = Cursor(), 0
        self.key: StateKey | None = None
        self.encoders: tuple[EncoderSpan, ...] = ()

    def attempt(
        self,
        num_steps: int,
        batch: int = 8,
        seq_len: int = 64,
        label: int | None = None,
        noted: Callable[[Cursor], Cursor] = lambda cursor: cursor,
        wrong: int = 0,
    ) -> None:
        """Trains `num_steps` steps, or to the end of the data, counting from `label` on. Every fourth step's
        cursor, and the data's last, goes into the journal as `noted` makes it. The digest of step `wrong` is
        not that of its samples.
        """
        self.number += 1
        why = RESUME if self.key else START
        self.store.claim(self.number, f"{self.number:016x}", why, "host", self.run_id)
        inherited = (self.key.point_name,) if self.key else ()
        self.store.write_parent(
            ClaimParent(attempt=self.number, parent=self.key, inherited=inherited, encoders=self.encoders)
        )
        journal = JournalWriter(self.store.storage, self.number, run_id=self.run_id)
        journal.event("attempt", launch="", why="", pid=1, config=self.job.flat())
        first = (self.key.step if self.key else 0) if label is None else label
        journal.generation(
            GenerationStart(
                attempt=self.number, generation=1, parent=self.key, step=first, world_size=1,
                consumed_samples=self.cursor.consumed_samples, consumed_tokens=self.cursor.consumed_tokens,
                target_tokens=self.cursor.target_tokens, global_batch_size=batch, seq_len=seq_len,
            )
        )  # fmt: skip
        feed = InProcessFeed(self.spec.made_by(self.encoders))
        for step in range(first + 1, first + num_steps + 1):
            asked = StepRange(
                first_sample=self.cursor.consumed_samples, num_samples=batch, num_tokens=batch * seq_len,
                seq_len=seq_len,
            )  # fmt: skip
            taken = feed.get(asked, 0, 1, batch, self.cursor)
            if not taken.step.num_samples:
                break
            self.cursor = taken.cursor
            at = self.cursor
            record = StepRecord(
                attempt=self.number, generation=1, step=step, consumed_samples=at.consumed_samples,
                consumed_tokens=at.consumed_tokens, target_tokens=at.target_tokens, loss=1.0, grad_norm=1.0,
                lr=1.0, digest=f"{taken.step_digest + (step == wrong):016x}", step_s=1.0,
                data_wait_s=0.0, save_blocked_s=0.0,
            )  # fmt: skip
            journal.step(record)
            self.key = record.key
            if step % 4 == 0 or taken.end_of_data:
                journal.event("cursor", cursor=encode(noted(self.cursor)))
            if taken.end_of_data:
                break
        feed.close()
        journal.close()

    def records(self) -> tuple[StepRecord, ...]:
        return survey(self.store).lineage.records

    def audit(self, steps: str | None = None) -> dict[str, Any]:
        return orchestrator.open(self.folder).audit(steps)


@pytest.fixture
def mapping(tmp_path: Path, tiny_config: Make) -> dict[str, Any]:
    """Two epochs of a small corpus in many fragments, blocks and windows."""
    write_corpus(tmp_path / "data", some_texts(120), "jsonl")
    source = {"name": "made", "path": str(tmp_path / "data"), "format": "jsonl"}
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "data.num_epochs": 2}
    return tiny_config({"data.sources": [source], **small})


def test_a_run_that_was_trained_to_its_end_is_shown_whole(mapping: dict[str, Any]) -> None:
    run = TrainedRun(mapping)
    run.attempt(7)
    run.attempt(1000, batch=16, seq_len=50)
    report = run.audit()
    assert report["exactly_once"], report["first_difference"]
    assert report["not_shown"] == [], "the last epoch is compared, too"
    assert (report["samples"], report["tokens"]) == (run.cursor.consumed_samples, run.cursor.consumed_tokens)
    assert (report["attempts"], report["first_step"]) == (2, "1")
    assert report["last_step"] == str(report["steps"])


def test_what_an_audit_leaves_open_it_says(mapping: dict[str, Any]) -> None:
    run = TrainedRun(mapping)
    run.attempt(12)
    (text,) = run.audit()["not_shown"]
    assert text.startswith("that epoch 0 holds every document of the files")
    assert "it goes on after them; no record came twice" in text
    (text,) = run.audit("7:9")["not_shown"]
    assert "it begins before them" in text


def test_parts_begin_at_the_nearest_cursor_and_join(mapping: dict[str, Any]) -> None:
    run = TrainedRun(mapping)
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


def one_token_later(cursor: Cursor) -> Cursor:
    source = cursor.sources["made"]
    return replace(cursor, sources={"made": replace(source, token=source.token + 1)})


def test_a_cursor_that_is_not_the_streams_is_found_by_whoever_passes_it_or_begins_there(
    mapping: dict[str, Any],
) -> None:
    run = TrainedRun(mapping)
    run.attempt(6, noted=one_token_later)
    found = run.audit()["first_difference"]
    assert (found["step"], "the journal's cursor behind it" in found["reason"]) == ("4", True)
    with pytest.raises(DataIdentityError, match="tokens before it had digest"):
        run.audit("5:6")


def test_a_label_that_occurs_twice_is_written_with_its_attempt(mapping: dict[str, Any]) -> None:
    run = TrainedRun(mapping)
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
    ("steps", "text"),
    [
        ("5:8", "step 5 occurs 2 times in the run's history; write a1:5 or a2:5"),
        ("7:99", "no step 99; it goes from step 1 to step 9"),
        ("a1:9:", "no step a1:9"),
        ("8:7", "7 comes before 8"),
        ("a2:5:a1:6", "a1:6 comes before a2:5"),
        ("5", "step 5 occurs 2 times"),
        ("a3:5", "no step a3:5; it goes from step 1 to step 9; it has that of a1, a2"),
        ("7-8", "'7-8' names no steps; write A:B"),
        ("٣:5", "names no steps"),
        ("-1:5", "names no steps"),
    ],
)
def test_steps_that_are_not_there_or_not_one_are_refused(
    mapping: dict[str, Any], steps: str, text: str
) -> None:
    run = TrainedRun(mapping)
    run.attempt(6)
    run.attempt(6, label=3)
    with pytest.raises(RefusedError, match=re.escape(text)):
        run.audit(steps)


def test_the_command_audits_steps_and_says_what_it_leaves_open(
    mapping: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = TrainedRun(mapping)
    run.attempt(8, wrong=8)
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder), "--steps", "2:4"])
    told = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert told.startswith("steps 2 to 4: 24 samples, 1,536 tokens, 3 steps, 1 attempt, exactly once")
    assert "not shown: that epoch 0 holds every document" in told
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder), "--steps", "5:", "--json"])
    assert ended.value.code == 1
    assert orjson.loads(capsys.readouterr().out)["first_difference"]["step"] == "8"
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder), "--steps", "9:"])
    assert (ended.value.code, "no step 9" in capsys.readouterr().err) == (2, True)


# ---------------------------------------------------------------------------------------- planted faults
def test_where_nothing_is_trained_no_proof_is_claimed(
    mapping: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = TrainedRun(mapping)
    run.attempt(0)
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder)])
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out == "nothing is trained yet, so there is nothing to compare\n"


def a_block_twice(seed: int, source: str, epoch: int, position: int, num_blocks: int, shuffle: str) -> int:
    """Position 1 gives the block of position 0 again."""
    return block_at(seed, source, epoch, 0 if position == 1 else position, num_blocks, shuffle)


def a_line_lost_at_each_border(handle: int, start: int, stop: int, size: int) -> tuple[int, bytes]:
    """Begins at `start` instead of the byte before it (data rule 10)."""
    begin, data = readers_range(handle, start, stop, size)
    cut = data.find(b"\n") + 1 if start else 0
    return begin + cut, data[cut:]


def the_last_id_is_not_eos(ids: Any, lengths: Any, first: Any, last: Any, settings: Any) -> Any:
    """Each document ends with the id that begins it."""
    tokens, wrapped = chunks_wrap(ids, lengths, first, last, settings)
    ends = np.cumsum(wrapped)
    tokens[ends - 1] = tokens[ends - wrapped]
    return tokens, wrapped


readers_range, chunks_wrap = readers.read_range, chunks._wrap
WRONG = [
    (sources, "block_at", a_block_twice, "epoch 0 held the record at"),
    (readers, "read_range", a_line_lost_at_each_border, "the files hold"),
    (chunks, "_wrap", the_last_id_is_not_eos, "the files hold"),
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


def one_lost_one_repeated(inputs: Any, labels: Any, documents: Any) -> None:
    """In each sample token 6 is token 5 again."""
    inputs[:, 6] = inputs[:, 5]
    labels[:, 5] = labels[:, 4]


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
    (one_lost_one_repeated, "one behind the other"),
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
    right = StepSamples.arrays

    def arrays(self: StepSamples, start: int, stop: int) -> Any:
        numbers, *samples = right(self, start, stop)
        wrong(*samples)
        return numbers, *samples

    monkeypatch.setattr(StepSamples, "arrays", arrays)


@pytest.mark.parametrize("wrong", [wrong for wrong, _ in PACKED_WRONG])
def test_what_the_trainers_packer_does_wrong_is_found_in_the_step_that_trained_it(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch, wrong: Change
) -> None:
    plant_in_the_trainers_packer(monkeypatch, wrong)
    run = TrainedRun(mapping)
    run.attempt(1000)
    found = run.audit()["first_difference"]
    assert found is not None
    last = str(len(run.records()))
    assert found["step"] == (last if "padding" in wrong.__name__ else "1")
    assert "trained samples have digest" in found["reason"]


def test_a_packer_that_loses_a_token_at_each_step_and_repeats_one_is_found(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Packer._gather

    def gather(self: Packer, start: int, stop: int) -> Any:
        tokens, starts = right(self, start, stop)
        return np.concatenate([tokens[:9], tokens[8:9], tokens[10:]]), starts

    monkeypatch.setattr(Packer, "_gather", gather)
    run = TrainedRun(mapping)
    run.attempt(1000)
    found = run.audit()["first_difference"]
    assert found is not None
    assert (found["step"], "trained samples have digest" in found["reason"]) == ("1", True)


@pytest.mark.parametrize(
    ("num_steps", "wrong", "text"),
    [(1000, *planted) for planted in PACKED_WRONG]
    # where no epoch is finished; only the last sample of all has padding
    + [(6, *planted) for planted in PACKED_WRONG if "padding" not in planted[0].__name__],
)
def test_what_both_packers_do_wrong_is_found_in_the_samples_own_tokens(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch, num_steps: int, wrong: Change, text: str
) -> None:
    right = ReferencePacker.samples

    def samples(self: ReferencePacker, num_tokens: int, seq_len: int) -> Samples:
        found = right(self, num_tokens, seq_len)
        wrong(found.input_ids, found.labels, found.document_ids)
        return found

    plant_in_the_trainers_packer(monkeypatch, wrong)
    monkeypatch.setattr(ReferencePacker, "samples", samples)
    run = TrainedRun(mapping)
    run.attempt(num_steps)
    found = run.audit()["first_difference"]
    assert found is not None
    assert text in found["reason"]


def test_a_step_that_says_to_have_taken_what_makes_no_samples_is_found(mapping: dict[str, Any]) -> None:
    run = TrainedRun(mapping)
    run.attempt(5)
    seen = survey(run.store)
    records = [*seen.lineage.records]
    records[2] = replace(records[2], consumed_samples=records[2].consumed_samples + 1)
    wrong = replace(seen, lineage=replace(seen.lineage, records=tuple(records)))
    found = audit_history(run.spec, wrong)["first_difference"]
    assert (found["step"], found["reason"]) == ("3", "the step took 9 samples of 64 for 512 tokens")


def test_a_cursor_of_steps_that_the_history_left_is_not_taken_for_one_of_its_own(
    mapping: dict[str, Any],
) -> None:
    cursors: list[Cursor] = []

    def noted(cursor: Cursor) -> Cursor:
        cursors.append(cursor)
        return cursor if len(cursors) == 1 else one_token_later(cursor)

    run = TrainedRun(mapping)
    run.attempt(9, noted=noted)  # the cursor behind step 4, and behind step 8 one of another stream
    run.key, run.cursor = run.records()[3].key, cursors[0]
    run.attempt(6, label=3)  # the history leaves attempt 1 after step 4, and notes none behind its 8th step
    assert len(run.records()) == 10
    report = run.audit()
    assert report["exactly_once"], report["first_difference"]
    assert run.audit("a2:8:")["exactly_once"], "nor does an audit begin there"


def test_changed_files_mean_that_nothing_can_be_said(mapping: dict[str, Any], tmp_path: Path) -> None:
    run = TrainedRun(mapping)
    run.attempt(3)
    (tmp_path / "data" / "part-0.jsonl").write_text('{"text": "another"}\n')
    with pytest.raises(DataIdentityError, match="changed"):
        run.audit()


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
    assert report["not_shown"] == ["epoch 0's tokens against the files: two encoders made them"]
    seen = survey(run.store)
    for spans in ((EncoderSpan(encoder=FAST),), (EncoderSpan(encoder=SLOW),)):
        assert audit_history(run.spec.made_by(spans), seen)["first_difference"] is not None


def test_the_feeder_notes_a_cursor_every_so_many_tokens_and_gives_it_once_it_is_committed(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_notes, "CURSOR_TOKENS", 1000)
    spec, feed_log, cursors = TrainedRun(mapping).spec, FeedLog(), [Cursor()]
    packer = spec.packer(Cursor())
    for chunk in spec.chunks(Cursor()):
        packer.feed(chunk)
    for first in range(0, 48, 8):  # steps of 512 tokens: 1000, 2000 and 3000 lie in the 2nd, 4th and 6th
        drawn = packer.draw(StepRange(first_sample=first, num_samples=8, num_tokens=512, seq_len=64))
        assert drawn is not None
        feed_log.drawn(drawn)
        cursors.append(drawn.cursor)
    assert feed_log.give(24).cursors == (cursors[2],)
    assert feed_log.give(48).cursors == (cursors[4], cursors[6])
    assert feed_log.give(48).cursors == ()
