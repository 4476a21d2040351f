"""Computes how a state moves between layouts: which rank gives which rows to which, and their places.

Also divides the reading of common data among several readers. Pure integers, the same on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.planning.state.state_layout import Layout, StateTensor, chunk_rows, held_rows, shard_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Rank `giver` gives rank `receiver` everything it needs of the old shard `shard`, `num_bytes` bytes.

    Both may be the same rank. `whole_tensors`: includes the tensors that are not sharded.
    """

    giver: int
    receiver: int
    shard: int
    whole_tensors: bool
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One run of `num_bytes` bytes of tensor number `tensor`, on both sides.

    `source` is counted in bytes from the tensor's first row in the giver's shard, `target` from its first row
    in the receiver's new shard.
    """

    tensor: int
    source: int
    target: int
    num_bytes: int


def transfers(
    tensors: Sequence[StateTensor], holders: Sequence[Sequence[int]], layout: Layout
) -> tuple[Transfer, ...]:
    """Returns the transfers by which each rank of `layout` gets its shard, every byte of it exactly once.

    `holders[s]` are the ranks (of the new group) that have shard s of the old state, of len(holders) shards;
    none may be empty. A rank that has a shard gives it to itself. Otherwise one holder gives everything that
    the receiver needs of the shard: the largest first, each by the holder that gives least so far, so that
    one rank never serves all while others could. Sorted by (receiver, shard). O(ranks · len(holders)) at
    most, and one pass over the tensors.
    """
    assert all(holders), (
        f"nobody holds shard {[s for s, ranks in enumerate(holders) if not ranks]} of {len(holders)}"
    )
    num_shards = len(holders)
    whole_bytes = sum(t.num_rows * t.row_bytes for t in tensors if not t.sharded)
    needed = [_needed(tensors, num_shards, layout.num_shards, shard) for shard in range(layout.num_shards)]
    own: list[set[int]] = [set() for _ in range(layout.world_size)]
    for shard, ranks in enumerate(holders):
        for rank in ranks:
            own[rank].add(shard)
    wanted: list[
        tuple[int, int, int, bool]
    ] = []  # bytes, receiver, shard, with the tensors that are not sharded
    for receiver in range(layout.world_size):
        need = dict(needed[layout.shard_of(receiver)])
        # from itself if it has any part of the state; a rank without a row of its own also needs them
        carrier = min(own[receiver] or need, default=0) if whole_bytes else None
        if carrier is not None:
            need[carrier] = need.get(carrier, 0) + whole_bytes
        wanted += [(num, receiver, shard, shard == carrier) for shard, num in need.items()]
    found: list[Transfer] = []
    given: Counter[int] = Counter()
    for num_bytes, receiver, shard, whole in sorted(wanted, key=lambda w: (-w[0], w[1:])):
        giver = receiver
        if shard not in own[receiver]:
            giver = min(holders[shard], key=lambda rank: (given[rank], rank))
            given[giver] += num_bytes
        found.append(
            Transfer(giver=giver, receiver=receiver, shard=shard, whole_tensors=whole, num_bytes=num_bytes)
        )
    return tuple(sorted(found, key=lambda t: (t.receiver, t.shard)))


def moves(
    tensors: Sequence[StateTensor], num_shards: int, transfer: Transfer, layout: Layout
) -> Iterator[Move]:
    """Yields the runs of bytes of one transfer out of `num_shards` old shards, in the order of the tensors.

    Both sides make the same list. O(len(tensors)).
    """
    new_shard = layout.shard_of(transfer.receiver)
    for number, tensor in enumerate(tensors):
        if not (tensor.sharded or transfer.whole_tensors):
            continue
        old = held_rows(tensor, num_shards, transfer.shard)
        new = held_rows(tensor, layout.num_shards, new_shard)
        rows = range(max(old.start, new.start), min(old.stop, new.stop))
        if len(rows) * tensor.row_bytes:
            yield Move(
                tensor=number,
                source=(rows.start - old.start) * tensor.row_bytes,
                target=(rows.start - new.start) * tensor.row_bytes,
                num_bytes=len(rows) * tensor.row_bytes,
            )


def _needed(tensors: Sequence[StateTensor], num_old: int, num_new: int, shard: int) -> Counter[int]:
    """Returns the bytes of sharded tensors that new shard `shard` needs of each old one, if any."""
    row_bytes: Counter[int] = Counter()  # by number of rows: models have few different ones
    for tensor in tensors:
        if tensor.sharded:
            row_bytes[tensor.num_rows] += tensor.row_bytes
    needed: Counter[int] = Counter()
    for num_rows, num_bytes in row_bytes.items():
        new, chunk = shard_rows(num_rows, num_new, shard), chunk_rows(num_rows, num_old)
        if not (new and num_bytes):
            continue
        for old in range(new.start // chunk, (new.stop - 1) // chunk + 1):
            first, stop = max(new.start, old * chunk), min(new.stop, (old + 1) * chunk)
            needed[old] += (stop - first) * num_bytes
    return needed


def even_runs(sizes: Sequence[int], num_runs: int) -> tuple[range, ...]:
    """Returns `num_runs` contiguous runs that together are all positions of `sizes`, in order.

    A run may be empty. Each position belongs to the run in whose equal part of the sum its middle is. No run
    thus has more than its equal part plus the largest size. O(len(sizes) + num_runs).
    """
    assert num_runs > 0, "somebody must read"
    total, before, at = sum(sizes), 0, 0
    ends = [0] * num_runs
    for number, size in enumerate(sizes):
        if total:
            at = max(at, min(num_runs - 1, (2 * before + size) * num_runs // (2 * total)))
        before += size
        ends[at] = number + 1
    runs, first = [], 0
    for end in ends:
        runs.append(range(first, max(first, end)))
        first = runs[-1].stop
    return tuple(runs)


def readers_with(rank: int, needy: Sequence[int], machines: Sequence[int]) -> list[int]:
    """Returns the ranks of `needy` among which `rank` divides the common reading, in order.

    `rank` is one of them. The group has one rank of each machine, because a second reader on a machine finds
    the data in memory. `machines[r]` is that of rank r. All ranks are thus divided into as many groups as the
    largest number on one machine.
    """
    counts: dict[int, int] = {}
    places = []
    for each in needy:
        places.append(counts.get(machines[each], 0))
        counts[machines[each]] = places[-1] + 1
    own = places[list(needy).index(rank)]
    return [each for each, place in zip(needy, places, strict=True) if place == own]
