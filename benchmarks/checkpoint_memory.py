"""A memory point after every step, as `benchmarks.checkpoint` compares it: the product's own copies, to this
rank's memory and over a socket to that of the other rank, which is taken for one on another node.
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
from orchestrator.trainer.memory_point import MemoryPoints
from orchestrator.trainer.state import TrainState


class EveryStep:
    """See `Way`; what is begun before a step's end is whole before the round's is."""

    name = "memory"

    def __init__(self, state: TrainState, port: int) -> None:
        self._state, self._step, self._on, self._awaited = state, 0, False, False
        self._memory = MemoryPoints(1, torch.device("cpu"), no_fault)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        view = view_of(rank, world_size)
        view = dataclasses.replace(view, nodes=tuple(range(world_size)), own_host="127.0.0.1")
        store = dist.PrefixStore("memory", dist.TCPStore("127.0.0.1", port, is_master=False))
        self._within = ExitStack()
        self._within.enter_context(self._memory.within(view, store))
        self._next_key()
        self._memory.enter(state)
        self._wait_whole()

    def begin(self, number: int) -> None:
        """See `Way`."""
        self._on = True

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
