"""The generation that abandoned each step off the history.

Each such step is abandoned once, by the generation that continued from an earlier state. A generation may go
back behind the one before it, if a memory point is older than that. Reads no storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from orchestrator.history.claims.claims import GenerationId
from orchestrator.inspect.views.facts.arrays import Array
from orchestrator.inspect.views.facts.columns import Columns, RecordedGeneration
from orchestrator.inspect.views.facts.effective_steps import EffectiveSteps
from orchestrator.records.steps import StateKey

Chain = list[tuple[GenerationId, float]]  # the generations that a state came through, and up to which step


@dataclass(frozen=True, kw_only=True, slots=True)
class _Left:
    """`by` abandoned the steps of `of` that come after `after`, up to `last`."""

    by: GenerationId
    of: GenerationId
    after: float
    last: float = inf


def left_behind(columns: Columns, path: EffectiveSteps, attempt: int) -> dict[GenerationId, Array]:
    """Rows of the steps that an attempt abandoned, by its generations; under (attempt, 0) where it formed
    none.
    """
    pieces = path.dropped(attempt)
    if not pieces:
        return {}
    known = [g for g in columns.generations if g.start is not None and g.id[0] == attempt]
    formed = sorted(known, key=lambda g: g.id)
    ids = [columns.generations[piece.generation].id for piece in pieces]
    if not formed:
        return {(attempt, 0): np.concatenate([piece.rows for piece in pieces])}
    spans: dict[GenerationId, list[_Left]] = {}
    for left in (*_at_first(columns, formed[0], ids), *_later(columns, formed)):
        spans.setdefault(left.of, []).append(left)
    found: dict[GenerationId, list[Array]] = {}
    for id_, piece in zip(ids, pieces, strict=True):
        open_, steps = np.ones(len(piece.rows), bool), columns["step"][piece.rows]
        for left in spans.get(id_, ()):
            mine = open_ & (steps > left.after) & (steps <= left.last)
            found.setdefault(left.by, []).append(piece.rows[mine])
            open_ &= ~mine
        found.setdefault(formed[-1].id, []).append(piece.rows[open_])
    return {by: np.concatenate(rows) for by, rows in found.items()}


def _at_first(columns: Columns, first: RecordedGeneration, ids: list[GenerationId]) -> Iterator[_Left]:
    """Steps that other attempts had trained and this one did not continue."""
    continued = dict(_chain(columns, _parent(first)))
    for id_ in dict.fromkeys(ids):
        if id_[0] != first.id[0]:
            yield _Left(by=first.id, of=id_, after=continued.get(id_, -1.0))


def _later(columns: Columns, formed: list[RecordedGeneration]) -> Iterator[_Left]:
    """Steps that the attempt itself repeated, because nobody held their state any more."""
    chain = _chain(columns, _parent(formed[0]))
    for before, now in pairwise(formed):
        chain.append((before.id, inf))
        parent, gone = _parent(now), list[tuple[GenerationId, float]]()
        at = (parent.attempt, parent.generation) if parent is not None else None
        while chain and chain[-1][0] != at:
            gone.append(chain.pop())
        if chain and parent is not None:
            gone.append(chain.pop())
            chain.append((gone[-1][0], parent.step))
            continued = dict(chain[-1:])
        else:
            chain = _chain(columns, parent)
            continued = dict(chain)
        for id_, last in gone:
            yield _Left(by=now.id, of=id_, after=continued.get(id_, -1.0), last=last)


def _parent(generation: RecordedGeneration) -> StateKey | None:
    return generation.start.parent if generation.start is not None else None


def _chain(columns: Columns, state: StateKey | None) -> Chain:
    """Oldest first."""
    found: Chain = []
    while state is not None:
        id_ = state.attempt, state.generation
        found.append((id_, state.step))
        index = columns.index.get(id_)
        above = _parent(columns.generations[index]) if index is not None else None
        state = above if above is not None and (above.attempt, above.generation) < id_ else None
    return found[::-1]
