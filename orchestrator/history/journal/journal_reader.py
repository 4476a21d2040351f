"""Reads a run's journal: its generations, step records and events.

It takes no lock: the writer may be writing, or may have died in the middle of a line. `read_journal` reads
all of it. `read_outline` skips the contents of step records, which are nearly all lines, and decodes only the
newest of each generation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator.cluster.machine import Process
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claims.claims import GenerationId, GenerationStart
from orchestrator.history.claims.segments import journal_folder, journals, read_first, read_from, segments
from orchestrator.history.journal.journal_version import (
    DAMAGED,
    FORMAT,
    LaterLineError,
    require_known,
    require_known_begin,
)
from orchestrator.history.journal.journal_writer import GENERATION, STEP, check_copy
from orchestrator.json_form import decode
from orchestrator.records.steps import StepRecord
from orchestrator.storage.files import Storage

_NO_LINE = (OrchestratorError, orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError)
_FLOATS = tuple(f.name for f in dataclasses.fields(StepRecord) if str(f.type).startswith("float"))


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalEvent:
    """A line that is neither a step nor a generation.

    `fields` are those of the kind. `seq` counts within the attempt. `time` is for display.
    """

    attempt: int
    seq: int
    time: str
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """The content of a run's journal, in the order of attempts and lines.

    Each step record occurs once; orphans are included. `torn` names the segments that end in the middle of a
    line: the rest of that line was never durable, so nothing was decided from it.
    """

    generations: tuple[GenerationStart, ...]
    records: tuple[StepRecord, ...]
    events: tuple[JournalEvent, ...]
    torn: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalOutline:
    """The content of a journal without its step records, in the order of attempts and lines.

    `torn` as in `Journal`. `last_records` has the step record with the highest label of each generation that
    has any. The others were not checked: neither their fields nor whether two copies of one agree.
    """

    generations: tuple[GenerationStart, ...]
    last_records: tuple[StepRecord, ...]
    events: tuple[JournalEvent, ...]
    torn: tuple[str, ...]

    @property
    def last_steps(self) -> dict[GenerationId, int]:
        """The highest label with a step record of each generation that has any."""
        return {(record.attempt, record.generation): record.step for record in self.last_records}


class _Outline:
    """Collects the lines of a journal; of steps only the newest."""

    def __init__(self) -> None:
        self.generations: dict[GenerationId, GenerationStart] = {}
        self.last_lines: dict[GenerationId, dict[str, Any]] = {}
        self.events: list[JournalEvent] = []

    def add(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind == STEP:
            self.add_step(line)
            return
        del line["kind"]
        seq, time = line.pop("seq"), line.pop("time")
        del line["run"]
        line.pop("run_id", None)
        line.pop("format", None)
        if kind == GENERATION:
            start = decode(GenerationStart, line)
            known = self.generations.setdefault(start.id, start)
            if known != start:
                raise OrchestratorError(
                    f"two different starts of generation {start.generation}: {known} and {start}",
                    code=DAMAGED,
                )
        else:
            self.events.append(
                JournalEvent(attempt=line.pop("attempt"), seq=seq, time=time, kind=kind, fields=line)
            )

    def add_step(self, line: dict[str, Any]) -> None:
        generation = line["attempt"], line["generation"]
        if generation not in self.last_lines or line["step"] > self.last_lines[generation]["step"]:
            self.last_lines[generation] = line

    def last_records(self) -> Iterator[StepRecord]:
        """The newest record of each generation. Raises `StorageError`."""
        for (attempt, generation), line in self.last_lines.items():
            try:
                yield _step(line)
            except (OrchestratorError, KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"{journal_folder(attempt)}: the newest step record of generation {generation} is "
                    f"damaged: {error}; restore the file",
                    code=DAMAGED,
                ) from error


def _step(line: dict[str, Any]) -> StepRecord:
    for name in ("kind", "seq", "time", "run"):
        del line[name]
    line.pop("run_id", None)
    line.pop("format", None)
    for name in _FLOATS:
        if isinstance(line.get(name), str):  # not finite
            line[name] = float(line[name])
    return decode(StepRecord, line)


class _Whole(_Outline):
    """Collects the step records, too."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[tuple[int, int, int], StepRecord] = {}

    def add_step(self, line: dict[str, Any]) -> None:
        record = _step(line)
        known = self.records.setdefault((record.attempt, record.generation, record.step), record)
        if known is not record:
            check_copy(known, record)


def read_journal(storage: Storage, run_id: str | None = None) -> Journal:
    """The whole journal of a run; empty if there is none.

    `run_id`: that of run.json, which every segment must have (None: not checked). Tolerates an unfinished
    last line in the last segment of an attempt, and in any whose next segment begins with that line or an
    earlier one: storage failed there, and the writer began anew. Raises `StorageError` naming file and line
    for anything else that is no line of a journal, for a missing segment, and for two records of one step
    that differ. Raises `LaterLineError`, a subclass, for a line of a later version.
    """
    whole = _Whole()
    torn = _read_lines(storage, whole.add, run_id)
    return Journal(
        generations=tuple(whole.generations.values()),
        records=tuple(whole.records.values()),
        events=tuple(whole.events),
        torn=torn,
    )


def read_outline(storage: Storage, run_id: str | None = None) -> JournalOutline:
    """The journal without the contents of its step records, at a fraction of the time and memory
    (benchmarks/journal.py).

    As strict as `read_journal` with all other lines, segments and line numbers.
    """
    outline = _Outline()
    torn = _read_lines(storage, outline.add, run_id)
    return JournalOutline(
        generations=tuple(outline.generations.values()),
        last_records=tuple(outline.last_records()),
        events=tuple(outline.events),
        torn=torn,
    )


def journal_process(storage: Storage, attempt: int) -> Process | None:
    """The process that writes an attempt's journal, from its first line.

    None while there is no line, or if it does not name the process. A line of a later version counts as not
    naming it: a process that continues reads the journal, and is refused. Raises `StorageError`.
    """
    try:
        first, end, _ = read_first(storage, attempt).partition(b"\n")
    except FileNotFoundError:
        return None
    try:
        line = orjson.loads(first) if end else {}
        require_known(line)
        return Process(str(line["machine"]), int(line["pid"]), str(line["pid_start"]))
    except _NO_LINE:
        return None


def _read_lines(
    storage: Storage, add: Callable[[dict[str, Any]], None], run_id: str | None
) -> tuple[str, ...]:
    """Calls `add` with every line, and returns the segments that are torn."""
    torn = []
    for attempt in journals(storage):
        found = segments(storage, attempt)
        numbers = [ref.number for ref in found]
        if numbers != list(range(1, len(numbers) + 1)):
            raise StorageError(
                f"the journal {journal_folder(attempt)} has segments {numbers}, expected 1 to "
                f"{len(numbers)}; restore the missing ones",
                code="journal.missing_file",
            )
        lines = _Lines(add)
        for ref in found:
            data = read_from(storage, ref)
            _require_own(ref.path, data, run_id)
            lines.read(ref.path, data)
        if lines.torn:
            torn.append(lines.torn)
    return tuple(torn)


def _require_own(path: str, data: bytes, run_id: str | None) -> None:
    """Checks the run id of a segment's first line, unless that line was cut off.

    Every line has the run id; the first line stands for its segment. If a later version wrote it, that is
    reported instead.
    """
    require_known_begin(path, data)
    first, end, _ = data.partition(b"\n")
    try:
        found = orjson.loads(first).get("run_id", "") if end and run_id is not None else run_id
    except (orjson.JSONDecodeError, AttributeError):
        return  # reading its lines reports the error
    if found != run_id:
        raise StorageError(
            f"{path} belongs to run {found or 'without an id'}, run.json says {run_id or 'without an id'}: "
            "the folder has files of two runs, and nothing is decided from it; move those of the other run "
            "away",
            code="run.mixed_files",
        )


class _Lines:
    """The lines of one attempt, each passed to `add` once.

    A segment may begin with lines from the end of those before it (see `JournalWriter`). `torn`: the newest
    segment whose last line is incomplete, and is not in a later one.
    """

    def __init__(self, add: Callable[[dict[str, Any]], None]) -> None:
        self.torn = ""
        self._add = add
        self._next = 1  # the next expected sequence number
        self._known: dict[int, bytes] = {}  # lines that may be repeated

    def read(self, path: str, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        repeats, begin = True, self._next
        known = self._known
        for number, text in enumerate(lines, start=1):
            try:
                line = orjson.loads(text)
                if line.get("format") != FORMAT:
                    require_known(line, f"{path} line {number}")
                seq = line["seq"]
                repeats = repeats and seq in known
                if repeats and known[seq] != text:
                    raise OrchestratorError(
                        f"it differs from line {seq} in the segment before it", code=DAMAGED
                    )
                if not repeats:
                    self._take(seq, line)
            except LaterLineError:
                raise
            except _NO_LINE as error:
                raise StorageError(
                    f"{path} line {number} is damaged: {error}; restore the file", code=DAMAGED
                ) from error
        new = dict(enumerate(lines[begin - self._next :], start=begin)) if self._next > begin else {}
        if new and len(new) == len(lines):
            self._known = new
        else:
            self._known = {**known, **new}
        if rest:
            self.torn = path
        elif new:
            self.torn = ""

    def _take(self, seq: int, line: dict[str, Any]) -> None:
        if seq != self._next:
            cut = f"; {self.torn} is cut off after line number {self._next - 1}" if self.torn else ""
            raise OrchestratorError(
                f"expected line number {self._next} of the attempt, found {seq}{cut}", code=DAMAGED
            )
        self._add(line)
        self._next += 1
