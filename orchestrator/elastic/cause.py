"""Why a generation was formed, as one word of a closed set: what charts and lists of a run group by.

The sentences for people are elsewhere (`history.sentences`); this decides between facts, and knows no text.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from orchestrator.history.claim_files import RESTARTED, RESUME, REWIND


class Cause(StrEnum):
    """The texts stand in the journals of runs, so they stay; readers pass over those they do not know."""

    START = "start"  # the first of a run's first attempt
    RESUME = "resume"  # the first of a start command that continues the run
    REWIND = "rewind"  # the same, from an older point
    COORDINATOR_RESTARTED = "coordinator restarted"
    NODE_LOST = "node lost"
    NODE_DRAINED = "node drained"  # its workers left before it was taken away
    LEFT_OUT = "left out"  # a worker stopped responding and was killed
    WORKER_LOST = "worker lost"
    WORKER_JOINED = "worker joined"
    STORAGE = "storage"  # saves were given up because writes failed, and the group met again to save
    RE_FORMED = "re-formed"  # nobody was lost and nobody came: connections broke, or a save was given up


_LOSSES = (Cause.NODE_LOST, Cause.LEFT_OUT, Cause.WORKER_LOST, Cause.NODE_DRAINED)


def first_cause(why: str) -> Cause:
    """Of an attempt's first generation; `why` is its claim's."""
    known = {RESTARTED: Cause.COORDINATOR_RESTARTED, RESUME: Cause.RESUME, REWIND: Cause.REWIND}
    return known.get(why, Cause.START)


def next_cause(lost: Collection[Cause], joined: bool, storage_failed: bool) -> Cause:
    """Of a later one: `lost` says how each was lost since the generation before; whoever is lost with a node
    is lost for that reason, whatever else was seen of it.
    """
    for cause in _LOSSES:
        if cause in lost:
            return cause
    if joined:
        return Cause.WORKER_JOINED
    return Cause.STORAGE if storage_failed else Cause.RE_FORMED
