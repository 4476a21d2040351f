"""Which rows of which tensor of the training state each rank holds, and which it writes: `replicate`, FSDP2
and HSDP by one rule.

Pure integers. It knows no tensor, no process group and no storage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

ALIGN_BYTES = 64  # a tensor begins at a multiple of it in a flat buffer: a cache line, enough for every dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """A tensor of the state as a whole, whoever holds its rows.

    `shape` is that of the whole tensor, `itemsize` is bytes per element. `sharded`: its rows (dim 0) are
    divided among the shards; else every rank holds all of it (buffers, counts of steps, every scalar).
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
        """Length of dim 0; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 where a later dimension is 0."""
        return math.prod(self.shape[1:]) * self.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a state lies on a group: `num_replicas` times the whole state, each cut into `num_shards` shards.

    DDP on W ranks is (1 shard, W replicas), FSDP2 (W, 1), HSDP (n, m) with W = n·m. Ranks are numbered as a
    device mesh of shape (num_replicas, num_shards) numbers them: the ranks of one replica are neighbours.
    """

    num_shards: int
    num_replicas: int

    def __post_init__(self) -> None:
        assert self.num_shards >= 1 <= self.num_replicas, f"{self} holds no whole state"

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self.num_shards * self.num_replicas

    def shard_of(self, rank: int) -> int:
        """Which shard `rank` holds."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        return rank % self.num_shards

    def replica_of(self, rank: int) -> int:
        """Which replica `rank` belongs to."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        return rank // self.num_shards


def layout_of(world_size: int, num_shards: int | None) -> Layout:
    """The layout of a group of `world_size` ranks that was asked for `num_shards` shards (1: replicate, None:
    as many as there are ranks).

    Where `num_shards` does not divide the world it is one shard per rank: nobody is idle, and nobody holds
    more than the 1/num_shards that was asked for, unless the world itself is smaller than that.
    """
    if num_shards is None or world_size % num_shards:
        return Layout(num_shards=world_size, num_replicas=1)
    return Layout(num_shards=num_shards, num_replicas=world_size // num_shards)


def chunk_rows(num_rows: int, num_shards: int) -> int:
    """Rows of a shard that is full."""
    return -(-num_rows // num_shards)


def shard_rows(num_rows: int, num_shards: int, shard: int) -> range:
    """The rows (half open) of one shard of a tensor of `num_rows` rows.

    As `torch.chunk` divides, and FSDP2 with it (torch/distributed/fsdp/_fully_shard/_fsdp_common.py,
    `_chunk_with_empty`): all shards have ceil(num_rows / num_shards) rows, the last ones fewer or none. FSDP2
    pads shards to equal sizes in its own buffers; padding is never a part of the state.
    """
    assert 0 <= shard < num_shards, f"shard {shard} of {num_shards}"
    chunk = chunk_rows(num_rows, num_shards)
    return range(min(shard * chunk, num_rows), min((shard + 1) * chunk, num_rows))


def held_rows(tensor: StateTensor, num_shards: int, shard: int) -> range:
    """The rows of `tensor` that a holder of `shard` has: all of one that is not sharded."""
    return shard_rows(tensor.num_rows, num_shards, shard) if tensor.sharded else range(tensor.num_rows)


# ---- one shard as one buffer
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Rows of a tensor in a flat buffer: they begin `offset` bytes after its start, one after the other."""

    tensor: StateTensor
    rows: range
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of these rows."""
        return len(self.rows) * self.tensor.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatShard:
    """One shard of the whole state as one buffer of `num_bytes` bytes; `places` in the order of the tensors.

    Places do not overlap and begin at multiples of `ALIGN_BYTES`; the bytes between them mean nothing.
    """

    places: tuple[Place, ...]
    num_bytes: int


def flat_shard(tensors: Sequence[StateTensor], num_shards: int, shard: int) -> FlatShard:
    """Where each tensor's rows lie in the flat buffer of a shard; tensors of which it has no row have an
    empty place. O(len(tensors)).
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
    """Which replica writes each tensor, in the order of `tensors`: every shard of it by its rank of that
    replica.

    Balanced by bytes: the largest first, each to the replica that has least so far (Graham, "Bounds on
    multiprocessing timing anomalies", 1969: at most 4/3 of the best division). Shard 0 is never smaller than
    another, so it is the one that is balanced. O(n log n) of the tensors, whatever the world.
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
    """The rows of each tensor that `rank` writes at a save, empty where others do: over all ranks each row of
    each tensor exactly once. Tensors that are not sharded are written by a holder of shard 0.
    """
    shard, replica = layout.shard_of(rank), layout.replica_of(rank)
    return tuple(
        held_rows(tensor, layout.num_shards, shard)
        if writer == replica and (tensor.sharded or shard == 0)
        else range(0)
        for tensor, writer in zip(tensors, writing_replicas(tensors, layout), strict=True)
    )


def flat_part(tensors: Sequence[StateTensor], layout: Layout, rank: int) -> FlatShard:
    """Where the rows that `rank` writes at a save lie in its staging buffer, as `flat_shard` does it."""
    return _flat(tensors, written_rows(tensors, layout, rank))
