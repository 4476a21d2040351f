"""Tracks the ranks of each member in the generations for which it may still owe a vote.

The conclusions go to the commit machine.
"""

from __future__ import annotations

from orchestrator.checkpoint.commit.commit_events import VoterGone
from orchestrator.records.steps import StateKey


class Places:
    """The ranks of one attempt's members.

    For each member up to three are kept: in its newest generation, in the one that it left at its last join,
    and in that of the save for which it may still owe a vote.
    """

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._of: dict[str, dict[int, int]] = {}  # member -> generation -> rank

    def answered(self, member: str, generation: int, rank: int) -> None:
        """`member` is `rank` of `generation`, its newest."""
        self._of.setdefault(member, {})[generation] = rank

    def joined(self, member: str, saving: StateKey | None) -> list[VoterGone]:
        """A member left its generation and joins again. It is `saving` a state (`MemberState.saving`).

        It may continue to write, and its vote for that save may still arrive, even from an older generation.
        """
        places = self._of.get(member)
        if not places:
            return []
        newest = max(places)
        owes = saving.generation if saving is not None and saving.attempt == self._attempt else 0
        self._of[member] = {g: rank for g, rank in places.items() if g in (newest, owes)}
        here = saving if owes == newest else None
        return [VoterGone(generation=newest, rank=places[newest], saving=here)]

    def lost(self, member: str, writing: bool) -> list[VoterGone]:
        """No vote of `member` will arrive any more, for any generation.

        `writing`: it is not known to be dead, and may be writing its part of a save.
        """
        places = self._of.get(member, {})
        return [VoterGone(generation=g, rank=rank, writing=writing) for g, rank in sorted(places.items())]
