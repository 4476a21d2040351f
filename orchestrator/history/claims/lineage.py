"""The effective history of a run: follows parents back from the newest claim to the first state.

Claims, parent files and journal records are passed in as values. Decisions use only names and keys, never
clocks, step labels or the order in which things were found (membership rules 1, 2 and 6). `skips_of` finds
the skipped samples of a history.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.claims import (
    INCONSISTENT,
    ORIGIN,
    Claim,
    ClaimParent,
    GenerationId,
    GenerationStart,
)
from orchestrator.planning.resume.skipping import Skip, SkipClaim
from orchestrator.records.steps import StateKey, StepRecord

# The fields that every rank measures itself: copies of a step's record may differ in these.
_TIMINGS = frozenset({"step_s", "data_wait_s", "save_blocked_s", "ended", "peak_memory_bytes", "mfu"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The part of a generation that belongs to the history.

    It has the states with labels from `start.step` up to, not including, `stop_step`. The first of them is
    the parent's state under the generation's own name. `steps` are the trained steps.
    """

    start: GenerationStart
    stop_step: int
    open: bool  # nothing branched off: further steps of this generation belong to the history too

    @property
    def steps(self) -> range:
        """The labels of the steps that were trained here."""
        return range(self.start.step + 1, self.stop_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The effective history, oldest first. With `errors` it must not be used to resume or delete anything.

    `gaps` name steps that belong to the history but have no record; `holes` are the indices of the records
    after them. `orphans` counts records off the history.
    `attempts` are the claims on the chain, oldest first, with the names that each inherited.
    """

    attempt: int | None  # the newest claim with a parent file
    segments: tuple[Segment, ...]
    records: tuple[StepRecord, ...]
    attempts: tuple[ClaimParent, ...]
    orphans: int
    gaps: tuple[str, ...]
    errors: tuple[str, ...]
    holes: tuple[int, ...] = ()

    def on_lineage(self, key: StateKey) -> bool:
        """Whether a committed point with this key belongs to the history."""
        return not self.why_orphan(key)

    def has_state(self, key: StateKey) -> bool:
        """Whether the state `key` belongs to the history, under any of its names."""
        segment = self._segment(key)
        return segment is not None and (
            segment.start.step <= key.step and (segment.open or key.step < segment.stop_step)
        )

    def first_name(self, key: StateKey) -> StateKey:
        """The key under which the state `key` of the history was trained.

        A generation gives the state that it continues a key of its own.
        """
        while (segment := self._segment(key)) is not None and key.step == segment.start.step:
            if segment.start.parent is None:
                break
            key = segment.start.parent
        return key

    def _segment(self, key: StateKey) -> Segment | None:
        return next((s for s in self.segments if s.start.id == (key.attempt, key.generation)), None)

    def why_orphan(self, key: StateKey) -> str:
        """Why a committed point with this key does not belong to the history; empty if it does."""
        name = f"generation {key.generation} of attempt {key.attempt}"
        segment = self._segment(key)
        if segment is None:
            return f"the history does not pass through {name}"
        if key.step < segment.start.step:
            return f"{name} began after step {segment.start.step}"
        if not segment.open and key.step >= segment.stop_step:
            return f"the history left {name} after step {segment.stop_step - 1}"
        for claim in self.attempts:
            if claim.attempt > key.attempt and key.point_name not in claim.inherited:
                return f"attempt {claim.attempt} did not inherit it: it was not committed before that claim"
        return ""


def effective_history(
    claims: Iterable[Claim],
    parents: Iterable[ClaimParent],
    generations: Iterable[GenerationStart],
    records: Iterable[StepRecord],
    lost: Collection[int] = (),
) -> Lineage:
    """The history as the chain of parents from the newest claim with a parent file back to the first state.

    It begins at that claim's newest generation, or, before it has formed one, at the claim's parent. Of each
    generation only the part at or before the branch to its child counts. Equal copies of a record count once.
    Unequal copies, a missing link, and a link that no correct writer makes are reported in `errors`, and the
    history then ends there.

    `lost` are the attempts whose journals have lost lines. A generation that cannot be joined to the history
    because the start of an older one is lost is no head: no point depends on it, for each point's generations
    are sealed. It is reported in `gaps`.
    """
    chain = _Chain(claims, parents, generations, lost)
    segments = chain.follow()
    by_key = _unique(records, chain.errors)
    segments = [_closed(s, by_key) for s in segments]
    history: list[StepRecord] = []
    gaps: list[str] = []
    holes: list[int] = []
    is_hole = False
    for previous, segment in zip([None, *segments], segments, strict=False):
        found = [by_key.get(_key(segment.start, step)) for step in segment.steps]
        gaps += _gaps(segment, found)
        chain.errors += discontinuity(segment.start, previous, by_key)
        for record in found:
            if record is None:
                is_hole = True
                continue
            if is_hole:
                holes.append(len(history))
            is_hole = False
            history.append(record)
    gaps += chain.unjoined
    if is_hole or chain.unjoined:
        holes.append(len(history))
    chain.errors += _backwards(history)
    return Lineage(
        attempt=chain.newest,
        segments=tuple(segments),
        records=tuple(history),
        attempts=tuple(chain.claims_on(segments)),
        orphans=len(by_key) - len(history),
        gaps=tuple(gaps),
        errors=tuple(chain.errors),
        holes=tuple(holes),
    )


def effective_chain(
    claims: Iterable[Claim],
    parents: Iterable[ClaimParent],
    generations: Iterable[GenerationStart],
    lost: Collection[int] = (),
) -> Lineage:
    """The effective history without its steps: its points, generations and attempts.

    It follows the rules of `effective_history`, at a cost that does not grow with the steps trained.
    `records`, `orphans` and `gaps` stay empty, and the open segment ends with its start. Errors that only
    step records show are not found: unequal copies, gaps, counts that decrease.
    """
    chain = _Chain(claims, parents, generations, lost)
    segments = chain.follow()
    for previous, segment in zip([None, *segments], segments, strict=False):
        chain.errors += discontinuity(segment.start, previous, {})
    return Lineage(
        attempt=chain.newest,
        segments=tuple(segments),
        records=(),
        attempts=tuple(chain.claims_on(segments)),
        orphans=0,
        gaps=(),
        errors=tuple(chain.errors),
    )


class _Chain:
    """Claims and generations by number, and the walk along their parents."""

    def __init__(
        self,
        claims: Iterable[Claim],
        parents: Iterable[ClaimParent],
        generations: Iterable[GenerationStart],
        lost: Collection[int],
    ) -> None:
        self.errors: list[str] = []
        self.unjoined: list[str] = []  # generations of the newest attempt without a known past
        self._lost = lost
        self.claims = self._by(claims, lambda c: c.number, "claim")
        self.parents = self._by(parents, lambda p: p.attempt, "parent file of attempt")
        begins = [parent.begins for parent in self.parents.values() if parent.begins is not None]
        self._origins = {start.id for start in begins}
        self.generations = self._by([*begins, *generations], lambda g: g.id, "start of generation")
        self.errors += [
            f"attempt {number} has a parent file but no claim"
            for number in self.parents
            if number not in self.claims
        ]
        self.errors += [
            f"attempt {number} has a journal but no claim (attempts/{number:04d}.json); restore the file"
            for number in sorted(self._written() - set(self.claims))
        ]
        # the parent file is durable before the attempt's journal begins, so a crash cannot cause this (rule
        # 6)
        self.errors += [
            f"attempt {number} has a journal but no whole parent file (attempts/{number:04d}.parent.json); "
            "restore the file"
            for number in sorted(self._written() & set(self.claims))
            if number not in self.parents
        ]
        self.newest = max((number for number in self.parents if number in self.claims), default=None)

    def _written(self) -> set[int]:
        """The attempts with a generation in the journal."""
        return {attempt for attempt, _ in {*self.generations} - self._origins}

    def _by(self, values: Iterable[Any], name: Any, what: str) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for value in values:
            if found.setdefault(name(value), value) != value:
                self.errors.append(
                    f"two unequal copies of {what} {name(value)}: {found[name(value)]} and {value}"
                )
        return found

    def follow(self) -> list[Segment]:
        """The segments, oldest first. An open one stops after its start, until its records are known."""
        if self.newest is None:
            return []
        for head in sorted((id_ for id_ in self.generations if id_[0] == self.newest), reverse=True):
            segments, broken = self._walk(head)
            if broken is None or broken[0].attempt not in self._lost:
                break
            self.unjoined.append(f"generation {head[1]} of attempt {head[0]} has no known past: {broken[1]}")
        else:
            segments, broken = self._walk(None)
        self.errors += [broken[1]] if broken is not None else []
        return segments[::-1]

    def _walk(self, head: GenerationId | None) -> tuple[list[Segment], tuple[StateKey, str] | None]:
        """The segments from `head` (None: from the newest claim's parent), newest first; and the state whose
        generation is not known, with a sentence, if the walk ends at one.
        """
        assert self.newest is not None, "there is a claim with a parent file"
        segments: list[Segment] = []
        if head is not None:
            start = self.generations[head]
            segments.append(Segment(start=start, stop_step=start.step + 1, open=True))
            parent = self._parent_of(start)
        else:
            parent = self.parents[self.newest].parent
        while parent is not None:
            segment = self._segment(parent)
            if isinstance(segment, str):
                return segments, (parent, segment)
            segments.append(segment)
            parent = self._parent_of(segment.start)
        return segments, None

    def claims_on(self, segments: Iterable[Segment]) -> list[ClaimParent]:
        """The parent files of the attempts on the chain, including the newest claim's, oldest first."""
        numbers = {self.newest, *(segment.start.attempt for segment in segments)}
        return [self.parents[number] for number in sorted(self.parents) if number in numbers]

    def _segment(self, end: StateKey) -> Segment | str:
        """The part of a generation up to the state `end`, at which its child branched off; or why there is
        none.
        """
        start = self.generations.get((end.attempt, end.generation))
        if start is not None and end.step >= start.step:
            return Segment(start=start, stop_step=end.step + 1, open=False)
        why = "has no start record in the journal" if start is None else f"began after step {start.step}"
        return f"the state {end.point_name} is somebody's parent, but its generation {why}"

    def _parent_of(self, start: GenerationStart) -> StateKey | None:
        """The generation's parent, if a correct coordinator can have written it (else None, and an error)."""
        wrong = self._wrong_parent(start)
        text = f"generation {start.generation} of attempt {start.attempt} {wrong}"
        if wrong and text not in self.errors:
            self.errors.append(text)
        return None if wrong else start.parent

    def _wrong_parent(self, start: GenerationStart) -> str:
        if start.id in self._origins:
            return ""
        claim, parent = self.parents.get(start.attempt), start.parent
        if claim is None or start.attempt not in self.claims:
            return "was formed under a claim without a parent file, which can have no descendants"
        if parent is None:
            continued = claim.parent.point_name if claim.parent else ""
            return f"begins from nothing, but its claim continues {continued}" if continued else ""
        handed_down = parent.point_name in claim.inherited or parent.attempt == start.attempt
        if handed_down or self._same_launch(parent.attempt, start.attempt):
            return ""
        return f"continues {parent.point_name}, which its claim did not inherit and another launch made"

    def _same_launch(self, older: int, newer: int) -> bool:
        """Whether one launch made all claims from `older` to `newer`.

        Only then can members carry a state over (membership rule 8).
        """
        launches = {self.claims[n].launch if n in self.claims else None for n in range(older, newer + 1)}
        return len(launches) == 1 and None not in launches


def _key(start: GenerationStart, step: int) -> StateKey:
    return StateKey(attempt=start.attempt, generation=start.generation, step=step)


def _unique(records: Iterable[StepRecord], errors: list[str]) -> dict[StateKey, StepRecord]:
    """The records by key.

    Copies that differ in more than their holder's own timings are errors, and the first one counts.
    """
    found: dict[StateKey, StepRecord] = {}
    for record in records:
        first = found.setdefault(record.key, record)
        if first is not record and _substance(first) != _substance(record):
            errors.append(f"two unequal records of step {record.key.point_name}: {first} and {record}")
    return found


def _substance(record: StepRecord) -> list[str]:
    # as text, because a grad_norm of NaN must equal its copy too
    return [repr(getattr(record, f.name)) for f in fields(record) if f.name not in _TIMINGS]


def _closed(segment: Segment, by_key: Mapping[StateKey, StepRecord]) -> Segment:
    """An open segment with the end that its records give it; a closed one unchanged."""
    if not segment.open:
        return segment
    last = max((key.step for key in by_key if (key.attempt, key.generation) == segment.start.id), default=0)
    return Segment(start=segment.start, stop_step=max(last, segment.start.step) + 1, open=True)


def _gaps(segment: Segment, found: list[StepRecord | None]) -> list[str]:
    return [
        f"step {_key(segment.start, step).point_name} belongs to the history, but the journal has no record"
        for step, record in zip(segment.steps, found, strict=True)
        if record is None
    ]


def discontinuity(
    start: GenerationStart, previous: Segment | None, by_key: Mapping[StateKey, StepRecord]
) -> list[str]:
    """A generation must begin with its parent's counts, as far as they are known."""
    at: GenerationStart | StepRecord | None = None
    if start.parent is not None and previous is not None:
        # the parent is a trained step, or the initial state of the parent's generation
        at = previous.start if start.parent.step == previous.start.step else by_key.get(start.parent)
    before = _counts(at) if at is not None else (0, 0, 0)
    if start.attempt == ORIGIN or (at is None and start.parent is not None) or _counts(start) == before:
        return []
    return [
        f"generation {start.generation} of attempt {start.attempt} begins at (samples, tokens, targets) = "
        f"{_counts(start)}, but its parent stood at {before}"
    ]


def _counts(at: GenerationStart | StepRecord) -> tuple[int, int, int]:
    return at.consumed_samples, at.consumed_tokens, at.target_tokens


def _backwards(history: list[StepRecord]) -> list[str]:
    """Every step must consume something: a history whose counts do not increase trains a token twice."""
    return [
        f"step {b.key.point_name} ends at consumed_tokens={b.consumed_tokens}, "
        f"the step before it, {a.key.point_name}, at {a.consumed_tokens}"
        for a, b in zip(history, history[1:], strict=False)
        if b.consumed_tokens <= a.consumed_tokens
    ]


def require_sound(lineage: Lineage) -> Lineage:
    """Returns `lineage`. Raises `OrchestratorError` with all its errors if it has any."""
    if lineage.errors:
        listed = "\n".join(f"  {error}" for error in lineage.errors)
        raise OrchestratorError(
            f"the run's history contradicts itself:\n{listed}\nNothing is continued or read from it. Restore "
            "attempts/ and journal/ from a copy, or start a new run with another name",
            code=INCONSISTENT,
        )
    return lineage


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipAt:
    """A skip on the history.

    `attempt` claimed it, after the point `parent`, before the history's record number `index`.
    """

    index: int
    attempt: int
    parent: StateKey
    skip: Skip


def skips_of(lineage: Lineage) -> tuple[SkipAt, ...]:
    """All skips on the history, in order.

    A claim's skip is on the history if one of the attempt's generations continues the claim's own parent.
    Other generations continue a state after that, which includes the skip.
    """
    ids = [(record.attempt, record.generation) for record in lineage.records]
    claims = {claim.attempt: claim for claim in lineage.attempts}
    found = []
    for segment in lineage.segments:
        claim = claims.get(segment.start.attempt)
        if claim is None or claim.skip is None or claim.parent is None:
            continue
        if segment.start.parent == claim.parent:
            index = sum(id_ < segment.start.id for id_ in ids)
            found.append(SkipAt(index=index, attempt=claim.attempt, parent=claim.parent, skip=claim.skip))
    return tuple(found)


def skip_claims(parents: Iterable[ClaimParent]) -> tuple[SkipClaim, ...]:
    """The claims of a run with a skip, also off its history."""
    return tuple(
        SkipClaim(attempt=claim.attempt, parent=claim.parent, request=claim.skip.request)
        for claim in parents
        if claim.skip is not None and claim.parent is not None
    )
