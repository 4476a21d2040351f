"""A run's journal in memory: its steps as columns (113 bytes each), its generations and events as they are.

It is read once and goes on with what is new. It knows lines; which steps count in the end is for `path`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from typing import Any

import numpy as np

from orchestrator.errors import OrchestratorError
from orchestrator.history.claims import GenerationId, GenerationStart
from orchestrator.history.journal import GENERATION, STEP, check_copy
from orchestrator.json_form import decode
from orchestrator.monitor.views.arrays import Array, Growing
from orchestrator.monitor.views.lines import Chunk, JournalLines, Line, UnreadableError
from orchestrator.records.steps import StepRecord
from orchestrator.storage.files import Storage

INTS = ("step", "consumed_samples", "consumed_tokens", "target_tokens")
FLOATS = ("loss", "grad_norm", "lr", "step_s", "data_wait_s", "save_blocked_s")
PEAK = "peak_memory_bytes"  # NaN where the journal does not say
_NAMES = ("attempt", "generation", *INTS, *FLOATS, "digest", "time")
_TYPES = (int, int, *(int for _ in INTS), *(float for _ in FLOATS), str, str)
_FIELDS = itemgetter(*_NAMES)
_START_FIELDS = frozenset(f.name for f in dataclasses.fields(GenerationStart))
_DIGEST = re.compile(r"[0-9a-f]{16}").fullmatch
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A line that is no step; `t` are seconds since 1970 by the clock of who wrote it. `id` is its place in
    the journal, `a0003:17`.
    """

    attempt: int
    seq: int
    t: float
    kind: str
    fields: Line

    @property
    def id(self) -> str:
        """(attempt, number of the line) as text."""
        return f"a{self.attempt:04d}:{self.seq}"


@dataclass(kw_only=True, slots=True)
class Generation:
    """One membership of the group, known by its start or by steps alone (then `start` is None, which
    `lineage` finds). `event` is the start's line.

    `ranges` are the rows of its steps in the order in which they were read; `is_sorted`: that is by step.
    """

    id: GenerationId
    start: GenerationStart | None = None
    event: Event | None = None
    ranges: list[tuple[int, int]] = field(default_factory=list)
    is_sorted: bool = True
    last_step: int = -1
    last_tokens: int | None = None

    @property
    def t(self) -> float:
        """When it began; 0 if no line says so."""
        return self.event.t if self.event is not None else 0.0

    def said(self, name: str) -> Any:
        """A field of the start that versions since then write; None if it is not there."""
        return self.event.fields.get(name) if self.event is not None else None


@dataclass(kw_only=True, slots=True)
class Written:
    """What one attempt's journal spans: times of its first and last line, and that one's number."""

    first: float
    last: float
    seq: int


class Columns:
    """All of a run's journal. `steps` has a column for each name of `INTS` and `FLOATS`, `PEAK`, and `t`
    (when the step ended, else when its line was written; seconds since 1970), `width` (tokens trained),
    `generation` (index into `generations`), `digest`, `is_timed` (`t` is when the step ended). A step that
    stands there several times is taken once, where it stands first. `kinds` and `of_attempt` have the events
    by these.
    """

    def __init__(self) -> None:
        kinds = dict.fromkeys(INTS, "i8") | dict.fromkeys((*FLOATS, PEAK), "f8")
        kinds |= {"t": "f8", "width": "i8", "generation": "i4", "digest": "u8", "is_timed": "?"}
        self.steps = {name: Growing(kind) for name, kind in kinds.items()}
        self.generations: list[Generation] = []
        self.index: dict[GenerationId, int] = {}
        self.events: list[Event] = []
        self.kinds: dict[str, list[Event]] = {}
        self.of_attempt: dict[int, list[Event]] = {}
        self.attempts: dict[int, Written] = {}
        self.last_id: str = ""

    def __len__(self) -> int:
        return len(self.steps["step"])

    def __getitem__(self, name: str) -> Array:
        return self.steps[name].array

    def refresh(self, lines: JournalLines) -> bool:
        """Take up what is new; whether there was any. Raises as `JournalLines.new`."""
        changed = False
        for chunk in lines.new():
            changed = True
            self._add(chunk)
        return changed

    def rows(self, generation: int) -> Array:
        """The rows of a generation, by step."""
        known = self.generations[generation]
        parts = [np.arange(a, b) for a, b in known.ranges]
        rows = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if not known.is_sorted:
            rows = rows[np.argsort(self["step"][rows], kind="stable")]
        return rows

    def record(self, row: int) -> StepRecord:
        """The step record that was read as this row."""
        attempt, generation = self.generations[int(self["generation"][row])].id
        values: dict[str, Any] = {name: int(self[name][row]) for name in INTS}
        values |= {name: float(self[name][row]) for name in FLOATS}
        if math.isnan(values["loss"]):
            values["loss"] = None
        digest = f"{int(self['digest'][row]):016x}"
        if "ended" in StepRecord.__dataclass_fields__:
            values["ended"] = float(self["t"][row]) if self["is_timed"][row] else None
        peak = float(self[PEAK][row])
        values[PEAK] = None if math.isnan(peak) else int(peak)
        return StepRecord(attempt=attempt, generation=generation, digest=digest, **values)

    # ---------------------------------------------------------------------- inside
    def _add(self, chunk: Chunk) -> None:
        steps: list[tuple[int, Line]] = []
        for number, line in chunk.lines:
            try:
                if line["kind"] == STEP:
                    steps.append((number, line))
                else:
                    self._add_event(chunk.attempt, line)
            except (OrchestratorError, KeyError, TypeError, ValueError) as error:
                reason = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
                raise UnreadableError(chunk.path, number, reason) from error
        if steps:
            self._add_steps(chunk.path, steps)
        first, last = chunk.lines[0][1], chunk.lines[-1][1]
        begun, now = (datetime.fromisoformat(line["time"]).timestamp() for line in (first, last))
        written = self.attempts.setdefault(chunk.attempt, Written(first=begun, last=now, seq=0))
        written.last, written.seq = max(written.last, now), last["seq"]
        newest = max(self.attempts)
        self.last_id = f"a{newest:04d}:{self.attempts[newest].seq}"

    def _add_event(self, attempt: int, line: Line) -> None:
        t = datetime.fromisoformat(line["time"]).timestamp()
        event = Event(attempt=attempt, seq=line["seq"], t=t, kind=line["kind"], fields=line)
        if event.kind == GENERATION:
            start = decode(GenerationStart, {k: v for k, v in line.items() if k in _START_FIELDS})
            known = self._generation(start.id)
            if known.start is not None and known.start != start:
                raise OrchestratorError(f"two different starts of generation: {known.start} and {start}")
            known.start, known.event = start, known.event or event
            if known.last_tokens is None:
                known.last_tokens = start.consumed_tokens
        elif line["attempt"] != attempt:
            raise OrchestratorError(f"it is one of attempt {line['attempt']} in the journal of {attempt}")
        self.events.append(event)
        self.kinds.setdefault(event.kind, []).append(event)
        self.of_attempt.setdefault(attempt, []).append(event)

    def _generation(self, id_: GenerationId) -> Generation:
        at = self.index.get(id_)
        if at is None:
            at = self.index[id_] = len(self.generations)
            self.generations.append(Generation(id=id_))
        return self.generations[at]

    def _add_steps(self, path: str, steps: list[tuple[int, Line]]) -> None:
        fields = self._checked(path, steps)
        found = {
            name: np.array(fields[name], dtype=self.steps[name].array.dtype) for name in (*INTS, *FLOATS)
        }
        found["digest"] = np.array([int(digest, 16) for digest in fields["digest"]], dtype="u8")
        found["t"], found["is_timed"] = _ended(steps, fields["time"])
        found[PEAK] = np.array([line.get(PEAK) for _, line in steps], dtype="f8")  # None becomes NaN
        ids = np.array([fields["attempt"], fields["generation"]])
        # pieces of one generation whose steps rise: nearly always all of the chunk
        cut = np.any(np.diff(ids, axis=1), axis=0) | (np.diff(found["step"]) <= 0)
        edges = [0, *(np.flatnonzero(cut) + 1).tolist(), len(steps)]
        for a, b in zip(edges, edges[1:], strict=False):
            known = self._generation((int(ids[0, a]), int(ids[1, a])))
            piece = {name: column[a:b] for name, column in found.items()}
            if piece["step"][0] <= known.last_step:
                new = self._not_known(path, known, steps[a:b], piece["step"])
                piece = {name: column[new] for name, column in piece.items()}
            if len(piece["step"]):
                self._append(known, piece)

    def _append(self, known: Generation, piece: dict[str, Array]) -> None:
        begin, at = len(self), self.index[known.id]
        tokens = piece["consumed_tokens"]
        before = tokens[0] if known.last_tokens is None else known.last_tokens
        piece["width"] = np.diff(tokens, prepend=before)  # tokens trained: what the count grew by
        piece["generation"] = np.full(len(tokens), at)
        for name, column in self.steps.items():
            column.extend(piece[name])
        if known.ranges and known.ranges[-1][1] == begin:
            known.ranges[-1] = (known.ranges[-1][0], len(self))
        else:
            known.ranges.append((begin, len(self)))
        if piece["step"][0] <= known.last_step:
            known.is_sorted = False
        known.last_step = max(known.last_step, int(piece["step"][-1]))
        known.last_tokens = int(tokens[-1])
        if not known.is_sorted:
            rows = self.rows(at)
            tokens = self["consumed_tokens"][rows]
            before = known.start.consumed_tokens if known.start is not None else tokens[0]
            self["width"][rows] = np.diff(tokens, prepend=before)
            known.last_tokens = int(tokens[-1])

    def _not_known(
        self, path: str, known: Generation, steps: list[tuple[int, Line]], labels: Array
    ) -> list[int]:
        """Which of these steps of a generation are none that it has: a copy may come again, brought by a
        member that outlived a coordinator, and must not differ.
        """
        rows = self.rows(self.index[known.id])
        row_of = dict(zip(self["step"][rows].tolist(), rows.tolist(), strict=True))
        new = []
        for at, label in enumerate(labels.tolist()):
            if label not in row_of:
                new.append(at)
                continue
            number, line = steps[at]
            try:
                check_copy(self.record(row_of[label]), _record(line))
            except OrchestratorError as error:
                raise UnreadableError(path, number, str(error)) from error
        return new

    def _checked(self, path: str, steps: list[tuple[int, Line]]) -> dict[str, tuple[Any, ...]]:
        """The fields of step lines by column, each of its type. Raises `UnreadableError` for the first line
        that is none.
        """
        try:
            columns = list(zip(*[_FIELDS(line) for _, line in steps], strict=True))
            for name, kind, column in zip(_NAMES, _TYPES, columns, strict=True):
                found = set(map(type, column)) - ({type(None)} if name == "loss" else set())
                if found - ({float, int, str} if kind is float else {kind}):
                    raise TypeError(name)
                if (
                    kind is float
                    and str in found
                    and not {c for c in column if type(c) is str} <= _NOT_FINITE
                ):
                    raise ValueError(name)
            if not all(map(_DIGEST, columns[-2])):
                raise ValueError("digest")
        except (KeyError, TypeError, ValueError) as error:
            for number, line in steps:
                if reason := _wrong(line):
                    raise UnreadableError(path, number, reason) from error
            raise
        return dict(zip(_NAMES, columns, strict=True))


def read_columns(storage: Storage, run_id: str | None = None) -> Columns:
    """The whole journal as it lies in storage now. Raises as `JournalLines.new`."""
    columns = Columns()
    columns.refresh(JournalLines(storage, run_id))
    return columns


def seconds(times: Iterable[str]) -> Array:
    """Seconds since 1970 of times as the journal writes them."""
    texts = list(times)
    if {text[23:] for text in texts} == {"+00:00"}:
        stamps = np.array([text[:23] for text in texts], dtype="datetime64[ms]")
        return stamps.astype("i8") / 1000.0
    return np.array([datetime.fromisoformat(text).timestamp() for text in texts], dtype="f8")


def _ended(steps: list[tuple[int, Line]], times: Iterable[str]) -> tuple[Array, Array]:
    """(when each step ended, whether the journal says so); else that is when its line was written."""
    ended = [line.get("ended") for _, line in steps]
    if not any(ended):
        return seconds(times), np.zeros(len(steps), dtype="?")
    known = np.array([float("nan") if each is None else each for each in ended], dtype="f8")
    return np.where(np.isnan(known), seconds(times), known), ~np.isnan(known)


def _record(line: Line) -> StepRecord:
    values: Any = {f.name: line[f.name] for f in dataclasses.fields(StepRecord) if f.name in line}
    floats = {name: None if line[name] is None else float(line[name]) for name in FLOATS}
    return StepRecord(**{**values, **floats})


def _wrong(line: Line) -> str:
    """What is wrong with a step's line; empty if nothing is."""
    for name, kind in zip(_NAMES, _TYPES, strict=True):
        if name not in line:
            return f"the step has no field {name!r}"
        value = line[name]
        fits = type(value) is kind or (kind is float and (type(value) is int or value in _NOT_FINITE))
        fits = fits or (name == "loss" and value is None)  # a step without targets
        if not fits or (name == "digest" and not _DIGEST(value)):
            return f"the step's field {name} is {value!r}"
    return ""
