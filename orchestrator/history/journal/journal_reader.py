"""Reads a run's journal: its generations, step records and events.

`read_journal` reads all of it. `read_outline` skips the contents of step records, which are nearly all lines,
and decodes only the newest of each generation. Both leave out the lines that are damaged, and name them
(`journal_lines`). `beginning_of` reads only how an attempt began, from the first lines of its journal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.cluster.machine import Process
from orchestrator.errors import OrchestratorError, StorageError, TrainingError
from orchestrator.history.claims.claims import INCONSISTENT, GenerationId, GenerationStart
from orchestrator.history.claims.segments import journal_folder, read_first
from orchestrator.history.journal.journal_lines import Chunk, DamagedLines, JournalLines, Line
from orchestrator.history.journal.journal_writer import GENERATION, OWN_FIELDS, STEP, check_copy
from orchestrator.history.journal.line_format import (
    DamagedLineError,
    EventKind,
    LaterLineError,
    first_line,
    parse_line,
)
from orchestrator.json_form import decode
from orchestrator.planning.state.memory import ParallelChoice
from orchestrator.records.steps import DocumentLoss, StateKey, StepRecord
from orchestrator.storage.files import Storage

_FLOATS = tuple(f.name for f in dataclasses.fields(StepRecord) if str(f.type).startswith("float"))
# of a step's line, and not in the records that are read
_OPTIONAL = ("run_id", "format", "documents", "not_finite")


class _ContradictionError(Exception):
    """Two whole lines that cannot both be true."""


_FAILED = (OrchestratorError, _ContradictionError, AttributeError, KeyError, TypeError, ValueError)
Place = tuple[str, int, int]  # of a line: its file, its number there, and the attempt whose journal it is


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
    line: the rest of that line was never durable, so nothing was decided from it. `damages` are the lines
    that are lost. `num_lines` has the highest line number of each attempt.

    An outline's `records` are the step records with the highest label of each generation that has any. The
    others were not checked: neither their fields nor whether two copies of one agree.
    """

    generations: tuple[GenerationStart, ...]
    records: tuple[StepRecord, ...]
    events: tuple[JournalEvent, ...]
    torn: tuple[str, ...]
    damages: tuple[DamagedLines, ...] = ()
    num_lines: Mapping[int, int] = field(default_factory=dict)

    @property
    def last_steps(self) -> dict[GenerationId, int]:
        """The highest label with a step record of each generation that has any."""
        found: dict[GenerationId, int] = {}
        for record in self.records:
            id_ = record.attempt, record.generation
            found[id_] = max(record.step, found.get(id_, 0))
        return found


class _Outline:
    """Collects the lines of a journal; of steps only the newest of each generation."""

    def __init__(self) -> None:
        self.generations: dict[GenerationId, GenerationStart] = {}
        self.records: dict[tuple[int, int, int], StepRecord] = {}
        self.events: list[JournalEvent] = []
        self.damages: list[DamagedLines] = []
        self._last: dict[GenerationId, tuple[Place, Line]] = {}

    def read(self, storage: Storage, run_id: str | None) -> Journal:
        """The journal as it lies in storage now."""
        lines = JournalLines(storage, run_id)
        for chunk in lines.new():
            for number, line in chunk.lines:
                seq = line["seq"]
                try:
                    self._add(chunk, number, line)
                except _FAILED as error:
                    self._set_aside((chunk.path, number, chunk.attempt), seq, error)
        for place, line in self._last.values():
            seq = line["seq"]
            try:
                self.add_record(_step(line))
            except _FAILED as error:
                self._set_aside(place, seq, error)
        damages = sorted((*lines.damages, *self.damages), key=lambda each: (each.attempt, each.first))
        return Journal(
            generations=tuple(self.generations.values()),
            records=tuple(self.records.values()),
            events=tuple(self.events),
            torn=lines.torn,
            damages=tuple(damages),
            num_lines=lines.num_lines,
        )

    def _add(self, chunk: Chunk, number: int, line: Line) -> None:
        kind = line["kind"]
        if kind == STEP:
            self.add_step(chunk, number, line)
        else:
            self._add_other(kind, line)

    def add_step(self, chunk: Chunk, number: int, line: Line) -> None:
        generation = line["attempt"], line["generation"]
        known = self._last.get(generation)
        if known is None or line["step"] > known[1]["step"]:
            self._last[generation] = (chunk.path, number, chunk.attempt), line

    def add_record(self, record: StepRecord) -> None:
        known = self.records.setdefault((record.attempt, record.generation, record.step), record)
        if known is not record:
            check_copy(known, record)

    def _add_other(self, kind: str, line: Line) -> None:
        seq, time = line["seq"], line["time"]
        fields = {name: value for name, value in line.items() if name not in OWN_FIELDS}
        if kind == GENERATION:
            start = decode(GenerationStart, fields)
            known = self.generations.setdefault(start.id, start)
            if known != start:
                raise _ContradictionError(
                    f"two different starts of generation {start.generation}: {known} and {start}"
                )
        else:
            attempt = fields.pop("attempt")
            self.events.append(JournalEvent(attempt=attempt, seq=seq, time=time, kind=kind, fields=fields))

    def _set_aside(self, place: Place, seq: int, error: Exception) -> None:
        """Notes a line that is no record of its kind. Raises `StorageError` for one that contradicts an
        earlier one: both are as they were written, so no one can say which is true (rule 2).
        """
        path, number, attempt = place
        if isinstance(error, _ContradictionError | TrainingError):
            raise StorageError(
                f"{path} line {number} contradicts an earlier line: {error}; restore journal/ from a copy",
                code=INCONSISTENT,
            ) from error
        reason = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
        self.damages.append(
            DamagedLines(attempt=attempt, first=seq, last=seq, path=path, line=number, reason=reason)
        )


class _Whole(_Outline):
    """Collects all step records."""

    def add_step(self, chunk: Chunk, number: int, line: Line) -> None:
        self.add_record(_step(line))


def _step(line: Line) -> StepRecord:
    for name in ("kind", "seq", "time", "run"):
        del line[name]
    for name in _OPTIONAL:
        line.pop(name, None)
    for name in _FLOATS:
        if isinstance(line.get(name), str):  # not finite
            line[name] = float(line[name])
    return decode(StepRecord, line)


def read_journal(storage: Storage, run_id: str | None = None) -> Journal:
    """The whole journal of a run; empty if there is none.

    `run_id`: that of run.json, which every segment must have (None: not checked). Lines that are missing or
    not as they were written are in `damages`. Raises `StorageError` if storage cannot be read, if the folder
    has files of two runs, or if two records of a step or a generation differ; and `LaterLineError`, a
    subclass, for a line of a later version.
    """
    return _Whole().read(storage, run_id)


def read_outline(storage: Storage, run_id: str | None = None) -> Journal:
    """The journal without the contents of its step records, at a fraction of the time and memory
    (benchmarks/journal.py).

    Raises as `read_journal`.
    """
    return _Outline().read(storage, run_id)


def journal_process(storage: Storage, attempt: int) -> Process | None:
    """The process that writes an attempt's journal, from its first line.

    None while there is no line, if it is damaged, or if it does not name the process. A line of a later
    version counts as not naming it: a process that continues reads the journal, and is refused. Raises
    `StorageError`.
    """
    try:
        first = first_line(read_first(storage, attempt), journal_folder(attempt))
        line = first.fields if first is not None else {}
        return Process(str(line["machine"]), int(line["pid"]), str(line["pid_start"]))
    except (FileNotFoundError, LaterLineError, KeyError, TypeError, ValueError):
        return None


_MARK = f'"kind":"{EventKind.ATTEMPT.value}"'.encode()


def beginning_of(storage: Storage, attempt: int) -> dict[str, Any] | None:
    """The fields of an attempt's event `attempt`; None if it has not begun, or if that line is damaged.

    Raises `StorageError`, also for the journal of a later version (`LaterLineError`).
    """
    try:
        data = read_first(storage, attempt)
    except FileNotFoundError:
        return None
    first_line(data, journal_folder(attempt))
    for text in data.split(b"\n"):
        if _MARK in text:
            try:
                line = parse_line(text)
            except DamagedLineError:
                return None  # or it is being written
            if line.fields["kind"] == EventKind.ATTEMPT:
                return line.fields
    return None


def newest_choice(storage: Storage, attempts: Sequence[int]) -> tuple[int, ParallelChoice] | None:
    """The choice for `train.parallel` in the newest of these attempts that recorded one, with its number.

    None if none has. Raises `StorageError`.
    """
    for number in sorted(attempts, reverse=True):
        fields = beginning_of(storage, number) or {}
        if fields.get("parallel"):
            return _choice(number, fields)
    return None


def choice_in(events: Sequence[JournalEvent]) -> tuple[int, ParallelChoice] | None:
    """Like `newest_choice`, for a journal that was read."""
    begun = (event for event in events if event.kind == EventKind.ATTEMPT and event.fields.get("parallel"))
    newest = max(begun, key=lambda event: event.attempt, default=None)
    return None if newest is None else _choice(newest.attempt, newest.fields)


def _choice(number: int, fields: Mapping[str, Any]) -> tuple[int, ParallelChoice] | None:
    try:
        return number, decode(ParallelChoice, fields["parallel"], "the event `attempt`")
    except OrchestratorError:
        return None  # written by a later version: not known


def documents_of(storage: Storage, key: StateKey, run_id: str | None = None) -> tuple[DocumentLoss, ...]:
    """Returns the documents that the journal has of a step, the one with the highest loss first.

    Empty if it has none. Reads the whole journal. Raises as `read_journal`.
    """
    for chunk in JournalLines(storage, run_id).new():
        for _, line in chunk.lines:
            at = (line.get("attempt"), line.get("generation"), line.get("step"))
            if line.get("kind") == STEP and at == (key.attempt, key.generation, key.step):
                return tuple(decode(DocumentLoss, each) for each in line.get("documents") or ())
    return ()
