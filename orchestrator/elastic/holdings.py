"""Which state the next generation continues, of all that the members hold in part or whole: the newest one
that is complete among them (membership rule 1).

Pure. It knows no rank, no generation and no storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from orchestrator.records import StateKey


class Source(IntEnum):
    """Where a member has a shard, the one that is given first of two: what needs no further copy, then what
    lies in its own memory, then what it keeps for a neighbour.
    """

    LIVE = 0  # the tensors that it trains
    PREPARED = 1  # live at the step before, with the reduced gradient of this one (rule 3)
    STAGED = 2  # its own memory point
    NEIGHBOUR = 3  # a neighbour's memory point


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """`member` can give shard `shard` of the `num_shards` of the state `key`; with replicate there is one
    shard.

    Only whole copies are holdings: one is taken off the member's list before its first byte is overwritten,
    and put on it after the last byte has come and was verified.
    """

    member: str
    key: StateKey
    shard: int
    num_shards: int
    source: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class CompleteState:
    """A state of which every shard is held: `holders[shard]` is everyone who can give it, `Source` by
    `Source`, then by name. A member occurs twice in one shard if it has it twice.
    """

    key: StateKey
    holders: tuple[tuple[Holding, ...], ...]


def newest_complete(holdings: Iterable[Holding], floor: StateKey | None) -> CompleteState | None:
    """The state of the greatest key of which every shard is held. None: none is complete, or `floor`, the
    newest committed point, has a greater key; then the point is loaded. Of equal keys the members' is taken:
    it needs no reading.

    Shards of two keys are never joined (rule 5). A prepared shard counts only where some member is live at
    its key: such a member has seen the step's summary, so the step is part of the history, and it brings the
    step's record. A key belongs to one generation, and so to one number of shards.
    """
    usable: dict[StateKey, list[Holding]] = {}
    live: set[StateKey] = set()
    for holding in holdings:
        usable.setdefault(holding.key, []).append(holding)
        if holding.source is Source.LIVE:
            live.add(holding.key)
    for key in sorted(usable, reverse=True):
        if floor is not None and key < floor:
            return None
        held = [h for h in usable[key] if h.source is not Source.PREPARED or key in live]
        sizes = {h.num_shards for h in usable[key]}
        assert len(sizes) == 1, (
            f"{key} is held as shards of {sorted(sizes)}; a generation has one number of shards"
        )
        holders: list[list[Holding]] = [[] for _ in range(sizes.pop())]
        for holding in held:
            holders[holding.shard].append(holding)
        if all(holders):
            return CompleteState(
                key=key,
                holders=tuple(
                    tuple(sorted(of_one, key=lambda h: (h.source, h.member))) for of_one in holders
                ),
            )
    return None


def replicated(member: str, key: StateKey) -> Holding:
    """What a member of a group without shards holds: all of it, live."""
    return Holding(member=member, key=key, shard=0, num_shards=1, source=Source.LIVE)
