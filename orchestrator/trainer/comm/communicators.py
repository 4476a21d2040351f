"""NCCL communicators of one generation, which can be aborted from any thread.

A collective of NCCL waits for a peer that died until its timeout. Aborting the communicator ends the wait at
once: the kernels stop, and the thread that waits gets an error.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
import torch.distributed as dist


class Communicator(Protocol):
    """What torch's `ProcessGroupNCCL` has."""

    def abort(self) -> None:
        """Ends all operations, of this and of all later calls, with an error."""


class Communicators:
    """The communicators of one generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: list[Communicator] = []
        self._aborted = False

    def add(self, group: dist.ProcessGroup) -> None:
        """Adds that of a group, if the group has one for GPUs. It is aborted at once if the others are."""
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # the group is for CPUs alone
            return
        if hasattr(backend, "abort"):
            self.add_communicator(backend)

    def add_communicator(self, communicator: Communicator) -> None:
        """Adds a communicator."""
        with self._lock:
            self._added.append(communicator)
            aborted = self._aborted
        if aborted:
            communicator.abort()

    def abort(self) -> None:
        """Aborts all. Can be called from any thread, and repeatedly."""
        with self._lock:
            added, self._aborted = ([] if self._aborted else list(self._added)), True
        for communicator in added:
            communicator.abort()

    def forget(self) -> None:
        """Aborts nothing from now on. Must be called before the groups are destroyed."""
        with self._lock:
            self._added.clear()
