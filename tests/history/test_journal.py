"""The journal: what was flushed is read back, what was torn is known, what is wrong is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from orchestrator.errors import StorageError, TrainingError
from orchestrator.history.claims.segments import read_first
from orchestrator.history.journal import journal_reader as reader
from orchestrator.history.journal.journal_reader import read_journal, read_outline
from orchestrator.history.journal.journal_writer import OWN_FIELDS, JournalWriter
from orchestrator.history.journal.line_format import FIRST, EventKind, line_bytes, parse_line
from orchestrator.inspect.status.tail import read_tail
from orchestrator.inspect.views.facts.columns import read_columns
from orchestrator.records.steps import StepRecord
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, no_sleep, record, start
from tests.raising import raises
from tests.storage.crashfs import ModelDisk


@pytest.fixture
def storage(new_storage: Callable[[str], Storage]) -> Storage:
    return new_storage("quickstart")


def writer(storage: Storage, attempt: int = 1, segment_bytes: int = 1 << 20) -> JournalWriter:
    return JournalWriter(
        storage, attempt, segment_bytes=segment_bytes, now=lambda: datetime(2026, 1, 2, tzinfo=UTC)
    )


def rewritten(data: bytes, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """The lines of a segment with other fields, and with the checksums of a writer of such lines."""
    found, last = b"", FIRST
    for text in data.splitlines():
        line = change(parse_line(text).fields)
        more, last = line_bytes(line, last)
        found += more
    return found


def test_generations_steps_and_events_are_read_back_in_order(storage) -> None:
    for attempt in (2, 1):
        journal = writer(storage, attempt)
        journal.event(EventKind.END, outcome="done", reason="", by="")
        journal.generation(start(1, None, attempt))
        for step in (1, 2):
            assert journal.step(record(key(step, attempt=attempt)))
        journal.event(EventKind.LEFT_OUT, member="a", reason="it did not answer")
        journal.close()
    found = read_journal(storage)
    assert found.generations == (start(1, None, 1), start(1, None, 2))
    assert [r.key for r in found.records] == [key(s, attempt=a) for a in (1, 2) for s in (1, 2)]
    assert found.records[0] == record(key(1))
    assert [(e.attempt, e.seq, e.kind, e.fields) for e in found.events[:2]] == [
        (1, 1, "end", {"outcome": "done", "reason": "", "by": ""}),
        (1, 5, "left out", {"member": "a", "reason": "it did not answer"}),
    ]
    assert found.torn == ()


def test_every_line_is_json_with_the_common_fields(storage) -> None:
    journal = writer(storage)
    journal.step(record(key(1)))
    journal.flush()
    line = json.loads(read_first(storage, 1))
    common = {
        "seq": 1,
        "time": "2026-01-02T00:00:00.000+00:00",
        "run": "quickstart",
        "attempt": 1,
        "kind": "step",
    }
    assert line.items() >= common.items()
    assert (line["step"], line["digest"], line["consumed_samples"]) == (1, f"{1:016x}", 8)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("left out", {"member": "a", "reason": ""}, "'left out'"),
        (
            EventKind.LEFT_OUT,
            {"member": "a"},
            r"\['member', 'reason'\], not \['member'\]",
        ),
        (EventKind.LEFT_OUT, {"member": "a", "reason": "", "step": 2}, r"not \['member', 'reason', 'step'\]"),
    ],
)
def test_an_event_of_no_kind_or_without_the_fields_of_its_kind_is_not_written(
    storage, kind, fields, message
) -> None:
    journal = writer(storage)
    with pytest.raises(AssertionError, match=message):
        journal.event(kind, **fields)
    journal.close()
    assert read_journal(storage).events == ()


def test_no_kind_of_event_is_read_as_a_record_or_writes_over_what_every_line_has() -> None:
    assert not {"step", "generation"} & {str(kind) for kind in EventKind}
    assert not [kind for kind in EventKind if kind.fields.intersection(OWN_FIELDS)]
    # an event's attempt is its journal's
    assert [kind for kind in EventKind if "attempt" in kind.fields] == [EventKind.GROUP_FORMED]


def test_kinds_and_fields_that_only_a_newer_version_knows_are_read_as_they_stand(storage, tmp_path) -> None:
    journal = writer(storage)
    journal.event(EventKind.LEFT_OUT, member="a", reason="it did not answer")
    journal.event(EventKind.CONTROL_REQUEST, what="save", by="ada@desk", request=0)
    journal.close()
    path = tmp_path / "quickstart" / "journal" / "a0001" / "000001.jsonl"
    newer = {"left out": {"kind": "quarantined"}, "wish": {"who": "somebody"}}
    path.write_bytes(rewritten(path.read_bytes(), lambda line: line | newer[line["kind"]]))
    for read in (read_journal, read_outline):
        assert [(event.kind, event.fields) for event in read(storage).events] == [
            ("quarantined", {"member": "a", "reason": "it did not answer"}),
            ("wish", {"what": "save", "by": "ada@desk", "request": 0, "who": "somebody"}),
        ]
    assert read_tail(storage).faults == []


def test_nothing_is_on_disk_before_flush_and_an_empty_run_has_an_empty_journal(storage) -> None:
    journal = writer(storage)
    journal.event(EventKind.CONTROL_REQUEST, what="save", by="ada@desk", request=0)
    assert read_journal(storage).events == ()
    journal.flush()
    assert len(read_journal(storage).events) == 1


def test_segments_are_rotated_at_their_size_and_never_changed(storage) -> None:
    journal = writer(storage, segment_bytes=2000)
    seen: dict[str, bytes] = {}
    for step in range(1, 60):
        journal.step(record(key(step)))
        if step % 7 == 0:
            journal.flush()
            names = storage.list("journal/a0001")
            closed = {name: storage.read(f"journal/a0001/{name}") for name in names[:-1]}
            assert closed.items() >= seen.items()
            seen = closed
    journal.close()
    names = storage.list("journal/a0001")
    assert names == [f"{n:06d}.jsonl" for n in range(1, len(names) + 1)]
    assert len(names) > 5
    assert all(2000 <= storage.size(f"journal/a0001/{name}") < 2600 for name in names[:-1])
    assert [r.step for r in read_journal(storage).records] == list(range(1, 60))


def test_a_torn_last_line_is_left_out_and_reported(storage, tmp_path) -> None:
    journal = writer(storage)
    for step in (1, 2):
        journal.step(record(key(step)))
    journal.close()
    path = tmp_path / "quickstart" / "journal" / "a0001" / "000001.jsonl"
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for length in range(first, len(data)):
        path.write_bytes(data[:length])
        found = read_journal(storage)
        assert [r.step for r in found.records] == [1]
        assert found.torn == (("journal/a0001/000001.jsonl",) if length > first else ())
    path.write_bytes(data[:first] + bytes(300))
    assert [r.step for r in read_journal(storage).records] == [1], "the size on disk, the blocks not"


@pytest.mark.parametrize(
    ("change", "where", "left"),
    [
        (lambda lines: [lines[0][: len(lines[0]) // 2], *lines[1:]], "line 1", [2, 3]),
        (lambda lines: [lines[0], lines[2]], "line 2", [1, 3]),
        (lambda lines: [lines[0], b"{}", lines[2]], "line 2", [1, 3]),
        (lambda lines: [lines[0], b"[1]", lines[2]], "line 2", [1, 3]),
        (lambda lines: [lines[0], lines[1].replace(b'"loss"', b'"lass"'), lines[2]], "line 2", [1, 3]),
        (lambda lines: [lines[0], lines[1] + b"x" + lines[2]], "line 2", [1]),
    ],
)
@pytest.mark.parametrize("read", [read_journal, read_outline])
def test_a_line_that_is_not_as_it_was_written_is_left_out_and_named(
    storage, tmp_path, read, change, where, left
) -> None:
    journal = writer(storage)
    for step in (1, 2, 3):
        journal.step(record(key(step)))
    journal.close()
    path = tmp_path / "quickstart" / "journal" / "a0001" / "000001.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join(change(lines)) + b"\n")
    found = read(storage)
    assert [record.step for record in found.records] == (left if read is read_journal else left[-1:])
    (damage,) = found.damages
    assert damage.where == f"journal/a0001/000001.jsonl {where}"
    assert damage.first == next(step for step in (1, 2, 3) if step not in left)
    assert damage.last == (damage.first if 3 in left else None)


def test_an_outline_decodes_only_the_newest_step_records_and_says_all_else(storage, monkeypatch) -> None:
    journal = writer(storage, segment_bytes=1500)
    journal.event(EventKind.CONTROL_REQUEST, what="save", by="ada@desk", request=0)
    journal.generation(start(1, None))
    for step in range(1, 9):
        journal.step(record(key(step)))
    journal.event(EventKind.LEFTOVER_REMOVED, point=key(8).point_name)
    journal.generation(start(2, key(7)))
    journal.step(record(key(8, generation=2)))
    journal.generation(start(3, key(8, generation=2)))
    journal.close()
    later = writer(storage, attempt=2)
    later.event(EventKind.CONTROL_REQUEST, what="stop", by="ada@desk", request=0)
    later.step(record(key(8, generation=2)))  # brought by members that outlived the first coordinator
    later.step(record(key(9, generation=2)))
    later.close()
    whole = read_journal(storage)

    def decode(kind, value):
        assert kind is not StepRecord or (value["generation"], value["step"]) in ((1, 8), (2, 9))
        return decode_any(kind, value)

    decode_any = reader.decode
    monkeypatch.setattr(reader, "decode", decode)
    outline = read_outline(storage)
    assert (outline.generations, outline.events, outline.torn) == (whole.generations, whole.events, ())
    assert outline.records == (record(key(8)), record(key(9, generation=2)))
    assert outline.last_steps == {(1, 1): 8, (1, 2): 9}, "generation 3 has trained no step"


@pytest.mark.parametrize("read", [read_journal, read_outline])
def test_a_whole_line_that_is_no_record_of_its_kind_is_named(storage, tmp_path, read) -> None:
    journal = writer(storage)
    journal.step(record(key(3)))
    journal.close()
    path = tmp_path / "quickstart" / "journal" / "a0001" / "000001.jsonl"
    data = path.read_bytes()
    path.write_bytes(rewritten(data, lambda line: {k: v for k, v in line.items() if k != "lr"}))
    found = read(storage)
    assert found.records == ()
    (damage,) = found.damages
    assert damage.line == 1
    assert "missing fields ['lr']" in damage.reason


def test_fields_of_steps_that_a_later_version_may_write_are_passed_over(storage, tmp_path) -> None:
    journal = writer(storage)
    journal.step(record(key(3)))
    journal.close()
    path = tmp_path / "quickstart" / "journal" / "a0001" / "000001.jsonl"
    more = {"documents": [{"source": "web"}]}
    path.write_bytes(rewritten(path.read_bytes(), lambda line: line | more))
    for read in (read_journal, read_outline):
        assert read(storage).records == (record(key(3)),)
        assert read(storage).damages == ()
    assert len(read_columns(storage)) == 1


def test_an_outline_leaves_out_a_torn_line_as_the_whole_journal_does(storage, tmp_path) -> None:
    journal = writer(storage)
    for step in (1, 2):
        journal.step(record(key(step)))
    journal.close()
    path = tmp_path / "quickstart" / "journal" / "a0001" / "000001.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    outline = read_outline(storage)
    assert (outline.last_steps, outline.torn) == ({(1, 1): 1}, ("journal/a0001/000001.jsonl",))


def test_a_cut_or_missing_segment_in_the_middle_is_named(storage, tmp_path) -> None:
    journal = writer(storage, segment_bytes=500)
    for step in range(1, 9):
        journal.step(record(key(step)))
    journal.close()
    path = tmp_path / "quickstart" / "journal" / "a0001" / "000002.jsonl"
    data = path.read_bytes()
    steps = [record.step for record in read_journal(storage).records]
    inside = [json.loads(line)["step"] for line in data.splitlines()]
    path.write_bytes(data[:-5])
    found = read_journal(storage)
    assert [record.step for record in found.records] == [step for step in steps if step != inside[-1]]
    assert [(each.path, each.first, each.last) for each in found.damages] == [
        ("journal/a0001/000002.jsonl", inside[-1], inside[-1])
    ]
    path.unlink()
    found = read_journal(storage)
    assert [record.step for record in found.records] == [step for step in steps if step not in inside]
    assert [(each.path, each.first, each.last) for each in found.damages] == [
        ("journal/a0001/000002.jsonl", inside[0], inside[-1])
    ]


def test_equal_copies_count_once_whatever_each_rank_measured(storage) -> None:
    journal = writer(storage)
    assert journal.step(record(key(1)))
    assert not journal.step(record(key(1)))
    assert not journal.step(replace(record(key(1)), step_s=9.0, data_wait_s=1.0, save_blocked_s=2.0))
    journal.close()
    later = writer(storage, attempt=2)  # members bring what the dead coordinator had journalled already
    later.step(record(key(1)))
    later.close()
    assert read_journal(storage).records == (record(key(1)),)


@pytest.mark.parametrize("change", [{"digest": "f" * 16}, {"loss": 1.0}, {"consumed_tokens": 1}, {"lr": 9.0}])
def test_unequal_copies_are_an_error_for_writer_and_reader(storage, change) -> None:
    journal = writer(storage)
    journal.step(record(key(1)))
    (name,) = change
    with raises(TrainingError, "training.records_differ", name, change[name], getattr(record(key(1)), name)):
        journal.step(replace(record(key(1)), **change))
    journal.close()
    other = writer(storage, attempt=2)
    other.step(replace(record(key(1)), **change))
    other.close()
    with raises(StorageError, "history.inconsistent", "a0002/000001.jsonl line 1", name):
        read_journal(storage)


def test_a_float_that_is_not_finite_survives(storage) -> None:
    journal = writer(storage)
    strange = replace(record(key(1)), loss=math.nan, grad_norm=math.inf)
    journal.step(strange)
    assert not journal.step(strange), "nan is equal to nan here"
    journal.close()
    found = read_journal(storage).records[0]
    assert math.isnan(found.loss)
    assert found.grad_norm == math.inf


def test_flush_says_up_to_where_all_records_are_durable(storage) -> None:
    journal = writer(storage)
    assert journal.flush() is None
    journal.generation(start(1, None))
    assert journal.flush() == key(0)
    for step in (1, 2, 4):
        journal.step(record(key(step)))
    assert not journal.covers(key(2)), "not before it is flushed"
    assert journal.flush() == key(2), "3 is missing"
    assert journal.covers(key(2))
    assert not journal.covers(key(4))
    journal.step(record(key(3)))
    assert journal.flush() == key(4)
    assert journal.covers(key(4))


def test_a_generation_is_covered_only_with_the_chain_of_its_parents(storage) -> None:
    journal = writer(storage)
    journal.generation(start(1, None))
    journal.generation(start(2, key(3)))
    journal.step(record(key(1)))
    for step in (4, 5):
        journal.step(record(key(step, generation=2)))
    assert journal.flush() == key(5, generation=2)
    assert not journal.covers(key(5, generation=2)), "steps 2 and 3 of generation 1 are missing"
    for step in (2, 3):
        journal.step(record(key(step)))
    journal.flush()
    assert journal.covers(key(5, generation=2))
    assert not journal.covers(key(5, generation=3))
    assert not journal.covers(key(5, attempt=2))


def test_records_of_an_older_attempt_belong_to_it_and_not_to_the_new_chain(storage) -> None:
    journal = writer(storage, attempt=2)
    journal.step(record(key(7, attempt=1)))
    journal.generation(start(1, key(7, attempt=1), attempt=2))
    assert journal.flush() == key(7, attempt=2)
    assert journal.covers(key(7, attempt=2))
    assert [r.key for r in read_journal(storage).records] == [key(7, attempt=1)]


def test_no_power_cut_loses_a_line_that_was_flushed_or_makes_the_journal_unreadable() -> None:
    disk = ModelDisk(block=700)
    journal = JournalWriter(Storage("/run", disk, no_sleep), 1, segment_bytes=3000)
    told: list[tuple[int, int]] = []  # calls of the disk, and the newest step that was durable then
    for step in range(1, 13):
        journal.step(record(key(step)))
        if step % 4 == 0:
            journal.flush()
            told.append((len(disk.history), step))
    num_disks = num_damaged = 0
    for calls, _, files in disk.crashes():
        num_disks += 1
        found = read_journal(Storage("/run", ModelDisk.of(files), no_sleep))
        flushed = max((step for before, step in told if before < calls), default=0)
        steps = [each.step for each in found.records]
        assert set(range(1, flushed + 1)) <= {*steps}
        assert all(each == record(each.key) for each in found.records)
        assert all(damage.first > flushed for damage in found.damages)
        num_damaged += bool(found.damages)
    assert num_disks > 50
    assert num_damaged > 5, "a block in the middle of a flush was lost"


class Dying(ModelDisk):
    """A disk that cannot sync any more."""

    def fsync(self, handle: int) -> None:
        raise OSError(5, "Input/output error")


def test_after_a_failed_flush_nothing_is_durable_any_more() -> None:
    journal = JournalWriter(Storage("/run", Dying(), no_sleep), 1)
    journal.generation(start(1, None))
    for _ in range(2):
        with raises(StorageError, "storage.failed", "EIO"):
            journal.flush()
    assert not journal.covers(key(0))


def test_lines_that_come_again_with_another_text_are_named(storage, tmp_path) -> None:
    journal = writer(storage, segment_bytes=300)
    for step in range(1, 5):
        journal.step(record(key(step)))
    journal.close()
    folder = tmp_path / "quickstart" / "journal" / "a0001"
    first, second = (folder / f"00000{number}.jsonl" for number in (1, 2))
    again = first.read_bytes().splitlines(keepends=True)[-1]
    second.write_bytes(again + second.read_bytes())
    assert [r.step for r in read_journal(storage).records] == [1, 2, 3, 4]
    second.write_bytes(again.replace(b'"loss":', b'"loss":1') + second.read_bytes()[len(again) :])
    assert read_journal(storage).damages == (), "the first one is whole, and so nothing is lost"
    other = line_bytes(parse_line(again[:-1]).fields | {"loss": 9.0}, "0" * 16)[0]
    second.write_bytes(other + second.read_bytes()[len(again) + 1 :])
    found = read_journal(storage)
    assert [each.where for each in found.damages] == ["journal/a0001/000002.jsonl line 1"]
    assert "was another one before" in found.damages[0].reason


def test_a_line_that_was_damaged_and_is_brought_again_by_the_next_segment_is_not_lost(
    storage, tmp_path
) -> None:
    journal = writer(storage, segment_bytes=300)
    for step in range(1, 5):
        journal.step(record(key(step)))
    journal.close()
    folder = tmp_path / "quickstart" / "journal" / "a0001"
    first, second = (folder / f"00000{number}.jsonl" for number in (1, 2))
    lost = first.read_bytes()
    first.write_bytes(bytes(len(lost) - 1) + b"\n")  # pages that a failed flush has left
    assert [(each.first, each.last) for each in read_journal(storage).damages] == [(1, 1)]
    second.write_bytes(lost + second.read_bytes())
    found = read_journal(storage)
    assert ([record.step for record in found.records], found.damages) == ([1, 2, 3, 4], ())


def test_every_flipped_bit_is_noticed_and_costs_one_line_or_two(storage, tmp_path) -> None:
    journal = writer(storage)
    for step in (1, 2, 3):
        journal.step(record(key(step)))
    journal.close()
    path = tmp_path / "quickstart" / "journal" / "a0001" / "000001.jsonl"
    data = path.read_bytes()
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        found = read_journal(storage)
        assert found.damages, f"byte {at}"
        assert found.records
        assert all(each == record(each.key) for each in found.records)


def test_a_line_that_was_exchanged_for_another_whole_one_is_noticed(storage, tmp_path) -> None:
    journal = writer(storage)
    for step in (1, 2, 3):
        journal.step(record(key(step)))
    journal.close()
    path = tmp_path / "quickstart" / "journal" / "a0001" / "000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    second = parse_line(lines[1][:-1])
    lines[1], _ = line_bytes(second.fields | {"loss": 9.0}, second.prev)
    path.write_bytes(b"".join(lines))
    (damage,) = read_journal(storage).damages
    assert damage.where == "journal/a0001/000001.jsonl line 3"


class FailsOnClose(ModelDisk):
    """A network file system: a write that failed is reported by the sync, and by the close again."""

    broken = False

    def fsync(self, handle: int) -> None:
        self._fail()
        super().fsync(handle)

    def close(self, handle: int) -> None:
        super().close(handle)
        self._fail()

    def _fail(self) -> None:
        if self.broken:
            raise OSError(5, "Input/output error")


def test_a_close_that_fails_loses_no_line_and_leaves_a_journal_that_can_be_read() -> None:
    disk = FailsOnClose()
    storage = Storage("/run", disk, no_sleep)
    journal = JournalWriter(storage, 1)
    journal.event(EventKind.CONTROL_REQUEST, what="a", by="ada@desk", request=0)
    journal.flush()
    disk.broken = True
    journal.event(EventKind.CONTROL_REQUEST, what="b", by="ada@desk", request=0)
    for _ in range(2):
        with raises(StorageError, "storage.failed", "sync ", "EIO"):
            journal.flush()
    disk.broken = False
    journal.event(EventKind.CONTROL_REQUEST, what="c", by="ada@desk", request=0)
    journal.flush()
    assert [event.fields["what"] for event in read_journal(storage).events] == ["a", "b", "c"]


class FailsOnlyOnClose(FailsOnClose):
    def fsync(self, handle: int) -> None:
        ModelDisk.fsync(self, handle)


def test_lines_of_a_full_segment_that_could_not_be_closed_come_again_and_are_read_once() -> None:
    disk = FailsOnlyOnClose()
    storage = Storage("/run", disk, no_sleep)
    journal = JournalWriter(storage, 1, segment_bytes=10)
    disk.broken = True
    journal.event(EventKind.CONTROL_REQUEST, what="a", by="ada@desk", request=0)
    with raises(StorageError, "storage.failed", "close "):
        journal.flush()
    disk.broken = False
    journal.event(EventKind.CONTROL_REQUEST, what="b", by="ada@desk", request=0)
    journal.close()
    assert [event.fields["what"] for event in read_journal(storage).events] == ["a", "b"]


class OutOfMemory(ModelDisk):
    broken = False

    def write(self, handle: int, data: memoryview) -> int:
        if self.broken:
            raise MemoryError
        return super().write(handle, data)


def test_whatever_ends_a_flush_its_lines_are_written_by_the_next_one() -> None:
    disk = OutOfMemory()
    storage = Storage("/run", disk, no_sleep)
    journal = JournalWriter(storage, 1)
    journal.event(EventKind.CONTROL_REQUEST, what="a", by="ada@desk", request=0)
    disk.broken = True
    with pytest.raises(MemoryError):
        journal.flush()
    disk.broken = False
    journal.event(EventKind.CONTROL_REQUEST, what="b", by="ada@desk", request=0)
    journal.flush()
    assert [event.fields["what"] for event in read_journal(storage).events] == ["a", "b"]
