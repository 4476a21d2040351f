"""A save that is slow is waited for as long as some part of it grows; one that stands still is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checkpoint.commit.commit_events import (
    Action,
    Event,
    GenerationFormed,
    GiveUp,
    PartFailed,
    PartGrows,
    Tick,
    VoterGone,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.records.steps import StateKey
from tests.checkpoint.commit_machines import cast, machine, run
from tests.checkpoint.samples import key

LIMIT_S = 60  # of `machine`
P, Q = key(10), key(20)


def grows(at: StateKey, rank: int, now_s: float, moved: bool = True) -> PartGrows:
    return PartGrows(key=at, rank=rank, world_size=2, moved=moved, now_s=now_s)


def given_up(actions: list[Action]) -> list[StateKey]:
    return [action.key for action in actions if isinstance(action, GiveUp)]


def test_a_part_that_takes_hours_is_waited_for_as_long_as_it_grows() -> None:
    state, _ = run(machine(), cast(P, 0, now_s=0.0))
    for minute in range(1, 600):
        state, actions = run(state, grows(P, 1, 59.0 * minute), Tick(now_s=59.0 * minute + 0.5))
        assert given_up(actions) == []
    state, actions = run(state, cast(P, 1, now_s=36_000.0))
    assert given_up(actions) == []
    assert P in state.saves


def test_a_writer_that_stands_still_is_given_up_also_where_it_says_that_it_lives() -> None:
    state, _ = run(machine(), cast(P, 0, now_s=0.0), grows(P, 1, 30.0))
    state, _ = run(state, grows(P, 1, 80.0, moved=False), grows(P, 0, 85.0))
    assert given_up(run(state, Tick(now_s=90.0))[1]) == []
    (gone,) = [a for a in run(state, Tick(now_s=90.5))[1] if isinstance(a, GiveUp)]
    assert gone.reason == "1 of 2 ranks had saved their part, and the others wrote nothing for 60 s"


def test_a_save_for_which_nobody_ever_votes_is_given_up_too() -> None:
    state, actions = run(machine(), grows(P, 0, 5.0), grows(P, 1, 6.0, moved=False), Tick(now_s=65.0))
    assert given_up(actions) == []
    state, actions = run(state, Tick(now_s=65.5))
    assert given_up(actions) == [P]
    assert state.is_hopeless(P, 2)


def test_from_the_first_vote_to_commit_is_what_a_save_took_however_long_its_parts_did() -> None:
    state, _ = run(machine(), grows(P, 0, 5.0), cast(P, 0, now_s=40.0), cast(P, 1, now_s=50.0))
    assert state.saves[P].started_s == 40.0


def test_what_grows_for_a_save_that_is_decided_or_foreign_changes_nothing() -> None:
    state, _ = run(machine(), cast(P, 0), PartFailed(key=P, rank=1, world_size=2, reason="disk", now_s=1.0))
    for at in (P, key(10, attempt=2), key(10, generation=7)):
        assert run(state, grows(at, 1, 3.0)) == (state, [])
    behind, _ = run(state, GenerationFormed(generation=2, parent=key(5)))
    assert run(behind, grows(Q, 1, 3.0)) == (behind, [])


class AnyProgressCounts(CommitMachine):
    """Planted mistake: progress of another save counts."""

    def _part_grows(self, event: PartGrows) -> tuple[CommitMachine, tuple[Action, ...]]:
        after, actions = super()._part_grows(event)
        saves = {at: replace(save, moved_s=event.now_s) for at, save in after.saves.items()}
        return replace(after, saves=saves if event.moved else after.saves), actions


class WhoHasVotedCounts(CommitMachine):
    """Planted mistake: who has voted for it keeps it alive."""

    def _part_grows(self, event: PartGrows) -> tuple[CommitMachine, tuple[Action, ...]]:
        after, actions = super()._part_grows(event)
        if event.moved and event.key in after.saves:
            moved = replace(after.saves[event.key], moved_s=event.now_s)
            after = replace(after, saves={**after.saves, event.key: moved})
        return after, actions


class CountsFromTheFirstVote(CommitMachine):
    """Planted mistake: as it was."""

    def _part_grows(self, event: PartGrows) -> tuple[CommitMachine, tuple[Action, ...]]:
        return self, ()


# at most one step, then who does what: votes, or says that it writes, in one of two saves; or time goes on
STEPS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from(["vote", "moved", "still", "tick"]),
        st.integers(0, 1),
        st.booleans(),
    ),
    max_size=14,
)


def differs(kind: type[CommitMachine], steps: list[tuple[int, str, int, bool]]) -> bool:
    """Whether a tick gives up other saves than a list of dates says."""
    state, now = kind(attempt=1, kept=KeptPoints(keep_latest=3), vote_limit_s=LIMIT_S), 0
    state, _ = run(state, GenerationFormed(generation=1, parent=None))
    news, voted, over = dict[StateKey, int](), set[tuple[StateKey, int]](), set[StateKey]()
    for wait, what, who, second in steps:
        at, now = Q if second else P, now + wait
        # rank 1 never votes: no save is complete
        rank = 0 if what == "vote" else who
        event: Event = Tick(now_s=now)
        if what == "vote":
            event = cast(at, rank, now_s=now)
        elif what != "tick":
            event = grows(at, rank, now, what == "moved")
        if what != "tick" and (at not in news or (what != "still" and (at, rank) not in voted)):
            news[at] = now
        if what == "vote":
            voted.add((at, rank))
        state, actions = run(state, event)
        late = {at for at, since in news.items() if at not in over and now - since > LIMIT_S}
        gone = {action.key for action in actions if isinstance(action, GiveUp) and not action.late}
        if gone != (late if what == "tick" else set()):
            return True
        over |= gone
    return False


@given(STEPS)
def test_a_save_is_given_up_when_it_stood_still_for_the_limit_and_never_else(steps) -> None:
    assert not differs(CommitMachine, steps)


@pytest.mark.parametrize("mistake", [AnyProgressCounts, WhoHasVotedCounts, CountsFromTheFirstVote])
def test_the_dates_catch_a_planted_mistake(mistake: type[CommitMachine]) -> None:
    found = {
        AnyProgressCounts: [(0, "vote", 0, False), (40, "moved", 1, True), (30, "tick", 0, False)],
        WhoHasVotedCounts: [(0, "vote", 0, False), (40, "moved", 0, False), (30, "tick", 0, False)],
        CountsFromTheFirstVote: [(0, "vote", 0, False), (40, "moved", 1, False), (30, "tick", 0, False)],
    }[mistake]
    assert differs(mistake, found)


def test_what_is_known_of_generations_that_are_over_does_not_grow() -> None:
    state = machine()
    for generation in range(1, 200):
        for rank in (0, 1):
            state, _ = run(state, VoterGone(generation=generation, rank=rank))
        state, _ = run(
            state, GenerationFormed(generation=generation + 1, parent=key(1, generation=generation))
        )
    assert set(state.departures) == {199}
    late = cast(key(1, generation=5), 0)
    assert given_up(run(state, late)[1]) == [late.vote.key], "nobody else of it will vote"
    assert run(state, VoterGone(generation=5, rank=0)) == (state, [])


def test_a_generation_from_which_a_vote_is_owed_is_remembered() -> None:
    owed = key(1)
    state, _ = run(machine(), cast(owed, 0), VoterGone(generation=1, rank=0))
    state, _ = run(state, VoterGone(generation=1, rank=1, saving=owed))
    for generation in (2, 3, 4):
        state, _ = run(state, GenerationFormed(generation=generation, parent=owed))
    assert given_up(run(state, cast(key(1), 1))[1]) == []
