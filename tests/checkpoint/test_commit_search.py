"""Every interleaving of votes, deaths, generations, claims and store answers, for the real commit machine.

Two ranks save two states, of one generation or of two; one rank may die, one store action may fail,
a newer claim may appear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from orchestrator.checkpoint.commit.commit_events import (
    Acknowledge,
    Action,
    CheckNewerClaim,
    ClaimChecked,
    CommitWritten,
    DiscardSave,
    Event,
    Failed,
    FlushJournal,
    GenerationFormed,
    GiveUp,
    JournalDurable,
    VoteCast,
    VoterGone,
    WriteCommit,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.pending_save import UNDER_WAY, PendingSave, SaveStage
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.records.steps import StateKey
from tests.checkpoint.commit_machines import vote
from tests.checkpoint.samples import key

Saves = tuple[StateKey, StateKey]
ONE_GENERATION: Saves = (key(10), key(20))
TWO_GENERATIONS: Saves = (key(10), key(25, generation=2))
PARENTS = (key(5), key(10), key(20))
RANKS = (0, 1)
LIMIT = 200_000
Pending = FlushJournal | CheckNewerClaim | WriteCommit


@dataclass(frozen=True)
class World:
    """The machine, and what the world around it knows and promised."""

    machine: CommitMachine
    pending: tuple[Pending, ...] = ()
    votes: frozenset[tuple[StateKey, int]] = frozenset()
    dead: bool = False
    failed: bool = False
    claim: bool = False
    flushed: frozenset[StateKey] = frozenset()
    committed: frozenset[StateKey] = frozenset()
    cleared: frozenset[StateKey] = frozenset()  # no newer claim existed when asked after COMMIT
    acknowledged: frozenset[StateKey] = frozenset()
    given_up: frozenset[StateKey] = frozenset()
    wrong: str = ""

    @property
    def identity(self) -> tuple[object, ...]:
        m = self.machine
        saves = tuple(sorted((s.key, s.stage.name, s.ranks) for s in m.saves.values()))
        parts = (
            saves,
            tuple(m.outcomes),
            tuple((g, d.silent, d.quiet) for g, d in m.departures.items()),
            tuple(m.discarding.items()),
            m.generation,
            tuple(m.parents.values()),
            m.fenced,
        )
        pending = tuple((type(a).__name__, a.key) for a in self.pending)
        flags = (self.dead, self.failed, self.claim, self.wrong)
        return (
            *parts,
            pending,
            self.votes,
            flags,
            self.flushed,
            self.committed,
            self.cleared,
            self.acknowledged,
            self.given_up,
        )


def tell(world: World, event: Event) -> World:
    """Give the machine an event and take note of, and check, everything it asks for."""
    machine, actions = world.machine.on(event)
    world = replace(world, machine=machine)
    for action in actions:
        world = take(world, action)
    return world


def take(world: World, action: Action) -> World:
    match action:
        case WriteCommit():
            whole = all((action.key, rank) in world.votes for rank in RANKS)
            wrong = "" if whole else "COMMIT without all votes"
            wrong = wrong if action.key in world.flushed else wrong or "COMMIT before the journal is durable"
            others = any(
                save.stage in UNDER_WAY and at != action.key for at, save in world.machine.saves.items()
            )
            wrong = wrong or ("two saves are committed at once" if others else "")
            return replace(world, pending=(*world.pending, action), wrong=world.wrong or wrong)
        case FlushJournal() | CheckNewerClaim():
            return replace(world, pending=(*world.pending, action))
        case Acknowledge():
            wrong = (
                ""
                if action.key in world.cleared
                else "acknowledged without looking for a newer claim after COMMIT"
            )
            wrong = "acknowledged after it was given up" if action.key in world.given_up else wrong
            return replace(world, acknowledged=world.acknowledged | {action.key}, wrong=world.wrong or wrong)
        case GiveUp():
            wrong = "given up after it was acknowledged" if action.key in world.acknowledged else ""
            return replace(world, given_up=world.given_up | {action.key}, wrong=world.wrong or wrong)
        case DiscardSave():
            at = parse_point_name(action.name)
            writing = [r for r in RANKS if (at, r) not in world.votes and not (world.dead and r == 1)]
            wrong = f"files deleted under rank {writing[0]}" if writing else ""
            return replace(world, wrong=world.wrong or wrong)
    return world


def answer(world: World, number: int, fails: bool) -> World:
    """The store answers the pending action `number`."""
    action = world.pending[number]
    world = replace(world, pending=world.pending[:number] + world.pending[number + 1 :])
    if fails:
        assert action.key is not None
        return tell(replace(world, failed=True), Failed(key=action.key, reason="disk"))
    match action:
        case FlushJournal():
            return tell(replace(world, flushed=world.flushed | {action.key}), JournalDurable(key=action.key))
        case WriteCommit():
            return tell(
                replace(world, committed=world.committed | {action.key}), CommitWritten(key=action.key)
            )
        case CheckNewerClaim():
            if action.key in world.committed and not world.claim:
                world = replace(world, cleared=world.cleared | {action.key})
            return tell(world, ClaimChecked(key=action.key, newer=world.claim))


def moves(world: World, saves: Saves) -> Iterator[World]:
    """Everything that may happen next."""
    machine = world.machine
    for at in saves:
        for rank in RANKS:
            reachable = at.generation <= machine.generation and not (world.dead and rank == 1)
            if (at, rank) not in world.votes and reachable:
                yield tell(
                    replace(world, votes=world.votes | {(at, rank)}), VoteCast(vote=vote(at, rank), now_s=0.0)
                )
    for number, action in enumerate(world.pending):
        yield answer(world, number, fails=False)
        if not world.failed and action.key is not None:
            yield answer(world, number, fails=True)
    if not world.dead:
        yield tell(replace(world, dead=True), VoterGone(generation=1, rank=1))
    if not world.claim:
        yield replace(world, claim=True)
    if machine.generation == 1 and not world.pending and not machine.fenced:
        for parent in PARENTS:
            if not machine.outdates(2, parent):
                yield form(world, parent)


def form(world: World, parent: StateKey) -> World:
    left_out = [at for at in world.acknowledged if at > parent]
    wrong = "a generation left out an acknowledged point" if left_out else ""
    return tell(replace(world, wrong=world.wrong or wrong), GenerationFormed(generation=2, parent=parent))


def hangs(world: World, saves: Saves) -> bool:
    """Whether no vote and no answer can come any more, and yet somebody waits for one."""
    machine = world.machine
    if world.pending or machine.fenced:
        return False
    came = {rank: all((at, rank) in world.votes for at in saves if at.generation == 1) for rank in RANKS}
    waiting = [at for at in machine.saves if at.generation == 1]
    return bool(waiting) and came[0] and (came[1] or world.dead)


def search(machine: type[CommitMachine], saves: Saves, stop_at_first: bool = False) -> tuple[int, set[str]]:
    """The number of states, and what went wrong in any of them."""
    state = machine(attempt=1, kept=KeptPoints(keep_latest=3), vote_limit_s=60)
    first = tell(World(machine=state), GenerationFormed(generation=1, parent=None))
    seen, queue, wrong = {first.identity}, deque([first]), set()
    while queue and not (wrong and stop_at_first):
        world = queue.popleft()
        if world.wrong or hangs(world, saves):
            wrong.add(world.wrong or "a save waits for ever")
            continue
        for after in moves(world, saves):
            if after.identity not in seen:
                seen.add(after.identity)
                queue.append(after)
        assert len(seen) < LIMIT, "the search must end"
    return len(seen), wrong


@pytest.mark.parametrize(
    "saves", [ONE_GENERATION, TWO_GENERATIONS], ids=["one generation", "two generations"]
)
def test_no_interleaving_breaks_a_promise_of_the_commit_machine(saves) -> None:
    states, wrong = search(CommitMachine, saves)
    assert wrong == set()
    assert states > 1000, "the search must be one"


class OneVoteLess(CommitMachine):
    """Planted mistake: commits with one vote missing."""

    def _vote(self, event: VoteCast) -> tuple[CommitMachine, tuple[Action, ...]]:
        after, actions = super()._vote(event)
        at = event.vote.key
        if after._is_at(at, SaveStage.COLLECTING) and len(after.saves[at].votes) == 1:
            return after._move(at, SaveStage.FLUSHING), (FlushJournal(key=at, records=()),)
        return after, actions


class DiscardsAtOnce(CommitMachine):
    """Planted mistake: the files of a save go as soon as it is given up."""

    def _discard_what_is_quiet(self) -> tuple[CommitMachine, tuple[Action, ...]]:
        names = tuple(DiscardSave(name=at.point_name) for at in self.discarding)
        return replace(self, discarding={}), names


class WaitsForTheDead(CommitMachine):
    """Planted mistake: a save whose voter is gone stays."""

    def _missing_voter(self, save: PendingSave) -> int | None:
        return None


class TakesUpAll(CommitMachine):
    """Planted mistake: goes on with every save whose votes are there."""

    def _take_up_next(self) -> tuple[CommitMachine, tuple[Action, ...]]:
        found = [at for at, s in self.saves.items() if s.is_complete and s.stage is SaveStage.COLLECTING]
        after = self
        for at in found:
            after = after._move(at, SaveStage.FLUSHING)
        return after, tuple(FlushJournal(key=at, records=()) for at in found)


class DoesNotFlush(CommitMachine):
    """Planted mistake: COMMIT does not wait for the journal."""

    def _vote(self, event: VoteCast) -> tuple[CommitMachine, tuple[Action, ...]]:
        after, actions = super()._vote(event)
        after, more = after._take_up_next()
        if after._is_at(event.vote.key, SaveStage.FLUSHING):
            return after._journal_durable(JournalDurable(key=event.vote.key))
        return after, (*actions, *more)


class LooksOnce(CommitMachine):
    """Planted mistake: looks for a newer claim before COMMIT only."""

    def _commit_written(self, event: CommitWritten) -> tuple[CommitMachine, tuple[Action, ...]]:
        after, _ = super()._commit_written(event)
        return after._claim_checked(ClaimChecked(key=event.key, newer=False))


class ForgetsPoints(CommitMachine):
    """Planted mistake: any parent will do, whatever was committed meanwhile."""

    def outdates(self, generation: int, parent: StateKey | None) -> bool:
        return False


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (OneVoteLess, "COMMIT without all votes"),
        (DiscardsAtOnce, "files deleted under rank 1"),
        (WaitsForTheDead, "a save waits for ever"),
        (TakesUpAll, "two saves are committed at once"),
        (DoesNotFlush, "COMMIT before the journal is durable"),
        (LooksOnce, "acknowledged without looking for a newer claim after COMMIT"),
        (ForgetsPoints, "a generation left out an acknowledged point"),
    ],
)
def test_the_search_catches_a_planted_mistake(machine, reason) -> None:
    assert search(machine, ONE_GENERATION, stop_at_first=True)[1] == {reason}
