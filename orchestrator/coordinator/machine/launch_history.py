"""The past of a launch: its newest steps, its failures, the ranks of its members, and its losses.

Pure: times are seconds of one monotonic clock. The failure budget decides how many failures a run may have.
The conclusions from ranks go to the commit machine. Members get the losses with the view of a generation
(`GenerationView.losses`).
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from orchestrator.checkpoint.commit.commit_events import VoterGone
from orchestrator.elastic.failure import Failure, FailureBudget
from orchestrator.elastic.formation import PreviousGeneration
from orchestrator.history.claims.claims import GenerationId, GenerationStart
from orchestrator.records.run_status import MemberInfo
from orchestrator.records.steps import SKIP_CAUSES, LossHistory, StateKey, StepRecord

SILENCE_S = 5.0  # after this long without a record, members are checked as while a group forms
_MEDIAN_OF = 31  # steps


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierCoordinator:
    """What earlier coordinators of the launch left to their successor.

    `previous`: the generation that is still training; `members`: where its members run.
    `finished`: (member, reason, step) of those whose part is over.
    `ended`: (outcome, reason) if the launch had already ended.
    `failures`, `last_step`: the state of its failure budget.
    `answered`: the answered requests from outside.
    `reported`: the members that have reported an error.
    `died`: the process (pid, or 0 if unknown, and host) of the predecessor.
    """

    previous: PreviousGeneration | None = None
    members: tuple[MemberInfo, ...] = ()
    finished: tuple[tuple[str, str, int], ...] = ()
    ended: tuple[str, str] | None = None
    failures: tuple[Failure, ...] = ()
    last_step: StepRecord | None = None
    answered: tuple[int, ...] = ()
    reported: tuple[str, ...] = ()
    died: tuple[int, str] | None = None


class RecentSteps:
    """Tracks step records. `newest` has the greatest key; None before the first.

    `heard_at` is when the last record arrived, which may be a copy.
    """

    def __init__(self) -> None:
        self.newest: StepRecord | None = None
        self.heard_at = float("-inf")
        self._durations: list[float] = []

    def recorded(self, record: StepRecord, now: float) -> bool:
        """Takes a record, possibly a copy. Returns whether it is the newest."""
        self.heard_at = now
        if self.newest is not None and record.key <= self.newest.key:
            return False
        self.newest = record
        self._durations = [*self._durations[1 - _MEDIAN_OF :], record.step_s]
        return True

    @property
    def median_s(self) -> float:
        """The median duration of the last 31 steps; 0 before the first."""
        return statistics.median(self._durations) if self._durations else 0.0

    def is_training(self, attempt: int, generation: int, now: float) -> bool:
        """Whether this generation has done a step and sent a record a short while ago."""
        step = self.newest
        done = step is not None and (step.attempt, step.generation) == (attempt, generation)
        return done and now - self.heard_at < SILENCE_S


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


class RankHistory:
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


_UNKNOWN = -1  # the code of a step without a record


class LossTrail:
    """The steps of a launch since the point that it continued, 20 bytes each."""

    def __init__(
        self,
        window: int,
        first_attempt: int,
        before: Iterable[StepRecord],
        starts: Iterable[GenerationStart],
        records: Iterable[StepRecord],
    ) -> None:
        """`first_attempt`: of the launch. `before`: the records of the history that it continues.

        `starts` and `records`: those that earlier coordinators of the launch have journalled.
        """
        self._window, self._first = window, first_attempt
        self._before = LossHistory()
        for record in takewhile(lambda each: each.attempt < first_attempt, before):
            self._before = self._before.after(record, window)
        self._starts: dict[GenerationId, GenerationStart] = {}
        self._steps: dict[GenerationId, tuple[array[float], array[float], array[int]]] = {}
        self._at_start: dict[GenerationId, LossHistory] = {}
        for start in starts:
            self.begun(start)
        for record in records:
            self.recorded(record)

    def begun(self, start: GenerationStart) -> None:
        """A generation begins. Those of earlier launches do not count."""
        if start.attempt >= self._first:
            self._starts[start.id] = start
            self._steps.setdefault(start.id, (array("d"), array("d"), array("b")))

    def recorded(self, record: StepRecord) -> None:
        """Takes a step's record, possibly a copy."""
        id_ = (record.attempt, record.generation)
        if id_ not in self._starts:
            return
        losses, norms, codes = self._steps[id_]
        at = record.step - self._starts[id_].step - 1
        while len(codes) <= at:
            losses.append(math.nan)
            norms.append(math.nan)
            codes.append(_UNKNOWN)
        losses[at] = math.nan if record.loss is None else record.loss
        norms[at] = record.grad_norm
        codes[at] = 0 if record.skipped is None else 1 + SKIP_CAUSES.index(record.skipped)

    def at(self, key: StateKey | None) -> LossHistory:
        """Returns the history before the state `key` (None: before anything was trained).

        A step whose record is lost counts for nothing. Every step on the way to a state that a member holds
        has one, unless the journal was damaged.
        """
        ways: list[tuple[GenerationStart, int]] = []
        history = self._before
        while key is not None and key.attempt >= self._first:
            id_ = (key.attempt, key.generation)
            if id_ not in self._starts:
                break
            ways.append((self._starts[id_], key.step))
            if id_ in self._at_start:
                history = self._at_start[id_]
                break
            key = self._starts[id_].parent
        for start, last_step in reversed(ways):
            self._at_start[start.id] = history
            history = self._along(start, last_step, history)
        return history

    def _along(self, start: GenerationStart, last_step: int, history: LossHistory) -> LossHistory:
        num = last_step - start.step
        for loss, norm, code in zip(*(column[:num] for column in self._steps[start.id]), strict=True):
            if code != _UNKNOWN:
                skipped = SKIP_CAUSES[code - 1] if code else None
                history = history.after_step(
                    None if math.isnan(loss) else loss, norm, skipped, self._window
                )
        return history
