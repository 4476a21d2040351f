"""The history of a run within its journal, and the fate of other steps: lost, or set aside by a rewind.

`history.claims.lineage` follows the chain of generations. This file follows only the steps, which are many,
by column. Each step off the history is abandoned once, by the generation that continued from an earlier
state. A generation may go back behind the one before it, if a memory point is older than that. Reads no
storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np

from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.claim_files import REWIND
from orchestrator.history.claims.claims import INCONSISTENT, Claim, ClaimParent, GenerationId
from orchestrator.history.claims.lineage import Lineage, Segment, discontinuity, effective_chain
from orchestrator.inspect.views.facts.arrays import Array, Growing
from orchestrator.inspect.views.facts.columns import Columns, RecordedGeneration
from orchestrator.records.steps import StateKey, StepRecord

HISTORY, LOST, REWOUND = 0, 1, 2
FATES = ("history", "lost", "rewound")


@dataclass(kw_only=True, slots=True)
class StepSpan:
    """Consecutive steps of one generation (index) with one fate. `by`: the attempt that continued from an
    earlier state; None on the history, and if no attempt did yet.
    """

    generation: int
    rows: Array
    fate: int
    by: int | None


@dataclass(kw_only=True, slots=True)
class EffectiveSteps:
    """The history by rows of the columns. `stops`: the last step of each generation on it, None for the head,
    of which all is. `pieces` are in the order of generations and steps. `gaps` counts steps of the history
    that have no record.
    """

    lineage: Lineage
    stops: dict[GenerationId, int | None]
    pieces: list[StepSpan] = field(default_factory=list)
    rows: Growing = field(default_factory=lambda: Growing("i8"))
    head: int | None = None
    gaps: int = 0
    size: int = 0  # rows of the columns that were included
    _segments: dict[GenerationId, Segment] = field(init=False)
    _inherited: list[tuple[int, frozenset[str]]] = field(init=False)

    def __post_init__(self) -> None:
        self._segments = {segment.start.id: segment for segment in self.lineage.segments}
        self._inherited = [(p.attempt, frozenset(p.inherited)) for p in self.lineage.attempts]

    @property
    def attempts(self) -> frozenset[int]:
        """The attempts whose claims are on the chain."""
        return frozenset(parent.attempt for parent in self.lineage.attempts)

    def why_orphan(self, key: StateKey) -> str:
        """As `Lineage.why_orphan`, but fast for a point that is no orphan."""
        return "" if self.has(key) else self.lineage.why_orphan(key)

    def has(self, key: StateKey) -> bool:
        """As `Lineage.on_lineage`, but its cost does not grow with the history."""
        segment = self._segments.get((key.attempt, key.generation))
        if segment is None or key.step < segment.start.step:
            return False
        name, inside = key.point_name, segment.open or key.step < segment.stop_step
        later = (names for attempt, names in self._inherited if attempt > key.attempt)
        return inside and all(name in names for names in later)

    def dropped(self, attempt: int) -> list[StepSpan]:
        """The steps that were abandoned when this attempt continued from an earlier state."""
        return [piece for piece in self.pieces if piece.fate != HISTORY and piece.by == attempt]


def build(columns: Columns, claims: Sequence[Claim], parents: Sequence[ClaimParent]) -> EffectiveSteps:
    """Builds the history of a journal. Raises `OrchestratorError` if it contradicts itself."""
    starts = [g.start for g in columns.generations if g.start is not None]
    lineage = effective_chain(claims, parents, starts, {each.attempt for each in columns.damages})
    stops = {s.start.id: None if s.open else s.stop_step - 1 for s in lineage.segments}
    path = EffectiveSteps(lineage=lineage, stops=stops, size=len(columns))
    fates = _StepFates(columns, stops, claims, parents)
    for at, _ in sorted(enumerate(columns.generations), key=lambda item: item[1].id):
        path.pieces += fates.pieces(at)
    here = {p.generation: p for p in path.pieces if p.fate == HISTORY}
    for segment in lineage.segments:
        index = columns.index.get(segment.start.id)  # None: what a fork begins with, made in another run
        path.head = index if segment.open else path.head
        if index is not None and index in here:
            path.rows.extend(here[index].rows)
    _check(columns, path)
    return path


def extend(columns: Columns, path: EffectiveSteps) -> bool:
    """Adds the new steps, if all of them continue from the head in order. Returns False if the history must
    be built anew.
    """
    if len(columns) == path.size:
        return True
    new = np.arange(path.size, len(columns))
    head = columns.generations[path.head] if path.head is not None else None
    of_head = head is not None and head.is_sorted and bool(np.all(columns["generation"][new] == path.head))
    if not of_head or path.head is None:
        return False
    piece = next((p for p in reversed(path.pieces) if p.generation == path.head and p.fate == HISTORY), None)
    if piece is None:
        return False
    before = int(path.rows.array[-1])
    tokens, steps = (columns[name][[before, *new]] for name in ("consumed_tokens", "step"))
    if np.any(np.diff(tokens) <= 0) or np.any(np.diff(steps) != 1):
        return False
    begin = len(path.rows) - len(piece.rows)
    path.rows.extend(new)
    piece.rows, path.size = path.rows.array[begin:], len(columns)
    return True


class _StepFates:
    """The fate of the steps of each generation, derived from what was continued from it."""

    def __init__(
        self,
        columns: Columns,
        stops: Mapping[GenerationId, int | None],
        claims: Sequence[Claim],
        parents: Sequence[ClaimParent],
    ) -> None:
        self._columns, self._stops = columns, stops
        self._why = {claim.number: claim.why for claim in claims}
        self._parents = {parent.attempt: parent.parent for parent in sorted(parents, key=lambda p: p.attempt)}
        self._children: dict[GenerationId, list[tuple[GenerationId, int]]] = {}
        self._formed = [generation.id for generation in columns.generations if generation.start is not None]
        for generation in columns.generations:
            parent = generation.start.parent if generation.start is not None else None
            if parent is not None:
                of = self._children.setdefault((parent.attempt, parent.generation), [])
                of.append((generation.id, parent.step))

    def pieces(self, at: int) -> list[StepSpan]:
        """The pieces of one generation, by step."""
        columns, id_ = self._columns, self._columns.generations[at].id
        rows = columns.rows(at)
        steps = columns["step"][rows]
        start, stop = columns.generations[at].start, self._stops.get(id_, -1)
        cuts = {step for _, step in self._children.get(id_, ())} | (
            {start.step} if start is not None else set()
        )
        if stop is not None and stop >= 0:
            cuts.add(stop)
        cuts |= {s.step for s in self._parents.values() if s is not None and (s.attempt, s.generation) == id_}
        edges = [0, *np.searchsorted(steps, sorted(cuts), side="right").tolist(), len(rows)]
        found: list[tuple[int, int, int, int | None]] = []
        for a, b in zip(edges, edges[1:], strict=False):
            if a == b:
                continue
            fate, by = self._fate(id_, int(steps[a]), start.step if start is not None else 0, stop)
            if found and found[-1][2:] == (fate, by):
                found[-1] = (found[-1][0], b, fate, by)
            else:
                found.append((a, b, fate, by))
        return [StepSpan(generation=at, rows=rows[a:b], fate=fate, by=by) for a, b, fate, by in found]

    def _fate(self, id_: GenerationId, step: int, begin: int, stop: int | None) -> tuple[int, int | None]:
        if id_ in self._stops and begin < step and (stop is None or step <= stop):
            return HISTORY, None
        by, of = self._dropped_by(id_, step)
        # an attempt that goes back by itself, because all its members died, rewinds nothing
        rewound = by is not None and by != of and self._why.get(by) == REWIND
        return (REWOUND if rewound else LOST), by

    def _dropped_by(self, id_: GenerationId, step: int) -> tuple[int | None, int]:
        """(the attempt that abandoned this state, the attempt that held it last)."""
        first, at_first = id_, step
        while True:
            children = self._children.get(id_, [])
            if inherited := [child for child, branch in children if branch >= step]:
                id_ = max(inherited)
                start = self._columns.generations[self._columns.index[id_]].start
                assert start is not None, "children are known by their starts"
                step = start.step
                continue
            # the attempt itself, if it formed another generation: that went back further, or began anew
            later_ones = (other for other in self._formed if other > id_ and other[0] == id_[0])
            if left := [*(child for child, branch in children if branch < step), *later_ones]:
                by = min(left)[0]
                rewinds = (n for n in self._parents if id_[0] < n < by and self._why.get(n) == REWIND)
                return next((n for n in rewinds if not self._continues(n, first, at_first)), by), id_[0]
            later = (number for number in self._parents if number > id_[0])
            return next((n for n in later if not self._continues(n, first, at_first)), None), id_[0]

    def _continues(self, attempt: int, id_: GenerationId, step: int) -> bool:
        """Whether the state that an attempt continues came after this one. The attempt may have trained
        nothing, as a rewind.
        """
        state = self._parents[attempt]
        while state is not None:
            at = state.attempt, state.generation
            if at == id_:
                return step <= state.step
            index = self._columns.index.get(at)
            start = self._columns.generations[index].start if index is not None else None
            state = start.parent if start is not None else None
        return False


def _check(columns: Columns, path: EffectiveSteps) -> None:
    """Checks what only steps can contradict, and counts missing records. Raises `OrchestratorError` for
    counts that go back, or a generation that does not begin at its parent's state.
    """
    errors = list(path.lineage.errors)
    previous = None
    pieces = {p.generation: p for p in path.pieces if p.fate == HISTORY}
    for segment in path.lineage.segments:
        parent, known = segment.start.parent, dict[StateKey, StepRecord]()
        if parent is not None and previous is not None and parent.step != previous.start.step:
            piece = pieces.get(columns.index.get((parent.attempt, parent.generation), -1))
            rows = piece.rows if piece is not None else np.zeros(0, "i8")
            row = rows[columns["step"][rows] == parent.step]
            if len(row):
                known[parent] = columns.record(int(row[0]))
            errors += discontinuity(segment.start, previous, known)
        here = pieces.get(columns.index.get(segment.start.id, -1))
        steps = columns["step"][here.rows] if here is not None else np.zeros(0, "i8")
        last = int(steps[-1]) if len(steps) else segment.start.step
        path.gaps += (last if segment.open else segment.stop_step - 1) - segment.start.step - len(steps)
        previous = segment
    rows = path.rows.array
    tokens = columns["consumed_tokens"][rows]
    for at in np.flatnonzero(np.diff(tokens) <= 0)[:3]:
        a, b = columns.record(int(rows[at])), columns.record(int(rows[at + 1]))
        errors.append(
            f"step {b.key.point_name} ends at consumed_tokens={b.consumed_tokens}, the step before it, "
            f"{a.key.point_name}, at {a.consumed_tokens}"
        )
    if errors:
        raise OrchestratorError("\n".join(errors), code=INCONSISTENT)


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
