"""A model of FSDP2 ranks that keep memory points, and a search over all orders of their copies, messages,
summaries, steps, losses and new generations: what is left after any loss must hold a complete state no older
than the newest sealed memory point.

Which buffer is taken, what is held and what is sealed is decided by the real `MemorySlots`, one for each
rank; which state is complete, and which memory point is kept, by `holdings`. It follows
lab/fsdp2/holdings.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from orchestrator.elastic.next_formation import ShardHolding, memory_point_to_keep, newest_complete
from orchestrator.planning.state.copy_placement import neighbours
from orchestrator.records.membership import HeldShard, Source
from orchestrator.records.steps import StateKey
from orchestrator.trainer.memory_points.memory_slots import MemorySlots


class Rank(NamedTuple):
    """One member: the step it is live at, whether it is yet to send its memory point, and its buffers.
    `coming`: the copy that is on its way to it, with what its sender keeps.
    """

    live: int
    slots: MemorySlots
    staged: bool = True  # nothing reads the live tensors
    sent: bool = True
    coming: StateKey | None = None


class Group(NamedTuple):
    """All ranks. `summed`: the summary of the next step has come, and whether it seals the memory point;
    `sealed`: the newest memory point that any summary sealed.
    """

    ranks: tuple[Rank, ...]
    generation: int = 1
    summed: bool | None = None
    sealed: StateKey | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How far the search goes. `lost`: so many members at once, no two of them neighbours."""

    world: int = 3
    steps: int = 2
    generations: int = 1
    lost: int = 1
    slots: MemorySlots = MemorySlots()
    lent: bool = False  # what is kept for a neighbour lies in that one's own buffers, as on one machine
    keeps_newest: bool = False  # wrong: a new generation keeps the newest point, however few hold it


def search(bounds: Bounds) -> tuple[str, int]:
    """What is lost, after which events (empty: nothing ever is); how many states were seen. Breadth first."""
    keeper = neighbours(["node"] * bounds.world)
    losses = [
        lost
        for lost in combinations(range(bounds.world), bounds.lost)
        if not any(keeper[a] == b or keeper[b] == a for a, b in combinations(lost, 2))
    ]
    first = Group(tuple(Rank(0, bounds.slots.entered(None, True)) for _ in range(bounds.world)))
    start = began(first, range(bounds.world))
    came: dict[Group, tuple[Group, str] | None] = {start: None}
    todo = deque([start])
    while todo:
        group = todo.popleft()
        held = [held_by(number, rank, group, bounds) for number, rank in enumerate(group.ranks)]
        for lost in losses:
            found = newest_complete(
                [h for n, of_one in enumerate(held) if n not in lost for h in of_one], None
            )
            if group.sealed is not None and (found is None or found.key < group.sealed):
                return f"{lost} lost, sealed {group.sealed}: {', '.join(trace(came, group)[-9:])}", len(came)
        for event, after in events(group, bounds, keeper):
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


def held_by(number: int, rank: Rank, group: Group, bounds: Bounds) -> list[ShardHolding]:
    """All that a member can give: what it is live at, what it prepared, and its whole copies; of those that
    were lent to it, the ones that their owner has not begun to write over.
    """
    shard = HeldShard(
        key=key_of(group, rank.live), shard=number, num_shards=len(group.ranks), source=Source.LIVE
    )
    held = [shard, *there(rank, group, bounds).holdings]
    if group.summed is not None and rank.live == slowest(group):
        held.append(
            HeldShard(
                key=key_of(group, rank.live + 1),
                shard=number,
                num_shards=len(group.ranks),
                source=Source.PREPARED,
            )
        )
    return [
        ShardHolding(member=str(number), key=h.key, shard=h.shard, num_shards=h.num_shards, source=h.source)
        for h in held
    ]


def there(rank: Rank, group: Group, bounds: Bounds) -> MemorySlots:
    """Its buffers without what was lent to it and is gone."""
    slots = rank.slots
    for number, slot in enumerate(slots.kept if bounds.lent else ()):
        if slot.copy is not None and not any(
            own.holds(slot.copy.key) for own in group.ranks[slot.copy.shard].slots.own
        ):
            slots = slots.overwritten(number)
    return slots


def key_of(group: Group, step: int) -> StateKey:
    return StateKey(attempt=1, generation=group.generation, step=step)


def slowest(group: Group) -> int:
    return min(rank.live for rank in group.ranks)


def events(group: Group, bounds: Bounds, keeper: tuple[int, ...]) -> Iterator[tuple[str, Group]]:
    """Every event that is possible now, and the group after it. A copy has a beginning and an end."""
    ranks, last = group.ranks, slowest(group)
    for number, rank in enumerate(ranks):
        if not rank.staged:
            yield (
                f"{number} has copied",
                put(group, number, rank._replace(staged=True, slots=rank.slots.staged())),
            )
        to = keeper[number]
        if rank.staged and not rank.sent and ranks[to].coming is None:
            making = rank.slots.making
            assert making is not None, "what is sent is being made"
            copy = HeldShard(key=making, shard=number, num_shards=len(ranks), source=Source.NEIGHBOUR)
            slots, _ = ranks[to].slots.arriving(copy, rank.slots.keep)
            after = put(group, number, rank._replace(sent=True))
            after = put(after, to, after.ranks[to]._replace(slots=slots, coming=making))
            yield f"{number} sends to {to}", after
        if rank.coming is not None:
            whole = rank._replace(slots=rank.slots.arrived(rank.coming), coming=None)
            yield f"{number} has received", put(group, number, whole)
        # the live tensors are written to only when they have been copied
        if group.summed is not None and rank.live == last < bounds.steps and rank.staged:
            slots = rank.slots.sealed() if group.summed else rank.slots
            after = put(group, number, rank._replace(live=last + 1, slots=slots))
            after = began(after, [number])
            if all(r.live == last + 1 for r in after.ranks):
                after = after._replace(summed=None)
            yield f"{number} applies {last + 1}", after
    if group.summed is None and all(rank.live == last for rank in ranks):
        whole = all(rank.slots.is_whole for rank in ranks)
        sealed = ranks[0].slots.making if whole else group.sealed
        yield "summary", group._replace(summed=whole, sealed=sealed)
    if group.generation < bounds.generations:
        yield "a new generation", formed(group, bounds)


def formed(group: Group, bounds: Bounds) -> Group:
    """The generation ends, nobody is lost, and all form the next one, as after a join."""
    held = [h for number, rank in enumerate(group.ranks) for h in held_by(number, rank, group, bounds)]
    parent = newest_complete(held, None)
    assert parent is not None, "nobody was lost"
    copies = [h for h in held if h.source in (Source.STAGED, Source.NEIGHBOUR)]
    newest = newest_complete(copies, None)
    keep = (newest and newest.key) if bounds.keeps_newest else memory_point_to_keep(held, None)
    ranks = tuple(
        Rank(parent.key.step, there(rank, group, bounds).entered(keep, True)) for rank in group.ranks
    )
    after = Group(ranks, group.generation + 1, None, group.sealed)
    return began(after, range(len(ranks)))


def began(group: Group, numbers: range | list[int]) -> Group:
    """These members begin a memory point of what they are live at, if they may."""
    for number in numbers:
        rank = group.ranks[number]
        if rank.slots.is_free:
            copy = HeldShard(
                key=key_of(group, rank.live), shard=number, num_shards=len(group.ranks), source=Source.STAGED
            )
            slots, _ = rank.slots.begun(copy)
            group = put(group, number, rank._replace(slots=slots, staged=False, sent=False))
    return group


def put(group: Group, number: int, rank: Rank) -> Group:
    """The group with this rank in the place of another."""
    return group._replace(ranks=(*group.ranks[:number], rank, *group.ranks[number + 1 :]))
