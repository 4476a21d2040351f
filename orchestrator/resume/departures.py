"""What is known of the ranks of one generation that have left it: whose votes will never come, and who writes
no part of a save any more.

It knows neither why nor when somebody left, nor which saves there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.records.steps import StateKey
from orchestrator.resume.save import set_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Departures:
    """Of one generation. All are sets of ranks (`resume.save`).

    `silent` ranks cast no vote any more, but for the save for which they stand in `owed`; `quiet` ranks write
    no part any more, but of the save for which they stand in `writing`. The two differ: who is left out is
    waited for no longer, and may write on.
    """

    silent: int = 0
    quiet: int = 0
    owed: Mapping[StateKey, int] = field(default_factory=dict)
    writing: Mapping[StateKey, int] = field(default_factory=dict)

    def over(self, rank: int, saving: StateKey | None = None) -> Departures:
        """`rank` has left; it is dead, or said itself that it has settled (voted for, or reported as failed)
        all saves that it began but `saving`. What was known before is replaced.
        """
        who = set_of(rank)
        return Departures(
            silent=self.silent | who,
            quiet=self.quiet | who,
            owed=_only(self.owed, who, saving),
            writing=_only(self.writing, who, saving),
        )

    def left_out(self, rank: int) -> Departures:
        """`rank` is not waited for any more, and nothing is known of what it writes."""
        who = set_of(rank)
        return dataclasses.replace(self, silent=self.silent | who, owed=_only(self.owed, who, None))

    @property
    def may_come(self) -> bool:
        """Whether a rank that has left owes a vote, or may still be writing some part."""
        return bool(self.owed or self.writing or self.silent & ~self.quiet)

    def missing(self, key: StateKey, waited_for: int) -> int:
        """Who of `waited_for` will never vote for the save of `key`."""
        return waited_for & self.silent & ~self.owed.get(key, 0)

    def may_write(self, key: StateKey, waited_for: int) -> int:
        """Who of `waited_for` may still be writing a part of the save of `key`."""
        return waited_for & (~self.quiet | self.writing.get(key, 0))


NOBODY_LEFT = Departures()
# of a generation of which no more is kept: nobody votes, and who may still write is not known
ALL_SILENT = Departures(silent=-1)


def _only(sets: Mapping[StateKey, int], who: int, key: StateKey | None) -> dict[StateKey, int]:
    """`sets` with the ranks `who` in that of `key` and in no other."""
    left = {each: ranks & ~who for each, ranks in sets.items()}
    if key is not None:
        left[key] = left.get(key, 0) | who
    return {each: ranks for each, ranks in left.items() if ranks}
