"""Finds a resume point of a run: by its name, or the newest whole one at or before a step, samples or tokens.

It reads a run and changes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

from orchestrator.checkpoint.points.point_files import Each
from orchestrator.checkpoint.points.points import Point, newest_first
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import Survey
from orchestrator.errors import RefusedError, ResumePointError, WantedPointError
from orchestrator.history.sentences import count
from orchestrator.history.step_names import StepName, ambiguous_step
from orchestrator.records.points import Damage
from orchestrator.records.steps import StepRecord
from orchestrator.storage.parallel import at_once

LATEST = "latest"


@dataclass(frozen=True, kw_only=True, slots=True)
class PointQuery:
    """The requested point: exactly one of its name (or `latest`), or the last step, sample or token before
    it. `step`: a label, or the name of a step (`250`, `a2:250`).
    """

    point: str | None = None
    step: int | str | None = None
    samples: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises `RefusedError` unless exactly one is set, for a number that is not whole, and a text that
        names no step.
        """
        for name in ("step", "samples", "tokens"):
            value = getattr(self, name)
            if name == "step" and isinstance(value, str):
                StepName.parse(value)
                continue
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise RefusedError(
                    f"{name} is {value!r}, which is not a whole number; give one, e.g. {name}=100",
                    code="command.not_whole_number",
                )
        given = [name for name in ("point", "step", "samples", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise RefusedError(
                "give exactly one of a point, a step, a number of samples and a number of tokens; "
                f"{' and '.join(given) + ' are' if given else 'none is'} given",
                code="command.not_exactly_one",
            )

    def __str__(self) -> str:
        if self.point is not None:
            return self.point
        if (named := self.named_step) is not None:
            return f"step {named.label:,}" if named.attempt is None else f"step {named}"
        return f"{self.samples:,} samples" if self.samples is not None else f"{self.tokens:,} tokens"

    @property
    def named_step(self) -> StepName | None:
        """The name of the requested step; None if something else is requested."""
        if self.step is None:
            return None
        return StepName.parse(self.step) if isinstance(self.step, str) else StepName(label=int(self.step))


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A place in a run's history, after a step that `attempt` counted."""

    attempt: int
    step: int
    samples: int
    tokens: int

    def allows(self, wanted: PointQuery) -> bool:
        """Whether it is at or before the wanted samples or tokens."""
        if wanted.samples is not None:
            return self.samples <= wanted.samples
        return wanted.tokens is None or self.tokens <= wanted.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PointMatch:
    """The point, its distance to the wanted place, and the damages of newer points."""

    point: Point
    steps_before: int
    tokens_before: int
    damages: tuple[Damage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PointPlan:
    """The plan shown to a user who has requested a point of `run`; tokens are positions, as in the cursor.

    `wanted` is the request, `steps_before` and `tokens_before` the point's distance to it. `damages` are why
    newer points were skipped.
    """

    run: str
    wanted: str
    point: str
    step: int
    consumed_samples: int
    consumed_tokens: int
    steps_before: int
    tokens_before: int
    damages: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The document of the command's `--json`."""
        return asdict(self)

    def point_lines(self, would: str) -> list[str]:
        """The lines of the plan: `would` happen, with which point."""
        before = ""
        if self.steps_before or self.tokens_before:
            steps = count(self.steps_before, "step")
            before = f", {steps} ({self.tokens_before:,} tokens) before {self.wanted}"
        return [
            f"{would}{before}",
            f"  step {self.step:,}, {self.consumed_samples:,} samples, {self.consumed_tokens:,} tokens",
            *(f"  passed over: {damage}" for damage in self.damages),
        ]


def planned(run: str, found: PointMatch, wanted: PointQuery) -> dict[str, Any]:
    """The fields of `PointPlan` for the found point."""
    at = place(found.point)
    return {
        "run": run,
        "wanted": str(wanted),
        "point": found.point.name,
        "step": at.step,
        "consumed_samples": at.samples,
        "consumed_tokens": at.tokens,
        "steps_before": found.steps_before,
        "tokens_before": found.tokens_before,
        "damages": tuple(map(str, found.damages)),
    }


def place(point: Point) -> Position:
    """The position of a point."""
    key, cursor = point.key, point.cursor
    return Position(
        attempt=key.attempt, step=key.step, samples=cursor.consumed_samples, tokens=cursor.consumed_tokens
    )


def _place_of(record: StepRecord) -> Position:
    return Position(
        attempt=record.attempt,
        step=record.step,
        samples=record.consumed_samples,
        tokens=record.consumed_tokens,
    )


def wanted_place(
    wanted: PointQuery, records: Sequence[StepRecord], points: Sequence[Point]
) -> Position | None:
    """The last place of the history that `wanted` allows; None if a point is named.

    If attempts have given two steps the same label (another batch size, data rule 18), the label alone is
    refused. Raises `RefusedError` for a place that the history does not have, also for one beyond its end.
    """
    if wanted.point is not None:
        return None
    places = sorted(
        {place.tokens: place for place in [*map(place, points), *map(_place_of, records)]}.values(),
        key=lambda place: place.tokens,
    )
    if not places:
        raise RefusedError(f"{wanted}: this run has trained nothing yet", code="run.nothing_trained")
    before = [place for place in places if place.allows(wanted)]
    named = wanted.named_step
    alike = [] if named is None else [place for place in places if named.means(place)]
    if named is not None and len(alike) > 1:
        raise ambiguous_step(named, alike)
    first, last = places[0], places[-1]
    beyond = (wanted.samples or 0) > last.samples or (wanted.tokens or 0) > last.tokens
    if not before or beyond or (named is not None and not alike):
        raise RefusedError(
            f"{wanted}: the run's history goes from step {first.step:,} ({first.samples:,} samples, "
            f"{first.tokens:,} tokens) to step {last.step:,} ({last.samples:,} samples, {last.tokens:,} "
            "tokens); give a place in it",
            code="command.beyond_history",
        )
    if not alike:
        return before[-1]
    return alike[0]


def find(
    store: RunStore,
    seen: Survey,
    wanted: PointQuery,
    among: Sequence[str] | None = None,
    fast: bool = False,
    each: Each | None = None,
) -> PointMatch:
    """The requested point, with every digest of it verified; `fast` and `each` as in
    `PointFiles.verify_point`.

    `among`: the points that may be named, by default those of the history. A named point must be whole: no
    other one replaces it. By a place, and by `latest`, damaged ones are skipped and reported. Raises
    `RefusedError` for a missing one, `ResumePointError` if none is whole.
    """
    history = newest_first((*seen.points, *seen.lost, *seen.foreign))
    if wanted.point is not None and wanted.point != LATEST:
        return _named(store, wanted.point, history if among is None else among, fast, each)
    points, damages = _readable(store, history)
    end = wanted_place(wanted, seen.lineage.records, points) if wanted.point is None else None
    for point in points:
        if end is not None and place(point).tokens > end.tokens:
            continue
        if found := store.verify_point(point.name, fast=fast, each=each):
            damages += found
            continue
        return PointMatch(
            point=point,
            steps_before=0 if end is None else _steps_between(seen.lineage.records, point, end),
            tokens_before=0 if end is None else end.tokens - place(point).tokens,
            damages=tuple(damage for damage in damages if _is_newer(damage, point)),
        )
    listed = "; ".join(map(str, damages))
    if damages:
        raise WantedPointError(
            f"{wanted}: no resume point at or before it is whole: {listed}", code="point.none_healthy"
        )
    oldest = points[-1] if points else None
    there = f"the oldest, {oldest.name}, is at step {oldest.key.step}" if oldest else "it has none"
    raise RefusedError(
        f"{wanted}: the run's history has no resume point at or before it; {there}", code="point.none_before"
    )


def _named(store: RunStore, name: str, among: Sequence[str], fast: bool, each: Each | None) -> PointMatch:
    if name not in among and name in store.point_names() and not store.is_foreign(name):
        raise RefusedError(
            f"resume point {name} of {store.storage.root} is not in the run's history (an orphan), and a run "
            f"can go back only within its history. `orchestrator fork {shlex.quote(store.storage.root)} "
            f"NEW_RUN --at {name}` makes a new run that begins with it",
            code="point.orphan",
        )
    if name not in among:
        listed = ", ".join(sorted(among)) or "none"
        raise RefusedError(
            f"{store.storage.root} has no resume point {name}; it has: {listed}", code="point.unknown"
        )
    if damages := store.verify_point(name, fast=fast, each=each):
        listed = "; ".join(map(str, damages))
        raise WantedPointError(
            f"resume point {name} of {store.storage.root} is damaged ({listed}); name another point",
            code="point.damaged",
        )
    return PointMatch(point=store.read_point(name), steps_before=0, tokens_before=0, damages=())


def _readable(store: RunStore, names: Sequence[str]) -> tuple[list[Point], list[Damage]]:
    """The points whose documents can be read, in the same order, and the damages of the others."""

    def read(name: str) -> Point | list[Damage]:
        try:
            return store.read_point(name)
        except ResumePointError:
            return store.verify_point(name, fast=True)

    points, damages = list[Point](), list[Damage]()
    for found in at_once(store.storage, read, names):
        if isinstance(found, Point):
            points.append(found)
        else:
            damages += found
    return points, damages


def _steps_between(records: Sequence[StepRecord], point: Point, end: Position) -> int:
    begin = place(point).tokens
    return sum(begin < record.consumed_tokens <= end.tokens for record in records)


def _is_newer(damage: Damage, point: Point) -> bool:
    return newest_first([damage.point, point.name])[0] == damage.point
