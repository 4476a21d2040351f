"""A run's history around a step for a replay: the point to begin at, the steps from there, and their regimes.

The run is only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.field_rules import in_todays_fields, nested
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.survey import Survey, survey
from orchestrator.errors import OtherFormatError, ResumePointError
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.claims.lineage import skips_of
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.launch.branch.point_query import Position, Wanted, place, wanted_place
from orchestrator.planning.resume.source_lists import SourceLists, moved
from orchestrator.planning.schedule import Budgets
from orchestrator.records.cursor import Cursor
from orchestrator.storage.at_once import at_once


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """What the steps of an attempt are trained with."""

    config: JobConfig
    budgets: Budgets
    sources: tuple[SourceLists, ...]  # the lists that it reads

    def trains_as(self, other: Regime) -> bool:
        """Whether both give the same steps."""
        sections = ("data", "pack", "model", "train")
        same = all(getattr(self.config, each) == getattr(other.config, each) for each in sections)
        return same and (self.budgets, self.sources) == (other.budgets, other.sources)


class History:
    """A run's history around a step: where to begin, the steps from there, and the regime of each."""

    def __init__(self, store: RunStore, wanted: Wanted) -> None:
        self.store, self.seen = store, survey(store)
        points = _readable(store, self.seen)
        self.target = _target(self.seen, wanted, points)
        self._at_target = [p for p in points if place(p).tokens == self.target.tokens]
        self.begin = self._begin(points)
        tokens = place(self.begin).tokens if self.begin else 0
        self.records = [
            r for r in self.seen.lineage.records if tokens < r.consumed_tokens <= self.target.tokens
        ]
        self._skips = skips_of(self.seen.lineage)
        self._regimes: dict[int, Regime] = {}
        self._configs = {
            event.attempt: event.fields["config"]
            for event in self.seen.journal.events
            if event.kind == EventKind.ATTEMPT
        }

    def carried(self, cursor: Cursor, sources: tuple[SourceLists, ...]) -> Cursor:
        """Where the step after `cursor` begins: after the samples that the history skips there, in the lists
        of its attempt.
        """
        for at in self._skips:
            cursor = at.skip.carry(cursor)
        return moved(sources, cursor)

    def regime(self, attempt: int) -> Regime:
        """The regime of an attempt that has trained. Raises `ResumePointError` if its files are missing."""
        if attempt not in self._regimes:
            parent, config = self.store.read_parent(attempt), self._configs.get(attempt)
            if not isinstance(parent, ClaimParent) or config is None:
                raise ResumePointError(
                    f"{self.store.storage.root}: attempt {attempt} cannot be replayed, because its parent "
                    "file or the beginning of its journal is gone; restore them",
                    code="history.attempt_incomplete",
                )
            flat = {**in_todays_fields(config), "resume.from": "latest"}
            self._regimes[attempt] = Regime(
                config=parse_config(nested(flat)),
                budgets=parent.budgets or Budgets(),
                sources=parent.sources,
            )
        return self._regimes[attempt]

    def first_regime(self) -> Regime:
        """The regime of the first step to train, or, if there is none, of the one after the target."""
        return self.regime(self.records[0].attempt if self.records else self.next_attempt())

    def next_attempt(self) -> int:
        """The attempt that trained the step after the target, or would."""
        after = [r for r in self.seen.lineage.records if r.consumed_tokens > self.target.tokens]
        return after[0].attempt if after else max(self._configs)

    def expected_digest(self) -> str | None:
        """The digest that the run recorded of the weights at the target."""
        if self._at_target:
            return self._at_target[-1].commit.weights_digest
        keys = {
            (r.attempt, r.generation, r.step)
            for r in self.seen.lineage.records
            if r.consumed_tokens == self.target.tokens
        }
        for event in self.seen.journal.events:
            found = event.fields
            if (
                event.kind == EventKind.STATE_DIGEST
                and (event.attempt, found["generation"], found["step"]) in keys
            ):
                return str(found["weights_digest"])
        return None

    def _begin(self, points: Sequence[Point]) -> Point | None:
        """The newest whole point at or before the target; None: the first weights."""
        damages = []
        for point in sorted(points, key=lambda each: place(each).tokens, reverse=True):
            if place(point).tokens > self.target.tokens:
                continue
            if not (found := self.store.verify_point(point.name)):
                return point
            damages += found
        run = self.store.read_run()
        if run is not None and run.forked_from is not None:
            listed = "; ".join(map(str, damages)) or "it has none there"
            raise ResumePointError(
                f"step {self.target.step}: no resume point of this fork at or before it is whole: {listed}",
                code="point.none_healthy",
            )
        return None


def _readable(store: RunStore, seen: Survey) -> list[Point]:
    """The points of the history whose documents can be read. The others cannot be used for a replay."""

    def read(name: str) -> Point | None:
        try:
            return store.read_point(name)
        except OtherFormatError:
            raise  # it is whole
        except ResumePointError:
            return None

    return [point for point in at_once(store.storage, read, seen.points) if point is not None]


def _target(seen: Survey, wanted: Wanted, points: Sequence[Point]) -> Position:
    if wanted.step == 0 and not any(point.key.step == 0 for point in points):
        return Position(step=0, samples=0, tokens=0)
    found = wanted_place(wanted, seen.lineage.records, points)
    assert found is not None, "no point is named"
    return found
