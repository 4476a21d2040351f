"""Reads each line of a run's journal once, from the end of the last look on.

It checks segments, sequence numbers and the lines' owner by the rules of `history.journal.journal_reader`,
and interprets no kind of line. A look costs as much as there is new, independent of the journal's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from orchestrator.errors import LaterFormatError, OrchestratorError
from orchestrator.history.claims.segments import SegmentRef, journal_folder, journals, read_from, segments
from orchestrator.history.journal.journal_version import DAMAGED, FORMAT, LaterLineError, require_known
from orchestrator.storage.files import Storage

_NEWEST = 3  # attempts checked each time; of the older ones, which are no longer written, some in turn
_BY_TURNS = 8
_NO_LINE = (OrchestratorError, orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError)
CHUNK = 8192  # lines decoded at a time

Line = dict[str, Any]


class UnreadableError(OrchestratorError):
    """A piece of the run differs from what was written. Views that depend on it are not shown.

    `line` is 0 if no line is meant. `advice` is what to do, a sentence without its end. `code` is that of a
    damaged journal, unless another is passed.
    """

    code = DAMAGED
    advice = "Restore the file from a copy of the storage"

    def __init__(self, file: str, line: int, reason: str, *, code: str | None = None) -> None:
        super().__init__(reason, code=code)
        self.file, self.line, self.reason = file, line, reason

    def __str__(self) -> str:
        return f"{self.where} is damaged: {self.reason}; restore the file"

    @property
    def where(self) -> str:
        """The file, with the line where one is meant."""
        return f"{self.file} line {self.line}" if self.line else self.file


class LaterError(UnreadableError):
    """Another version wrote the line or the file. Nothing is damaged, and restoring it does not help."""

    code = LaterFormatError.code
    advice = "Use the version of orchestrator that wrote it"

    def __str__(self) -> str:
        return f"{self.where} {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Some consecutive lines of one segment: `path`, the attempt whose journal it is, and (number in the
    file, line).
    """

    path: str
    attempt: int
    lines: list[tuple[int, Line]]


@dataclass(kw_only=True, slots=True)
class _Segment:
    """The read part of a segment. `begin`: the first sequence number that was new in it; `is_new`: it began
    with that one.
    """

    path: str
    offset: int = 0
    num_lines: int = 0
    begin: int = 0
    is_new: bool = True


@dataclass(kw_only=True, slots=True)
class _Attempt:
    next_seq: int = 1
    segments: list[_Segment] = field(default_factory=list)
    torn: str = ""
    repeats: dict[int, bytes] | None = None  # while the segment may still begin with repeated lines


class JournalLines:
    """Follows all attempts' journals. Not for several threads; after an error it must not be used again."""

    def __init__(self, storage: Storage, run_id: str | None) -> None:
        """`run_id`: that of run.json, which every segment must have (None: any)."""
        self._storage, self._run_id = storage, run_id
        self._attempts: dict[int, _Attempt] = {}
        self._turn = 0

    def new(self) -> Iterator[Chunk]:
        """The complete lines that came since the last call, attempts and lines in order. Raises
        `UnreadableError`, and `StorageError` if storage cannot be read; then begin anew.
        """
        for number in self._due():
            refs = segments(self._storage, number)
            numbers = [ref.number for ref in refs]
            if numbers != list(range(1, len(numbers) + 1)):
                raise UnreadableError(
                    journal_folder(number),
                    0,
                    f"it has the segments {numbers}, expected 1 to {len(numbers)}",
                    code="journal.missing_file",
                )
            if not refs:
                continue
            attempt = self._attempts.setdefault(number, _Attempt())
            known = len(attempt.segments)
            if known:  # the newest of those that are known may have grown
                yield from self._read(refs[known - 1], attempt, attempt.segments[-1])
            for ref in refs[known:]:
                segment = _Segment(path=ref.path, begin=attempt.next_seq)
                attempt.segments.append(segment)
                attempt.repeats = None
                yield from self._read(ref, attempt, segment)

    @property
    def torn(self) -> tuple[str, ...]:
        """The segments that end in the middle of a line."""
        return tuple(a.torn for _, a in sorted(self._attempts.items()) if a.torn)

    def _due(self) -> list[int]:
        """The attempts to check now: all new ones, the newest, and some of the others in turn."""
        found = journals(self._storage)
        old, newest = found[:-_NEWEST], found[-_NEWEST:]
        new = [each for each in old if each not in self._attempts]
        rest = [each for each in old if each in self._attempts]
        at = self._turn % max(1, len(rest))
        self._turn = at + _BY_TURNS
        return sorted({*new, *rest[at : at + _BY_TURNS], *newest})

    def _read(self, ref: SegmentRef, attempt: _Attempt, segment: _Segment) -> Iterator[Chunk]:
        try:
            data = read_from(self._storage, ref, segment.offset)
        except FileNotFoundError as error:
            raise UnreadableError(
                segment.path, 0, "it vanished while it was read", code="run.changed_while_read"
            ) from error
        end = data.rfind(b"\n") + 1
        rest = len(data) > end
        texts = data[:end].split(b"\n")[:-1]
        del data
        if texts and segment.num_lines == 0:
            self._require_own(segment.path, texts[0])
        before = attempt.next_seq
        for at in range(0, len(texts), CHUNK):
            lines = self._decode(attempt, segment, texts[at : at + CHUNK])
            if lines:
                yield Chunk(path=segment.path, attempt=ref.attempt, lines=lines)
        segment.offset += end
        if rest:
            attempt.torn = segment.path
        elif attempt.next_seq > before:
            attempt.torn = ""

    def _decode(self, attempt: _Attempt, segment: _Segment, texts: list[bytes]) -> list[tuple[int, Line]]:
        found: list[tuple[int, Line]] = []
        loads, expected, number = orjson.loads, attempt.next_seq, segment.num_lines
        try:
            for text in texts:
                number += 1
                line = loads(text)
                if line.get("format") != FORMAT:
                    require_known(line)
                if line["seq"] != expected:
                    self._repeated(attempt, segment, number, line["seq"], text)
                    continue
                expected += 1
                attempt.next_seq = expected
                found.append((number, line))
        except LaterLineError as error:
            raise LaterError(segment.path, number, str(error)) from error
        except _NO_LINE as error:
            if isinstance(error, UnreadableError):
                raise
            reason = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
            raise UnreadableError(
                segment.path, number, reason, code=getattr(error, "code", None)
            ) from error
        segment.num_lines = number
        return found

    def _repeated(self, attempt: _Attempt, segment: _Segment, number: int, seq: Any, text: bytes) -> None:
        """Checks a line that is not the next one: a segment may begin with lines that were written before."""
        nothing_new = attempt.next_seq == segment.begin
        if nothing_new and attempt.repeats is None:
            attempt.repeats = self._may_repeat(attempt)
        known = attempt.repeats if nothing_new and attempt.repeats is not None else {}
        if seq not in known:
            cut = (
                f"; {attempt.torn} is cut off after line number {attempt.next_seq - 1}"
                if attempt.torn
                else ""
            )
            raise OrchestratorError(
                f"expected line number {attempt.next_seq} of the attempt, found {seq}{cut}", code=DAMAGED
            )
        if known[seq] != text:
            raise OrchestratorError(f"it differs from line {seq} in the segment before it", code=DAMAGED)
        segment.is_new = False

    def _may_repeat(self, attempt: _Attempt) -> dict[int, bytes]:
        """The lines of earlier segments that may be repeated: back to the newest segment that began with a
        new line and had any.
        """
        known: dict[int, bytes] = {}
        for segment in attempt.segments[-2::-1]:
            texts = self._storage.read(segment.path).split(b"\n")[:-1]
            new = {
                line["seq"]: text for text in texts if (line := orjson.loads(text))["seq"] >= segment.begin
            }
            known = {**new, **known}
            if new and segment.is_new:
                break
        return known

    def _require_own(self, path: str, first: bytes) -> None:
        """Checks the run of a segment by its first line. A later version may write that in another form."""
        try:
            line = orjson.loads(first)
            require_known(line)
            found = line.get("run_id", "")
        except LaterLineError as error:
            raise LaterError(path, 1, str(error)) from error
        except (orjson.JSONDecodeError, OrchestratorError, AttributeError):
            return  # reading its lines says what is wrong
        if self._run_id is not None and found != self._run_id:
            raise UnreadableError(
                path,
                0,
                f"it belongs to run {found or 'without an id'}, run.json says "
                f"{self._run_id or 'without an id'}: the folder has files of two runs",
                code="run.mixed_files",
            )
