"""A save that is not decided yet, and how far it has come.

It knows neither events nor storage.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey


class Stage(Enum):
    """How far a save has come. From WRITING on its COMMIT may exist, so that it can only be awaited."""

    COLLECTING = "waits for votes, or for an older save to be decided"
    FLUSHING = "waits for the journal"
    CLEARING = "asks for a newer claim before COMMIT"
    WRITING = "writes COMMIT"
    CHECKING = "asks for a newer claim before the answer"


UNDER_WAY = (Stage.WRITING, Stage.CHECKING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save that is not decided yet.

    `rows` are its votes in the order in which they came; `voted` and `failed` are sets of ranks (see
    `ranks_of`): those that voted, and those that reported that they could not save their part. A vote costs
    the same however many came before: rows of equal length are joined, as the digits of a counter are
    carried, so that a vote is copied at most log2(votes) times. `started_s` is when its first vote came,
    before that when it was first heard of; `moved_s` when one of its ranks last got on with it.
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
        """The save with one vote more, which came at `now_s`."""
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
        """All votes, in the order in which they came. Builds them: not for each vote."""
        return tuple(chain.from_iterable(self.rows))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who waits for an answer. Builds them: not for each vote."""
        return tuple(vote.rank for vote in self.votes)

    @property
    def num_votes(self) -> int:
        """How many ranks have voted."""
        return self.voted.bit_count()

    @property
    def is_complete(self) -> bool:
        """Whether as many ranks have voted as there are."""
        return self.num_votes >= self.world_size

    @property
    def waited_for(self) -> int:
        """The set of the ranks that have neither voted nor reported: they may be writing their part."""
        return all_ranks(self.world_size) & ~(self.voted | self.failed)


# Sets of ranks are integers, bit r for rank r: values like any other, and one of 10,000 ranks has 1.3 KB.
def set_of(rank: int) -> int:
    """The set of one rank."""
    return 1 << rank


def all_ranks(world_size: int) -> int:
    """The set of the ranks 0 to `world_size` - 1."""
    return (1 << world_size) - 1


def first_of(ranks: int) -> int | None:
    """The lowest rank of a set, None of an empty one."""
    return (ranks & -ranks).bit_length() - 1 if ranks else None
