"""Reads the lines of a run's journal, each once, from where the last call ended: the one reader of all of it.

It interprets no kind of line. It takes no lock: the writer may be writing, or may have died in the middle of
a line. Each line is compared with its checksum (`line_format`). A line that is not as it was written is left
out and named in `damages`; the lines around it are read. So one damaged line costs what it said, and nothing
else. `lines_backwards` reads only the newest lines.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.errors import StorageError
from orchestrator.history.claims.segments import (
    SegmentRef,
    journal_folder,
    journals,
    num_bytes,
    read_from,
    segment_path,
    segments,
)
from orchestrator.history.journal.line_format import (
    FIRST,
    DamagedLineError,
    LaterLineError,
    ParsedLine,
    first_line,
    parse_line,
)
from orchestrator.storage.files import Storage

MIXED = "run.mixed_files"  # the code of the error for a segment of another run
CHUNK = 8192  # lines decoded at a time
_NEWEST = 3  # attempts checked each time; of the older ones, which are no longer written, some in turn
_IN_TURN = 8
_MOST_MISSING = 10_000_000  # before a line without a checksum: its number is damaged

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedLines:
    """Consecutive lines of an attempt's journal that are lost: damaged, or missing.

    `first` and `last` are their numbers in the attempt (`last` None: all from `first` on). `path` and `line`
    are the place of the first one: a file and a number of a line in it (0: the file as a whole). `reason`
    says what is wrong there.
    """

    attempt: int
    first: int
    last: int | None
    path: str
    line: int
    reason: str

    @property
    def where(self) -> str:
        """The file, with the line where one is meant."""
        return f"{self.path} line {self.line}" if self.line else self.path

    def __str__(self) -> str:
        return f"{self.where} is damaged: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Some consecutive lines of one segment: `path`, the attempt whose journal it is, and (number in the
    file, line).
    """

    path: str
    attempt: int
    lines: list[tuple[int, Line]]


@dataclass(kw_only=True, slots=True)
class _Place:
    """Where the next line of a segment is expected: its first byte, and the number of the line before it."""

    path: str
    offset: int = 0
    number: int = 0


class _AttemptLines:
    """The lines of one attempt. A segment may begin with lines that the one before it has, too, because a
    write failed (`JournalWriter`).
    """

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.read: list[_Place] = []  # by segment; also those that are missing
        self.gone: tuple[str, ...] = ()  # the missing pieces of the segment that is read
        self.torn = ""  # the newest segment that ends in the middle of a line which is in no later one
        self._sums = array("Q")  # by sequence number - 1; 0: the line is lost
        self._newest = FIRST  # the checksum of the newest line
        self._lost: list[DamagedLines] = []  # where lines were skipped
        self._wrong: list[DamagedLines] = []  # what else is not as it was written
        self._bad: tuple[str, int, str] | None = None  # the first damaged text after the newest line

    @property
    def damages(self) -> tuple[DamagedLines, ...]:
        """What is lost, as far as it was read."""
        found = [each for place in self._lost for each in self._still_lost(place)] + self._wrong
        if self._bad is not None:
            path, line, reason = self._bad
            found.append(self._damage(len(self._sums) + 1, None, path, line, reason))
        return tuple(found)

    @property
    def num_lines(self) -> int:
        """The highest number of a line that was read."""
        return len(self._sums)

    def note_missing(self, path: str, reason: str) -> None:
        """A file is missing. Which lines were in it, the next line shows."""
        self._bad = self._bad or (path, 0, reason)

    def add(self, place: _Place, texts: Sequence[bytes]) -> Iterator[tuple[int, Line]]:
        """The new ones of the next lines of a segment. Raises `LaterLineError`."""
        for text in texts:
            place.number += 1
            try:
                line = parse_line(text)
            except DamagedLineError as error:
                self._bad = self._bad or (place.path, place.number, str(error))
                continue
            except LaterLineError as error:
                raise LaterLineError(f"{place.path} line {place.number} {error}") from error
            fields, seq, found, prev = line
            if prev == self._newest and seq == len(self._sums) + 1:  # nearly always
                self._take(found)
                yield place.number, fields
            elif self._is_new(line, place):
                yield place.number, fields

    def add_rest(self, place: _Place, rest: bytes) -> Iterator[tuple[int, Line]]:
        """What follows the last line feed: a part of a line, or a whole one whose line feed is damaged."""
        self.torn = place.path
        try:
            line = parse_line(rest[:-1])
        except (DamagedLineError, LaterLineError):
            return
        place.number += 1
        self._note_wrong(line, place, "another byte than a line feed ends it")
        if self._is_new(line, place):
            yield place.number, line.fields

    def _is_new(self, line: ParsedLine, place: _Place) -> bool:
        at = len(self._sums)
        if line.seq <= at:
            return self._is_brought_again(line, place)
        if line.prev is None and line.seq > at + _MOST_MISSING:
            why = f"its number is {line.seq}, expected {at + 1}"
            self._bad = self._bad or (place.path, place.number, why)
            return False
        if line.seq > at + 1:
            path, number, reason = self._bad or self._why_missing() or (
                place.path,
                place.number,
                f"expected line number {at + 1} of the attempt, found {line.seq}",
            )
            self._lost.append(self._damage(at + 1, line.seq - 1, path, number, reason))
            self._sums.extend([0] * (line.seq - 1 - at))
        elif line.prev is not None and line.prev != self._newest:
            continued = f"it continues a line with the checksum {line.prev}"
            self._note_wrong(line, place, f"{continued}, the line before it has {self._newest}")
        self._take(line.sum)
        return True

    def _take(self, found: str) -> None:
        self._bad, self.torn, self._newest = None, "", found
        self._sums.append(int(found, 16))

    def _why_missing(self) -> tuple[str, int, str] | None:
        if self.gone:
            return self.gone[0], 0, "it is missing, although later pieces of its segment exist"
        return (self.torn, 0, "it ends in the middle of a line") if self.torn else None

    def _is_brought_again(self, line: ParsedLine, place: _Place) -> bool:
        """Whether a line that was passed is new after all: it was damaged in the segment before."""
        known, found = self._sums[line.seq - 1], int(line.sum, 16)
        if not known:
            self._sums[line.seq - 1] = found
        elif known != found:
            self._note_wrong(line, place, f"line number {line.seq} of the attempt was another one before")
        return not known

    def _still_lost(self, place: DamagedLines) -> Iterator[DamagedLines]:
        """The parts of it that no later segment has brought again."""
        assert place.last is not None, "these were found before a line"
        first = None
        for seq in range(place.first, place.last + 2):
            is_lost = seq <= place.last and not self._sums[seq - 1]
            if is_lost and first is None:
                first = seq
            elif not is_lost and first is not None:
                yield replace(place, first=first, last=seq - 1)
                first = None

    def _note_wrong(self, line: ParsedLine, place: _Place, reason: str) -> None:
        self._wrong.append(self._damage(line.seq, line.seq, place.path, place.number, reason))

    def _damage(self, first: int, last: int | None, path: str, line: int, reason: str) -> DamagedLines:
        return DamagedLines(
            attempt=self.attempt, first=first, last=last, path=path, line=line, reason=reason
        )


class JournalLines:
    """Follows the journals of all attempts. Not for several threads.

    After a `StorageError` of the storage itself the next call continues behind what was returned.
    """

    def __init__(self, storage: Storage, run_id: str | None = None, first: int = 1) -> None:
        """`run_id`: that of run.json, which every segment must have (None: any). Journals of attempts before
        `first` are not read.
        """
        self._storage, self._run_id, self._first = storage, run_id, first
        self._attempts: dict[int, _AttemptLines] = {}
        self._turn = 0

    def new(self) -> Iterator[Chunk]:
        """The complete lines that came since the last call, attempts and lines in order.

        A line that a segment repeats occurs once. Raises `StorageError` if storage cannot be read or if a
        segment belongs to another run, and `LaterLineError`.
        """
        for number in self._due():
            refs = segments(self._storage, number)
            attempt = self._attempts.setdefault(number, _AttemptLines(number))
            known = len(attempt.read)
            if known and refs:  # the newest of those that are known may have grown
                at = next((ref for ref in refs if ref.path == attempt.read[-1].path), None)
                if at is not None:
                    yield from self._read(at, attempt, attempt.read[-1])
            newest = attempt.read[-1].path if known else ""
            for ref in refs:
                if ref.path <= newest:
                    continue
                for missing in range(len(attempt.read) + 1, ref.number):
                    attempt.note_missing(segment_path(number, missing), "it is missing")
                    attempt.read.append(_Place(path=segment_path(number, missing)))
                attempt.read.append(_Place(path=ref.path))
                yield from self._read(ref, attempt, attempt.read[-1])

    @property
    def num_lines(self) -> dict[int, int]:
        """The highest line number of each attempt whose journal was read."""
        return {number: attempt.num_lines for number, attempt in self._attempts.items()}

    @property
    def torn(self) -> tuple[str, ...]:
        """The segments that end in the middle of a line."""
        return tuple(a.torn for _, a in sorted(self._attempts.items()) if a.torn)

    @property
    def damages(self) -> tuple[DamagedLines, ...]:
        """The lost lines of all that was read, by attempt and number."""
        found = (each for _, attempt in sorted(self._attempts.items()) for each in attempt.damages)
        return tuple(sorted(found, key=lambda each: (each.attempt, each.first)))

    def _due(self) -> list[int]:
        """The attempts to check now: all new ones, the newest, and some of the others in turn."""
        found = [number for number in journals(self._storage) if number >= self._first]
        old, newest = found[:-_NEWEST], found[-_NEWEST:]
        new = [each for each in old if each not in self._attempts]
        rest = [each for each in old if each in self._attempts]
        at = self._turn % max(1, len(rest))
        self._turn = at + _IN_TURN
        return sorted({*new, *rest[at : at + _IN_TURN], *newest})

    def _read(self, ref: SegmentRef, attempt: _AttemptLines, place: _Place) -> Iterator[Chunk]:
        attempt.gone = ref.gone
        with _there(ref):
            data = read_from(self._storage, ref, place.offset)
        end = data.rfind(b"\n") + 1
        rest, texts = data[end:], data[:end].split(b"\n")[:-1]
        del data
        is_first = place.number == 0
        for at in range(0, len(texts), CHUNK):
            lines = list(attempt.add(place, texts[at : at + CHUNK]))
            if lines:
                if is_first:
                    self._require_own(ref.path, lines[0][1])
                is_first = False
                yield Chunk(path=ref.path, attempt=ref.attempt, lines=lines)
        place.offset += end
        if rest and (lines := list(attempt.add_rest(place, rest))):
            place.offset += len(rest)
            yield Chunk(path=ref.path, attempt=ref.attempt, lines=lines)

    def _require_own(self, path: str, first: Line) -> None:
        """Checks the run of a segment by its first line; every line has the run id."""
        found = first.get("run_id", "")
        if self._run_id is not None and found != self._run_id:
            raise StorageError(
                f"{path} belongs to run {found or 'without an id'}, run.json says "
                f"{self._run_id or 'without an id'}: the folder has files of two runs, and nothing is "
                "decided from it; move those of the other run away",
                code=MIXED,
            )


def lines_backwards(
    storage: Storage, most_bytes: int, *, may_exceed: bool = True
) -> tuple[int, Iterator[tuple[SegmentRef, bytes, bool]]]:
    """The newest lines of the journal, newest first, unchecked: `parse_line` checks one.

    Reads whole segments until they have `most_bytes`; without `may_exceed` the oldest one is cut. Each line
    comes with its segment, and with whether it follows the last line feed there (such a line may be half
    written). Also returns the attempt from which on all lines are among them (0: of the whole journal).
    Raises `StorageError`, and `LaterLineError` for a segment that begins with a line of a later format.
    """
    newest, whole_from = _newest_segments(storage, most_bytes, may_exceed)
    return whole_from, _backwards(storage, newest)


def _newest_segments(
    storage: Storage, most_bytes: int, may_exceed: bool
) -> tuple[list[tuple[SegmentRef, int]], int]:
    """The segments to read, newest first, each with its first byte, and the attempt from which on they are
    complete (0: all).
    """
    newest: list[tuple[SegmentRef, int]] = []
    found = 0
    for attempt in reversed(journals(storage)):
        for ref in reversed(segments(storage, attempt)):
            if found >= most_bytes:
                is_cut = bool(newest) and newest[-1][1] > 0
                return newest, (newest[-1][0].attempt if is_cut else attempt) + 1
            with _there(ref):
                size = num_bytes(storage, ref)
            newest.append((ref, 0 if may_exceed else max(0, size - (most_bytes - found))))
            found += size
    return newest, newest[-1][0].attempt + 1 if newest and newest[-1][1] else 0


def _backwards(
    storage: Storage, newest: Sequence[tuple[SegmentRef, int]]
) -> Iterator[tuple[SegmentRef, bytes, bool]]:
    for ref, begin in newest:
        with _there(ref):
            content = read_from(storage, ref, begin)
        if begin:
            content = content[content.find(b"\n") + 1 :]
        first_line(content, ref.path)  # in another form, no line might be found below
        is_last = True
        for line in reversed(content.split(b"\n")):
            yield ref, line, is_last
            is_last = False


@contextmanager
def _there(ref: SegmentRef) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(
            f"{ref.path} vanished while it was read; read it again", code="run.changed_while_read"
        ) from error


def with_cut_off(
    damages: Sequence[DamagedLines], num_lines: Mapping[int, int], least: Mapping[int, int]
) -> tuple[DamagedLines, ...]:
    """`damages`, and the lines that are missing at the end of journals, by attempt and number.

    `num_lines` has the highest line number that was read of each attempt, `least` the number of lines that
    were durable.
    """
    found = list[DamagedLines]()
    for attempt, least_lines in least.items():
        lines = num_lines.get(attempt, 0)
        if lines < least_lines and not any(d.attempt == attempt and d.last is None for d in damages):
            found.append(
                DamagedLines(
                    attempt=attempt,
                    first=lines + 1,
                    last=least_lines,
                    path=journal_folder(attempt),
                    line=0,
                    reason=f"it has {lines} lines and had {least_lines}",
                )
            )
    return tuple(sorted((*damages, *found), key=lambda each: (each.attempt, each.first)))
