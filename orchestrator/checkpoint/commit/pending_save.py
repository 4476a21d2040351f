"""A save that is not decided yet, and its progress."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey


class Stage(Enum):
    """The stage of a save. From WRITING on its COMMIT may exist, so that it can only be awaited."""

    COLLECTING = "waits for votes, or for an older save to be decided"
    FLUSHING = "waits for the journal"
    CLEARING = "asks for a newer claim before COMMIT"
    WRITING = "writes COMMIT"
    CHECKING = "asks for a newer claim before the answer"


UNDER_WAY = (Stage.WRITING, Stage.CHECKING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save that is not decided yet.

    `rows` are its votes in the order of their arrival. `voted` and `failed` are sets of ranks (see `set_of`):
    those that voted, and those that reported that they could not save their part. A vote has constant cost:
    rows of equal length are joined, as the digits of a counter are carried, so that a vote is copied at most
    log2(votes) times. `started_s` is when its first vote arrived; before that, when the save was first
    reported. `moved_s` is when one of its ranks last made progress.
    """

    key: StateKey
    world_size: int
    started_s: float
    moved_s: float
    stage: Stage = Stage.COLLECTING
    rows: tuple[tuple[Vote, ...], ...] = ()
    voted: int = 0
    failed: int = 0

    def with_vote(self, vote: Vote, now_s: float) -> Save:
        """Returns the save with one more vote, which arrived at `now_s`."""
        rows = list(self.rows)
        last: tuple[Vote, ...] = (vote,)
        while rows and len(rows[-1]) == len(last):
            last = rows.pop() + last
        return dataclasses.replace(
            self,
            rows=(*rows, last),
            voted=self.voted | set_of(vote.rank),
            started_s=self.started_s if self.rows else now_s,
            moved_s=now_s,
        )

    @property
    def votes(self) -> tuple[Vote, ...]:
        """All votes, in the order of their arrival. Builds the tuple, so not to be used for each vote."""
        return tuple(chain.from_iterable(self.rows))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wait for an answer. Builds the tuple, so not to be used for each vote."""
        return tuple(vote.rank for vote in self.votes)

    @property
    def num_votes(self) -> int:
        """The number of ranks that have voted."""
        return self.voted.bit_count()

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have voted."""
        return self.num_votes >= self.world_size

    @property
    def waited_for(self) -> int:
        """The set of the ranks that have neither voted nor reported. They may be writing their part."""
        return all_ranks(self.world_size) & ~(self.voted | self.failed)


# Sets of ranks are integers, bit r for rank r. They are plain values, and one of 10,000 ranks takes 1.3 KB.
def set_of(rank: int) -> int:
    """Returns the set of one rank."""
    return 1 << rank


def all_ranks(world_size: int) -> int:
    """Returns the set of the ranks 0 to `world_size` - 1."""
    return (1 << world_size) - 1


def first_of(ranks: int) -> int | None:
    """Returns the lowest rank of a set, None for an empty one."""
    return (ranks & -ranks).bit_length() - 1 if ranks else None
