"""Digests of the rows that a rank holds together with other ranks, for comparing replicas at each save.

Under `replicate` and HSDP several ranks hold the same rows, and only one of them writes each row to a point.
A bit that flipped in the memory of another rank would stay unnoticed. Each rank therefore sums its rows while
it copies its part of the save, and sends the digest with its vote.
`checkpoint.points.points.differing_replicas` compares the digests.

    rows of a tensor     |---- 64 KiB ----|---- 64 KiB ----|-- rest --|
    sums (int64, mod 2^64)       s0               s1            s2
    digest               blake3 over the sums of all tensors, in the order of the state's items

A sum of integers changes with every single flipped bit and does not depend on the order of addition. A GPU
and a CPU thus compute the same sum. Each byte is read once: 6 GB/s on one CPU core, and memory speed on a
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.points import ReplicaDigests
from orchestrator.trainer.loading.state_tensors import Item

BLOCK_BYTES = 64 << 10
_WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """The tensors that other ranks hold, too.

    `of_shard` are held by the ranks with the same shard, `of_all` by every rank. Either is empty if no other
    rank holds them.
    """

    of_shard: tuple[Tensor, ...]
    of_all: tuple[Tensor, ...]

    def sums(self) -> tuple[Tensor, Tensor]:
        """Returns the block sums of both, int64 on the tensors' device. Work is queued on the
        current stream.
        """
        return block_sums(self.of_shard), block_sums(self.of_all)


def shared_rows(items: Sequence[Item], layout: Layout) -> SharedRows:
    """Returns the rows of `items`, as one rank holds them, that other ranks of `layout` also hold."""
    replicated = layout.num_replicas > 1
    return SharedRows(
        of_shard=tuple(item.tensor for item in items if item.whole.sharded and replicated),
        of_all=tuple(item.tensor for item in items if not item.whole.sharded and layout.world_size > 1),
    )


def block_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Sums each block of `BLOCK_BYTES` bytes of each tensor, and the bytes after the last whole block.

    Blocks are read as little-endian words of 8 bytes and summed modulo 2^64. Shape (num_sums,), int64; empty
    for no tensors.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    device = tensors[0].device
    return torch.cat([part.to(device) for tensor in tensors for part in _sums_of(tensor)])


def _sums_of(tensor: Tensor) -> tuple[Tensor, ...]:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % _WORD_BYTES or flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()
    whole = flat.numel() // BLOCK_BYTES * BLOCK_BYTES
    blocks = flat[:whole].view(torch.int64).view(-1, BLOCK_BYTES // _WORD_BYTES).sum(1)
    words_end = flat.numel() // _WORD_BYTES * _WORD_BYTES
    words = flat[whole:words_end].view(torch.int64).sum().reshape(1)
    return blocks, words, flat[words_end:].sum(dtype=torch.int64).reshape(1)


def replica_digests(sums: tuple[Tensor, Tensor]) -> ReplicaDigests:
    """Computes the digests of `SharedRows.sums`, which are copied to the CPU."""
    of_shard, of_all = (
        blake3(each.cpu().numpy().tobytes()).hexdigest(length=16) if each.numel() else "" for each in sums
    )
    return ReplicaDigests(of_shard=of_shard, of_all=of_all)
