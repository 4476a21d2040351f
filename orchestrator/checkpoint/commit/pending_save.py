"""A save that is not decided yet, when another one is tried after it, and the ranks that have left.

Pure machines over events and times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from orchestrator.storage.tries import STORAGE_BACKOFF


class SaveStage(Enum):
    """The stage of a save. From WRITING on its COMMIT may exist, so that it can only be awaited."""

    COLLECTING = "waits for votes, or for an older save to be decided"
    FLUSHING = "waits for the journal"
    CLEARING = "asks for a newer claim before COMMIT"
    WRITING = "writes COMMIT"
    CHECKING = "asks for a newer claim before the answer"


UNDER_WAY = (SaveStage.WRITING, SaveStage.CHECKING)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingSave:
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
    stage: SaveStage = SaveStage.COLLECTING
    rows: tuple[tuple[Vote, ...], ...] = ()
    voted: int = 0
    failed: int = 0

    def with_vote(self, vote: Vote, now_s: float) -> PendingSave:
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


# --------------------------------------------------------------------------------------- ranks that have left
@dataclass(frozen=True, kw_only=True, slots=True)
class DepartedRanks:
    """The ranks that have left one generation. All fields are sets of ranks (`set_of`).

    `silent` ranks cast no vote any more, except for the save for which they are in `owed`. `quiet` ranks
    write no part any more, except of the save for which they are in `writing`. The two differ: a rank that is
    left out is no longer waited for, but may continue to write.
    """

    silent: int = 0
    quiet: int = 0
    owed: Mapping[StateKey, int] = field(default_factory=dict)
    writing: Mapping[StateKey, int] = field(default_factory=dict)

    def over(self, rank: int, saving: StateKey | None = None) -> DepartedRanks:
        """`rank` has left. It is dead, or stated that it has settled all saves that it began, except
        `saving`.

        Settled means voted for, or reported as failed. Replaces what was known before.
        """
        who = set_of(rank)
        return DepartedRanks(
            silent=self.silent | who,
            quiet=self.quiet | who,
            owed=_only(self.owed, who, saving),
            writing=_only(self.writing, who, saving),
        )

    def left_out(self, rank: int) -> DepartedRanks:
        """`rank` is no longer waited for, and it is unknown what it writes."""
        who = set_of(rank)
        return dataclasses.replace(self, silent=self.silent | who, owed=_only(self.owed, who, None))

    @property
    def may_come(self) -> bool:
        """Whether a rank that has left owes a vote, or may still be writing a part."""
        return bool(self.owed or self.writing or self.silent & ~self.quiet)

    def missing(self, key: StateKey, waited_for: int) -> int:
        """Returns those of `waited_for` that will never vote for the save of `key`."""
        return waited_for & self.silent & ~self.owed.get(key, 0)

    def may_write(self, key: StateKey, waited_for: int) -> int:
        """Returns those of `waited_for` that may still be writing a part of the save of `key`."""
        return waited_for & (~self.quiet | self.writing.get(key, 0))


NOBODY_LEFT = DepartedRanks()
# for a generation whose details are no longer stored: no rank votes, and any may still write
ALL_SILENT = DepartedRanks(silent=-1)


def _only(sets: Mapping[StateKey, int], who: int, key: StateKey | None) -> dict[StateKey, int]:
    """Returns `sets` with the ranks `who` in that of `key` and in no other."""
    left = {each: ranks & ~who for each, ranks in sets.items()}
    if key is not None:
        left[key] = left.get(key, 0) | who
    return {each: ranks for each, ranks in left.items() if ranks}


class SaveRetries:
    """Retries of saves that are given up: after 5, 10, 20, ... 320 s, and then every 320 s.

    A committed save ends the retries. All times are seconds of one monotonic clock. The reason for giving up
    makes no difference: the state is not saved, and the next regular save may be an hour away.

    Guarantees: each save that is given up leads to one try, which `due` reports once. None is due after a
    commit.
    """

    def __init__(self) -> None:
        self._wait_s = 0.0
        self._next: float | None = None

    @property
    def next_try(self) -> float | None:
        """When the next try is due; None: there is none."""
        return self._next

    def given_up(self, now: float) -> float:
        """A save was given up. Returns the seconds until another one is tried."""
        self._wait_s = STORAGE_BACKOFF.after(self._wait_s)
        self._next = now + self._wait_s
        return self._wait_s

    def committed(self) -> None:
        """A save was committed."""
        self._wait_s, self._next = 0.0, None

    def due(self, now: float) -> bool:
        """Whether another save is to be tried now."""
        if self._next is None or now < self._next:
            return False
        self._next = None
        return True
