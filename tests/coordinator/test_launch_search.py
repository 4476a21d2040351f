"""Random histories of launches over the real machines (kills, joins, freezes, stops, rewinds, restarts of the
coordinator, storage that fails, ends) keep every rule, and each wrong version planted here is caught.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.checkpoint.commit.commit_events import Action as CommitAction
from orchestrator.checkpoint.commit.commit_events import DiscardSave, VoterGone
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.coordinator.machine.launch_actions import Action, Note
from orchestrator.coordinator.machine.launch_machine import LaunchMachine
from orchestrator.coordinator.machine.reported_errors import ReportedErrors
from orchestrator.coordinator.machine.requests import RequestAnswer, Requests
from orchestrator.elastic.formation import LeaveOut
from orchestrator.records.run_status import MemberInfo
from orchestrator.records.steps import StateKey
from tests.coordinator.launch_model import BrokenError, Member, World, walk

SEEDS = 400
CAMPAIGN = 20_000


@pytest.mark.parametrize(
    "seeds",
    [
        range(SEEDS),
        # the tests' usual limit is too short for so many
        pytest.param(range(SEEDS, CAMPAIGN), marks=[pytest.mark.chaos, pytest.mark.timeout(1800)]),
    ],
    ids=["some", "many"],
)
def test_no_random_history_breaks_a_rule_and_each_comes_to_its_end(seeds: range) -> None:
    outcomes: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            world, outcome = walk(seed)
        except BrokenError as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken
        outcomes[outcome] += 1
        seen.update(world.num)
    assert set(outcomes) == {"done", "stopped", "failed"}
    what = (
        *("steps", "commits", "restarts", "ends", "rewinds", "saves given up", "answered", "saved as asked"),
        *("errors", "given up by Ray"),
    )
    assert min(seen[each] for each in what) > 0, seen


class WaitsForNewcomers(LaunchMachine):
    """The run does not end while anybody waits to join."""

    def _over(self) -> list[Action]:
        return [] if self.waiting else super()._over()


def without(named: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Arguments of a machine whose coordinator does not know these facts of its predecessor."""
    return {**named, "earlier": replace(named["earlier"], **changes)}


class ForgetsProgress(LaunchMachine):
    """A restarted coordinator knows the failures, but not the steps between them."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **without(named, last_step=None))


class ForgetsWhoWasLeftOut(LaunchMachine):
    """Nobody hears that the vote of a member that was left out will never come, nor asks whether it lives."""

    def _leave_out(self, action: LeaveOut) -> list[Action]:
        actions = super()._leave_out(action)
        self._left_out.clear()
        return [a for a in actions if not isinstance(a, VoterGone)]


class TakesTheSilentForQuiet(LaunchMachine):
    """A member that was left out is taken to have stopped writing."""

    def _leave_out(self, action: LeaveOut) -> list[Action]:
        actions = super()._leave_out(action)
        return [replace(a, writing=False) if isinstance(a, VoterGone) else a for a in actions]


class TakesAJoinForQuiet(CommitMachine):
    """A member that joins anew is taken to have stopped writing."""

    def _voter_gone(self, event: VoterGone) -> tuple[CommitMachine, tuple[CommitAction, ...]]:
        after, actions = super()._voter_gone(event)
        writes_nothing = {g: replace(left, writing={}) for g, left in after.departures.items()}
        return replace(after, departures=writes_nothing), actions


class DecidesAsVotesCome(CommitMachine):
    """A save whose votes are there does not wait for an older one."""

    def _take_up_next(self) -> tuple[CommitMachine, tuple[CommitAction, ...]]:
        newest = {at: save for at, save in self.saves.items() if at == max(self.saves)}
        after, actions = CommitMachine._take_up_next(replace(self, saves=newest))
        return replace(after, saves={**self.saves, **after.saves}), actions


class SaysOnlyWhatItVotedFor(World):
    """A member that joins does not say which save it is still writing."""

    def send_join(self, member: Member) -> None:
        said, member.voted = member.voted, None if member.writing else member.voted
        super().send_join(member)
        member.voted = said


class AsksOnlyWhoForms(LaunchMachine):
    """Nobody looks after a group that trains."""

    def to_ask(self, committing: bool, now: float) -> list[MemberInfo]:
        return super().to_ask(committing, self._steps.heard_at)


class StopsForASave(LaunchMachine):
    """A save that fails ends the run."""

    def save_given_up(self, key: StateKey, text: str, now: float) -> list[Action]:
        return [*super().save_given_up(key, text, now), *self.end("failed", "a save failed", code="code")]


class MetByAnyPoint(Requests):
    """The next point meets a request to save, also one that was under way before."""

    def committed(self, key: StateKey) -> list[RequestAnswer]:
        self._saves = dict.fromkeys(self._saves, StateKey(attempt=0, generation=0, step=0))
        return super().committed(key)


class MeetsRequestsWithAnyPoint(LaunchMachine):
    """See `MetByAnyPoint`."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._requests = MetByAnyPoint(named["earlier"].answered)


class EndsWithoutAnswers(LaunchMachine):
    """Who has asked for something does not hear that the run has ended."""

    def end(self, outcome: str, reason: str, by: str = "", code: str | None = None) -> list[Action]:
        return [action for action in super().end(outcome, reason, by, code) if not isinstance(action, Note)]


class AnswersAgain(LaunchMachine):
    """A restarted coordinator does not know what was answered."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **without(named, answered=()))


class DiscardsAtOnce(CommitMachine):
    """The files of a save go as soon as it is given up."""

    def _discard_what_is_quiet(self) -> tuple[CommitMachine, tuple[CommitAction, ...]]:
        return self, tuple(DiscardSave(name=at.point_name) for at in self.discarding)


class BusyIgnored(LaunchMachine):
    """A member that says that it still computes counts as silent nevertheless."""

    def busy(self, member: str, until: float) -> None:
        pass


class TrustsTheReporter(LaunchMachine):
    """An error of ours ends the run, whichever worker reports it."""

    def failed(self, member: str, kind: str, text: str, fatal: bool, *where: Any) -> list[Action]:
        actions = super().failed(member, kind, text, fatal, *where)
        return [*actions, *self.end("failed", text, code="code")] if fatal else actions


class EndsWithTheLastOfAGroup(ReportedErrors):
    """Newcomers that wait do not count: the run ends with the last member of its group."""

    def _of_members(self, reports: Any, members: Any, now: float) -> Any:
        found = super()._of_members(reports, members, now)
        failed = [report for report in reports if report.repeats]
        left = [m for m in members if m not in self._reports and not self._rendezvous.is_gone(m)]
        return found if left or not failed else [self._end_of_run(failed)]


class ForgetsTheWaiting(LaunchMachine):
    """See `EndsWithTheLastOfAGroup`."""

    def __init__(self, rendezvous: Any, *args: Any, **named: Any) -> None:
        super().__init__(rendezvous, *args, **named)
        self._errors = EndsWithTheLastOfAGroup(rendezvous)


class TakesAReportForADeath(LaunchMachine):
    """A member that has reported an error is taken to have stopped writing."""

    def _ends(self, member: str) -> list[Action]:
        return [
            replace(action, writing=False) if isinstance(action, VoterGone) else action
            for action in super()._ends(member)
        ]


class NeverLetsGo(LaunchMachine):
    """The processes of members that have failed are kept, so that nobody takes their places."""

    def may_end(self, member: str, now: float) -> bool:
        return False


class CountsTwice(LaunchMachine):
    """A restarted coordinator does not know whose errors were counted."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **without(named, reported=()))


class NobodyHears(World):
    """Members learn of their generation's end by their collectives alone, and a host without power ends
    none.
    """

    def hears_end(self, member: Member) -> bool:
        return False


@pytest.mark.parametrize(
    ("wrong", "rule", "seed"),
    [
        (WaitsForNewcomers, "the run does not end", 81),
        (ForgetsProgress, "a healthy run is stopped", 7),
        (ForgetsWhoWasLeftOut, "the run does not end", 653),
        (TakesTheSilentForQuiet, "are deleted while", 1023),
        (TakesAJoinForQuiet, "are deleted while", 395),
        (SaysOnlyWhatItVotedFor, "are deleted while", 23),
        (DecidesAsVotesCome, "are undecided", 2631),
        (AsksOnlyWhoForms, "the run does not end", 822),
        (StopsForASave, "and the run ends", 58),
        (MeetsRequestsWithAnyPoint, "lacks what was trained before request", 178),
        (EndsWithoutAnswers, "were never answered", 0),
        (AnswersAgain, "is answered twice", 3),
        (DiscardsAtOnce, "are deleted while", 0),
        (BusyIgnored, "is given up and killed", 68),
        (NobodyHears, "is given up and killed", 0),
        (TrustsTheReporter, "ends the run of", 4),
        (ForgetsTheWaiting, "ends the run of", 134),
        (TakesAReportForADeath, "are deleted while", 1279),
        (NeverLetsGo, "the run does not end", 29),
        (CountsTwice, "a healthy run is stopped", 324),
    ],
)
def test_the_search_catches_a_planted_mistake(wrong: type, rule: str, seed: int) -> None:
    """`seed`: a history that showed it when this was written; any other will do."""
    places = {"commits": CommitMachine, "machine": LaunchMachine, "world": World}
    planted = {place: wrong for place, right in places.items() if issubclass(wrong, right)}
    for number in (seed, *range(10 * SEEDS)):
        try:
            walk(number, **planted)
        except BrokenError as broken:
            if rule in str(broken):
                return
    raise AssertionError(f"{wrong.__name__} is not caught by {10 * SEEDS} histories")
