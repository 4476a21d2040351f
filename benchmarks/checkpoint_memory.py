"""A memory point after every step, as `benchmarks.checkpoint` compares it: the product's own copies, in this
rank's memory, which the other rank borrows as both are on one machine; and the same where the other rank is
taken for one on another node, to which the copy is sent over a socket.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack

import torch
import torch.distributed as dist

from benchmarks.checkpoint_ranks import view_of
from orchestrator.faults import no_fault
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey
from orchestrator.trainer.memory_points.memory_point import MemoryPoints
from orchestrator.trainer.state.train_state import TrainState

MEMORY, MEMORY_SENT = "memory", "memory_sent"


class EveryStep:
    """See `Way`: one memory point is made beside each step, the first of them of the state as the round finds
    it; what is begun after the last step is whole before the round's end.
    """

    def __init__(self, name: str, state: TrainState, port: int, one_machine: bool) -> None:
        self.name = name
        self._state, self._step, self._on = state, 0, False
        self._memory = MemoryPoints(1, torch.device("cpu"), no_fault)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        view = view_of(rank, world_size)
        nodes = (0,) * world_size if one_machine else tuple(range(world_size))
        view = dataclasses.replace(view, nodes=nodes, own_host="127.0.0.1")
        store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))
        self._within = ExitStack()
        self._within.enter_context(self._memory.within(view, store))
        self._next_key()
        self._memory.enter(state)
        self._wait_whole()

    def begin(self, number: int) -> None:
        """See `Way`."""
        self._on = True
        self.applied()

    def before_write(self) -> None:
        """See `Way`."""
        self._memory.writable()

    def applied(self) -> None:
        """See `Way`."""
        if self._on:
            self._next_key()
            self._memory.applied(self._state, self._is_whole())

    def durable(self) -> float:
        """See `Way`: whole on both ranks, twice."""
        self._on = False
        self._wait_whole()
        return time.monotonic()

    def tidy(self) -> None:
        """See `Way`."""

    def close(self) -> None:
        """See `Way`."""
        self._within.close()
        self._memory.close()

    def _next_key(self) -> None:
        self._step += 1
        self._state.key = StateKey(attempt=1, generation=1, step=self._step)
        self._state.cursor = Cursor()

    def _is_whole(self) -> bool:
        """What the summary of a step says: the ranks that have the newest memory point whole are all."""
        whole = torch.tensor([int(self._memory.is_whole)])
        dist.all_reduce(whole)
        return int(whole) == dist.get_world_size()

    def _wait_whole(self) -> None:
        while not self._is_whole():
            time.sleep(0.01)
