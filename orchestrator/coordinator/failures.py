"""What counts as a failure of a launch: one for each generation, however many members it cost.

A part of the launch machine, pure. How many a run may have, the failure budget knows.
"""

from __future__ import annotations

from orchestrator.elastic.failure_budget import Failure, FailureBudget


class Failures:
    """The failures of one launch, as one coordinator hears of them."""

    def __init__(self, budget: FailureBudget) -> None:
        self._budget = budget
        self._generations: set[int] = set()
        self._groups: set[tuple[int, str]] = set()  # generation, node
        self._early = 0  # members that failed before the first generation

    @property
    def all(self) -> tuple[Failure, ...]:
        """Those of this launch, also of earlier coordinators."""
        return self._budget.failures

    def applied(self, step: int) -> None:
        """`step` is the newest step now."""
        self._budget.applied(step)

    def count(
        self, generation: int, reason: str, *, again: bool = False, over: bool = False
    ) -> Failure | None:
        """Something ended in `generation` without having been asked to; None where that is no failure of its
        own: a lost node, with all its members and its group, is one. `again`: it counts nevertheless. `over`:
        the run has ended, so that nothing counts any more.
        """
        known = generation in self._generations
        self._generations.add(generation)
        return None if over or (known and not again) else self._budget.failed(reason)

    def is_again(self, generation: int, node: str) -> bool:
        """The group of `node` ended in `generation`; whether one there had ended in it before."""
        group = (generation, node)
        again = group in self._groups
        self._groups.add(group)
        return again

    def is_next_round(self, expected: int) -> bool:
        """A member failed before there was a generation; whether `expected` others had before, since the last
        one of which this was so: they failed, were started again, and fail again.
        """
        self._early += 1
        return self._early > 1 and (self._early - 1) % max(1, expected) == 0

    def verdict(self) -> str | None:
        """Why the run must stop now; None while it may go on."""
        return self._budget.verdict()
