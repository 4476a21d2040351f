"""Computes which rows of which tensor of the training state each rank holds, and which it writes.

One rule covers `replicate`, FSDP2 and HSDP. Pure integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

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
class Place:
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

    places: tuple[Place, ...]
    num_bytes: int


def flat_shard(tensors: Sequence[StateTensor], num_shards: int, shard: int) -> FlatShard:
    """Returns the places of each tensor's rows in the flat buffer of a shard. O(len(tensors)).

    Tensors of which the shard has no row have an empty place.
    """
    return _flat(tensors, [held_rows(tensor, num_shards, shard) for tensor in tensors])


def _flat(tensors: Sequence[StateTensor], rows: Sequence[range]) -> FlatShard:
    places: list[Place] = []
    offset = 0
    for tensor, some in zip(tensors, rows, strict=True):
        places.append(Place(tensor=tensor, rows=some, offset=offset))
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
