"""What is known about ranks that have left a generation.

It tracks whose votes will never arrive, and which ranks no longer write a part of a save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.checkpoint.commit.pending_save import set_of
from orchestrator.records.steps import StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Departures:
    """The departures from one generation. All fields are sets of ranks (`checkpoint.commit.pending_save`).

    `silent` ranks cast no vote any more, except for the save for which they are in `owed`. `quiet` ranks
    write no part any more, except of the save for which they are in `writing`. The two differ: a rank that is
    left out is no longer waited for, but may continue to write.
    """

    silent: int = 0
    quiet: int = 0
    owed: Mapping[StateKey, int] = field(default_factory=dict)
    writing: Mapping[StateKey, int] = field(default_factory=dict)

    def over(self, rank: int, saving: StateKey | None = None) -> Departures:
        """`rank` has left. It is dead, or stated that it has settled all saves that it began, except
        `saving`.

        Settled means voted for, or reported as failed. Replaces what was known before.
        """
        who = set_of(rank)
        return Departures(
            silent=self.silent | who,
            quiet=self.quiet | who,
            owed=_only(self.owed, who, saving),
            writing=_only(self.writing, who, saving),
        )

    def left_out(self, rank: int) -> Departures:
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


NOBODY_LEFT = Departures()
# for a generation whose details are no longer stored: no rank votes, and any may still write
ALL_SILENT = Departures(silent=-1)


def _only(sets: Mapping[StateKey, int], who: int, key: StateKey | None) -> dict[StateKey, int]:
    """Returns `sets` with the ranks `who` in that of `key` and in no other."""
    left = {each: ranks & ~who for each, ranks in sets.items()}
    if key is not None:
        left[key] = left.get(key, 0) | who
    return {each: ranks for each, ranks in left.items() if ranks}
