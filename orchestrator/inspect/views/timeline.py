"""The timeline of a run, by time and by position.

It has attempts, generations with their world size and fate, points, and events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.inspect.status.point_rows import DAMAGED, DIGESTS, HEALTHY, ORPHAN
from orchestrator.inspect.views.facts.effective_steps import StepSpan
from orchestrator.inspect.views.facts.facts import RunFacts
from orchestrator.inspect.views.incidents import happenings
from orchestrator.inspect.views.points_table import deleted, table

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
    The first is its begin.
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
    """The segments that are seen on so many pixels, see `timeline`."""
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
