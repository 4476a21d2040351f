"""The journal: a run's events, one JSON object per line, written by one process per attempt.

Any process may read it. It manages lines, segments and the set of durable step records.
`history.claims.lineage` determines which records count in the end.

Layout: `journal/a0003/000001.jsonl`, `000002.jsonl`, … for attempt 3 (`segments` has all names). Every line
has `format`, `prev` and `sum` (`line_format`), `seq` (1, 2, … within the attempt), `time` (UTC, for display),
`run`, `run_id`, `attempt` and `kind`, and `step` and `rank` where they apply. Kind `step`: the
fields of `records.steps.StepRecord`, whose attempt may be an older one (members that outlived a coordinator
bring records). Kind `generation`: the fields of `history.claims.claims.GenerationStart`. Any other kind is an
event (`history.journal.line_format`). A float that is not finite is a string ("nan", "inf", "-inf"). `run_id`
is that of run.json, and absent if that has none. A segment is closed before the next begins, and never
changed afterwards.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from orchestrator.errors import TrainingError
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.claims.segments import SEGMENT_BYTES, segment_log
from orchestrator.history.journal.line_format import FIRST, FORMAT, EventKind, line_bytes
from orchestrator.json_form import encode
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.storage.files import Storage

STEP, GENERATION = "step", "generation"
# of every line, beside its attempt and its checksums
OWN_FIELDS = frozenset({"format", "seq", "time", "run", "run_id", "kind"})
# Smaller steps of the wall clock are not reported: times in the journal are wrong by at most this much.
JUMP_S = 1.0
_TRIES = 5  # to read both clocks at one moment
REMEMBERED = 100_000  # recent step records compared with later copies, which come soon: until acknowledged
# a step's line has them only with a value
_WHERE_KNOWN = ("metrics", "mfu", "skipped", "documents", "not_finite")
# The fields of a step that are equal on all ranks. The other fields are one rank's own measurements.
_SHARED = (
    *("consumed_samples", "consumed_tokens", "target_tokens", "loss", "lr", "digest", "metrics"),
    "skipped",
)


@dataclass(kw_only=True, slots=True)
class _Chain:
    """The durable records of one generation: all steps from its start's to `reached`, and later steps in
    `beyond`.
    """

    start: GenerationStart
    reached: int
    beyond: set[int] = field(default_factory=set)

    def add(self, step: int) -> None:
        self.beyond.add(step)
        while self.reached + 1 in self.beyond:
            self.reached += 1
            self.beyond.remove(self.reached)


class Listener(Protocol):
    """Receives each new fact of a journal, in its order. It must not wait or raise."""

    def step(self, record: StepRecord) -> None:
        """A step was recorded."""

    def generation(self, start: GenerationStart) -> None:
        """A generation begins."""

    def event(self, kind: EventKind, fields: Mapping[str, Any]) -> None:
        """An event was recorded."""


class JournalWriter:
    """The journal of one attempt. Lines are collected in memory and durable after `flush`. Thread-safe.

    `event`, `step` and `generation` never wait for a disk. After a `StorageError` the next `flush` retries,
    from the first line that is not known to be durable.
    """

    def __init__(
        self,
        storage: Storage,
        attempt: int,
        run: str | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        now: Callable[[], datetime] | None = None,
        run_id: str = "",
        listener: Listener | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        """`run`: the name in every line, by default that of the storage's folder.

        `segment_bytes`: a segment is closed when it has reached this size. `run_id`: that of run.json. `now`
        and `monotonic` default to this machine's clocks. If `now` jumps against `monotonic` by `JUMP_S` or
        more, the next line is an event that reports it.
        """
        self._listener = listener
        self._attempt, self._run = attempt, run or os.path.basename(storage.root)
        self._now, self._monotonic, self._run_id = now or _utc_now, monotonic, run_id
        if now is None and monotonic is None:
            self._monotonic = time.monotonic
        self._apart_s: float | None = None  # between the two clocks, when first compared
        self._lock = threading.Lock()  # protects collected lines and facts
        self._disk_lock = threading.Lock()  # protects the file; held while waiting for a disk
        self._pending: list[bytes] = []
        self._pending_facts: list[StepRecord | GenerationStart] = []
        self._seen: OrderedDict[StateKey, StepRecord] = OrderedDict()
        self._chains: dict[int, _Chain] = {}
        self._seq, self._sum = 0, FIRST  # of the line before
        self.num_durable = 0  # lines that are surely in storage
        self._log = segment_log(storage, attempt, segment_bytes)

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Records an event with the fields of its kind, which are JSON values."""
        assert isinstance(kind, EventKind), f"{kind!r} is no kind of event"
        assert fields.keys() == kind.fields, (
            f"an event of kind {kind} has the fields {sorted(kind.fields)}, not {sorted(fields)}"
        )
        with self._lock:
            self._append(kind, fields)
            if self._listener is not None:
                self._listener.event(kind, fields)

    def generation(self, start: GenerationStart) -> None:
        """Records that a generation begins and what it continues.

        Call `flush` before sending it to any member (rule 2).
        """
        with self._lock:
            self._append(GENERATION, encode(start))
            self._pending_facts.append(start)
            if self._listener is not None:
                self._listener.generation(start)

    def step(self, record: StepRecord) -> bool:
        """Records a step and returns True. An equal copy of a known record changes nothing (False).

        Fields that a rank measures itself may differ. Raises `TrainingError` if it differs from the known
        record in a field that all ranks must agree on.
        """
        with self._lock:
            known = self._seen.get(record.key)
            if known is not None:
                check_copy(known, record)
                return False
            self._seen[record.key] = record
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
            fields = {name: _json_float(value) for name, value in encode(record).items()}
            for name in _WHERE_KNOWN:
                if fields[name] is None:
                    del fields[name]
            self._append(STEP, fields)
            self._pending_facts.append(record)
            if self._listener is not None:
                self._listener.step(record)
            return True

    def flush(self) -> StateKey | None:
        """Makes all recorded lines durable, and returns the newest state of the newest generation whose
        records are all durable.

        That key's step may be acknowledged to members of its generation. None before the first generation.
        Raises `StorageError`.
        """
        with self._disk_lock:
            with self._lock:
                last = self._seq
                lines, self._pending = self._pending, []
                facts, self._pending_facts = self._pending_facts, []
            try:
                self._log.write(lines)
            except BaseException:  # a lost line would be a gap, which no command reads past
                with self._lock:
                    self._pending = [*lines, *self._pending]
                    self._pending_facts = [*facts, *self._pending_facts]
                raise
            with self._lock:
                self.num_durable = last
                for fact in facts:
                    self._note_durable(fact)
                return self._newest()

    @property
    def least_flush_s(self) -> float:
        """The minimum interval between flushes that no process waits for."""
        return self._log.least_flush_s

    def covers(self, key: StateKey) -> bool:
        """Whether every step of this attempt on the chain up to `key` has a durable record (rule 14).

        Records of older attempts are not checked: they were durable, or brought and journalled, before this
        attempt's first generation.
        """
        with self._lock:
            at: StateKey | None = key
            while at is not None and at.attempt == self._attempt:
                chain = self._chains.get(at.generation)
                if chain is None or chain.reached < at.step:
                    return False
                at = chain.start.parent
            return at is not key

    def starts_up_to(self, key: StateKey) -> list[GenerationStart]:
        """The durable starts of this attempt's generations on the chain up to `key`, newest first."""
        found: list[GenerationStart] = []
        with self._lock:
            at: StateKey | None = key
            while at is not None and at.attempt == self._attempt and at.generation in self._chains:
                found.append(self._chains[at.generation].start)
                at = found[-1].parent
        return found

    def mean_loss(self, key: StateKey, after: StateKey | None) -> float | None:
        """The mean loss of the steps from the state `after` (None: from this attempt's beginning) to `key`.

        It covers the steps that this attempt has recorded, without those that have no targets or were
        skipped. None if no
        step has a loss, or one is not finite.
        """
        losses = list[float]()
        with self._lock:
            at: StateKey | None = key
            while at is not None and at.attempt == self._attempt and at.generation in self._chains:
                chain, key = self._chains[at.generation], at
                here = after is not None and (after.attempt, after.generation) == (at.attempt, at.generation)
                first = max(chain.start.step, after.step) if here and after is not None else chain.start.step
                keys = (dataclasses.replace(key, step=step) for step in range(first + 1, at.step + 1))
                known = [self._seen[each] for each in keys if each in self._seen]
                losses += [each.loss for each in known if each.loss is not None and each.skipped is None]
                at = None if here else chain.start.parent
        mean = math.fsum(losses) / len(losses) if losses else math.nan
        return mean if math.isfinite(mean) else None

    def why_lost(self) -> str:
        """Returns `SegmentLog.why_lost` of the current segment."""
        with self._disk_lock:
            return self._log.why_lost()

    def close(self) -> None:
        """Flushes and closes the segment. Raises `StorageError`. If only closing failed, everything is
        durable.
        """
        self.flush()
        with self._disk_lock:
            self._log.close()

    # ---------------------------------------------------------------------- inside
    def _append(self, kind: str, fields: dict[str, Any]) -> None:
        now, jumped_s = self._read_clocks()
        if jumped_s:
            self._note(EventKind.CLOCK_JUMPED, now, by_s=jumped_s)
        self._write(kind, fields, now)

    def _note(self, kind: EventKind, now: datetime, **fields: Any) -> None:
        self._write(kind, fields, now)
        if self._listener is not None:
            self._listener.event(kind, fields)

    def _read_clocks(self) -> tuple[datetime, float]:
        """The time, and by how much the clock jumped since the last call (0: no jump)."""
        if self._monotonic is None:
            return self._now(), 0.0
        for _ in range(_TRIES):
            before = self._monotonic()
            now = self._now()
            if self._monotonic() - before < JUMP_S / 10:  # else this process was suspended between them
                break
        apart_s = now.timestamp() - before
        jumped_s = 0.0 if self._apart_s is None else round(apart_s - self._apart_s, 3)
        if self._apart_s is not None and abs(jumped_s) < JUMP_S:
            return now, 0.0
        self._apart_s = apart_s
        return now, jumped_s

    def _write(self, kind: str, fields: dict[str, Any], now: datetime) -> None:
        self._seq += 1
        line = {
            "format": FORMAT,
            "seq": self._seq,
            "time": now.isoformat(timespec="milliseconds"),
            "run": self._run,
            **({"run_id": self._run_id} if self._run_id else {}),
            "attempt": self._attempt,
        }
        data, self._sum = line_bytes({**line, "kind": kind, **fields}, self._sum)
        self._pending.append(data)

    def _note_durable(self, fact: StepRecord | GenerationStart) -> None:
        if fact.attempt != self._attempt:
            return
        if isinstance(fact, GenerationStart):
            self._chains[fact.generation] = _Chain(start=fact, reached=fact.step)
        elif fact.generation in self._chains:
            self._chains[fact.generation].add(fact.step)

    def _newest(self) -> StateKey | None:
        if not self._chains:
            return None
        generation = max(self._chains)
        return StateKey(attempt=self._attempt, generation=generation, step=self._chains[generation].reached)


def _utc_now() -> datetime:
    return datetime.now(UTC)


def check_copy(known: StepRecord, copy: StepRecord) -> None:
    """Raises `TrainingError` if two records of one step differ in a field that all ranks must agree on."""
    for name in _SHARED:
        first, second = getattr(known, name), getattr(copy, name)
        if _json_float(first) != _json_float(second):
            raise TrainingError(
                f"two records of step {known.step} (attempt {known.attempt}, generation {known.generation}) "
                f"differ in {name}: "
                f"{first} and {second}; the ranks did not train the same step, so do not continue it",
                code="training.records_differ",
            )


def _json_float(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
