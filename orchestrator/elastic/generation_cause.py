"""The cause of a generation, as one value of a closed set.

Charts and lists of a run group by it. The sentences for people are in `history.sentences`.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from orchestrator.history.claims.claim_files import RESTARTED, RESUME, REWIND


class Cause(StrEnum):
    """The values are stored in the journals of runs and must not change. Readers ignore unknown ones."""

    START = "start"  # the first generation of a run's first attempt
    RESUME = "resume"  # the first generation of a start command that continues the run
    REWIND = "rewind"  # the same, from an older point
    COORDINATOR_RESTARTED = "coordinator restarted"
    NODE_LOST = "node lost"
    NODE_DRAINED = "node drained"  # its workers left before it was taken away
    LEFT_OUT = "left out"  # a worker stopped responding and was killed
    WORKER_LOST = "worker lost"
    WORKER_JOINED = "worker joined"
    STORAGE = "storage"  # saves were given up because writes failed, and the group met again to save
    RE_FORMED = "re-formed"  # no member was lost or joined: connections broke, or a save was given up


_LOSSES = (Cause.NODE_LOST, Cause.LEFT_OUT, Cause.WORKER_LOST, Cause.NODE_DRAINED)


def first_cause(why: str) -> Cause:
    """Returns the cause of an attempt's first generation. `why` is from the attempt's claim."""
    known = {RESTARTED: Cause.COORDINATOR_RESTARTED, RESUME: Cause.RESUME, REWIND: Cause.REWIND}
    return known.get(why, Cause.START)


def next_cause(lost: Collection[Cause], joined: bool, storage_failed: bool) -> Cause:
    """Returns the cause of a later generation.

    `lost` has the cause of each loss since the previous generation. A member that was lost with its node
    counts as lost for that reason, whatever else was observed of it.
    """
    for cause in _LOSSES:
        if cause in lost:
            return cause
    if joined:
        return Cause.WORKER_JOINED
    return Cause.STORAGE if storage_failed else Cause.RE_FORMED
