"""Computes which rows of the training state each rank holds and writes, and how they move between layouts.

One rule covers `replicate`, FSDP2 and HSDP. A move between layouts lists which rank gives which rows to
which, and their places. Pure integers, the same on every rank.

`weights_sum` is a digest of the weights that does not depend on which rank holds which rows: each rank sums
its own rows, and these sums add up to the digest of the whole. Golden values are in
tests/planning/test_weights_sum.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ALIGN_BYTES = 64  # a tensor begins at a multiple of it in a flat buffer: a cache line, enough for every dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """A tensor of the state as a whole, independent of the holders of its rows.

    `shape` is that of the whole tensor, `itemsize` is bytes per element. `sharded`: its rows (dim 0) are
    divided among the shards. Otherwise every rank holds all of it (buffers, step counts, every scalar).
    """

    group: str
    name: str
    shape: tuple[int, ...]
    itemsize: int
    sharded: bool

    def __post_init__(self) -> None:
        assert self.shape or not self.sharded, (
            f"{self.group}/{self.name} is a scalar, which has no rows to divide"
        )

    @property
    def num_rows(self) -> int:
        """The length of dim 0; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """The bytes of one row; 0 if a later dimension is 0."""
        return math.prod(self.shape[1:]) * self.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of a state on a group: `num_replicas` copies of the state, each divided into `num_shards`
    shards.

    DDP on W ranks is (1 shard, W replicas), FSDP2 (W, 1), HSDP (n, m) with W = n·m. Ranks are numbered like a
    device mesh of shape (num_replicas, num_shards): the ranks of one replica are neighbours.
    """

    num_shards: int
    num_replicas: int

    def __post_init__(self) -> None:
        assert self.num_shards >= 1 <= self.num_replicas, f"{self} holds no whole state"

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""
        return self.num_shards * self.num_replicas

    def shard_of(self, rank: int) -> int:
        """Returns the shard of `rank`."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        return rank % self.num_shards

    def replica_of(self, rank: int) -> int:
        """Returns the replica of `rank`."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        return rank // self.num_shards


def layout_of(world_size: int, num_shards: int | None) -> Layout:
    """Returns the layout of a group of `world_size` ranks for the requested `num_shards`.

    1: replicate; None: as many shards as ranks. If `num_shards` does not divide the world size, there is one
    shard per rank: no rank is idle, and none holds more than the requested 1/num_shards, unless the world
    size itself is smaller.
    """
    if num_shards is None or world_size % num_shards:
        return Layout(num_shards=world_size, num_replicas=1)
    return Layout(num_shards=num_shards, num_replicas=world_size // num_shards)


def chunk_rows(num_rows: int, num_shards: int) -> int:
    """Returns the number of rows of a full shard."""
    return -(-num_rows // num_shards)


def shard_rows(num_rows: int, num_shards: int, shard: int) -> range:
    """Returns the rows (half open) of one shard of a tensor of `num_rows` rows.

    They are divided as by `torch.chunk`, and thus by FSDP2
    (torch/distributed/fsdp/_fully_shard/_fsdp_common.py, `_chunk_with_empty`): all shards have ceil(num_rows
    / num_shards) rows, the last ones fewer or none. FSDP2 pads shards to equal sizes in its own buffers.
    Padding is never a part of the state.
    """
    assert 0 <= shard < num_shards, f"shard {shard} of {num_shards}"
    chunk = chunk_rows(num_rows, num_shards)
    return range(min(shard * chunk, num_rows), min((shard + 1) * chunk, num_rows))


def held_rows(tensor: StateTensor, num_shards: int, shard: int) -> range:
    """Returns the rows of `tensor` that a holder of `shard` has: all rows if the tensor is not sharded."""
    return shard_rows(tensor.num_rows, num_shards, shard) if tensor.sharded else range(tensor.num_rows)


# ---- one shard as one buffer
@dataclass(frozen=True, kw_only=True, slots=True)
class BufferRows:
    """Rows of a tensor in a flat buffer. They begin `offset` bytes after its start, one after the other."""

    tensor: StateTensor
    rows: range
    offset: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes of these rows."""
        return len(self.rows) * self.tensor.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatShard:
    """One shard of the whole state as one buffer of `num_bytes` bytes. `places` are in the order of the
    tensors.

    Places do not overlap and begin at multiples of `ALIGN_BYTES`. The bytes between them have no meaning.
    """

    places: tuple[BufferRows, ...]
    num_bytes: int


def flat_shard(tensors: Sequence[StateTensor], num_shards: int, shard: int) -> FlatShard:
    """Returns the places of each tensor's rows in the flat buffer of a shard. O(len(tensors)).

    Tensors of which the shard has no row have an empty place.
    """
    return _flat(tensors, [held_rows(tensor, num_shards, shard) for tensor in tensors])


def _flat(tensors: Sequence[StateTensor], rows: Sequence[range]) -> FlatShard:
    places: list[BufferRows] = []
    offset = 0
    for tensor, some in zip(tensors, rows, strict=True):
        places.append(BufferRows(tensor=tensor, rows=some, offset=offset))
        offset += -(-places[-1].num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return FlatShard(places=tuple(places), num_bytes=offset)


# ---- who writes what
def writing_replicas(tensors: Sequence[StateTensor], layout: Layout) -> tuple[int, ...]:
    """Returns which replica writes each tensor, in the order of `tensors`.

    Every shard of a tensor is written by its rank of that replica. Replicas are balanced by bytes: the
    largest first, each to the replica that has least so far (Graham, "Bounds on multiprocessing timing
    anomalies", 1969: at most 4/3 of the best division). Shard 0 is never smaller than another, so it is the
    one that is balanced. O(n log n) of the tensors, whatever the world size.
    """
    sizes = [len(held_rows(tensor, layout.num_shards, 0)) * tensor.row_bytes for tensor in tensors]
    load = [(0, replica) for replica in range(layout.num_replicas)]
    heapify(load)
    writers = [0] * len(tensors)
    for number in sorted(range(len(tensors)), key=lambda n: (-sizes[n], n)):
        num_bytes, replica = load[0]
        writers[number] = replica
        heapreplace(load, (num_bytes + sizes[number], replica))
    return tuple(writers)


def written_rows(tensors: Sequence[StateTensor], layout: Layout, rank: int) -> tuple[range, ...]:
    """Returns the rows of each tensor that `rank` writes at a save; empty if others write them.

    Over all ranks each row of each tensor is written exactly once. Tensors that are not sharded are written
    by a holder of shard 0.
    """
    shard, replica = layout.shard_of(rank), layout.replica_of(rank)
    return tuple(
        held_rows(tensor, layout.num_shards, shard)
        if writer == replica and (tensor.sharded or shard == 0)
        else range(0)
        for tensor, writer in zip(tensors, writing_replicas(tensors, layout), strict=True)
    )


def flat_part(tensors: Sequence[StateTensor], layout: Layout, rank: int) -> FlatShard:
    """Returns the places in the staging buffer of the rows that `rank` writes at a save.

    As in `flat_shard`.
    """
    return _flat(tensors, written_rows(tensors, layout, rank))


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


# ---------------------------------------------------------------------------------- the digest of the weights
SUM_VERSION = "s1"
SUM_MODULUS = 1 << 128


def row_seed(group: str, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the seed of row 0 of a tensor; row r has this plus r. `shape` is that of the whole tensor.

    It is the upper 63 bits of the xxh3_64 of `group/name dtype (shape)`, so that no row's seed passes 2^64. A
    tensor of another name, dtype or shape has other seeds for all its rows.
    """
    return xxhash.xxh3_64_intdigest(f"{group}/{name} {dtype} {list(shape)}".encode()) >> 1


def rows_sum(rows: npt.NDArray[np.uint8], seed: int, first_row: int) -> int:
    """Returns the sum modulo 2^128 of the seeded xxh3_128 of each row; 0 for none.

    `rows` has shape (num_rows, row_bytes), row-major: rows [first_row, first_row + num_rows) of the tensor as
    in a safetensors file (little-endian); a scalar is one row. `seed` is the tensor's `row_seed`. A Python
    loop over rows, without a copy: about 10 GB per CPU second in rows of 3 KiB and 20 in rows of 12 KiB, but
    8 million rows per second however short they are (one core of a server CPU). It is not for a thread beside
    training, which would wait for the interpreter's lock.
    """
    contiguous = rows.ndim == 2 and rows.flags.c_contiguous
    assert contiguous, f"rows of shape {rows.shape}, strides {rows.strides} do not lie one after the other"
    first = seed + first_row
    return sum(map(xxhash.xxh3_128_intdigest, rows, range(first, first + len(rows)))) % SUM_MODULUS


def weights_sum(sums: Iterable[int]) -> str:
    """Returns `s1:` and 32 hex digits: the digest of a state from the sums of its parts, in any order.

    Every row of every tensor must be included exactly once: replicas and tensors that are on all ranks are
    added by the rank that writes them (`state_layout.written_rows`). Two states with equal digests have the
    same rows at the same places, up to accident (2^-128). The digest does not protect against deliberate
    collisions; the blake3 digests of files do. A tensor without rows adds nothing: names, dtypes and shapes
    are compared separately.
    """
    return f"{SUM_VERSION}:{sum(sums) % SUM_MODULUS:032x}"
