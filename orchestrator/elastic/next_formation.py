"""Builds the next generation from its members and its parent state, and each member's view of it.

It assigns ranks, the givers of each shard, and the memory point to keep. `member_selection.py` chooses the
members, `state_selection.py` the newest state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.elastic.formation import Formation, Generation, NewestPoint
from orchestrator.elastic.state_selection import (
    CompleteState,
    ParentStateSelection,
    complete,
    held_by_all,
    memory_point_to_keep,
)
from orchestrator.records.membership import GenerationView, JoinRequest, ShardSource
from orchestrator.records.steps import StateKey


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
