"""Chooses the members of the next generation and when it forms, and builds it and each member's view of it.

See membership rules 18 and 20. It assigns ranks, the givers of each shard, and the memory point to keep.
`state_selection.py` chooses the newest state. Pure functions of what is known about the members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.elastic.failure import FailureBackoff
from orchestrator.elastic.formation import Formation, Generation, NewestPoint, Refused
from orchestrator.elastic.membership_state import MembershipState
from orchestrator.elastic.state_selection import (
    CompleteState,
    ParentStateSelection,
    complete,
    held_by_all,
    memory_point_to_keep,
    newest_complete,
)
from orchestrator.errors import FencedError
from orchestrator.records.membership import GenerationView, JoinRequest, ShardSource
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
