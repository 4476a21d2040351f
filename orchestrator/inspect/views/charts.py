"""Charts of a run: curves of its metrics for a given width, and its timeline by time and by position.

A curve has the history with its spread, and the abandoned branches apart. Any range of any length costs about
the same (`facts.arrays.Pyramid`). A pixel without a step has no value. The timeline has attempts, generations
with their world size and fate, points, and events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.errors import RefusedError
from orchestrator.inspect.status.point_rows import DAMAGED, DIGESTS, HEALTHY, ORPHAN
from orchestrator.inspect.views.facts.arrays import Array, Growing
from orchestrator.inspect.views.facts.effective_steps import FATES, HISTORY, REWOUND, StepSpan
from orchestrator.inspect.views.facts.facts import RunFacts, StepSeries, shorts
from orchestrator.inspect.views.incidents import happenings
from orchestrator.inspect.views.points_table import deleted, table

AXES = {"time": "t", "tokens": "consumed_tokens"}
METRICS = (
    *("loss", "grad_norm", "lr", "step_s", "data_wait_s", "save_blocked_s", "peak_memory_bytes"),
    "mfu",
)
# ratios of two sums: numerator, denominator and name
RATIOS = {"tokens_per_s": ("width", "step_s"), "data_wait_share": ("data_wait_s", "step_s")}
OWN = "own"  # in a request: all metrics of the objective
LEAST_PX, MOST_PX = 40, 4000
GAP_S, GAP_STEPS = 60.0, 8
FAR = 2**62  # beyond every position

Pixels = tuple[Array, Array, Array]  # numbers of pixels, and the rows [start, stop) of each


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """Steps that were abandoned together: the rows [start, stop) of `Branches.along`."""

    fate: int
    by: int | None
    attempts: list[int]  # the first and the last
    start: int
    stop: int


class Branches:
    """All branches in one column, so that a curve over all takes one look-up."""

    def __init__(self, facts: RunFacts, groups: Sequence[Sequence[StepSpan]]) -> None:
        generations, rows, self.each = facts.columns.generations, Growing("i8"), list[Branch]()
        for pieces in groups:
            start = len(rows)
            for piece in pieces:
                rows.extend(piece.rows)
            self.each.append(
                Branch(
                    fate=pieces[0].fate,
                    by=pieces[0].by,
                    attempts=[generations[p.generation].id[0] for p in (pieces[0], pieces[-1])],
                    start=start,
                    stop=len(rows),
                )
            )
        self.along = StepSeries(facts.columns, rows)

    def of(self, branch: Branch, name: str) -> Array:
        """A column of one branch."""
        return self.along[name][branch.start : branch.stop]


def series(
    facts: RunFacts,
    axis: str = "tokens",
    metrics: Sequence[str] = ("loss",),
    start: float | None = None,
    stop: float | None = None,
    px: int = 800,
) -> dict[str, Any]:
    """The document of curves. `start` and `stop` are in the axis' unit. The metric `own` stands for all of
    the objective's own, whose names are in the document at `own`. Raises `RefusedError` for an unknown axis
    or metric, and for an invalid range.
    """
    own = tuple(facts.columns.metrics)
    metrics = [name for metric in metrics for name in (own if metric == OWN else (metric,))]
    if axis not in AXES:
        raise RefusedError(
            f"there is no axis {axis!r}; use one of {', '.join(AXES)}", code="command.unknown_axis"
        )
    known = (*METRICS, *RATIOS, *own)
    if unknown := [m for m in metrics if m not in known]:
        raise RefusedError(
            f"there is no metric {unknown[0]!r}; use {', '.join(known)}", code="metrics.unknown"
        )
    if not all(math.isfinite(each) for each in (start, stop) if each is not None):
        raise RefusedError(
            f"the range from {start} to {stop} is not finite; give finite numbers",
            code="command.range_not_finite",
        )
    px = max(LEAST_PX, min(MOST_PX, px))
    branches = facts.kept("branches", facts.shape, lambda: _branches(facts))
    along = [facts.history[AXES[axis]], *(branches.of(branch, AXES[axis]) for branch in branches.each)]
    ends = [x for x in along if len(x)]
    low = start if start is not None else min((float(x[0]) for x in ends), default=0.0)
    high = stop if stop is not None else max((float(x[-1]) for x in ends), default=1.0)
    x = facts.history[AXES[axis]]
    pixels, (first, last) = _pixels(x, low, high, px), _within(x, low, high)
    found: dict[str, Any] = {
        "axis": axis,
        "from": low,
        "to": high,
        "px": px,
        "steps": max(0, last - first),
        "own": list(own),
        "i": pixels[0].tolist(),
        "history": {metric: _curve(facts.history, metric, pixels, True) for metric in metrics},
        "gaps": _gaps(facts, pixels) if axis == "time" else [],
        "branches": _aside(branches, AXES[axis], metrics, (low, high, px)),
    }
    return found


def _aside(
    branches: Branches, column: str, metrics: Sequence[str], window: tuple[float, float, int]
) -> list[dict[str, Any]]:
    """The curves of the branches within the window."""
    seen = [(branch, _pixels(branches.of(branch, column), *window)) for branch in branches.each]
    seen = [(branch, part) for branch, part in seen if len(part[0])]
    if not seen:
        return []
    first, last = (np.concatenate([part[k] + branch.start for branch, part in seen]) for k in (1, 2))
    curves = {m: _curve(branches.along, m, (first, first, last), False)["mean"] for m in metrics}
    found, at = list[dict[str, Any]](), 0
    for branch, (pixels, _, _) in seen:
        steps, end = branches.of(branch, "step"), at + len(pixels)
        found.append(
            {
                "fate": FATES[branch.fate],
                "by": branch.by,
                "attempts": branch.attempts,
                "from_step": int(steps[0]),
                "to_step": int(steps[-1]),
                "i": pixels.tolist(),
                "values": {metric: {"mean": curve[at:end]} for metric, curve in curves.items()},
            }
        )
        at = end
    return found


def _branches(facts: RunFacts) -> Branches:
    """One branch for all that a rewind set aside, and one for each generation of lost steps."""
    groups: dict[tuple[int, Any], list[StepSpan]] = {}
    for piece in facts.path.pieces:
        if piece.fate != HISTORY:
            where = piece.by if piece.fate == REWOUND else piece.generation
            groups.setdefault((piece.fate, where), []).append(piece)
    return Branches(facts, sorted(groups.values(), key=lambda p: int(p[0].rows[0])))


def _pixels(x: Array, low: float, high: float, px: int) -> Pixels:
    """The steps that fall into each pixel, without empty pixels; `x` never falls."""
    first, last = _within(x, low, high)
    each = (high - low) / px or 1.0
    edges = low + each * np.arange(1, px)
    if x.dtype.kind == "i":  # else the whole column is turned into floats each time
        edges = np.ceil(edges).astype(x.dtype)
    cuts = np.searchsorted(x[first:last], edges, "left") + first
    cuts = np.concatenate([[first], cuts, [last]])
    some = np.flatnonzero(np.diff(cuts) > 0)
    return some, cuts[:-1][some], cuts[1:][some]


def _within(x: Array, low: float, high: float) -> tuple[int, int]:
    """The range of the rows from `low` to `high`, both included."""
    if x.dtype.kind == "i":
        low, high = math.ceil(max(low, -FAR)), math.floor(min(high, FAR))
    return int(np.searchsorted(x, low, "left")), int(np.searchsorted(x, high, "right"))


def _curve(along: StepSeries, metric: str, pixels: Pixels, with_bands: bool) -> dict[str, Any]:
    _, starts, stops = pixels
    if metric in RATIOS:
        of, by = (along.pyramid(name).over(starts, stops)[2] for name in RATIOS[metric])
        return {"mean": shorts(of / np.maximum(by, 1e-9))}
    low, high, total, count = along.pyramid(metric).over(starts, stops)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / np.where(count > 0, count, np.nan)
    if not with_bands:
        return {"mean": shorts(mean)}
    return {"mean": shorts(mean), "min": shorts(low), "max": shorts(high)}


def _gaps(facts: RunFacts, pixels: Pixels) -> list[list[float]]:
    """Pauses between two pixels that are longer than steps explain."""
    t, seconds = facts.history["t"], facts.history["step_s"][-200:]
    if not len(t):
        return []
    limit = max(GAP_S, GAP_STEPS * float(np.median(seconds)))
    _, starts, stops = pixels
    before, after = t[stops[:-1] - 1], t[starts[1:]]
    long = np.flatnonzero(after - before > limit)
    return [[float(before[i]), float(after[i])] for i in long]


# ----------------------------------------------------------------------------------------------- the timeline
SEGMENTS = ("attempt", "generation", "t0", "t1", "k0", "k1", "s0", "s1", "world", "fate", "by")
ATTEMPTS = ("attempt", "why", "t0", "t1", "outcome", "on_history", "then_off")
POINTS = ("name", "t", "k", "step", "state", "checked")
HAPPENINGS = ("t", "k", "step", "kind", "level", "attempt", "lost_steps", "text")
# of a point, as numbers: healthy, pinned, damaged, orphan, deleted
CODES = {HEALTHY: 0, DAMAGED: 2, ORPHAN: 3}
PINNED, DELETED = 1, 4


def timeline(facts: RunFacts, px: int | None, now: float) -> dict[str, Any]:
    """The document of the timeline. `then_off`: goodput leaves out the time after this attempt.

    `px` is its width. Neighbours of one fate and world size that are both thinner than a pixel, in time and
    in position, become one segment, under the first one's attempt.
    """
    segments = facts.kept("segments", facts.shape, lambda: [_segment(facts, p) for p in _by_time(facts)])
    segments = [
        _grown(facts, segment, piece) for segment, piece in zip(segments, _by_time(facts), strict=True)
    ]
    if px:
        segments = merged(segments, px)
    return {
        "now": now,
        "max_world": max((segment[8] for segment in segments), default=1),
        "segments": _columnar(SEGMENTS, segments),
        "attempts": _columnar(ATTEMPTS, _attempts(facts)),
        "points": _columnar(POINTS, _points(facts)),
        "happenings": _columnar(HAPPENINGS, _happenings(facts)),
        "labels": labels(facts),
    }


def labels(facts: RunFacts) -> list[list[Any]]:
    """The places where the history's step labels are counted anew: [tokens, label, tokens per step, attempt].
    The first is its beginning.
    """
    found: list[list[Any]] = []
    for segment in facts.path.lineage.segments:
        start = segment.start
        width = start.global_batch_size * start.seq_len
        if not found or found[-1][2] != width:
            found.append([start.consumed_tokens, start.step, width, start.attempt])
    return found


def _columnar(columns: Sequence[str], rows: list[list[Any]]) -> dict[str, Any]:
    return {"columns": list(columns), "rows": rows}


def _by_time(facts: RunFacts) -> list[StepSpan]:
    """The pieces in the order in which they began."""
    columns = facts.columns

    def begin(piece: StepSpan) -> float:
        return float(columns["t"][piece.rows[0]] - columns["step_s"][piece.rows[0]])

    return facts.kept("pieces by time", facts.shape, lambda: sorted(facts.path.pieces, key=begin))


def _segment(facts: RunFacts, piece: StepSpan) -> list[Any]:
    columns, generation = facts.columns, facts.columns.generations[piece.generation]
    a, b = int(piece.rows[0]), int(piece.rows[-1])
    world = generation.start.world_size if generation.start is not None else 0
    return [
        *generation.id,
        round(float(columns["t"][a] - columns["step_s"][a]), 2),
        round(float(columns["t"][b]), 2),
        int(columns["consumed_tokens"][a] - columns["width"][a]),
        int(columns["consumed_tokens"][b]),
        int(columns["step"][a]) - 1,
        int(columns["step"][b]),
        world,
        piece.fate,
        piece.by,
    ]


def _grown(facts: RunFacts, segment: list[Any], piece: StepSpan) -> list[Any]:
    """Extends a segment by a piece. The head's continues between two generations."""
    return _segment(facts, piece) if segment[7] != facts.columns["step"][piece.rows[-1]] else segment


def merged(segments: list[list[Any]], px: int) -> list[list[Any]]:
    """Joins neighbours that are thinner than one of `px` pixels; see `timeline`."""
    if not segments:
        return []
    time_px = (segments[-1][3] - segments[0][2]) / px
    token_px = (max(s[5] for s in segments) - min(s[4] for s in segments)) / px
    found = [list(segments[0])]
    for segment in segments[1:]:
        last = found[-1]
        alike = last[8:] == segment[8:] and last[5] == segment[4]
        thin = all(s[3] - s[2] < time_px and s[5] - s[4] < token_px for s in (last, segment))
        if alike and thin and segment[2] - last[3] < time_px:
            last[3], last[5], last[7] = segment[3], segment[5], segment[7]
        else:
            found.append(list(segment))
    return found


def _attempts(facts: RunFacts) -> list[list[Any]]:
    rows = []
    for number, written in sorted(facts.columns.attempts.items()):
        claim, end = facts.files.claims.get(number), facts.end_of(number)
        rows.append(
            [
                number,
                claim.why if claim is not None else None,
                round(written.first, 2),
                round(written.last, 2),
                end.outcome if end is not None else None,
                number in facts.path.attempts,
                end is not None and end.is_wanted,
            ]
        )
    return rows


def _points(facts: RunFacts) -> list[list[Any]]:
    rows = [
        [
            point.name,
            round(point.t, 1),
            point.consumed_tokens,
            point.step,
            PINNED if point.pin is not None and point.state == HEALTHY else CODES[point.state],
            int(point.checked == DIGESTS),
        ]
        for point in table(facts)
        if point.consumed_tokens is not None and point.t is not None
    ]
    rows += [
        [row["name"], round(row["t"], 1), row["consumed_tokens"], row["step"], DELETED, 0]
        for row in deleted(facts)
    ]
    return sorted(rows, key=lambda row: row[1])


def _happenings(facts: RunFacts) -> list[list[Any]]:
    return [
        [
            round(e["t"], 2),
            e["tokens"],
            e["step"],
            e["kind"],
            e["level"],
            e["attempt"],
            e["lost_steps"],
            e["text"],
        ]
        for e in happenings(facts)
    ]
