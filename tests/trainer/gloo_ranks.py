"""Ranks of a real gloo group as threads of one process, where no collective of torch's default group is
needed.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from orchestrator.trainer.comm.reshard import PendingMessage

Result = TypeVar("Result")
LIMIT = datetime.timedelta(seconds=240)


class GlooPeers:
    """Messages between the ranks of one group; see `orchestrator.trainer.comm.reshard.Peers`."""

    def __init__(self, group: dist.ProcessGroupGloo) -> None:
        self._group = group

    def give(self, buffer: Tensor, rank: int) -> PendingMessage:
        return self._group.send([buffer], rank, 0)

    def take(self, buffer: Tensor, rank: int) -> PendingMessage:
        return self._group.recv([buffer], rank, 0)


class GlooRanks:
    """`world_size` ranks, each a thread with its own end of one group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._pool = ThreadPoolExecutor(world_size)
        store = HashStore()

        def connect(rank: int) -> GlooPeers:
            return GlooPeers(dist.ProcessGroupGloo(PrefixStore("ranks", store), rank, world_size, LIMIT))

        self._peers = list(self._pool.map(connect, range(world_size)))

    def run(self, work: Callable[[int, GlooPeers], Result]) -> list[Result]:
        """What `work(rank, peers)` gives on each rank, all at the same time."""
        return list(self._pool.map(work, range(self.world_size), self._peers))
