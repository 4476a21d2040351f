"""Finds the state that the next generation continues (membership rule 1).

It is the newest state that is complete among everything that the members hold in part or whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import HeldShard, JoinRequest, Source
from orchestrator.records.steps import StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
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
    holders: tuple[tuple[Holding, ...], ...]

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


def newest_complete(holdings: Iterable[Holding], floor: StateKey | None) -> CompleteState | None:
    """Returns the newest state of which every shard is held.

    Returns None if no state is complete, or if `floor`, the newest committed point, has a greater key; then
    the point is loaded. If keys are equal, the members' state is used, because it needs no reading.

    Shards of two keys are never joined (rule 5). A prepared shard counts only if some member is live at its
    key. Such a member has seen the step's summary, so the step is part of the history, and the member has the
    step's record. A received shard counts by itself: it is a state of the history under a newer name. A key
    belongs to one generation, and so has one number of shards.
    """
    by_key: dict[StateKey, list[Holding]] = {}
    for holding in holdings:
        by_key.setdefault(holding.key, []).append(holding)
    for key in sorted(by_key, reverse=True):
        if floor is not None and key < floor:
            return None
        found = complete(by_key[key])
        if found is not None:
            return found
    return None


def complete(holdings: Sequence[Holding]) -> CompleteState | None:
    """Returns the state that `holdings` of one key form; None if a shard is missing."""
    sizes = {h.num_shards for h in holdings}
    assert len(sizes) == 1, (
        f"{holdings[0].key} is held as shards of {sorted(sizes)}; a generation has one number of shards"
    )
    summed = any(h.source is Source.LIVE for h in holdings)
    holders: list[list[Holding]] = [[] for _ in range(sizes.pop())]
    for holding in holdings:
        if holding.source is not Source.PREPARED or summed:
            holders[holding.shard].append(holding)
    if not all(holders):
        return None
    return CompleteState(
        key=holdings[0].key,
        holders=tuple(tuple(sorted(of_one, key=lambda h: (h.source, h.member))) for of_one in holders),
    )


def held_by(request: JoinRequest) -> tuple[Holding, ...]:
    """Returns everything that a member can give.

    A member that names no shards has the whole of its state, as under replicate, and of the step it prepared.
    """
    held = request.holdings
    if not held and request.key is not None:
        held = (_whole(request.key, Source.LIVE, request.cursor),)
        if request.prepared is not None:
            held = (*held, _whole(request.prepared, Source.PREPARED, None))
    return tuple(
        Holding(
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


def held_by_all(requests: Iterable[JoinRequest]) -> list[Holding]:
    """Returns everything that these members can give."""
    return [holding for request in requests for holding in held_by(request)]


def memory_point_to_keep(holdings: Iterable[Holding], floor: StateKey | None) -> StateKey | None:
    """Returns the memory point to keep until the next generation has made one of its own.

    It must not be overwritten before.

    It is the newest of which every shard is held by two members, so that any one of them may be lost
    meanwhile. If a loss has left no such point, it is the newest that is complete. None: there is none, or
    `floor`, the newest committed point, is newer.
    """
    by_key: dict[StateKey, list[Holding]] = {}
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
