"""Selects the state that the next generation continues, and its label (membership rules 1 and 2).

The state is the newest among the members and the committed point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from orchestrator.elastic.formation import Formation, NewestPoint
from orchestrator.elastic.held_shards import held_by_all, newest_complete
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import JoinRequest
from orchestrator.records.steps import StateKey


class ParentStateSelection:
    """The states of one attempt. `first_attempt`, `rebase`: see `Rendezvous`."""

    def __init__(
        self, attempt: int, first_attempt: int, rebase: Callable[[StateKey, Cursor | None], int] | None
    ) -> None:
        self.formed: dict[int, Formation] = {}  # every generation of this attempt
        self.point: NewestPoint | None = None
        self.distrusted: tuple[int, int] | None = None  # (attempt, generation); see `trusted`
        self._attempt, self._first_attempt, self._rebase = attempt, first_attempt, rebase

    def newest(self, requests: Iterable[JoinRequest]) -> tuple[StateKey | None, NewestPoint | None]:
        """Returns the newest state: complete among the members, or the committed point if its key is greater.

        The second value is that point if it was chosen.
        """
        complete = newest_complete(held_by_all(requests), self.floor)
        if complete is not None:
            return complete.key, None
        return (None, None) if self.point is None else (self.point.key, self.point)

    def trusted(self, request: JoinRequest) -> JoinRequest:
        """Removes from a request the states that may not be continued, because replicas of them differed.

        These are all states that are newer than the newest committed point and not newer than the generation
        `distrusted`. A member without any other state counts as blank (membership rule 27).
        """
        held = tuple(h for h in request.holdings if not self._is_distrusted(h.key))
        if self._is_distrusted(request.key):
            return replace(request, key=None, cursor=None, prepared=None, holdings=held)
        return replace(request, holdings=held)

    def _is_distrusted(self, key: StateKey | None) -> bool:
        if key is None or self.distrusted is None or (key.attempt, key.generation) > self.distrusted:
            return False
        return self.floor is None or key > self.floor

    @property
    def floor(self) -> StateKey | None:
        """The key of the newest committed point. No older state is continued."""
        return None if self.point is None else self.point.key

    def label(self, parent: StateKey | None, point: NewestPoint | None) -> int:
        """Returns the label of the last finished step, counted as after `parent`."""
        if parent is None:
            return 0
        if point is not None and self._rebase is not None and parent.attempt < self._first_attempt:
            return self._rebase(parent, point.cursor)
        return parent.step

    def origin(self, key: StateKey | None) -> StateKey | None:
        """Returns the oldest key of the same content. Agreeing on a state renames it without changing it."""
        at = key
        while at is not None and at.attempt == self._attempt and self.formed[at.generation].step == at.step:
            at = self.formed[at.generation].parent
        return at

    def is_unsaved(self, parent: StateKey | None) -> bool:
        """Whether no committed point holds the content of `parent`."""
        origin = self.origin(parent)
        return origin is not None and (self.point is None or self.origin(self.point.key) != origin)

    def copy(self) -> ParentStateSelection:
        """An independent copy."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.formed = dict(self.formed)
        return twin
