"""A journal in pieces: every order of what its writer and a reader ask of a bucket, with requests that are
lost, repeated late, or cut off by the writer's death. What was acknowledged is read, and nothing else than
what was written, in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from orchestrator.errors import StorageError
from orchestrator.history.claims import segments as segment_files
from orchestrator.history.claims.segments import (
    SegmentsInPieces,
    piece_path,
    read_first,
    read_from,
    segment_path,
    segments,
)
from orchestrator.history.journal.journal_lines import JournalLines
from orchestrator.history.journal.journal_reader import read_journal, read_outline
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.storage.files import Storage
from orchestrator.storage.store import Listed, Store
from tests.raising import raises
from tests.storage.interleaved_buckets import DIED, Act, Faults, interleavings
from tests.storage.model_store import PUT, Fate, ModelBucket, ModelStore

ATTEMPT = 1
LINES = 3
SEGMENT_BYTES = 300  # two lines
Reader = Callable[[Storage], list[int]]


def journal_on(storage: Storage, segment_bytes: int = SEGMENT_BYTES) -> JournalWriter:
    return JournalWriter(
        storage, ATTEMPT, "run", segment_bytes=segment_bytes, now=lambda: datetime(2026, 1, 2, tzinfo=UTC)
    )


def note(journal: JournalWriter) -> None:
    journal.event(EventKind.LEFTOVER_REMOVED, point="00000001-a0001-g0001")


# ------------------------------------------------------------------ every order
def writing(store: Store) -> int:
    """One line a flush, which is tried until it works; who hears of it hears it from the bucket."""
    storage = Storage.on(store)
    journal = journal_on(storage)
    for number in range(1, LINES + 1):
        note(journal)
        stubbornly(journal.flush)
        stubbornly(lambda number=number: storage.create(f"told/{number}", b""))  # type: ignore[misc]
    stubbornly(journal.close)
    return LINES


def stubbornly(act: Callable[[], object]) -> None:
    while True:
        try:
            act()
        except StorageError:
            continue
        return


class Pages(ModelStore):
    """A list of a name is one request: a list of more is of several moments."""

    def list(self, folder: str) -> list[Listed]:
        found: list[Listed] = []
        while True:
            after = found[-1].name if found else ""
            more = [listed for listed in super().list(folder) if listed.name > after]
            if not more:
                return found
            found.append(more[0])


def reading(reader: Reader, pages: bool = False) -> Act:
    """What it reads, and what it had heard of before."""

    def program(store: Store) -> tuple[int, list[int]]:
        told = max((int(found.name) for found in store.list("told")), default=0)
        if pages:
            store.__class__ = Pages
        return told, reader(Storage.on(store))

    return program


def whole(storage: Storage) -> list[int]:
    found = read_journal(storage)
    assert (found.torn, found.damages) == ((), ())
    return [event.seq for event in found.events]


def views(storage: Storage) -> list[int]:
    lines, found = JournalLines(storage, None), list[int]()
    for _ in range(2):
        found += [line["seq"] for chunk in lines.new() for _, line in chunk.lines]
    return found


def search(reader: Reader, faults: Faults, pages: bool = False) -> int:
    """The number of orders, all of which are right."""
    orders = 0
    for _, (written, read) in interleavings({}, [writing, reading(reader, pages)], lambda _: True, faults):
        orders += 1
        assert written == LINES or written is DIED
        if read is DIED or (isinstance(read, StorageError) and "(model)" in str(read)):
            continue
        assert isinstance(read, tuple), f"the reader failed: {read}"
        told, seen = read
        assert seen == [*range(1, len(seen) + 1)], "whole lines, in order, each once"
        assert told <= len(seen), "what was acknowledged is there"
    return orders


@pytest.mark.parametrize(
    ("reader", "faults"), [(whole, Faults()), (whole, Faults(deaths=1)), (views, Faults())]
)
@pytest.mark.quick("whole-faults0")
def test_a_reader_sees_what_was_acknowledged_whenever_it_comes(reader: Reader, faults: Faults) -> None:
    assert search(reader, faults) > 50


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("reader", [whole, views])
@pytest.mark.parametrize("faults", [Faults(errors=1), Faults(repeats=1, late_creates=True), Faults(deaths=1)])
def test_a_reader_sees_it_whatever_becomes_of_a_request(reader: Reader, faults: Faults) -> None:
    assert search(reader, faults) > 700


class DeletesFirst(SegmentsInPieces):
    """Takes the pieces away, and publishes the segment then."""

    def _publish(self) -> None:
        for number in range(1, len(self._pieces) + 1):
            self._storage.delete(piece_path(self._attempt, self._number, number))
        super()._publish()


class PutsAgain(SegmentsInPieces):
    """One object that grows, put anew each time."""

    def write(self, lines: list[bytes]) -> None:
        while lines:
            self._pieces.append(lines[0])
            self._storage.write(segment_path(self._attempt, 1), b"".join(self._pieces))
            del lines[:1]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("mistake", "faults"), [(DeletesFirst, Faults()), (PutsAgain, Faults(repeats=1))])
def test_the_search_catches_a_planted_mistake(
    mistake: type[SegmentsInPieces], faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "SegmentsInPieces", mistake)
    with pytest.raises(AssertionError):
        search(whole, faults)


class DeletesTheFirstLast(SegmentsInPieces):
    """So that the pieces which are left look like all that there were."""

    def _publish(self) -> None:
        paths = [piece_path(self._attempt, self._number, number + 1) for number in range(len(self._pieces))]
        self._storage.put(segment_path(self._attempt, self._number), lambda: self._pieces, self._num_bytes)
        self._number, self._pieces, self._num_bytes = self._number + 1, [], 0
        self._storage.delete_all(paths[::-1])


@pytest.fixture
def three_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_on, "__defaults__", (500,))


@pytest.mark.chaos
def test_a_list_that_is_not_of_one_moment_misleads_nobody(three_pieces: None) -> None:
    assert search(whole, Faults(), pages=True) > 100


def test_it_would_if_the_first_piece_were_deleted_last(
    three_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "SegmentsInPieces", DeletesTheFirstLast)
    with pytest.raises(AssertionError):
        search(whole, Faults(), pages=True)


# ------------------------------------------------------------------ by example
def bucket_and_storage() -> tuple[ModelBucket, Storage]:
    bucket = ModelBucket()
    return bucket, Storage.on(ModelStore(bucket))


def names(bucket: ModelBucket) -> list[str]:
    return sorted(key.removeprefix("run/journal/a0001/") for key in bucket.objects)


def test_a_segment_is_published_when_it_has_so_many_pieces_or_bytes_and_at_the_end() -> None:
    bucket, storage = bucket_and_storage()
    log, seen = SegmentsInPieces(storage, ATTEMPT, 1000, segment_pieces=3), list[list[str]]()
    for num_lines in (1, 1, 1, 11, 1):
        log.write([b"x" * 99 + b"\n"] * num_lines)
        seen.append(names(bucket))
    first, second = "000001.jsonl", "000002.jsonl"
    pieces = [f"000001.p{number:06d}.jsonl" for number in (1, 2)]
    newest = [f"000003.p{number:06d}.jsonl" for number in (1, 2)]
    assert seen == [pieces[:1], pieces, [first], [first, second, newest[0]], [first, second, *newest]]
    log.close()
    assert names(bucket) == [first, second, "000003.jsonl"]
    assert [storage.size(f"journal/a0001/{name}") for name in names(bucket)] == [300, 1000, 200]


def test_a_journal_in_pieces_has_the_bytes_of_one_in_a_file(tmp_path: Path) -> None:
    _, storage = bucket_and_storage()
    local = Storage(str(tmp_path / "run"))
    journals = [journal_on(each, 1 << 20) for each in (local, storage)]
    for _ in range(7):
        for journal in journals:
            note(journal)
            journal.flush()
        for offset in (0, 1, 130, 131, 500, 10_000):
            file, in_pieces = (
                read_from(each, segments(each, ATTEMPT)[0], offset) for each in (local, storage)
            )
            assert file == in_pieces
    for journal in journals:
        journal.close()
    assert storage.read("journal/a0001/000001.jsonl") == local.read("journal/a0001/000001.jsonl")


def test_what_was_read_of_pieces_is_not_read_again_of_the_segment() -> None:
    _, storage = bucket_and_storage()
    journal = journal_on(storage, 500)
    lines, viewed = JournalLines(storage), list[int]()
    for number in range(1, 13):
        note(journal)
        journal.flush()
        viewed += [line["seq"] for chunk in lines.new() for _, line in chunk.lines]
        assert viewed == [*range(1, number + 1)]


def test_the_begin_of_a_journal_is_found_whole_or_in_pieces() -> None:
    _, storage = bucket_and_storage()
    with pytest.raises(FileNotFoundError):
        read_first(storage, ATTEMPT)
    journal = journal_on(storage)
    note(journal)
    journal.flush()
    first = read_first(storage, ATTEMPT)
    assert first.count(b"\n") == 1
    note(journal)
    journal.close()
    assert read_first(storage, ATTEMPT).startswith(first)


def test_a_piece_that_is_gone_is_named() -> None:
    bucket, storage = bucket_and_storage()
    journal = journal_on(storage, 1 << 20)
    for _ in range(3):
        note(journal)
        journal.flush()
    assert journal.why_lost() == ""
    del bucket.objects["run/journal/a0001/000001.p000002.jsonl"]
    for read in (read_journal, read_outline):
        found = read(storage)
        assert [event.seq for event in found.events] == [1, 3]
        (damage,) = found.damages
        assert (damage.first, damage.last, damage.path) == (2, 2, "journal/a0001/000001.p000002.jsonl")
    del bucket.objects["run/journal/a0001/000001.p000003.jsonl"]
    assert "000001.p000003.jsonl is gone" in journal.why_lost()


def test_lines_of_another_writer_are_an_error_and_nothing_is_written_over_them() -> None:
    _, storage = bucket_and_storage()
    mine, other = journal_on(storage), journal_on(storage)
    note(mine)
    mine.flush()
    for _ in range(2):
        note(other)
    with raises(StorageError, "run.second_writer", "model/run/journal/a0001/000001"):
        other.flush()
    assert len(read_journal(storage).events) == 1


def test_a_piece_of_which_nobody_knows_whether_it_is_there_is_tried_again_with_the_same_lines() -> None:
    fates = iter([Fate.LOST, Fate.ANSWERED, Fate.ANSWERED, Fate.REFUSED])
    bucket = ModelBucket()
    storage = Storage.on(ModelStore(bucket, turn=lambda what, key: next(fates, Fate.ANSWERED)))
    journal, sizes = journal_on(storage, 1 << 20), list[int]()
    for _ in range(3):
        note(journal)
        stubbornly(journal.flush)
        sizes.append(len(names(bucket)))
    assert sizes == [1, 2, 3]
    assert [event.seq for event in read_journal(storage).events] == [1, 2, 3]


def test_lines_that_came_while_storage_failed_follow_in_a_piece_of_their_own() -> None:
    bucket, fates = ModelBucket(), iter([Fate.LOST])
    storage = Storage.on(ModelStore(bucket, turn=lambda what, key: next(fates, Fate.ANSWERED)))
    journal = journal_on(storage, 1 << 20)
    note(journal)
    with pytest.raises(StorageError):
        journal.flush()
    note(journal)
    journal.flush()
    assert names(bucket) == ["000001.p000001.jsonl", "000001.p000002.jsonl"]
    assert [event.seq for event in read_journal(storage).events] == [1, 2]


def test_a_segment_that_cannot_be_published_is_so_later_and_no_line_comes_twice() -> None:
    bucket, refuses = ModelBucket(), [True]

    def turn(what: str, key: str) -> Fate:
        return Fate.REFUSED if what == PUT and refuses[0] else Fate.ANSWERED

    storage = Storage.on(ModelStore(bucket, turn=turn))
    journal = journal_on(storage, 100)
    note(journal)
    for _ in range(2):
        with pytest.raises(StorageError):
            journal.flush()
        assert names(bucket) == ["000001.p000001.jsonl"]
    refuses[0] = False
    note(journal)
    journal.close()
    assert names(bucket) == ["000001.jsonl", "000002.jsonl"]
    assert [event.seq for event in read_journal(storage).events] == [1, 2]
