"""A run's journal in memory: its steps as columns (122 bytes each), its generations and events as they are.

It is read once and then extended with new lines. `path` determines which steps count in the end.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import itemgetter
from typing import Any

import numpy as np

from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.claims import INCONSISTENT, GenerationId, GenerationStart
from orchestrator.history.journal.journal_lines import Chunk, DamagedLines, JournalLines, Line
from orchestrator.history.journal.journal_writer import GENERATION, JUMP_S, STEP, check_copy
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.metrics.declared import RESERVED
from orchestrator.inspect.views.facts.arrays import Array, Growing
from orchestrator.json_form import decode
from orchestrator.records.steps import SKIP_CAUSES, StepRecord
from orchestrator.storage.files import Storage

INTS = ("step", "consumed_samples", "consumed_tokens", "target_tokens")
FLOATS = ("loss", "grad_norm", "lr", "step_s", "data_wait_s", "save_blocked_s")
PEAK, MFU = "peak_memory_bytes", "mfu"  # NaN where the journal does not say
_NAMES = ("attempt", "generation", *INTS, *FLOATS, "digest", "time")
_TYPES = (int, int, *(int for _ in INTS), *(float for _ in FLOATS), str, str)
_FIELDS = itemgetter(*_NAMES)
_START_FIELDS = frozenset(f.name for f in dataclasses.fields(GenerationStart))
_DIGEST = re.compile(r"[0-9a-f]{16}").fullmatch
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A line that is no step; `t` is a time as `Columns` has it. `id` is its place in the journal,
    `a0003:17`; what no line says, but the times of lines show, has the number of the line after it and an
    `x`.
    """

    attempt: int
    seq: int
    t: float
    kind: str
    fields: Line
    is_inferred: bool = False

    @property
    def id(self) -> str:
        """(attempt, number of the line) as text."""
        return f"a{self.attempt:04d}:{self.seq}{'x' if self.is_inferred else ''}"


@dataclass(kw_only=True, slots=True)
class RecordedGeneration:
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
        """A field of the start that only newer versions write; None if it is missing."""
        return self.event.fields.get(name) if self.event is not None else None


@dataclass(kw_only=True, slots=True)
class JournalSpan:
    """What one attempt's journal spans: times of its first and last line, and that one's number. `ahead_s`:
    how far the writer's clock is ahead of these times at the last line.
    """

    first: float
    last: float
    seq: int
    ahead_s: float = 0.0


class Columns:
    """All of a run's journal. `steps` has a column for each name of `INTS` and `FLOATS`, `PEAK`, `MFU`, and
    `t` (when its line was written), `ended` (when the step ended by the clock of rank 0, NaN where the
    journal does not say), `width` (tokens trained), `generation` (index into `generations`), `digest`,
    `skipped` (0, or 1 + the place in `SKIP_CAUSES`).
    `metrics` has a column for each metric of the objective, NaN where a step has no value. A repeated step is
    taken once, at its first place. `kinds` and `of_attempt` have the events by these.

    Times are seconds since 1970 by the clock of the attempt's first line. Where that clock jumps, the jump is
    taken out of all later times of the attempt, so they never fall and differences are durations. A step of
    an older attempt, which members brought, has the time at which it ended, within these bounds.
    """

    def __init__(self) -> None:
        kinds = dict.fromkeys(INTS, "i8") | dict.fromkeys((*FLOATS, PEAK, MFU), "f8")
        kinds |= {"t": "f8", "width": "i8", "generation": "i4", "digest": "u8", "ended": "f8"}
        kinds["skipped"] = "i1"
        self.steps = {name: Growing(kind) for name, kind in kinds.items()}
        self.metrics: dict[str, Growing] = {}
        self.generations: list[RecordedGeneration] = []
        self.index: dict[GenerationId, int] = {}
        self.events: list[Event] = []
        self.kinds: dict[str, list[Event]] = {}
        self.of_attempt: dict[int, list[Event]] = {}
        self.attempts: dict[int, JournalSpan] = {}
        self.last_id: str = ""
        self.damages: tuple[DamagedLines, ...] = ()  # the lines that are lost
        self._wrong: list[DamagedLines] = []  # those that are no record of their kind

    def __len__(self) -> int:
        return len(self.steps["step"])

    def __getitem__(self, name: str) -> Array:
        return (self.metrics[name] if name in self.metrics else self.steps[name]).array

    def refresh(self, lines: JournalLines) -> bool:
        """Reads the new lines. Returns whether there were any. Raises as `JournalLines.new`."""
        changed, before = False, self.damages
        for chunk in lines.new():
            changed = True
            self._add(chunk)
        self.damages = tuple(sorted((*lines.damages, *self._wrong), key=lambda d: (d.attempt, d.first)))
        return changed or self.damages != before

    def add_starts(self, starts: Iterable[GenerationStart]) -> None:
        """Adds starts that the journal has lost, from their sealed copies."""
        for start in starts:
            known = self._generation(start.id)
            known.start = known.start or start

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
            ended = float(self["ended"][row])
            values["ended"] = None if math.isnan(ended) else ended
        peak = float(self[PEAK][row])
        values[PEAK] = None if math.isnan(peak) else int(peak)
        mfu = float(self[MFU][row])
        values[MFU] = None if math.isnan(mfu) else mfu
        code = int(self["skipped"][row])
        values["skipped"] = SKIP_CAUSES[code - 1] if code else None
        metrics = {name: float(column.array[row]) for name, column in self.metrics.items()}
        values["metrics"] = {name: value for name, value in metrics.items() if not math.isnan(value)} or None
        return StepRecord(attempt=attempt, generation=generation, digest=digest, **values)

    # ---------------------------------------------------------------------- inside
    def _add(self, chunk: Chunk) -> None:
        steps: list[tuple[int, Line]] = []
        chunk = self._with_times(chunk)
        if not chunk.lines:
            return
        times = self._times(chunk)
        at = list[int]()
        for place, (number, line) in enumerate(chunk.lines):
            if line["kind"] == STEP:
                steps.append((number, line))
                at.append(place)
                continue
            try:
                self._add_event(chunk.attempt, line, float(times[place]))
            except (OrchestratorError, KeyError, TypeError, ValueError) as error:
                reason = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
                self._note_wrong(chunk, number, line, reason)
        self._add_steps(chunk, steps, times[at])
        written = self.attempts[chunk.attempt]
        written.last, written.seq = float(times[-1]), chunk.lines[-1][1]["seq"]
        newest = max(self.attempts)
        self.last_id = f"a{newest:04d}:{self.attempts[newest].seq}"

    def _with_times(self, chunk: Chunk) -> Chunk:
        """The lines that have a time; the others are damaged."""
        try:
            seconds(line["time"] for _, line in chunk.lines)
        except (KeyError, TypeError, ValueError):
            whole = list[tuple[int, Line]]()
            for number, line in chunk.lines:
                try:
                    seconds([line["time"]])
                    whole.append((number, line))
                except (KeyError, TypeError, ValueError):
                    self._note_wrong(chunk, number, line, f"its time is {line.get('time')!r}")
            return replace(chunk, lines=whole)
        return chunk

    def _note_wrong(self, chunk: Chunk, number: int, line: Line, reason: str) -> None:
        seq = line["seq"]
        damage = DamagedLines(
            attempt=chunk.attempt, first=seq, last=seq, path=chunk.path, line=number, reason=reason
        )
        self._wrong.append(damage)

    def _times(self, chunk: Chunk) -> Array:
        """The times of a chunk's lines, without the jumps of the clock; an attempt that is new begins with
        them.
        """
        clock = seconds(line["time"] for _, line in chunk.lines)
        known = self.attempts.get(chunk.attempt)
        if known is None:
            ahead_s = min(0.0, float(clock[0]) - self._begins_after(chunk.attempt))
            known = JournalSpan(first=float(clock[0]) - ahead_s, last=-math.inf, seq=0, ahead_s=ahead_s)
            self.attempts[chunk.attempt] = known
            if ahead_s <= -JUMP_S:
                self._infer_jump(chunk, 0, ahead_s, "an earlier attempt has later times", known.first)
        ahead = np.full(len(clock), known.ahead_s)
        for place, (_, line) in enumerate(chunk.lines):
            if line.get("kind") == EventKind.CLOCK_JUMPED and isinstance(line.get("by_s"), float | int):
                ahead[place:] += line["by_s"]
        falls = np.diff(clock - ahead, prepend=max(known.last, known.first))
        for place in np.flatnonzero(falls <= -JUMP_S).tolist():  # by a writer that noted no jumps
            ahead[place:] += falls[place]
            t = float(clock[place] - ahead[place])
            self._infer_jump(chunk, place, float(falls[place]), "the line before has a later time", t)
        known.ahead_s = float(ahead[-1])
        return np.maximum.accumulate(np.maximum(clock - ahead, max(known.last, known.first)))

    def _begins_after(self, attempt: int) -> float:
        """A time before the attempt began: the end of the attempt before it, or that one's begin."""
        before = max((number for number in self.attempts if number < attempt), default=None)
        if before is None:
            return -math.inf
        ends = (e.t for e in self.of_attempt.get(before, ()) if e.kind == EventKind.END)
        return max(ends, default=self.attempts[before].first)

    def _infer_jump(self, chunk: Chunk, place: int, by_s: float, known_by: str, t: float) -> None:
        line = {"attempt": chunk.attempt, "by_s": round(by_s, 3), "known_by": known_by}
        self._keep(
            Event(
                attempt=chunk.attempt,
                seq=chunk.lines[place][1]["seq"],
                t=t,
                kind=EventKind.CLOCK_JUMPED,
                fields=line,
                is_inferred=True,
            )
        )

    def _keep(self, event: Event) -> None:
        self.events.append(event)
        self.kinds.setdefault(event.kind, []).append(event)
        self.of_attempt.setdefault(event.attempt, []).append(event)

    def _add_event(self, attempt: int, line: Line, t: float) -> None:
        event = Event(attempt=attempt, seq=line["seq"], t=t, kind=line["kind"], fields=line)
        if event.kind == GENERATION:
            start = decode(GenerationStart, {k: v for k, v in line.items() if k in _START_FIELDS})
            known = self._generation(start.id)
            if known.start is not None and known.start != start:
                raise OrchestratorError(
                    f"two different starts of generation: {known.start} and {start}", code=INCONSISTENT
                )
            known.start, known.event = start, known.event or event
            if known.last_tokens is None:
                known.last_tokens = start.consumed_tokens
        elif line["attempt"] != attempt:
            raise OrchestratorError(
                f"it is an event of attempt {line['attempt']} in the journal of attempt {attempt}",
                code=INCONSISTENT,
            )
        self._keep(event)

    def _generation(self, id_: GenerationId) -> RecordedGeneration:
        at = self.index.get(id_)
        if at is None:
            at = self.index[id_] = len(self.generations)
            self.generations.append(RecordedGeneration(id=id_))
        return self.generations[at]

    def _add_steps(self, chunk: Chunk, steps: list[tuple[int, Line]], times: Array) -> None:
        if (fields := _step_fields(steps)) is None:
            wrong = [_wrong(line) for _, line in steps]
            for (number, line), reason in zip(steps, wrong, strict=True):
                if reason:
                    self._note_wrong(chunk, number, line, reason)
            whole = [place for place, reason in enumerate(wrong) if not reason]
            steps, times = [steps[place] for place in whole], times[whole]
            fields = _step_fields(steps)
        if not steps or fields is None:
            return
        found = {
            name: np.array(fields[name], dtype=self.steps[name].array.dtype) for name in (*INTS, *FLOATS)
        }
        found["digest"] = np.array([int(digest, 16) for digest in fields["digest"]], dtype="u8")
        found["ended"] = np.array([line.get("ended") for _, line in steps], dtype="f8")  # None becomes NaN
        found["t"] = times
        brought = np.array([number != chunk.attempt for number in fields["attempt"]])
        for row in np.flatnonzero(brought & ~np.isnan(found["ended"])).tolist():
            own = self.attempts.get(fields["attempt"][row])
            ended = float(found["ended"][row])
            found["t"][row] = min(times[row], ended if own is None else max(own.first, ended))
        found["skipped"] = np.array([_skip_code(line) for _, line in steps], dtype="i1")
        # None becomes NaN
        found |= {name: np.array([line.get(name) for _, line in steps], dtype="f8") for name in (PEAK, MFU)}
        metrics = [line.get("metrics") or {} for _, line in steps]
        for name in {name: None for of_step in metrics for name in of_step}:
            if name not in self.metrics:
                self.metrics[name] = Growing("f8")
                self.metrics[name].extend(np.full(len(self), np.nan))
        for name in self.metrics:
            found[name] = np.array([of_step.get(name) for of_step in metrics], dtype="f8")
        ids = np.array([fields["attempt"], fields["generation"]])
        # pieces of one generation whose steps rise: nearly always all of the chunk
        cut = np.any(np.diff(ids, axis=1), axis=0) | (np.diff(found["step"]) <= 0)
        edges = [0, *(np.flatnonzero(cut) + 1).tolist(), len(steps)]
        for a, b in zip(edges, edges[1:], strict=False):
            known = self._generation((int(ids[0, a]), int(ids[1, a])))
            piece = {name: column[a:b] for name, column in found.items()}
            if piece["step"][0] <= known.last_step:
                new = self._not_known(chunk, known, steps[a:b], piece["step"])
                piece = {name: column[new] for name, column in piece.items()}
            if len(piece["step"]):
                self._append(known, piece)

    def _append(self, known: RecordedGeneration, piece: dict[str, Array]) -> None:
        begin, at = len(self), self.index[known.id]
        tokens = piece["consumed_tokens"]
        before = tokens[0] if known.last_tokens is None else known.last_tokens
        piece["width"] = np.diff(tokens, prepend=before)  # tokens trained: what the count grew by
        piece["generation"] = np.full(len(tokens), at)
        for name, column in (*self.steps.items(), *self.metrics.items()):
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
        self, chunk: Chunk, known: RecordedGeneration, steps: list[tuple[int, Line]], labels: Array
    ) -> list[int]:
        """The steps that this generation does not have yet. A member that outlived a coordinator may bring a
        copy of a known step; a copy must not differ.
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
                self._note_wrong(chunk, number, line, str(error))
        return new


def _step_fields(steps: list[tuple[int, Line]]) -> dict[str, tuple[Any, ...]] | None:
    """The fields of step lines by column; None if one is missing or of another type."""
    try:
        columns = list(zip(*[_FIELDS(line) for _, line in steps], strict=True))
    except KeyError:
        return None
    for name, kind, column in zip(_NAMES, _TYPES, columns, strict=False):
        found = set(map(type, column)) - ({type(None)} if name == "loss" else set())
        if found - ({float, int, str} if kind is float else {kind}):
            return None
        if kind is float and str in found and not {c for c in column if type(c) is str} <= _NOT_FINITE:
            return None
    if columns and not all(map(_DIGEST, columns[-2])):
        return None
    if not all(_are_metrics(line) and _is_cause(line) for _, line in steps):
        return None
    return dict(zip(_NAMES, columns, strict=False))


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


def _record(line: Line) -> StepRecord:
    values: Any = {f.name: line[f.name] for f in dataclasses.fields(StepRecord) if f.name in line}
    floats = {name: None if line[name] is None else float(line[name]) for name in FLOATS}
    known = {name: value for name, value in (line.get("metrics") or {}).items() if value is not None}
    return StepRecord(**{**values, **floats, "metrics": known or None})


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
    if not _is_cause(line):
        return f"the step's field skipped is {line['skipped']!r}"
    return "" if _are_metrics(line) else f"the step's field metrics is {line['metrics']!r}"


def _is_cause(line: Line) -> bool:
    return line.get("skipped") in (None, *SKIP_CAUSES)


def _skip_code(line: Line) -> int:
    cause = line.get("skipped")
    return 0 if cause is None else 1 + SKIP_CAUSES.index(cause)


def _are_metrics(line: Line) -> bool:
    """Whether the metrics of a step's line, if it has any, are numbers or null under names of their own."""
    metrics = line.get("metrics")
    if metrics is None:
        return True
    if type(metrics) is not dict or not metrics.keys().isdisjoint(RESERVED):
        return False
    return {type(value) for value in metrics.values()} <= {float, int, type(None)}
