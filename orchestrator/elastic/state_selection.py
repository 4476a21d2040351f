"""Selects the state that the next generation continues, and its label (membership rules 1 and 2).

The state is the newest one that is complete among everything that the members hold in part or whole, or the
newest committed point if that is newer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.elastic.formation import Formation, NewestPoint
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import HeldShard, JoinRequest, Source
from orchestrator.records.steps import StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHolding:
    """`member` can give shard `shard` of the `num_shards` of the state `key`; see `HeldShard`."""

    member: str
    key: StateKey
    shard: int
    num_shards: int
    source: Source
    cursor: Cursor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompleteState:
    """A state of which every shard is held.

    `holders[shard]` are all members that can give it, ordered by `Source` and then by name. A member occurs
    twice in a shard if it has it twice.
    """

    key: StateKey
    holders: tuple[tuple[ShardHolding, ...], ...]

    @property
    def cursor(self) -> Cursor | None:
        """The state's cursor, according to its holders."""
        return next((h.cursor for of_one in self.holders for h in of_one if h.cursor is not None), None)

    @property
    def needed(self) -> tuple[frozenset[str], ...]:
        """Sets of members: the state is complete in a group that has at least one member of each set.

        If some members have only prepared the state's step, the first set is those that have seen its
        summary. The holders of each shard follow.
        """
        everyone = [h for of_one in self.holders for h in of_one]
        shards = tuple(frozenset(h.member for h in of_one) for of_one in self.holders)
        if all(h.source is not Source.PREPARED for h in everyone):
            return shards
        return (frozenset(h.member for h in everyone if h.source is Source.LIVE), *shards)

    def cover(self, *choices: Sequence[str]) -> tuple[str, ...]:
        """Chooses members among whom the state is complete, at most as many as there are shards.

        A shard that one choice can give is never taken from a later choice. Of the members that have it, the
        one that adds most is chosen; among equals, the first. Shards that no member of `choices` has are left
        out.
        """
        needed, chosen = self.needed, list[str]()
        places = [{member: at for at, member in enumerate(choice)} for choice in choices]
        has: dict[str, list[int]] = {}  # the sets of `needed` that each member is in
        for number, of_one in enumerate(needed):
            for member in of_one:
                has.setdefault(member, []).append(number)
        # the number of lacking sets that each member would add
        adds = {member: len(numbers) for member, numbers in has.items()}
        lacking = set(range(len(needed)))
        for number, of_one in enumerate(needed):
            if number not in lacking:
                continue
            able = next(filter(None, (_in_order(of_one, of_choice) for of_choice in places)), [])
            if not able:
                continue
            # a member that has seen a summary has a shard, too
            found = max(able, key=lambda member: adds[member])
            chosen.append(found)
            for met in lacking.intersection(has[found]):
                lacking.discard(met)
                for member in needed[met]:
                    adds[member] -= 1
        return tuple(chosen)


def newest_complete(holdings: Iterable[ShardHolding], floor: StateKey | None) -> CompleteState | None:
    """Returns the newest state of which every shard is held.

    Returns None if no state is complete, or if `floor`, the newest committed point, has a greater key; then
    the point is loaded. If keys are equal, the members' state is used, because it needs no reading.

    Shards of two keys are never joined (rule 5). A prepared shard counts only if some member is live at its
    key. Such a member has seen the step's summary, so the step is part of the history, and the member has the
    step's record. A received shard counts by itself: it is a state of the history under a newer name. A key
    belongs to one generation, and so has one number of shards.
    """
    by_key: dict[StateKey, list[ShardHolding]] = {}
    for holding in holdings:
        by_key.setdefault(holding.key, []).append(holding)
    for key in sorted(by_key, reverse=True):
        if floor is not None and key < floor:
            return None
        found = complete(by_key[key])
        if found is not None:
            return found
    return None


def complete(holdings: Sequence[ShardHolding]) -> CompleteState | None:
    """Returns the state that `holdings` of one key form; None if a shard is missing."""
    sizes = {h.num_shards for h in holdings}
    assert len(sizes) == 1, (
        f"{holdings[0].key} is held as shards of {sorted(sizes)}; a generation has one number of shards"
    )
    summed = any(h.source is Source.LIVE for h in holdings)
    holders: list[list[ShardHolding]] = [[] for _ in range(sizes.pop())]
    for holding in holdings:
        if holding.source is not Source.PREPARED or summed:
            holders[holding.shard].append(holding)
    if not all(holders):
        return None
    return CompleteState(
        key=holdings[0].key,
        holders=tuple(tuple(sorted(of_one, key=lambda h: (h.source, h.member))) for of_one in holders),
    )


def held_by(request: JoinRequest) -> tuple[ShardHolding, ...]:
    """Returns everything that a member can give.

    A member that names no shards has the whole of its state, as under replicate, and of the step it prepared.
    """
    held = request.holdings
    if not held and request.key is not None:
        held = (_whole(request.key, Source.LIVE, request.cursor),)
        if request.prepared is not None:
            held = (*held, _whole(request.prepared, Source.PREPARED, None))
    return tuple(
        ShardHolding(
            member=request.member,
            key=h.key,
            shard=h.shard,
            num_shards=h.num_shards,
            source=h.source,
            cursor=h.cursor,
        )
        for h in held
    )


def holds_any(request: JoinRequest) -> bool:
    """Whether a member has any part of any state."""
    return request.key is not None or bool(request.holdings)


def held_by_all(requests: Iterable[JoinRequest]) -> list[ShardHolding]:
    """Returns everything that these members can give."""
    return [holding for request in requests for holding in held_by(request)]


def memory_point_to_keep(holdings: Iterable[ShardHolding], floor: StateKey | None) -> StateKey | None:
    """Returns the memory point to keep until the next generation has made one of its own.

    It must not be overwritten before.

    It is the newest of which every shard is held by two members, so that any one of them may be lost
    meanwhile. If a loss has left no such point, it is the newest that is complete. None: there is none, or
    `floor`, the newest committed point, is newer.
    """
    by_key: dict[StateKey, list[ShardHolding]] = {}
    for holding in holdings:
        if holding.source in (Source.STAGED, Source.NEIGHBOUR) and not (floor and holding.key < floor):
            by_key.setdefault(holding.key, []).append(holding)
    found = [state for copies in by_key.values() if (state := complete(copies)) is not None]
    spare = {state.key: all(len({h.member for h in s}) > 1 for s in state.holders) for state in found}
    return max(spare, key=lambda key: (spare[key], key), default=None)


def _in_order(members: frozenset[str], places: Mapping[str, int]) -> list[str]:
    """Returns those of `members` that have a place, in the order of places."""
    return sorted(members & places.keys(), key=lambda member: places[member])


def _whole(key: StateKey, source: Source, cursor: Cursor | None) -> HeldShard:
    return HeldShard(key=key, shard=0, num_shards=1, source=source, cursor=cursor)


class ParentStateSelection:
    """The states of one attempt. `first_attempt`, `rebase`: see `Rendezvous`."""

    def __init__(
        self, attempt: int, first_attempt: int, rebase: Callable[[StateKey, Cursor | None], int] | None
    ) -> None:
        self.formed: dict[int, Formation] = {}  # every generation of this attempt
        self.point: NewestPoint | None = None
        self.distrusted: tuple[int, int] | None = None  # (attempt, generation); see `trusted`
        self._attempt, self._first_attempt, self._rebase = attempt, first_attempt, rebase

    def newest(self, requests: Iterable[JoinRequest]) -> tuple[StateKey | None, NewestPoint | None]:
        """Returns the newest state: complete among the members, or the committed point if its key is greater.

        The second value is that point if it was chosen.
        """
        state = newest_complete(held_by_all(requests), self.floor)
        if state is not None:
            return state.key, None
        return (None, None) if self.point is None else (self.point.key, self.point)

    def trusted(self, request: JoinRequest) -> JoinRequest:
        """Removes from a request the states that may not be continued, because replicas of them differed.

        These are all states that are newer than the newest committed point and not newer than the generation
        `distrusted`. A member without any other state counts as blank (membership rule 27).
        """
        held = tuple(h for h in request.holdings if not self._is_distrusted(h.key))
        if self._is_distrusted(request.key):
            return replace(request, key=None, cursor=None, prepared=None, holdings=held)
        return replace(request, holdings=held)

    def _is_distrusted(self, key: StateKey | None) -> bool:
        if key is None or self.distrusted is None or (key.attempt, key.generation) > self.distrusted:
            return False
        return self.floor is None or key > self.floor

    @property
    def floor(self) -> StateKey | None:
        """The key of the newest committed point. No older state is continued."""
        return None if self.point is None else self.point.key

    def label(self, parent: StateKey | None, point: NewestPoint | None) -> int:
        """Returns the label of the last finished step, counted as after `parent`."""
        if parent is None:
            return 0
        if point is not None and self._rebase is not None and parent.attempt < self._first_attempt:
            return self._rebase(parent, point.cursor)
        return parent.step

    def origin(self, key: StateKey | None) -> StateKey | None:
        """Returns the oldest key of the same content. Agreeing on a state renames it without changing it."""
        at = key
        while at is not None and at.attempt == self._attempt and self.formed[at.generation].step == at.step:
            at = self.formed[at.generation].parent
        return at

    def is_unsaved(self, parent: StateKey | None) -> bool:
        """Whether no committed point holds the content of `parent`."""
        origin = self.origin(parent)
        return origin is not None and (self.point is None or self.origin(self.point.key) != origin)

    def copy(self) -> ParentStateSelection:
        """An independent copy."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.formed = dict(self.formed)
        return twin
