"""Completes a group's saves before the group ends.

All ranks wait for each other. A failed last save is retried for a limited time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from orchestrator.errors import UnsavedError
from orchestrator.trainer.comm.group import GenerationEnded, Group
from orchestrator.trainer.interfaces.membership import Membership
from orchestrator.trainer.saving.saver import Saver
from orchestrator.trainer.state.train_state import TrainState

_ASK_AGAIN_S = 0.05
LAST_SAVE_LIMIT_S = 300.0  # how long saving the last state of a run is retried


def await_saves(
    group: Group, membership: Membership, saver: Saver, state: TrainState, settled: Callable[[], bool]
) -> bool:
    """Waits until every rank's saves are `settled`; returns whether `state` is in a committed point then.

    The ranks exchange their status. If one dies, or learns that the generation is over, the wait ends on all
    ranks with `GenerationEnded`. A rank that knows of the commit needs no other rank and returns. An error
    that answers a vote is raised.
    """
    while True:
        if not settled():
            saver.wait(_ASK_AGAIN_S)
        done = settled()  # before its outcome is checked
        saver.poll(state)
        if membership.control_requests(group.view).ended and not (done and state.committed):
            raise GenerationEnded("the membership ended it while votes were unanswered")
        mine = torch.tensor([int(done), int(state.committed)], dtype=torch.int64)
        try:
            num_done, num_committed = group.sum(mine, "waiting for the answers to votes").tolist()
        except GenerationEnded:
            if done and state.committed:
                return True
            raise
        if num_done == group.view.world_size:
            return bool(num_committed == group.view.world_size)


class Unsaved:
    """Paces and limits the attempts to save the last state of a run."""

    def __init__(self, limit_s: float = LAST_SAVE_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._wait_s = 0.1

    def again(self, point: str) -> float:
        """Waits before the next attempt, longer each time; returns the seconds left for retries.

        Called after a save was given up. Raises `UnsavedError` when the limit is reached.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since > self._limit_s:
            raise UnsavedError(
                f"the last state of the run could not be saved for {now - self._since:.0f} s "
                f"(allowed: {self._limit_s:g} s): every save was given up, the last one as {point}; the "
                "journal has the reasons. Start the same command again: it continues from the newest resume "
                "point, or from the beginning if the run has none"
            )
        time.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, 5.0)
        return self._limit_s - (now - self._since)
