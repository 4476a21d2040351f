"""Chooses the members of the next generation, when it forms, and the state that it continues.

See membership rules 1, 2, 18 and 20. It builds the generation and each member's view of it: the ranks, the
givers of each shard, and the memory point to keep. The state is the newest one that is complete among
everything that the members hold in part or whole, or the newest committed point if that is newer. Pure
functions of what is known about the members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.elastic.failure import FailureBackoff
from orchestrator.elastic.formation import Formation, Generation, NewestPoint, Refused
from orchestrator.elastic.membership_state import MembershipState
from orchestrator.errors import FencedError
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView, HeldShard, JoinRequest, ShardSource, Source
from orchestrator.records.steps import StateKey

NONE = (0, 0)  # older than every generation


def refusal(request: JoinRequest, *, attempt: int, launch: str, formed: Collection[int]) -> Refused | None:
    """Returns why this member has no place in `attempt` of `launch`; None if it may join.

    `formed` are the generations that the attempt has formed. Raises `FencedError` if the member knows a newer
    attempt.
    """
    who, named = f"member {request.member}", {request.leaves or NONE, *_generations_of(request)}
    if request.launch != launch:
        return Refused(reason=f"{who} is of launch {request.launch}, the run is now {launch}; it exits")
    newest = max(its_attempt for its_attempt, _ in named)
    if newest > attempt:
        raise FencedError(f"{who} knows attempt {newest}, this coordinator is attempt {attempt}; it ends")
    if any(its_attempt == attempt and number not in formed for its_attempt, number in named):
        known = f"attempt {attempt} has formed {max(formed, default=0)} generations"
        return Refused(
            reason=f"{who} leaves generation {request.leaves} with {request.key}, but {known}; it exits"
        )
    return None


def newest_left(member: str, attempt: int, group: MembershipState) -> tuple[int, int]:
    """Returns the newest generation that `member` is known to have been in. It cannot leave an older one any
    more.
    """
    waiting, current = group.waiting.get(member), group.current
    newest = (waiting.request.leaves or NONE) if waiting else NONE
    if current is not None and current.attempt == attempt and member in current.ranks:
        newest = max(newest, current.identity)
    return newest


def _generations_of(request: JoinRequest) -> set[tuple[int, int]]:
    """Returns the generations whose states a member has."""
    keys = [request.key, *(h.key for h in request.holdings)]
    return {(key.attempt, key.generation) for key in keys if key is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberSelection:
    """The chosen `members`. `unreached` would be among them, but some of the others did not reach them (rule
    18).
    """

    members: tuple[JoinRequest, ...]
    unreached: tuple[JoinRequest, ...] = ()


def choose(
    requests: Sequence[JoinRequest],
    group: MembershipState,
    states: ParentStateSelection,
    backoff: FailureBackoff,
    *,
    max_workers: int,
    now: float,
) -> MemberSelection:
    """Chooses members from `requests`: none that has to wait, and at most the maximum.

    Members that together hold the newest state come first, then the members of the current generation, then
    the others in the order of their arrival.
    """
    allowed = [r for r in requests if group.is_trusted(r.member) or backoff.not_before(r.node_id) <= now]
    newest = newest_complete(held_by_all(requests), None)
    state = newest_complete(held_by_all(allowed), None) if len(allowed) < len(requests) else newest
    if newest and (not state or states.origin(state.key) != states.origin(newest.key)):
        state = newest  # a member that alone holds a shard of the newest state is never left out
    names = dict.fromkeys(r.member for r in allowed)
    cover = frozenset(state.cover([*names], [r.member for r in requests])) if state else frozenset()
    allowed += [r for r in requests if r.member in cover and r.member not in names]
    allowed.sort(
        key=lambda r: (
            r.member not in cover,
            not group.is_inside(r.member),
            group.waiting[r.member].since,
            r.member,
        )
    )
    kept = _reaching(allowed, state)
    return MemberSelection(
        members=tuple(r for r in allowed if r.member in kept)[:max_workers],
        unreached=tuple(r for r in allowed if r.member not in kept),
    )


def worth_interrupting(
    current: Generation,
    group: MembershipState,
    arrivals: Sequence[JoinRequest],
    backoff: FailureBackoff,
    *,
    max_workers: int,
    debounce_s: float,
    now: float,
) -> bool:
    """Whether to re-form the running generation for `arrivals`.

    There must be room for one that need not wait. In addition, either no other member has arrived for
    `debounce_s`, or one of them has waited five times as long.
    """
    joiners = [group.waiting[r.member].since for r in arrivals if backoff.not_before(r.node_id) <= now]
    if not joiners or len(current.members) - len(group.gone) >= max_workers:
        return False
    return now - max(joiners) >= debounce_s or now - min(joiners) >= 5 * debounce_s


def too_few(
    num_chosen: int, requests: Sequence[JoinRequest], backoff: FailureBackoff, *, min_workers: int, now: float
) -> str:
    """Returns the reason why fewer than the minimum are chosen, as text for people."""
    reason = f"{num_chosen} of at least {min_workers} members are there"
    later = {r.member: backoff.not_before(r.node_id) for r in requests}
    waits = [f"{member} for {until - now:.0f} s" for member, until in sorted(later.items()) if until > now]
    if waits:
        reason += f"; waiting after a generation that failed before its first step: {', '.join(waits)}"
    return reason


def _reaching(requests: Sequence[JoinRequest], state: CompleteState | None) -> frozenset[str]:
    """Returns members that reach each other, as far as they have tried (rule 18).

    Together they hold `state` if that is possible.
    """
    names = [r.member for r in requests]
    failed = [(r.member, other) for r in requests for other in r.unreached]
    if not failed:
        return frozenset(names)
    needed = state.needed if state else [names]
    return largest_reaching(names, failed, needed) or largest_reaching(names, failed, [names])


# Up to this many undecided members are searched exactly (a few thousand branches at most). Of more, the
# member with the most failures is left out first.
EXACT = 24


def largest_reaching(
    members: Sequence[str], failed: Collection[tuple[str, str]], holders: Iterable[Collection[str]]
) -> frozenset[str]:
    """Returns the largest set of `members` in which all reach each other.

    It contains no pair of `failed`, and at least one of each of `holders`. Pairs count in either direction.
    Empty if there is no such set. Among equals the set that keeps the first in `members` is chosen. Exact up
    to `EXACT` members with failures.
    """
    order = {member: place for place, member in enumerate(members)}
    needed = [frozenset(of_one) for of_one in holders]
    pairs = {frozenset(pair) for pair in failed if set(pair) <= set(order) and len(set(pair)) == 2}

    def best(kept: frozenset[str], left: set[frozenset[str]]) -> frozenset[str]:
        """Returns the best set after leaving out as few as possible; empty if holders are lost."""
        if not all(kept & of_one for of_one in needed):
            return frozenset()
        if not left:
            return kept
        degree = Counter(member for pair in left for member in pair)
        worst = max(degree, key=lambda m: (degree[m], order[m]))
        others = frozenset(m for pair in left if worst in pair for m in pair if m != worst)
        without = best(kept - {worst}, {pair for pair in left if worst not in pair})
        if without and len(degree) > EXACT:
            return without
        instead = best(kept - others, {pair for pair in left if not pair & others})
        return max(without, instead, key=lambda s: (len(s), sorted(-order[m] for m in s)[::-1]))

    return best(frozenset(members), pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """What a generation continues: the state `parent` (None: from nothing).

    The member `source` has some or all of it, or else the point `point` has.
    """

    parent: StateKey | None
    source: str | None
    point: NewestPoint | None


def continued(
    requests: Sequence[JoinRequest], states: ParentStateSelection, current: Generation | None
) -> Continuation:
    """Returns the newest state (rule 1) of these members and the newest point.

    The source is a member that trains the state if there is one, else any member that has a part of it.
    """
    parent, point = states.newest(requests)
    if parent is None or point is not None:
        return Continuation(parent=parent, source=None, point=point)
    holders = {r.member for r in requests if r.key == parent} or {
        h.member for h in held_by_all(requests) if h.key == parent
    }
    return Continuation(parent=parent, source=_by_rank(holders, None, current)[0], point=None)


def next_formation(
    chosen: Sequence[JoinRequest],
    what: Continuation,
    states: ParentStateSelection,
    current: Generation | None,
    *,
    attempt: int,
    generation: int,
    probe_ports: bool,
    save_only: bool,
) -> Formation:
    """Builds `generation` of `attempt` from the members `chosen`, after `current`."""
    held = held_by_all(chosen)
    state = complete([h for h in held if h.key == what.parent]) if what.source else None
    known = set(current.members) if current is not None else set()
    names = {r.member for r in chosen}
    members = _by_rank(names, what.source, current)
    point = what.point
    return Formation(
        attempt=attempt,
        generation=generation,
        members=members,
        parent=what.parent,
        source=what.source,
        point=point.name if point else None,
        cursor=state.cursor if state else point.cursor if point else None,
        step=states.label(what.parent, point),
        newcomers=tuple(sorted(names - known)) if names & known else (),
        probe_ports=probe_ports,
        save_only=save_only,
        sources=_by_ranks(state, members) if state else (),
        keep=memory_point_to_keep(held, states.floor),
    )


def _by_rank(members: Iterable[str], source: str | None, current: Generation | None) -> tuple[str, ...]:
    """Orders the source first, the others by their rank in the current generation, then by name."""
    ranks = current.ranks if current is not None else {}
    return tuple(sorted(members, key=lambda m: (m != source, ranks.get(m, len(ranks)), m)))


def _by_ranks(state: CompleteState, members: Sequence[str]) -> tuple[tuple[ShardSource, ...], ...]:
    """Returns the members that can give each shard, by rank instead of by name."""
    rank = {member: number for number, member in enumerate(members)}
    return tuple(
        tuple(
            sorted(
                (ShardSource(rank=rank[h.member], source=h.source) for h in of_one),
                key=lambda s: (s.source, s.rank),
            )
        )
        for of_one in state.holders
    )


def view_of_first(current: Generation, launch: str) -> GenerationView | None:
    """Returns the generation as its first member sees it.

    None for a generation of an older attempt, whose formation is unknown.
    """
    if current.formation is None:
        return None
    formation, first = current.formation, current.requests[current.members[0]]
    return GenerationView(
        attempt=current.attempt,
        generation=current.number,
        rank=0,
        world_size=len(current.members),
        members=current.members,
        host=first.host,
        port=first.port,
        parent=formation.parent,
        source_rank=None if formation.source is None else 0,
        sources=formation.sources,
        keep=formation.keep,
        nodes=_numbered([current.requests[m].node_id for m in current.members]),
        own_host=first.host,
        point=formation.point,
        cursor=formation.cursor,
        step=formation.step,
        launch=launch,
        probe=tuple((r.host, r.port) for r in (current.requests[m] for m in current.members))
        if formation.probe_ports
        else (),
    )


def view_of(member: str, current: Generation, first: GenerationView) -> GenerationView:
    """Returns the view of `member`, derived from that of the first member.

    Views differ in two fields only, and building one from scratch takes time proportional to the number of
    members. This matters with 10,000 members.
    """
    return replace(first, rank=current.ranks[member], own_host=current.requests[member].host)


def _numbered(nodes: Iterable[str]) -> tuple[int, ...]:
    """Numbers distinct names in the order of their appearance."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(node, len(numbers)) for node in nodes)


# -------------------------------------------------------------------------------------------------- the state
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
