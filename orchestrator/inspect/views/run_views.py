"""One run's views for a server of pages: each view is a JSON value.

The run is read once, then only its new parts. `refresh` reads storage; the views read only the few documents
of a point. An object is for one thread at a time. Times are seconds since 1970; None means not recorded.
Secrets in configurations, errors and events are hidden (`config.redaction`). A state of a run is one of
`inspect.status.snapshot`. `open` means that the run has no end and was not watched long enough to tell
whether it is alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import least_lines, with_lost_generations
from orchestrator.errors import OrchestratorError, RefusedError, StorageError
from orchestrator.history.claims.claim_files import read_starts, sealed_ids
from orchestrator.history.claims.claims import GenerationId
from orchestrator.history.journal.journal_lines import MIXED, JournalLines, with_cut_off
from orchestrator.history.journal.line_format import EventKind, LaterLineError
from orchestrator.inspect.status.integrity import (
    lost_points,
    missing_pieces,
    newest_there,
    newest_unwritten,
    on_history,
    read_names,
)
from orchestrator.inspect.status.snapshot import UNREADABLE, Standing, level, verdict
from orchestrator.inspect.status.tail import Tail
from orchestrator.inspect.views import (
    cards,
    charts,
    events,
    goodput,
    lineage_graph,
    points_table,
    sources,
    summary,
)
from orchestrator.inspect.views.events import EventFilter
from orchestrator.inspect.views.facts import effective_steps
from orchestrator.inspect.views.facts.columns import Columns
from orchestrator.inspect.views.facts.facts import (
    WATCH_S,
    LaterError,
    LifeWatch,
    RunFacts,
    RunFiles,
    StepSeries,
    UnreadableError,
)

_FATES = (EventKind.POINT_COMMITTED, EventKind.DELETING_POINTS, EventKind.POINTS_DELETED)


def missing_now(facts: RunFacts, lost: frozenset[str]) -> tuple[str, ...]:
    """The paths that are missing or differ from what was written, as in `status`, a few words each.

    The views have the whole journal, so this lists at least as many as `status`.
    It lists all of the run's folders. `lost` are the points that lost their COMMIT although nobody meant to
    delete them. Raises `StorageError`.
    """
    store, begun = facts.files.store, facts.files.begun or 0
    names, there, tail = read_names(store), [*facts.files.points], _as_tail(facts)
    lost &= lost_points(tail, names, facts.parent(begun), there)
    if lost:
        lost -= store.deletions()
    torn = {number for number in facts.files.cut_off if number > begun}
    mine = on_history(facts.parent(begun), [name for name in there if name not in facts.files.marks])
    _, wrong = newest_there(mine, lambda name: facts.files.points[name].wrong)
    damaged = dict.fromkeys(damage.where for damage in facts.columns.damages)
    is_trained, unwritten = len(facts.columns) > 0, newest_unwritten(tail, there)
    return missing_pieces(names, lost, torn, unwritten, is_trained, wrong, [*damaged])


def _as_tail(facts: RunFacts) -> Tail:
    """A tail that reaches back to the beginning of the journal."""
    newest = max((attempt for attempt, _ in facts.columns.index), default=0)
    return Tail(
        generation={"attempt": newest} if newest else None,
        fates=[(event.kind, event.fields) for event in facts.events(*_FATES)],
    )


def _read(columns: Columns, lines: JournalLines) -> None:
    """Reads the new lines. Raises `UnreadableError` for a journal of a later version or of another run."""
    try:
        columns.refresh(lines)
    except LaterLineError as error:
        file, _, reason = str(error).partition(" ")
        raise LaterError(file, reason, code=error.code) from error
    except StorageError as error:
        if error.code != MIXED:
            raise
        file, _, reason = str(error).partition(" ")
        raise UnreadableError(file, f"it {reason}", code=MIXED) from error


LOOKS = 5  # tries, until what is read of a running run fits together
AGAIN_S = 10.0  # wait before an unreadable run is read again
PIECES_S = 10.0  # least interval between listings of all its folders

Document = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class _Reading:
    """State that is kept between two looks."""

    files: RunFiles
    columns: Columns
    facts: RunFacts
    lines: JournalLines | None = None
    shape: tuple[int, ...] = ()
    listed_at: float = float("-inf")  # when all folders were, for `facts.pieces`
    looks: int = 0
    num_damages: int = 0  # lines that were damaged when all was read
    unsealed: set[GenerationId] = field(default_factory=set)  # whose sealed copies were read


class RunViews:
    """The views of one run. Every view may raise `RefusedError`: for an unknown name, and, except `summary`,
    for an unreadable run.
    """

    def __init__(
        self,
        store: RunStore,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        watch_s: float = WATCH_S,
        life: LifeWatch | None = None,
    ) -> None:
        """`clock`: for what people read. `monotonic`: by which the run is watched for `watch_s`. `life`: a
        watch that others have a part in, in place of one by these.
        """
        self._store, self._clock, self._monotonic = store, clock, monotonic
        self._reading: _Reading | None = None
        self._failed_at = 0.0
        self.unreadable: UnreadableError | None = None
        self._life, self._was_watched = life or LifeWatch(clock, monotonic, watch_s), False

    # ---------------------------------------------------------------------- reading
    def refresh(self) -> bool:
        """Reads what is new of the run. Returns whether anything that a view shows may have changed.

        The first look reads all of it. A piece that differs from what was written makes the run `unreadable`;
        it is read again later. Raises `StorageError` if storage cannot be read: the next look continues from
        there.
        """
        if self.unreadable is not None and self._monotonic() - self._failed_at < AGAIN_S:
            return False
        try:
            changed = self._look()
            changed |= self._look_again_at_damages()
        except UnreadableError as error:
            was, self.unreadable = self.unreadable, error
            self._reading, self._failed_at = None, self._monotonic()
            return was is None or was.args != error.args
        changed |= self.unreadable is not None
        self.unreadable = None
        return self._watch() | changed

    @property
    def last_id(self) -> str:
        """The newest line's place in the journal, `a0200:17`; empty before the first."""
        return self._reading.columns.last_id if self._reading is not None else ""

    def _look_again_at_damages(self) -> bool:
        """Reads everything once more if lines seem damaged that were not read in the first look: a mount may
        show a page of a growing file as zeros for a moment.
        """
        reading = self._reading
        assert reading is not None, "it was read just now"
        reading.looks += 1
        if reading.looks == 1 or len(reading.columns.damages) <= reading.num_damages:
            reading.num_damages = len(reading.columns.damages)
            return False
        self._reading = None
        changed = self._look()
        return self._look_again_at_damages() | changed

    def _look(self) -> bool:
        reading = self._reading = self._reading or self._begin()
        files, facts, columns = reading.files, reading.facts, reading.columns
        for _ in range(LOOKS):
            before = self._store.attempt_files()
            files.refresh_attempts()
            if reading.lines is None:
                run_id = files.run.id if files.run is not None else None
                reading.lines = JournalLines(self._store.storage, run_id)
            sealed = sealed_ids(self._store.storage)
            least = least_lines(files.parents.values(), files.ends.get(files.begun or 0))
            _read(columns, reading.lines)
            columns.damages = with_cut_off(columns.damages, reading.lines.num_lines, least)
            self._add_sealed(reading, sealed)
            files.refresh_points()
            missing = points_table.lost(facts)
            if missing or points_table.of_no_generation(facts):  # the journal may say why by now
                _read(columns, reading.lines)
            # what it says was committed since is not missed: the list of points is older
            missing &= points_table.lost(facts)
            now = self._monotonic()
            is_due = now - reading.listed_at >= PIECES_S
            gone = missing_now(facts, missing) if is_due else facts.pieces
            if before == self._store.attempt_files():
                files.points_seen += missing != facts.missing
                facts.missing = missing
                is_other, facts.pieces = gone != facts.pieces, gone
                reading.listed_at = now if is_due else reading.listed_at
                return self._take(reading) | is_other
        raise StorageError(
            f"{self._store.storage.root} changed each of the {LOOKS} times that it was read, so its files do "
            "not fit together; read it again",
            code="run.changed_while_read",
        )

    def _add_sealed(self, reading: _Reading, sealed: frozenset[GenerationId]) -> None:
        """Adds the generations that the journal has lost. `sealed` was listed before it was read."""
        columns = reading.columns
        known = {generation.id for generation in columns.generations if generation.event is not None}
        if lost := sealed - known - reading.unsealed:
            run_id = reading.files.run.id if reading.files.run is not None else None
            columns.add_starts(read_starts(self._store.storage, lost, run_id))
            reading.unsealed |= lost  # one that cannot be read now is not tried again
        columns.damages = with_lost_generations(columns.damages, reading.unsealed)

    def _take(self, reading: _Reading) -> bool:
        """Updates what is derived from the journal. Returns whether anything was new."""
        files, facts, columns = reading.files, reading.facts, reading.columns
        size = len(columns) + len(columns.events)
        num_starts = len(columns.generations) + len(reading.unsealed)
        shape = files.attempts_seen, num_starts, len(columns.kinds.get(EventKind.END, ()))
        points_seen = files.points_seen, points_table.seen(facts)
        is_new = (size, shape, points_seen) != (facts.size, reading.shape, facts.points_seen)
        if shape != reading.shape or not effective_steps.extend(columns, facts.path):
            self._reshape(reading)
        facts.size, reading.shape, facts.points_seen = size, shape, points_seen
        return is_new

    def _begin(self) -> _Reading:
        columns = Columns()
        way = effective_steps.build(columns, (), ())
        facts = RunFacts(
            files=RunFiles(self._store), columns=columns, path=way, history=StepSeries(columns, way.rows)
        )
        return _Reading(files=facts.files, columns=columns, facts=facts)

    def _reshape(self, reading: _Reading) -> None:
        """Builds the history anew: there is a new attempt, generation or end, or steps beside the history."""
        facts, files = reading.facts, reading.files
        claims, parents = list(files.claims.values()), list(files.parents.values())
        try:
            facts.path = effective_steps.build(reading.columns, claims, parents)
        except OrchestratorError as error:
            reason = f"the run's history contradicts itself: {error}"
            raise UnreadableError("journal", reason, code=error.code) from error
        facts.history = StepSeries(reading.columns, facts.path.rows)
        facts.shape += 1

    def _watch(self) -> bool:
        """Returns whether the newest attempt lives, judged by changes on this process's own clock."""
        assert self._reading is not None, "it was read just now"
        facts = self._reading.facts
        number = facts.files.newest or 0
        before = facts.life
        over = number == 0 or facts.end_of(number) is not None
        life = self._life.look(number, over, b"" if over else self._store.signs_of_life(number))
        if life.last_sign is not None:
            life = replace(life, last_sign=life.last_sign - facts.ahead_s)  # as `_now`
        facts.life = life
        first, self._was_watched = not self._was_watched, True
        return first or before.alive != facts.life.alive or before.last_sign != facts.life.last_sign

    @property
    def _facts(self) -> RunFacts:
        if self.unreadable is not None:
            raise RefusedError(str(self.unreadable), code=self.unreadable.code)
        if self._reading is None:
            self.refresh()
            return self._facts
        return self._reading.facts

    @property
    def facts(self) -> RunFacts:
        """The facts that all views are made of, as last read."""
        return self._facts

    def _now(self) -> float:
        """This machine's time on the scale of the journal's times, which leave out jumps of a clock."""
        return self._clock() - (0.0 if self.unreadable is not None else self._facts.ahead_s)

    # ---------------------------------------------------------------------- views
    def summary(self, full: bool = True) -> Document:
        """The run at a glance; without `full` as in a list of runs. An unreadable run has its state, `error`
        (file, reason) and the verdict only.
        """
        if self.unreadable is None and self._reading is None:
            self.refresh()
        now = self._now()
        error = self.unreadable
        if error is None:
            return summary.summary(self._facts, now, full)
        standing = Standing(state=UNREADABLE, reason=str(error))
        return {
            "name": self._store.storage.root.rstrip("/").rpartition("/")[2],
            "uri": self._store.storage.root,
            "now": now,
            "state": UNREADABLE,
            "reason": error.file,
            "since": None,
            "created": None,
            "error": {"file": error.file, "reason": error.reason},
            "points_there": self._store.point_names()[-3:],
            "verdict": {"level": level(standing), "text": summary.sentence(verdict(standing))},
        }

    def timeline(self, px: int | None = None) -> Document:
        """Attempts, generations, points and what happened; `px`: how wide it is drawn."""
        return charts.timeline(self._facts, px, self._now())

    def series(
        self,
        axis: str = "tokens",
        metrics: Sequence[str] = ("loss",),
        start: float | None = None,
        stop: float | None = None,
        px: int = 800,
    ) -> Document:
        """Curves; `axis` is tokens or time, `start` and `stop` are in its unit."""
        return charts.series(self._facts, axis, metrics, start, stop, px)

    def points(
        self, state: str = "all", sort: str = "-step", q: str = "", offset: int = 0, limit: int = 100
    ) -> Document:
        """A page of the resume points."""
        return points_table.points(self._facts, state, sort, q, offset, limit)

    def point(self, name: str) -> Document:
        """One resume point. Its files' sizes are compared now."""
        facts = self._facts
        if name in facts.files.points and facts.files.compare(name):
            facts.files.points_seen += 1
            self.refresh()  # it may have been deleted just now
        return points_table.point(facts, name, self._now())

    def attempts(
        self,
        routine: bool = False,
        offset: int = 0,
        limit: int = 200,
        forks: Sequence[lineage_graph.Fork] = (),
    ) -> Document:
        """A page of the attempts, newest first; `routine`: with plain restarts of the coordinator. `forks`:
        what is known of the storage's other runs.
        """
        return lineage_graph.attempts(self._facts, routine, offset, limit, forks)

    def forked_from(self) -> lineage_graph.Fork | None:
        """The run and point that this run is a fork of; None if it is no fork, or that cannot be read."""
        run = self._reading.files.run if self._reading is not None else None
        if run is None or run.forked_from is None:
            return None
        name = self._store.storage.root.rstrip("/").rpartition("/")[2]
        return lineage_graph.Fork(run=name, of=run.forked_from.run_id, point=run.forked_from.point)

    def sources(self) -> Document:
        """The trained data, by source."""
        return sources.sources(self._facts)

    def cards(self) -> list[Document]:
        """Every card with its rows (`inspect.views.cards`)."""
        return cards.card_documents(self._facts, self._now())

    def card(self, name: str) -> Document:
        """One card with its rows. Raises `RefusedError` if there is none of this name."""
        return cards.card_document(cards.card_named(name), self._facts, self._now())

    def goodput(self) -> Document:
        """How the run's time was spent."""
        return goodput.goodput(self._facts)

    def events(
        self,
        which: EventFilter = EventFilter(),  # noqa: B008  frozen
        offset: int = 0,
        limit: int = 100,
    ) -> Document:
        """A page of these events, newest first."""
        return events.events(self._facts, which, offset, limit)

    def event(self, id_: str) -> Document:
        """One event with the fields of its line."""
        return events.event(self._facts, id_)

    def happenings_since(self, id_: str) -> list[Document]:
        """The events after a place in the journal, as rows, in the journal's order: what a reader of the
        stream has missed. Empty for a place that is no id.
        """
        return events.since(self._facts, id_)
