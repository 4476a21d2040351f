"""The common input of a run's views: its journal as columns, its small files, its history and its signs of
life.

The small files are claims, ends, points with file sizes, pins, and marks on damaged points. Unchangeable
files are read once. Sizes are compared again in turn, so a look costs no more for a run with many points. No
file of tensors is read. Values derived from generations and attempts are made anew only when one of these is
new.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from orchestrator.checkpoint.points import verify
from orchestrator.checkpoint.points.pins import Hold
from orchestrator.checkpoint.points.points import COMMIT, Commit
from orchestrator.checkpoint.points.run_file import RUN_FILE, RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import Mark
from orchestrator.errors import (
    LaterFormatError,
    OrchestratorError,
    OtherFormatError,
    ResumePointError,
    StorageError,
)
from orchestrator.history import numbered_files
from orchestrator.history.claims.claim_files import FORK, REWIND, UNREADABLE, AttemptEnd, UnreadableFile
from orchestrator.history.claims.claims import Claim, ClaimParent, GenerationStart
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import Finding, FindingFiles
from orchestrator.inspect.status.point_rows import stamp
from orchestrator.inspect.views.facts.arrays import Array, Growing, Pyramid
from orchestrator.inspect.views.facts.columns import Columns, Event, RecordedGeneration
from orchestrator.inspect.views.facts.effective_steps import EffectiveSteps
from orchestrator.storage.parallel import at_once

_NEWEST, _IN_TURN = 2, 16  # points whose sizes are compared at each look


class UnreadableError(OrchestratorError):
    """A file differs from what was written, and without it nothing of the run can be shown.

    `advice` is what to do, a sentence without its end.
    """

    advice = "Restore the file from a copy of the storage"

    def __init__(self, file: str, reason: str, *, code: str) -> None:
        super().__init__(reason, code=code)
        self.file, self.reason = file, reason

    def __str__(self) -> str:
        return f"{self.file} is damaged: {self.reason}; restore the file"


class LaterError(UnreadableError):
    """Another version wrote the file. Nothing is damaged, and restoring it does not help."""

    code = LaterFormatError.code
    advice = "Use the version of orchestrator that wrote it"

    def __str__(self) -> str:
        return f"{self.file} {self.reason}"


@dataclass(kw_only=True, slots=True)
class PointFacts:
    """A committed point as its files are. `commit` is None if it cannot be read. `wrong` lists faults by
    file: sizes and presence only. `away` names the nodes whose disks hold files that cannot be reached from
    here.
    """

    name: str
    commit: Commit | None
    wrong: dict[str, str] = field(default_factory=dict)
    away: str = ""


class RunFiles:
    """The files of one run except its journal, as they were at the last `refresh`."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.run: RunFile | None = None
        self.claims: dict[int, Claim] = {}
        self.parents: dict[int, ClaimParent] = {}
        self.cut_off: dict[int, UnreadableFile] = {}
        self.ends: dict[int, AttemptEnd] = {}
        self.points: dict[str, PointFacts] = {}
        self.leftovers: frozenset[str] = frozenset()
        self.pins: dict[str, Hold] = {}
        self.deletions: frozenset[str] = frozenset()  # points that are being deleted, or were pruned
        self.marks: dict[str, Mark] = {}
        self.findings: tuple[Finding, ...] = ()
        self._finding_names: list[str] = []
        self.attempts_seen = self.points_seen = 0  # grow with changes
        self._turn = 0

    @property
    def newest(self) -> int | None:
        """The newest attempt, including one that has not begun."""
        return max(self.claims, default=None)

    @property
    def begun(self) -> int | None:
        """The newest attempt with a parent file: the history is followed from it."""
        return max(self.parents, default=None)

    def refresh_attempts(self) -> None:
        """Reads new claims, parent files and ends. Raises `UnreadableError` for a file of another run, and
        `StorageError`.
        """
        store, newest_before = self.store, max(self.claims, default=0)
        if self.run is None:
            self.run = self._run_file()
        for number in store.claim_numbers():
            if number not in self.claims:
                self.claims[number] = self._own(store.read_claim(number))
            if number not in self.parents and number not in self.cut_off:
                parent = store.read_parent(number)
                if isinstance(parent, ClaimParent):
                    self.parents[number] = parent
                elif parent is not None:
                    self.cut_off[number] = parent
        for number in self.claims:
            # an attempt may record its end after the next one has followed; it does so soon, or never
            if number not in self.ends and number >= newest_before - 1:
                end = store.read_end(number)
                if end is not None:
                    self.ends[number] = end
        self.attempts_seen = len(self.claims) + len(self.parents) + len(self.cut_off) + len(self.ends)

    def refresh_points(self) -> None:
        """Reads changes of points, pins and findings, and compares sizes. Raises `StorageError`."""
        store, changed = self.store, False
        while True:
            folders = store.storage.list(verify.POINTS)
            there = store.point_names()
            changed |= set(there) != set(self.points)
            new = [name for name in there if name not in self.points]
            read = dict(zip(new, at_once(store.storage, self._read, new), strict=True))
            self.points = {name: self.points.get(name) or read[name] for name in there}
            self.leftovers = frozenset(folders) - set(there)
            for name in self._due(there):
                changed |= self.compare(name)
            wrong = [name for name, facts in self.points.items() if facts.wrong]
            if not any([self._drop_deleted(name) for name in wrong]):
                break  # else there may be newer ones
        # after the points: one that is not among them is held by then
        (pins, deletions), marks = store.held(), self._marks()
        changed = changed or (pins, deletions, marks) != (self.pins, self.deletions, self.marks)
        self.pins, self.deletions, self.marks = pins, deletions, marks
        self.points_seen += self._refresh_findings() or changed

    def _marks(self) -> dict[str, Mark]:
        found = ((name, self.store.read_mark(name)) for name in sorted(self.store.quarantined()))
        return {name: mark for name, mark in found if mark is not None}

    def _refresh_findings(self) -> bool:
        """Reads new findings of audits and verifications. A finding never changes."""
        names = self.store.storage.list(numbered_files.FINDINGS)
        if names == self._finding_names:
            return False
        run_id = self.run.id if self.run is not None else ""
        self.findings, self._finding_names = FindingFiles(self.store.storage, run_id).all(), names
        return True

    def compare(self, name: str) -> bool:
        """Compares the sizes of one point's files now. Returns whether the result is new."""
        facts = self.points[name]
        before = facts.wrong, facts.away
        facts.wrong, facts.away = self._wrong(name, facts.commit)
        return before != (facts.wrong, facts.away)

    def _due(self, there: list[str]) -> set[str]:
        """Returns which points to compare now: the newest, and some of the others in turn."""
        known = there[:-_NEWEST]
        at = self._turn % max(1, len(known))
        self._turn = at + _IN_TURN
        return {*known[at : at + _IN_TURN], *there[-_NEWEST:]}

    def _drop_deleted(self, name: str) -> bool:
        """Drops a point whose COMMIT was removed since. Its faults mean nothing then."""
        if self.store.storage.exists(verify.point_path(name, COMMIT)):
            return False
        del self.points[name]
        return True

    # ---------------------------------------------------------------------- inside
    def _run_file(self) -> RunFile | None:
        try:
            return self.store.read_run()
        except OtherFormatError as error:
            reason = str(error).removeprefix(f"{self.store.storage.root}/{RUN_FILE} ")
            raise LaterError(RUN_FILE, reason, code=error.code) from error
        except ResumePointError as error:
            raise UnreadableError(RUN_FILE, str(error), code=error.code) from error

    def _own(self, claim: Claim) -> Claim:
        run = self.run
        if run is not None and claim.why != UNREADABLE and claim.run_id != run.id:
            raise UnreadableError(
                f"attempts/{claim.number:04d}.json",
                f"it belongs to run {claim.run_id or 'without an id'}, run.json says "
                f"{run.id or 'without an id'}: the folder has files of two runs",
                code="run.mixed_files",
            )
        return claim

    def _read(self, name: str) -> PointFacts:
        commit, wrong = None, {}
        try:
            commit = verify.read_commit(self.store.storage, name)
        except verify.DamageError as error:
            wrong = {error.damage.file: error.damage.reason}
        except StorageError:
            raise
        except OrchestratorError as error:
            wrong = {COMMIT: str(error)}
        facts = PointFacts(name=name, commit=commit, wrong=wrong)
        if commit is not None:
            facts.wrong, facts.away = self._wrong(name, commit)
        return facts

    def _wrong(self, name: str, commit: Commit | None) -> tuple[dict[str, str], str]:
        if commit is None:
            return self._read(name).wrong, ""
        wrong, away = {}, ""
        for entry in commit.files:
            if text := self.store.storage.away(verify.point_path(name, entry.path)):
                away = away or text
                continue  # on the disk of a node that is not this one
            try:
                verify.check_file(self.store.storage, name, entry, with_digest=False)
            except verify.DamageError as error:
                wrong[error.damage.file] = error.damage.reason
        return wrong, away


# ---------------------------------------------------------------------------------------------- signs of life
WATCH_S = 10.0  # without any change for so long, a run without an end is dead (membership rule 12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """Whether the newest attempt lives, as this process saw it.

    `alive`: it changed something within `limit_s` seconds; None: it was not watched for so long, or it has
    ended. `last_sign`: the time of its last change, seconds since 1970; None if there was none while it was
    watched for `watched_s`.
    """

    alive: bool | None = None
    last_sign: float | None = None
    watched_s: float = 0.0
    limit_s: float = WATCH_S


class LifeWatch:
    """Watches the signs of life of one run. Safe to use from threads."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        watch_s: float = WATCH_S,
    ) -> None:
        """`clock`: gives times for people. `monotonic`: measures the watch of `watch_s`."""
        self._clock, self._monotonic, self._watch_s = clock, monotonic, watch_s
        self._lock = threading.Lock()
        self._signs: tuple[int, bytes] | None = None  # of the newest attempt, as they were last seen
        self._watched_since = self._changed_at = 0.0
        self._sign_at: float | None = None

    def look(self, number: int, over: bool, found: bytes) -> Life:
        """`number`: the newest attempt, 0 if there is none; `over`: it has ended, or there is none; `found`:
        its signs of life (`ClaimFiles.signs_of_life`), empty if it is over.
        """
        signs = (number, found)
        with self._lock:
            now = self._monotonic()
            if self._signs is None:
                self._watched_since = self._changed_at = now
            elif signs != self._signs and not over:  # an end without signs is no sign
                self._changed_at, self._sign_at = now, self._clock()
            self._signs = signs
            quiet = now - self._changed_at
            alive = None if self._sign_at is None and quiet < self._watch_s else quiet < self._watch_s
            return Life(
                alive=None if over else alive,
                last_sign=self._sign_at,
                watched_s=now - self._watched_since,
                limit_s=self._watch_s,
            )


# ------------------------------------------------------------------------------------------ one look at a run
Value = TypeVar("Value")

DRAIN = "drain notice"  # `by` of an end that nobody wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEnd:
    """The end of an attempt. `by` is None if the journal does not say who wanted it."""

    t: float
    outcome: str
    reason: str
    by: str | None

    @property
    def is_wanted(self) -> bool:
        """Whether the time after it is not counted as lost: the run was done, or somebody wanted it to
        stop.
        """
        return self.outcome in ("done", "stopped") and DRAIN not in (self.by or "")


class StepSeries:
    """Steps in one order, by row. Columns and pyramids are made on first use, and then extended with new
    rows.
    """

    def __init__(self, columns: Columns, rows: Growing) -> None:
        self._columns, self._rows = columns, rows
        self._gathered: dict[str, Growing] = {}
        self._pyramids: dict[str, Pyramid] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> Array:
        found = self._gathered.get(name)
        if found is None:
            found = self._gathered[name] = Growing(self._columns[name].dtype)
        found.extend(self._columns[name][self._rows.array[len(found) :]])
        return found.array

    @property
    def rows(self) -> Array:
        """The rows of the columns."""
        return self._rows.array

    def pyramid(self, name: str) -> Pyramid:
        """The pyramid of one column."""
        found = self._pyramids.setdefault(name, Pyramid())
        found.extend(self[name])
        return found


@dataclass(kw_only=True, slots=True)
class RunFacts:
    """One look at a run. `shape` counts what makes derived things new: attempts, ends, generations, fates;
    `size` all lines.
    """

    files: RunFiles
    columns: Columns
    path: EffectiveSteps
    history: StepSeries
    life: Life = field(default_factory=Life)
    shape: int = 0
    size: int = 0
    missing: frozenset[str] = frozenset()  # points that lost their COMMIT, and nobody meant to delete
    pieces: tuple[str, ...] = ()  # missing parts of the folder (`inspect.status.integrity`)
    points_seen: tuple[int, int] = (0, 0)  # grows with changes of points, pins and findings
    _kept: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.files.run.name if self.files.run else ""

    @property
    def uri(self) -> str:
        """The run's address in storage."""
        return self.files.store.storage.root

    @property
    def created(self) -> float | None:
        """The time of the run's first begin."""
        return stamp(self.files.run.created) if self.files.run else None

    def kept(self, name: str, key: Any, make: Callable[[], Value]) -> Value:
        """Returns `make()`, called once for each `key` of this name. The value of an older key is dropped."""
        found = self._kept.get(name)
        if found is None or found[0] != key:
            found = self._kept[name] = (key, make())
        return found[1]

    # ---------------------------------------------------------------------- attempts
    def end_of(self, attempt: int | None) -> RecordedEnd | None:
        """How an attempt ended, by its journal or its end record; None if neither says it."""
        if attempt is None:
            return None
        events = [e for e in self.columns.of_attempt.get(attempt, ()) if e.kind == EventKind.END]
        if events:
            last = events[-1]
            fields = last.fields
            return RecordedEnd(
                t=last.t, outcome=fields["outcome"], reason=fields["reason"], by=fields.get("by") or None
            )
        if (end := self.files.ends.get(attempt)) is not None:
            by = getattr(end, "by", None) or None
            return RecordedEnd(t=stamp(end.ended) or 0.0, outcome=end.outcome, reason=end.reason, by=by)
        return None

    def began(self, attempt: int) -> float | None:
        """The time of the attempt's first line."""
        written = self.columns.attempts.get(attempt)
        return written.first if written else None

    def wrote(self, attempt: int | None) -> float | None:
        """The time of the attempt's last line."""
        written = self.columns.attempts.get(attempt) if attempt is not None else None
        return written.last if written else None

    @property
    def ahead_s(self) -> float:
        """How far the clock of the newest journal's writer is ahead of the times that are shown for it."""
        attempts = self.columns.attempts
        return attempts[max(attempts)].ahead_s if attempts else 0.0

    def config(self, attempt: int | None) -> dict[str, Any]:
        """The flat configuration of an attempt; empty if its journal has not begun."""
        begun = self.beginning(attempt)
        return dict(begun.fields["config"]) if begun else {}

    def beginning(self, attempt: int | None) -> Event | None:
        """The event with which an attempt began."""
        events = self.columns.of_attempt.get(attempt, ()) if attempt is not None else ()
        return next((event for event in events if event.kind == EventKind.ATTEMPT), None)

    def parent(self, attempt: int | None) -> ClaimParent | None:
        """The parent of an attempt: what it continues."""
        return self.files.parents.get(attempt) if attempt is not None else None

    def commanded(self) -> tuple[int, str] | None:
        """(attempt, command) of the begin of the newest attempt that trains; None if it was not recorded."""
        for number in sorted(self.files.parents, reverse=True):
            begun, claim = self.beginning(number), self.files.claims.get(number)
            if command := begun.fields.get("command") if begun is not None else "":
                return number, command
            if claim is None or claim.why not in (REWIND, FORK):  # these have commands of their own
                return None
        return None

    # ---------------------------------------------------------------------- generations
    @property
    def head(self) -> RecordedGeneration | None:
        """The generation at the end of the history; None before the newest attempt has formed one."""
        return self.columns.generations[self.path.head] if self.path.head is not None else None

    def generations(self) -> list[RecordedGeneration]:
        """Those with a start, in order."""
        known = [g for g in self.columns.generations if g.start is not None]
        return sorted(known, key=lambda g: g.id)

    def events(self, *kinds: str) -> list[Event]:
        """The events of these kinds, in the order of the journal."""
        found = [event for kind in kinds for event in self.columns.kinds.get(kind, ())]
        return sorted(found, key=lambda e: (e.attempt, e.seq)) if len(kinds) > 1 else found

    # ---------------------------------------------------------------------- places on the history
    def index_at(self, t: float) -> int:
        """The number of the history's steps that ended at or before this time."""
        return int(np.searchsorted(self.history["t"], t, side="right"))

    def index_after(self, tokens: int) -> int:
        """The number of the history's steps that ended at or before this position."""
        return int(np.searchsorted(self.history["consumed_tokens"], tokens, side="right"))

    @property
    def tokens(self) -> int:
        """The position at the history's end."""
        if len(self.history):
            return int(self.history["consumed_tokens"][-1])
        return self.begin.consumed_tokens if self.begin is not None else 0

    @property
    def step(self) -> int | None:
        """The label of the history's last step; None before the first, unless a fork begins with some."""
        if len(self.history):
            return int(self.history["step"][-1])
        return (self.begin.step or None) if self.begin is not None else None

    @property
    def begin(self) -> GenerationStart | None:
        """The begin of a history without a step of its own: its newest generation's begin, or a fork's
        origin.
        """
        return self.path.lineage.segments[-1].start if self.path.lineage.segments else None


def short(value: float | None, digits: int = 5) -> float | None:
    """Rounds for a picture: `digits` significant digits; None for what is not finite, because JSON cannot
    express it.
    """
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def mean_loss(losses: Array) -> float | None:
    """The mean of the losses of those steps that have one; None if none has."""
    known = losses[~np.isnan(losses)]
    return float(known.mean()) if len(known) else None


def shorts(values: Array, digits: int = 5) -> list[float | None]:
    """`short` of every value."""
    finite = np.isfinite(values)
    some = np.where(finite & (values != 0), np.abs(values), 1.0)
    power = digits - 1 - np.floor(np.log10(some))
    up, down = 10.0 ** np.maximum(power, 0), 10.0 ** np.maximum(-power, 0)  # both are exact
    rounded = np.where(finite, np.round(np.where(finite, values, 0.0) * up / down) * down / up, 0.0)
    if finite.all():
        return rounded.tolist()  # type: ignore[no-any-return]
    return [value if ok else None for value, ok in zip(rounded.tolist(), finite.tolist(), strict=True)]
