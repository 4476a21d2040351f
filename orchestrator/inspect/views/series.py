"""Curves of a run for a chart of a given width: the history with its spread, abandoned branches apart.

Any range of any length costs about the same (`arrays.Pyramid`). A pixel without a step has no value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.errors import RefusedError
from orchestrator.inspect.views.facts.arrays import Array, Growing
from orchestrator.inspect.views.facts.effective_steps import FATES, HISTORY, REWOUND, StepSpan
from orchestrator.inspect.views.facts.facts import RunFacts, StepSeries, shorts

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
