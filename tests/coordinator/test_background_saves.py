"""Every interleaving of saves that members write while they train on, leave, join anew and die: the real
commit machine, told by the real `RankHistory` who has left.

Two members, two generations (in the chaos tests three), a save in each of the first two; the second member
may fail to write, be left out, and die. Storage answers at once: what may come between its answers is
searched in `tests/checkpoint/test_commit_search.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest

from orchestrator.checkpoint.commit.commit_events import (
    Acknowledge,
    Action,
    DiscardSave,
    Event,
    GenerationFormed,
    GiveUp,
    PartFailed,
    Tick,
    VoteCast,
    VoterGone,
    WriteCommit,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.coordinator.machine.launch_history import RankHistory
from orchestrator.records.steps import StateKey
from tests.checkpoint.commit_machines import vote
from tests.checkpoint.quick_storage import tell_machine
from tests.checkpoint.samples import key

MEMBERS = ("a", "b")
DUE = {1: key(10), 2: key(25, generation=2)}  # the save of a generation
PARENTS = {2: (key(5), key(12)), 3: (key(5), key(25, generation=2))}
LIMIT = 200_000
WRITES, VOTES, REPORTS, WAITS = "writes", "its vote is under way", "its report is under way", "waits"


@dataclass(frozen=True)
class Member:
    """`at` is the generation it is in (0: it has joined and waits), `save` the one undecided save it has."""

    at: int = 1
    save: StateKey | None = None
    phase: str = ""
    alive: bool = True
    left_out: bool = False

    @property
    def free(self) -> Member:
        return replace(self, save=None, phase="")


@dataclass(frozen=True)
class World:
    machine: CommitMachine
    places: RankHistory
    members: tuple[Member, ...] = (Member(), Member())
    ranks: tuple[tuple[int, tuple[int, ...]], ...] = ((1, (0, 1)),)  # of each generation, by member; -1: none
    begun: frozenset[StateKey] = frozenset()
    timed_out: bool = False
    wrong: str = ""

    @property
    def generation(self) -> int:
        return self.ranks[-1][0]

    def rank(self, generation: int, who: int) -> int:
        return dict(self.ranks)[generation][who]

    def with_member(self, who: int, member: Member) -> World:
        members = tuple(member if number == who else each for number, each in enumerate(self.members))
        return replace(self, members=members)

    @property
    def identity(self) -> tuple[object, ...]:
        m = self.machine
        return (
            self.members,
            self.ranks,
            self.begun,
            self.timed_out,
            self.wrong,
            tuple(sorted((s.key, s.stage.name, s.voted, s.failed) for s in m.saves.values())),
            tuple(m.outcomes.items()),
            tuple(m.discarding.items()),
            tuple(
                (g, d.silent, d.quiet, *d.owed.items(), *d.writing.items()) for g, d in m.departures.items()
            ),
            tuple(m.parents.values()),
            tuple((name, *places.items()) for name, places in self.places._of.items()),
        )


def tell(world: World, *events: Event) -> World:
    """Gives the machine the events, each with all that follows from it."""
    return tell_machine(
        world, events, lambda now: now.machine, lambda now, machine: replace(now, machine=machine), perform
    )


def perform(world: World, action: Action) -> World:
    match action:
        case WriteCommit():
            older = any(at < action.key for at in world.machine.saves)
            wrong = "COMMIT while an older save is undecided" if older else ""
            return replace(world, wrong=world.wrong or wrong)
        case Acknowledge() | GiveUp():
            for who, member in enumerate(world.members):
                mine = member.save == action.key and world.rank(action.key.generation, who) in action.ranks
                if mine and member.phase == WAITS:
                    world = world.with_member(who, member.free)
        case DiscardSave():
            writers = [m for m in world.members if m.alive and m.phase == WRITES and m.save is not None]
            under = [m for m in writers if m.save and m.save.point_name == action.name]
            wrong = "files deleted under a writer" if under else ""
            return replace(world, wrong=world.wrong or wrong)
    return world


def join(world: World, who: int) -> World:
    member = replace(world.members[who], at=0, left_out=False)
    world = replace(world.with_member(who, member), places=(places := deepcopy(world.places)))
    return tell(world, *places.joined(MEMBERS[who], member.save))


def lose(world: World, who: int, dies: bool) -> World:
    changed = replace(world.members[who], alive=not dies, left_out=not dies)
    return tell(world.with_member(who, changed), *world.places.lost(MEMBERS[who], writing=not dies))


def begin(world: World) -> Iterator[World]:
    """A save is due at a step boundary: all in the group begin it, or one loses the summary and leaves."""
    due = DUE.get(world.generation)
    inside = [who for who, m in enumerate(world.members) if m.alive and m.at == world.generation]
    placed = sum(rank >= 0 for rank in world.ranks[-1][1])
    if due is None or due in world.begun or len(inside) < placed:
        return
    if any(world.members[who].save for who in inside):
        return  # put off until that is decided
    for late in (None, *inside):
        after = replace(world, begun=world.begun | {due})
        for who in inside:
            if who != late:
                after = after.with_member(who, replace(after.members[who], save=due, phase=WRITES))
        yield after if late is None else join(after, late)


def form(world: World) -> Iterator[World]:
    """The next generation, of all who wait; ranks are others than before."""
    new = world.generation + 1
    waits = [who for who, m in enumerate(world.members) if m.alive and m.at == 0]
    missing = [m for m in world.members if m.alive and m.at and not m.left_out]
    if not waits or missing:
        return
    ranks = tuple(waits[::-1].index(who) if who in waits else -1 for who in range(len(MEMBERS)))
    for parent in PARENTS[new]:
        if parent.generation in dict(world.ranks) and not world.machine.outdates(new, parent):
            after = replace(world, ranks=(*world.ranks, (new, ranks)), places=deepcopy(world.places))
            for who in waits:
                after = after.with_member(who, replace(after.members[who], at=new))
            after = tell(after, GenerationFormed(generation=new, parent=parent))
            for who in waits:
                after.places.answered(MEMBERS[who], new, ranks[who])
            yield after


def saves(world: World, who: int) -> Iterator[World]:
    """What becomes of the save of one member."""
    member = world.members[who]
    at = member.save
    if not member.alive or at is None:
        return
    rank, size = world.rank(at.generation, who), sum(r >= 0 for r in dict(world.ranks)[at.generation])
    match member.phase:
        case "writes":
            yield world.with_member(who, replace(member, phase=VOTES))
            if who == 1:
                yield world.with_member(who, replace(member, phase=REPORTS))
        case "its vote is under way":
            waits = world.with_member(who, replace(member, phase=WAITS))
            yield tell(waits, VoteCast(vote=vote(at, rank, size), now_s=0.0))
        case "its report is under way":
            failed = PartFailed(key=at, rank=rank, world_size=size, reason="disk", now_s=0.0)
            yield tell(world.with_member(who, member.free), failed)


def moves(world: World, generations: int) -> Iterator[World]:
    """Everything that may happen next."""
    yield from begin(world)
    if world.generation < generations:
        yield from form(world)
    for who, member in enumerate(world.members):
        yield from saves(world, who)
        if member.alive and member.at:
            yield join(world, who)
    last = world.members[1]
    if last.alive:
        yield lose(world, 1, dies=True)
        if last.at and not last.left_out:
            yield lose(world, 1, dies=False)
    if not world.timed_out and world.machine.saves:
        yield tell(replace(world, timed_out=True), Tick(now_s=1e6))


def stuck(world: World) -> str:
    """What waits although nobody is left who could change it."""
    settled = [m for m in world.members if not m.alive or (not m.save and not m.left_out)]
    waiting = [m for m in world.members if m.alive and m.phase == WAITS]
    owing = [m for m in world.members if m.alive and m.phase and m.phase != WAITS]
    if (
        waiting
        and not owing
        and all(m.at != waiting[0].save.generation for m in world.members if m.save is None)
    ):
        return "a save waits for ever"
    left = world.machine.discarding and len(settled) == len(world.members)
    inside = [
        m for m in world.members if m.alive and any(m.at == at.generation for at in world.machine.discarding)
    ]
    return "files stay for ever" if left and not inside else ""


def search(
    machine: type[CommitMachine], places: type[RankHistory], generations: int, stop_at_first: bool
) -> tuple[int, set[str]]:
    """The number of states, and what went wrong in any of them."""
    there = places(1)
    for rank, name in enumerate(MEMBERS):
        there.answered(name, 1, rank)
    made = World(machine=machine(attempt=1, kept=KeptPoints(keep_latest=3), vote_limit_s=60), places=there)
    first = tell(made, GenerationFormed(generation=1, parent=None))
    seen, queue, wrong = {first.identity}, deque([first]), set()
    while queue and not (wrong and stop_at_first):
        world = queue.popleft()
        if problem := world.wrong or stuck(world):
            wrong.add(problem)
            continue
        for after in moves(world, generations):
            if after.identity not in seen:
                seen.add(after.identity)
                queue.append(after)
        assert len(seen) < LIMIT, f"the search must end: {wrong}"
    return len(seen), wrong


@pytest.mark.parametrize("generations", [2, pytest.param(3, marks=pytest.mark.chaos)])
def test_no_interleaving_deletes_files_under_a_writer_or_lets_a_save_wait_for_ever(generations: int) -> None:
    states, wrong = search(CommitMachine, RankHistory, generations, stop_at_first=False)
    assert wrong == set()
    assert states > 1000, "the search must be one"


class ForgetsOlderPlaces(RankHistory):
    """A loss is reported for the member's newest generation, not for an older one whose vote it owes."""

    def lost(self, member: str, writing: bool) -> list[VoterGone]:
        return super().lost(member, writing)[-1:]


class TakesAJoinForSettled(RankHistory):
    """What a member says when it joins is not heard: it counts as done with its save."""

    def joined(self, member: str, saving: StateKey | None) -> list[VoterGone]:
        return [replace(gone, saving=None) for gone in super().joined(member, saving)]


class TakesTheSilentForQuiet(RankHistory):
    """A member that is left out is taken to have stopped writing."""

    def lost(self, member: str, writing: bool) -> list[VoterGone]:
        return super().lost(member, writing=False)


class TakesAJoinForQuiet(CommitMachine):
    """A vote is waited for after a join, and yet the member is taken to write no more."""

    def _voter_gone(self, event: VoterGone) -> tuple[CommitMachine, tuple[Action, ...]]:
        after, actions = super()._voter_gone(event)
        return replace(
            after, departures={g: replace(d, writing={}) for g, d in after.departures.items()}
        ), actions


class DiscardsAtTheLimit(CommitMachine):
    """A save that has waited for too long is taken to be written by nobody."""

    def _tick(self, event: Tick) -> tuple[CommitMachine, tuple[Action, ...]]:
        after, actions = super()._tick(event)
        names = tuple(DiscardSave(name=at.point_name) for at in after.discarding)
        return replace(after, discarding={}), (*names, *actions)


class HearsNoReports(CommitMachine):
    """Who reports that it failed after the save was given up is not heard."""

    def _part_failed(self, event: PartFailed) -> tuple[CommitMachine, tuple[Action, ...]]:
        return (self, ()) if event.key in self.outcomes else super()._part_failed(event)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (ForgetsOlderPlaces, "files stay for ever"),
        (TakesAJoinForSettled, "files deleted under a writer"),
        (TakesTheSilentForQuiet, "files deleted under a writer"),
        (TakesAJoinForQuiet, "files deleted under a writer"),
        (DiscardsAtTheLimit, "files deleted under a writer"),
        (HearsNoReports, "files stay for ever"),
    ],
)
def test_the_search_catches_a_planted_mistake(wrong: type, reason: str) -> None:
    machine = wrong if issubclass(wrong, CommitMachine) else CommitMachine
    places = wrong if issubclass(wrong, RankHistory) else RankHistory
    assert search(machine, places, 2, stop_at_first=True)[1] == {reason}
