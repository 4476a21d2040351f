"""A save that is not decided yet, and how far it has come.

It knows neither events nor storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from orchestrator.records import StateKey, Vote


class Stage(Enum):
    """How far a save has come. From WRITING on its COMMIT may exist, so that it can only be awaited."""

    COLLECTING = "waits for votes"
    FLUSHING = "waits for the journal"
    CLEARING = "asks for a newer claim before COMMIT"
    WRITING = "writes COMMIT"
    CHECKING = "asks for a newer claim before the answer"


UNDER_WAY = (Stage.WRITING, Stage.CHECKING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save that is not decided yet."""

    key: StateKey
    stage: Stage
    world_size: int
    votes: tuple[Vote, ...]
    started_s: float
    failed: int = -1  # the rank that could not save its part; -1: none

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who waits for an answer."""
        return tuple(vote.rank for vote in self.votes)
