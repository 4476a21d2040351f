"""The common input of a run's views: its journal as columns, its small files, its history and its signs of
life.

Values derived from generations and attempts are made anew only when one of these is new.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from orchestrator.history.claims.claim_files import FORK, REWIND
from orchestrator.history.claims.claims import ClaimParent, GenerationStart
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.status.point_rows import stamp
from orchestrator.inspect.views.facts.arrays import Array, Growing, Pyramid
from orchestrator.inspect.views.facts.columns import Columns, Event, RecordedGeneration
from orchestrator.inspect.views.facts.effective_steps import EffectiveSteps
from orchestrator.inspect.views.facts.files import RunFiles

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
