"""Counts the failures of a launch: one for each generation, however many members it lost.

A part of the launch machine, pure. The failure budget decides how many a run may have.
"""

from __future__ import annotations

from orchestrator.elastic.failure import Failure, FailureBudget


class Failures:
    """The failures of one launch that one coordinator learns of."""

    def __init__(self, budget: FailureBudget) -> None:
        self._budget = budget
        self._generations: set[int] = set()
        self._groups: set[tuple[int, str]] = set()  # (generation, node)
        self._early = 0  # members that failed before the first generation

    @property
    def all(self) -> tuple[Failure, ...]:
        """The failures of this launch, including those of earlier coordinators."""
        return self._budget.failures

    def applied(self, step: int) -> None:
        """Records `step` as the newest step."""
        self._budget.applied(step)

    def count(
        self, generation: int, reason: str, *, again: bool = False, over: bool = False
    ) -> Failure | None:
        """Counts that something ended unexpectedly in `generation`; returns the failure.

        Returns None if it is no failure of its own: a lost node with all its members and its group is one
        failure. `again`: it counts nevertheless. `over`: the run has ended, so that nothing counts any more.
        """
        known = generation in self._generations
        self._generations.add(generation)
        return None if over or (known and not again) else self._budget.failed(reason)

    def is_again(self, generation: int, node: str) -> bool:
        """Records that the group of `node` ended in `generation`.

        Returns whether one there had already ended in it.
        """
        group = (generation, node)
        again = group in self._groups
        self._groups.add(group)
        return again

    def is_next_round(self, expected: int) -> bool:
        """Records that a member failed before the first generation.

        Returns whether a new round of failures begins. A round is complete after `expected` members. They
        failed, were started again, and fail again.
        """
        self._early += 1
        return self._early > 1 and (self._early - 1) % max(1, expected) == 0

    def verdict(self) -> str | None:
        """Returns why the run must stop now, or None."""
        return self._budget.verdict()
