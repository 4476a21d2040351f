"""How a run's time was spent: eleven parts that sum to the wall time, whole and by day.

The time between the first and the last line is cut into pieces that do not overlap, and each is counted once.
Time that the journal does not explain is a part of its own. Time after a wanted stop is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestrator.history.claims.claim_files import RESTARTED
from orchestrator.history.claims.claims import GenerationId
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.views.facts.arrays import Array
from orchestrator.inspect.views.facts.effective_steps import HISTORY, REWOUND
from orchestrator.inspect.views.facts.facts import RunFacts

PARTS = (
    "productive", "data_wait", "saving", "evaluating", "lost", "rewound", "reforming", "starting", "waiting",
    "down", "other",
)  # fmt: skip
DAY_S = 86400
_FIRST_LINES_S = 10.0  # steps that end within this time of the first one show when that began

Spent = tuple[float, float, dict[int, dict[str, float]]]


@dataclass(kw_only=True, slots=True)
class Goodput:
    """Seconds by part, and by day (number since 1970) and part; `off_s`: after wanted stops, not counted."""

    off_s: float = 0.0
    days: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """The sums over all days."""
        return {part: math.fsum(day[part] for day in self.days.values()) for part in PARTS}

    @property
    def wall_s(self) -> float:
        """The counted time."""
        return math.fsum(value for day in self.days.values() for value in day.values())

    def add(self, part: str, begin: float, end: float) -> None:
        """Counts the time between two moments."""
        while begin < end:
            day = int(begin // DAY_S)
            stop = min(end, float((day + 1) * DAY_S))
            self.on(day)[part] += stop - begin
            begin = stop

    def on(self, day: int) -> dict[str, float]:
        """The parts of one day."""
        return self.days.setdefault(day, dict.fromkeys(PARTS, 0.0))


def goodput(facts: RunFacts) -> dict[str, Any]:
    """The document: seconds to a tenth, and the parts in hundredths of a percent; both sum exactly."""
    good = measured(facts)
    parts = good.parts
    tenths = apportioned(parts, round(good.wall_s * 10))
    percent = apportioned(parts, 10_000 if sum(tenths.values()) else 0)
    days = []
    for day in sorted(good.days):
        of_day = apportioned(good.days[day], round(sum(good.days[day].values()) * 10))
        days.append({"day": day * DAY_S, "parts": {k: v / 10 for k, v in of_day.items() if v}})
    return {
        "wall_s": sum(tenths.values()) / 10,
        "off_s": round(good.off_s, 1),
        "parts": {part: tenths[part] / 10 for part in PARTS},
        "percent": {part: percent[part] / 100 for part in PARTS},
        "days": days,
    }


def measured(facts: RunFacts) -> Goodput:
    """The seconds, as they are."""
    return facts.kept("goodput", facts.size, lambda: _measured(facts))


def apportioned(parts: Mapping[str, float], whole: int) -> dict[str, int]:
    """Returns whole numbers in proportion to the parts, which sum to `whole` exactly. The parts that lose
    most by rounding down get the remainder (largest remainder).
    """
    total = math.fsum(parts.values())
    exact = {name: value / total * whole if total > 0 else 0.0 for name, value in parts.items()}
    found = {name: math.floor(value) for name, value in exact.items()}
    left = (whole if total > 0 else 0) - sum(found.values())
    for name in sorted(exact, key=lambda n: found[n] - exact[n])[: max(0, left)]:
        found[name] += 1
    return found


@dataclass(kw_only=True, slots=True)
class _Clock:
    """Moves forward through the run's time and assigns a part to each piece."""

    good: Goodput
    at: float

    def until(self, t: float, part: str) -> None:
        if t > self.at:
            self.good.add(part, self.at, t)
            self.at = t

    def skip(self, t: float) -> None:
        if t > self.at:
            self.good.off_s += t - self.at
            self.at = t

    def train(self, t: float, sums: Mapping[int, Mapping[str, float]]) -> None:
        """Counts the steps up to `t`, which took `sums` seconds by day and part. The rest of the time is not
        accounted for.
        """
        room = t - self.at
        if room <= 0:
            return
        used = math.fsum(value for day in sums.values() for value in day.values())
        share = min(1.0, room / used) if used > 0 else 0.0
        for number, parts in sums.items():
            day = self.good.on(number)
            for part, value in parts.items():
                day[part] += value * share
        rest = room - used * share
        if rest > 0:
            _spread(self.good, self.at, t, rest, sums, share)
        self.at = t


def _spread(
    good: Goodput,
    begin: float,
    end: float,
    rest: float,
    sums: Mapping[int, Mapping[str, float]],
    share: float,
) -> None:
    """Counts `rest` seconds of a piece as not accounted for, on the days that have room for them."""
    room: dict[int, float] = {}
    for day in range(int(begin // DAY_S), int(end // DAY_S) + 1):
        length = min(end, (day + 1.0) * DAY_S) - max(begin, float(day * DAY_S))
        room[day] = max(0.0, length - math.fsum(sums.get(day, {}).values()) * share)
    total = math.fsum(room.values())
    for day, value in room.items():
        if total > 0:
            good.on(day)["other"] += rest * value / total
    if total <= 0:
        good.on(int(end // DAY_S))["other"] += rest


def _measured(facts: RunFacts) -> Goodput:
    columns = facts.columns
    numbers = sorted(columns.attempts)
    good = Goodput()
    if not numbers:
        return good
    clock = _Clock(good=good, at=columns.attempts[numbers[0]].first)
    waits = [event for event in facts.events("waiting")]
    sums, generations, evaluated = _step_seconds(facts), facts.generations(), _evaluated(facts)
    for at, number in enumerate(numbers):
        written = columns.attempts[number]
        claim = facts.files.claims.get(number)
        restarted = claim is not None and claim.why == RESTARTED
        if at:
            _between(facts, clock, numbers[at - 1], written.first, restarted)
        limit = columns.attempts[numbers[at + 1]].first if at + 1 < len(numbers) else math.inf
        first = True
        for generation in generations:
            if generation.id[0] != number or generation.id not in sums:
                continue
            begin, end, seconds = sums[generation.id]
            began = min(begin, limit)
            waited = [event.t for event in waits if event.attempt == number and clock.at <= event.t <= began]
            if waited:
                clock.until(waited[0], "reforming")
                clock.until(began, "waiting")
            clock.until(began, "starting" if first and not restarted else "reforming")
            during, after = _parted(evaluated.get(generation.id, ()), end)
            clock.train(end, _with(seconds, during))
            for t, seconds_of_one in after:  # of the last state
                clock.until(t - seconds_of_one, "other")
                clock.until(t, "evaluating")
            first = False
        newest = at + 1 == len(numbers)
        waited = [event.t for event in waits if event.attempt == number and event.t >= clock.at]
        if newest and waited:
            clock.until(waited[-1], "reforming")
            clock.until(max(written.last, facts.life.last_sign or 0.0), "waiting")
        elif first:
            clock.until(min(written.last, limit), "starting" if not restarted else "reforming")
        clock.until(min(written.last, limit), "other")
    return good


def _evaluated(facts: RunFacts) -> dict[GenerationId, list[tuple[float, float]]]:
    """When the evaluations of each generation ended, and how many seconds each took."""
    found: dict[GenerationId, list[tuple[float, float]]] = {}
    for event in facts.events(EventKind.EVALUATED):
        id_ = event.attempt, int(event.fields["generation"])
        found.setdefault(id_, []).append((event.t, float(event.fields["seconds"])))
    return found


def _parted(
    evaluated: Iterable[tuple[float, float]], end: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Returns those that ended before `end`, the line of the last step, and the others."""
    of_both = list(evaluated)
    after = [each for each in of_both if each[0] > end]
    return [each for each in of_both if each not in after], after


def _with(
    sums: Mapping[int, Mapping[str, float]], evaluated: Iterable[tuple[float, float]]
) -> dict[int, dict[str, float]]:
    """Adds the seconds of evaluations to those of steps, by day and part."""
    found = {day: dict(parts) for day, parts in sums.items()}
    for t, seconds in evaluated:
        of_day = found.setdefault(int(t // DAY_S), {})
        of_day["evaluating"] = of_day.get("evaluating", 0.0) + seconds
    return found


def _between(facts: RunFacts, clock: _Clock, before: int, begin: float, restarted: bool) -> None:
    """Counts the time from the last line of one attempt to the first of the next."""
    end = facts.end_of(before)
    if restarted:
        clock.until(begin, "reforming")
    elif end is not None and end.is_wanted:
        clock.skip(begin)
    else:
        clock.until(begin, "down")


def _step_seconds(facts: RunFacts) -> dict[GenerationId, Spent]:
    """(begin of its first step, end of its last step, seconds by day and part) of each generation that cost
    the run time. Steps of a cut-off attempt that ran beside the next one cost none.
    """
    columns = facts.columns
    found: dict[GenerationId, Spent] = {}
    numbers = sorted(columns.attempts)
    for piece in facts.path.pieces:
        generation = columns.generations[piece.generation]
        rows = piece.rows
        if piece.fate != HISTORY:
            next_ = next((n for n in numbers if n > generation.id[0]), None)
            if next_ is not None:
                rows = rows[columns["t"][rows] <= columns.attempts[next_].first]
        if not len(rows):
            continue
        known = found.get(generation.id)
        key = (piece.generation, int(rows[0]), int(rows[-1]), len(rows), piece.fate)
        sums = _sums(facts, key, rows, piece.fate)
        before_s = 0.0 if known is None else math.fsum(v for day in known[2].values() for v in day.values())
        begin, end = _window(columns["t"], columns["step_s"], rows, before_s)
        if known is None:
            found[generation.id] = (begin, end, sums)
        else:
            merged = {d: {p: known[2].get(d, {}).get(p, 0.0) + sums.get(d, {}).get(p, 0.0) for p in PARTS}
                      for d in {*known[2], *sums}}  # fmt: skip
            found[generation.id] = (min(begin, known[0]), max(end, known[1]), merged)
    return found


def _window(t: Array, step_s: Array, rows: Array, before_s: float) -> tuple[float, float]:
    """The begin of the generation of these steps, and the end of the last. `before_s`: what its earlier steps
    took. The begin is infinite if these steps do not show it.

    A busy coordinator writes the lines of several steps together, after the last of them. So no line alone
    shows when the first step began: of the first lines, the one that was written soonest after its step does.
    Later lines are not used, because clocks drift.
    """
    since_begin = before_s + np.cumsum(step_s[rows])
    early = max(int(np.searchsorted(since_begin, _FIRST_LINES_S)), 0 if before_s else 1)
    begin = (t[rows[:early]] - since_begin[:early]).min(initial=math.inf)
    return float(begin), float(t[rows].max())


def _sums(facts: RunFacts, key: Any, rows: Array, fate: int) -> dict[int, dict[str, float]]:
    """Seconds by day and part of some steps of one fate. Only steps that are new since the last look are
    added.
    """
    cache = facts.kept("step seconds", facts.shape, dict[Any, Any])
    begun = (key[0], key[1], fate)
    known = cache.get(begun)
    done, sums = known if known is not None and known[0] <= len(rows) else (0, {})
    for day, parts in _summed(facts, rows[done:], fate):
        of_day = sums.setdefault(day, {})
        for part, value in parts.items():
            of_day[part] = of_day.get(part, 0.0) + value
    cache[begun] = (len(rows), sums)
    return sums  # type: ignore[no-any-return]


def _summed(facts: RunFacts, rows: Array, fate: int) -> Iterable[tuple[int, dict[str, float]]]:
    if not len(rows):
        return
    columns = facts.columns
    seconds = np.maximum(columns["step_s"][rows], 0.0)
    day = (columns["t"][rows] // DAY_S).astype("i8")
    first = int(day.min())
    if fate == HISTORY:
        wait = np.clip(columns["data_wait_s"][rows], 0.0, seconds)
        blocked = np.clip(columns["save_blocked_s"][rows], 0.0, seconds - wait)
        weights = {"productive": seconds - wait - blocked, "data_wait": wait, "saving": blocked}
    else:
        weights = {"rewound" if fate == REWOUND else "lost": seconds}
    sums = {part: np.bincount(day - first, weights=values) for part, values in weights.items()}
    for number in np.unique(day).tolist():
        yield number, {part: float(values[number - first]) for part, values in sums.items()}
