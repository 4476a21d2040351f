"""A model of FSDP2 ranks that keep memory points, and a search over all orders of their copies, summaries,
steps and losses: what is left after any loss must hold a complete state no older than the newest sealed
memory point.

It follows lab/fsdp2/holdings.py; every decision which state is complete is made by `newest_complete`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from orchestrator.elastic.holdings import Holding, newest_complete
from orchestrator.records import Source, StateKey

Copy = tuple[int, bool] | None  # the step that a buffer holds, and whether it is whole


class Rank(NamedTuple):
    """One member: the step it is live at, its own buffers, and those it keeps for the rank before it."""

    live: int
    own: tuple[Copy, ...]
    kept: tuple[Copy, ...]


class Group(NamedTuple):
    """All ranks; `summed`: the summary of the next step has come; `point`: the memory point in the making."""

    ranks: tuple[Rank, ...]
    summed: bool
    sealed: int | None
    point: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How far the search goes, and with how many buffers; `in_turn`: a buffer is taken whatever is sealed."""

    world: int = 3
    steps: int = 2
    own: int = 2
    kept: int = 2
    lost: int = 1
    in_turn: bool = False


def search(bounds: Bounds) -> tuple[str, int]:
    """What is lost, after which events (empty: nothing ever is); how many states were seen. Breadth first."""
    blank = Rank(0, (None,) * bounds.own, (None,) * bounds.kept)
    start = Group((blank,) * bounds.world, False, None, 0)
    came: dict[Group, tuple[Group, str] | None] = {start: None}
    todo = deque([start])
    while todo:
        group = todo.popleft()
        for lost in combinations(range(bounds.world), bounds.lost):
            beside = any((b - a) % bounds.world in (1, bounds.world - 1) for a, b in combinations(lost, 2))
            if not beside and not survives(group, lost):
                return f"{lost} lost, sealed {group.sealed}: {', '.join(trace(came, group)[-7:])}", len(came)
        for event, after in events(group, bounds):
            if after not in came:
                came[after] = group, event
                todo.append(after)
    return "", len(came)


def trace(came: dict[Group, tuple[Group, str] | None], group: Group) -> list[str]:
    """The events that lead to `group`."""
    found, step = [], came[group]
    while step is not None:
        found.append(step[1])
        step = came[step[0]]
    return found[::-1]


def survives(group: Group, lost: tuple[int, ...]) -> bool:
    """Whoever is left holds a complete state, no older than the sealed memory point."""
    world, there = len(group.ranks), []
    for number, rank in enumerate(group.ranks):
        if number in lost:
            continue
        copies = [(rank.live, number, Source.LIVE)]
        copies += [(c[0], number, Source.STAGED) for c in rank.own if c and c[1]]
        copies += [(c[0], (number - 1) % world, Source.NEIGHBOUR) for c in rank.kept if c and c[1]]
        there += [
            Holding(
                member=str(number),
                key=StateKey(attempt=1, generation=1, step=step),
                shard=shard,
                num_shards=world,
                source=source,
            )
            for step, shard, source in copies
        ]
    found = newest_complete(there, None)
    return group.sealed is None or (found is not None and found.key.step >= group.sealed)


def buffer_for(copies: tuple[Copy, ...], group: Group, bounds: Bounds) -> int:
    """The buffer of the memory point in the making: the one begun, else one without the sealed point."""
    for number, copy in enumerate(copies):
        if copy is not None and copy[0] == group.point:
            return number
    if bounds.in_turn or len(copies) == 1:
        return group.point % len(copies)
    return next(n for n, copy in enumerate(copies) if copy is None or copy[0] != group.sealed)


def events(group: Group, bounds: Bounds) -> Iterator[tuple[str, Group]]:
    """Every event that is possible now, and the group after it. A copy has a beginning and an end."""
    ranks, point, slowest = group.ranks, group.point, min(rank.live for rank in group.ranks)
    for number, rank in enumerate(ranks):
        whole = (point, True) in rank.own
        if rank.live == point and not whole:
            own = copied(rank.own, buffer_for(rank.own, group, bounds), point)
            yield f"{number} copies {point}", put(group, number, rank._replace(own=own))
        if (point, True) in ranks[number - 1].own and (point, True) not in rank.kept:
            kept = copied(rank.kept, buffer_for(rank.kept, group, bounds), point)
            yield f"{number} receives {point}", put(group, number, rank._replace(kept=kept))
        # the live tensors are written to only when they have been copied
        if group.summed and rank.live == slowest < bounds.steps and (rank.live != point or whole):
            after = put(group, number, rank._replace(live=rank.live + 1))
            if all(r.live == slowest + 1 for r in after.ranks):
                after = after._replace(summed=False, point=slowest + 1)
            yield f"{number} applies {rank.live + 1}", after
    if not group.summed and all(rank.live == slowest for rank in ranks):
        whole = all((point, True) in rank.own and (point, True) in rank.kept for rank in ranks)
        yield "summary", group._replace(summed=True, sealed=point if whole else group.sealed)


def copied(copies: tuple[Copy, ...], number: int, point: int) -> tuple[Copy, ...]:
    """The buffers after the copy into one has begun, or ended where it had begun."""
    return (*copies[:number], (point, copies[number] == (point, False)), *copies[number + 1 :])


def put(group: Group, number: int, rank: Rank) -> Group:
    """The group with this rank in the place of another."""
    return group._replace(ranks=(*group.ranks[:number], rank, *group.ranks[number + 1 :]))
