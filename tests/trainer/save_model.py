"""A model of a group that saves while it trains, around the real `SaveSlot`, `SaveTriggers`,
`CommitMachine` and `RankHistory`, and a search over all interleavings.

What members hold is modelled as in `tests/elastic/group_model.py`: a state is the tuple of the generations
that trained its steps. A staging buffer and a part in storage hold such a state too, or TORN if it was
written to while it was read. Storage answers the commit machine at once
(`tests/checkpoint/test_commit_search.py` has what may come in between); who trains, and from which state, is
chosen by the model in every way that the rendezvous may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from orchestrator.checkpoint.commit.commit_events import (
    Acknowledge,
    Action,
    DiscardSave,
    Event,
    GenerationFormed,
    GiveUp,
    PartFailed,
    PartGrows,
    Tick,
    VoteCast,
    VoterGone,
    WriteCommit,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.coordinator.machine.launch_history import RankHistory
from orchestrator.records.membership import ControlRequests
from orchestrator.records.steps import StateKey
from orchestrator.trainer.saving import save_machines
from orchestrator.trainer.saving.save_machines import (
    REFORM,
    SAVE,
    STOP,
    Answered,
    Begin,
    CallOff,
    SaveSlot,
    SaveTriggers,
    Staged,
    Stopped,
    Written,
    asked_for,
    carried_out,
)
from tests.checkpoint.commit_machines import vote
from tests.checkpoint.quick_storage import tell_machine

State = tuple[int, ...]  # which generation trained each step
TORN: State = (-1,)

# what a member does: trains, waits for the last save, knows that its generation is over, waits for the next,
# has left with its state committed, is dead
IN, LEAVING, OUT, WAITS, DONE, DEAD = "in", "leaving", "out", "waits", "done", "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The bounds of the search, and the wrong versions that do not lie in the machines themselves."""

    steps: int = 3
    generations: int = 2
    faults: int = 1  # deaths, writes that fail, generations that end by themselves
    requests: int = 1
    stops: bool = True
    every_steps: int = 1
    slot: type[SaveSlot] = SaveSlot
    progress: bool = False  # members say that their parts grow, and what stands still is given up
    carried_out: Callable[[int, int], int] = carried_out
    step_waits: bool = True  # False: a step is applied while the state is copied
    join_frees: bool = False  # True: who joins forgets its save


class Member(NamedTuple):
    """One of two processes, its staging buffer and its writer.

    `heard` is the control of a summary whose step it has not applied yet (-1: none). `buffer` is what lies in
    the staging buffer, `writes` what the writer reads of it and for which save; `sent` is the vote (True) or
    report (False) that is on its way, `answer` what is on its way back.
    """

    life: str = IN
    name: str = ""
    state: State | None = ()
    key: StateKey | None = None
    heard: int = -1
    slot: SaveSlot = SaveSlot()
    buffer: State = ()
    writes: tuple[StateKey, State] | None = None
    sent: tuple[StateKey, bool] | None = None
    answer: tuple[StateKey, bool] | None = None
    saved: StateKey | None = None  # the newest save that it has begun
    committed: bool = False
    triggers: SaveTriggers = SaveTriggers(every_steps=1, every_minutes=None, since_s=0.0)


class World(NamedTuple):
    """All there is. `ranks` are, of each generation, the members by rank; `truth` the state of each save that
    was begun; `parts` what lies in storage for (save, rank)."""

    members: tuple[Member, ...]
    machine: CommitMachine
    places: RankHistory
    ranks: tuple[tuple[int, ...], ...]
    truth: tuple[tuple[StateKey, State], ...] = ()
    parts: frozenset[tuple[StateKey, int, State]] = frozenset()
    committed: frozenset[StateKey] = frozenset()
    discarded: frozenset[str] = frozenset()
    faults: int = 0
    requests: int = 0
    asked: bool = False
    stop: bool = False

    @property
    def generation(self) -> int:
        return len(self.ranks)

    def put(self, who: int, member: Member) -> World:
        return self._replace(members=(*self.members[:who], member, *self.members[who + 1 :]))

    def rank(self, key: StateKey, who: int) -> int:
        return self.ranks[key.generation - 1].index(who)


class Broken(Exception):
    """A rule does not hold; the text says which."""


class Result(NamedTuple):
    """The rule that broke and the events that lead there (empty: none), and how many states were seen."""

    broken: str
    trace: tuple[str, ...]
    states: int


def search(rules: Rules, limit: int = 3_000_000) -> Result:
    """Visits every state within the bounds, breadth first, so that a trace found is a shortest one."""
    start = first_world(rules)
    came: dict[int, tuple[int, str] | None] = {identity(start): None}
    todo = deque([(identity(start), start)])
    while todo:
        known, world = todo.popleft()
        event, quiet = "", True
        try:
            for event, act in events(world, rules):
                after = act()
                quiet = False
                key = identity(after)
                if key not in came:
                    came[key] = (known, event)
                    todo.append((key, after))
            if quiet:
                event = "nothing more happens"
                check_end(world, rules)
        except (Broken, AssertionError) as broken:
            trace = [event]
            while (step := came[known]) is not None:
                known = step[0]
                trace.append(step[1])
            return Result(str(broken), tuple(reversed(trace)), len(came))
        assert len(came) < limit, f"more than {limit} states within {rules}"
    return Result("", (), len(came))


def first_world(rules: Rules) -> World:
    """Two members begin generation 1 from nothing."""
    places = RankHistory(1)
    machine, _ = CommitMachine(attempt=1, kept=KeptPoints(keep_latest=9), vote_limit_s=60).on(
        GenerationFormed(generation=1, parent=None)
    )
    members = []
    triggers = SaveTriggers(every_steps=rules.every_steps, every_minutes=None, since_s=0.0)
    for rank in (0, 1):
        places.answered(f"m{rank}", 1, rank)
        members.append(Member(name=f"m{rank}", key=_key(1, 0), slot=rules.slot(), triggers=triggers))
    return World(tuple(members), machine, places, ((0, 1),), faults=rules.faults, requests=rules.requests)


def _key(generation: int, step: int) -> StateKey:
    return StateKey(attempt=1, generation=generation, step=step)


def identity(world: World) -> int:
    """Equal for worlds that differ in nothing (64 bits)."""
    m = world.machine
    return hash(
        (
            world.members,
            world.ranks,
            world.truth,
            world.parts,
            world.committed,
            world.discarded,
            *(world.faults, world.requests, world.asked, world.stop),
            tuple((k, s.stage, s.voted, s.failed) for k, s in m.saves.items()),
            tuple(m.outcomes.items()),
            tuple(m.discarding.items()),
            tuple(
                (g, d.silent, d.quiet, *d.owed.items(), *d.writing.items()) for g, d in m.departures.items()
            ),
            tuple((name, *places.items()) for name, places in world.places._of.items()),
        )
    )


# ---- the coordinator
def tell(world: World, *events: Event) -> World:
    """Gives the commit machine the events, each with all that follows from it."""
    return tell_machine(
        world, events, lambda now: now.machine, lambda now, machine: now._replace(machine=machine), perform
    )


def perform(world: World, action: Action) -> World:
    """Storage, and the way back to the voters."""
    match action:
        case WriteCommit():
            state = dict(world.truth)[action.key]
            ranks = world.ranks[action.key.generation - 1]
            for rank in range(len(ranks)):
                if (action.key, rank, state) not in world.parts:
                    raise Broken("a COMMIT over a part that is missing, torn, or of another step")
            return world._replace(committed=world.committed | {action.key})
        case Acknowledge() | GiveUp():
            for rank in action.ranks:
                who = world.ranks[action.key.generation - 1][rank]
                member = world.members[who]
                if member.slot.key == action.key and member.sent is None and member.life != DEAD:
                    answer = (action.key, isinstance(action, Acknowledge))
                    world = world.put(who, member._replace(answer=answer))
            if isinstance(action, GiveUp) and action.by_storage and not action.late:
                world = world._replace(asked=True)  # the coordinator asks for another one, after a while
        case DiscardSave():
            if any(m.writes and m.writes[0].point_name == action.name for m in world.members):
                raise Broken("files are deleted under a writer")
            parts = frozenset(part for part in world.parts if part[0].point_name != action.name)
            return world._replace(discarded=world.discarded | {action.name}, parts=parts)
    return world


# ---- a member's save
def on(world: World, who: int, event: save_machines.Event) -> World:
    """Gives a slot an event and carries out what it answers."""
    slot, actions = world.members[who].slot.on(event)
    world = world.put(who, world.members[who]._replace(slot=slot))
    for action in actions:
        world = carry_out(world, who, action)
    return world


def carry_out(world: World, who: int, action: save_machines.Action) -> World:
    member = world.members[who]
    match action:
        case save_machines.Copy():
            assert member.state is not None, "who saves holds a state"
            if member.sent or member.answer:
                raise Broken("a save is begun while another one is undecided")
            if member.writes:
                raise Broken("the staging buffer is written to while it is read")
            truth = dict(world.truth).setdefault(action.key, member.state)
            assert truth == member.state, "all ranks save one state"
            world = world._replace(truth=tuple({**dict(world.truth), action.key: truth}.items()))
            return world.put(who, member._replace(buffer=member.state, saved=action.key))
        case save_machines.Write():
            if action.key.point_name in world.discarded:
                raise Broken("a part is written into a save whose files were deleted")
            return world.put(who, member._replace(writes=(action.key, member.buffer)))
        case save_machines.CastVote():
            return world.put(who, member._replace(sent=(action.key, True)))
        case save_machines.Report():
            return world.put(who, member._replace(sent=(action.key, False)))
        case save_machines.StopWriting():
            return world
    return world


def of_the_save(world: World, who: int, rules: Rules) -> Iterator[tuple[str, Callable[[], World]]]:
    """What may happen to one member's save."""
    member, slot = world.members[who], world.members[who].slot
    key, name = slot.key, world.members[who].name
    if slot.copies and key is not None:
        yield f"{name} has staged {key.step}", lambda: applied(on(world, who, Staged(key=key)), who)
    if member.writes is not None:
        at, state = member.writes
        if rules.progress:
            size, rank = len(world.ranks[at.generation - 1]), world.rank(at, who)
            says = PartGrows(key=at, rank=rank, world_size=size, moved=True, now_s=0.0)
            yield f"{name} says that it writes {at.step}", lambda: tell(world, says)
        rest = member._replace(writes=None)
        part = (at, world.rank(at, who), state)
        done = world._replace(parts=world.parts | {part}).put(who, rest)
        yield f"{name} has written {at.step}", lambda: on(done, who, Written(key=at))
        if slot.called_off:
            yield (
                f"{name} stops writing {at.step}",
                lambda: on(world.put(who, rest), who, Stopped(key=at, reason="stopped")),
            )
        elif world.faults:
            failed = world._replace(faults=world.faults - 1).put(who, rest)
            yield f"{name} cannot write {at.step}", lambda: on(failed, who, Stopped(key=at, reason="disk"))
    undecided = slot.copies or member.writes is not None
    size = len(world.ranks[key.generation - 1]) if key is not None else 0
    if key and undecided and not slot.called_off and world.machine.is_hopeless(key, size):
        yield (
            f"{name} hears that {key.step} is given up",
            lambda: on(world, who, CallOff(key=key, reason="given up")),
        )
    if member.sent is not None:
        at, voted = member.sent
        what = "vote" if voted else "report"
        yield f"the {what} of {name} for {at.step} comes", lambda: came(world, who, at, voted)
    if member.answer is not None:
        at, committed = member.answer
        yield f"{name} hears {committed} for {at.step}", lambda: answered(world, who, at, committed)


def came(world: World, who: int, key: StateKey, voted: bool) -> World:
    """A vote or a report reaches the coordinator; what was asked for as a save has begun."""
    world = world.put(who, world.members[who]._replace(sent=None))._replace(asked=False)
    rank, size = world.rank(key, who), len(world.ranks[key.generation - 1])
    if voted:
        return tell(world, VoteCast(vote=vote(key, rank, size), now_s=0.0))
    failed = PartFailed(key=key, rank=rank, world_size=size, reason="disk", now_s=0.0)
    world = world.put(who, world.members[who]._replace(answer=(key, False)))
    return tell(world, failed)


def answered(world: World, who: int, key: StateKey, committed: bool) -> World:
    """The answer reaches the member."""
    member = world.members[who]
    known = member.committed or (committed and member.key == key)
    return on(world.put(who, member._replace(answer=None, committed=known)), who, Answered(key=key))


# ---- a step
def of_the_group(world: World, rules: Rules) -> Iterator[tuple[str, Callable[[], World]]]:
    """A step of the running generation, its end, and the last save."""
    group = world.ranks[-1]
    members = [world.members[who] for who in group]
    lives = {m.life for m in members}
    if lives & {IN, LEAVING} and world.faults:
        yield "the generation ends", lambda: ended(world._replace(faults=world.faults - 1))
    if lives == {IN} and all(m.heard < 0 for m in members):
        yield from summaries(world, rules, group)
    if lives <= {LEAVING, DONE} and LEAVING in lives:
        yield from last_save(world, group)


def summaries(
    world: World, rules: Rules, group: tuple[int, ...]
) -> Iterator[tuple[str, Callable[[], World]]]:
    first = world.members[group[0]]
    assert first.key is not None, "who trains holds a state"
    step = first.key.step + 1
    if step > rules.steps:
        yield "the data end", lambda: leaving(world, group)
        return
    busy = sum(not world.members[who].slot.is_free for who in group)
    reform = any(m.life == WAITS for m in world.members) and not world.stop
    wanted = ControlRequests(
        ended=False, save=world.asked, stop=world.stop, reform=reform, resize=reform, acknowledged_step=0
    )
    asked = partial(asked_for, wanted, due=first.triggers.due(step, 0.0), is_free=first.slot.is_free)
    # how many were busy at the step before is one of these
    for obeyed in sorted({rules.carried_out(asked(num_busy=known), busy) for known in range(len(group) + 1)}):
        did = f"{obeyed} of step {step}"
        yield f"the summary with {did} reaches all", partial(heard, world, group, obeyed, rules)
        if world.faults and len(group) > 1:
            less = world._replace(faults=world.faults - 1)
            for who in group:
                one = world.members[who].name
                yield f"the summary with {did} reaches {one} alone", partial(alone, less, who, obeyed, rules)


def alone(world: World, who: int, control: int, rules: Rules) -> World:
    """One rank has the summary, and the generation is over."""
    return ended(heard(world, (who,), control, rules))


def heard(world: World, who_heard: tuple[int, ...], control: int, rules: Rules) -> World:
    """Who has the summary applies the step, as soon as nothing is copied any more."""
    for who in who_heard:
        world = world.put(who, world.members[who]._replace(heard=control))
        world = applied(world, who, waits=rules.step_waits)
    return world


def applied(world: World, who: int, waits: bool = True) -> World:
    """The step that a member has the summary of is applied, unless its state is being copied; and what the
    summary asks for is done."""
    member = world.members[who]
    if member.heard < 0 or (waits and member.slot.copies):
        return world
    assert member.key is not None, "who trains holds a state"
    key = _key(member.key.generation, member.key.step + 1)
    if member.slot.copies:
        member = member._replace(buffer=TORN)
    control = member.heard
    state = (*(member.state or ()), key.generation)
    member = member._replace(heard=-1, key=key, state=state, committed=False)
    if control & SAVE:
        member = member._replace(triggers=member.triggers.begun(key.step, 0.0))
    world = world.put(who, member)
    if control & SAVE:
        world = on(world, who, Begin(key=key))
    if member.life == IN and control & STOP:
        return leaving(world, (who,))
    if member.life == IN and control & REFORM:
        return world.put(who, world.members[who]._replace(life=OUT))
    return world


def leaving(world: World, group: tuple[int, ...]) -> World:
    """The run stops for these; a save of an older state comes to its end first."""
    for who in group:
        world = world.put(who, world.members[who]._replace(life=LEAVING))
    return world


def last_save(world: World, group: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], World]]]:
    """All are free or save their last state; then they save it, and leave when it is committed."""
    members = [world.members[who] for who in group]
    here = [(who, m) for who, m in zip(group, members, strict=True) if m.life == LEAVING]
    fresh = [(who, m) for who, m in here if not m.committed and m.saved != m.key]
    if fresh and len(fresh) == len(group) and all(m.slot.is_free for _, m in here):

        def begin() -> World:
            after = world
            for who, m in fresh:
                assert m.key is not None, "who leaves holds a state"
                after = on(after, who, Begin(key=m.key))
            return after

        yield "the last save begins", begin
        return
    if fresh:
        return
    for who, m in here:
        if m.slot.is_free and m.committed:
            yield f"{m.name} leaves", partial(world.put, who, m._replace(life=DONE))
    if all(m.slot.is_free for _, m in here) and any(not m.committed for _, m in here):
        yield "the last save was given up", lambda: ended(world)


def ended(world: World) -> World:
    """The generation is over for who is in it. A step whose summary was heard is applied before the join."""
    for who, member in enumerate(world.members):
        if member.life in (IN, LEAVING):
            world = world.put(who, member._replace(life=OUT))
    return world


# ---- members
def of_a_member(world: World, who: int, rules: Rules) -> Iterator[tuple[str, Callable[[], World]]]:
    """It joins, dies, or is started anew."""
    member = world.members[who]
    if member.life == OUT and not member.slot.copies:
        yield f"{member.name} joins", lambda: joined(world, who, rules)
    if member.life == DEAD and not any(m.life == DONE for m in world.members):
        fresh = Member(
            life=WAITS, name=f"{member.name}'", state=None, slot=rules.slot(), triggers=member.triggers
        )
        yield f"{fresh.name} is started", lambda: world.put(who, fresh)
    if world.faults and member.life not in (DEAD, DONE):

        def die() -> World:
            after = world._replace(faults=world.faults - 1, places=deepcopy(world.places))
            after = after.put(who, Member(life=DEAD, name=member.name, state=None))
            if who in after.ranks[-1] and member.life in (IN, LEAVING):
                after = ended(after)
            return tell(after, *after.places.lost(member.name, writing=False))

        yield f"{member.name} dies", die


def joined(world: World, who: int, rules: Rules) -> World:
    member = world.members[who]._replace(life=WAITS, heard=-1)
    if rules.join_frees:
        member = member._replace(slot=rules.slot(), sent=None, answer=None)
    places = deepcopy(world.places)
    gone: list[VoterGone] = places.joined(member.name, member.slot.key)
    return tell(world.put(who, member)._replace(places=places), *gone)


def forming(world: World, rules: Rules) -> Iterator[tuple[str, Callable[[], World]]]:
    """All that live have come: a generation goes on from the newest state that one of them holds, or from the
    newest point."""
    here = [who for who, m in enumerate(world.members) if m.life == WAITS]
    if not here or any(m.life in (IN, LEAVING, OUT, DONE) for m in world.members):
        return
    if world.generation == rules.generations:
        return
    held = max((m.key for m in world.members if m.life == WAITS and m.key is not None), default=None)
    point = max(world.committed, default=None)
    states = {m.key: m.state for m in world.members if m.life == WAITS} | dict(world.truth)
    number = world.generation + 1
    for parent in dict.fromkeys([held if held is not None else point, point]):
        if world.machine.outdates(number, parent) or (parent is None and held is not None):
            continue
        yield (
            f"generation {number} of {here} from {parent and parent.point_name}",
            partial(formed, world, here, parent, states.get(parent) or ()),
        )


def formed(world: World, here: list[int], parent: StateKey | None, state: State) -> World:
    number, step = world.generation + 1, len(state)
    places = deepcopy(world.places)
    world = tell(world, GenerationFormed(generation=number, parent=parent))
    for rank, who in enumerate(here):
        member = world.members[who]
        places.answered(member.name, number, rank)
        if member.slot.copies:
            raise Broken("the state is replaced while it is copied")
        after = member._replace(
            life=IN,
            key=_key(number, step),
            state=state,
            committed=parent in world.committed,
            triggers=member.triggers.formed(step),
        )
        world = world.put(who, after)
    return world._replace(places=places, ranks=(*world.ranks, tuple(here)))


# ---- all of it
def events(world: World, rules: Rules) -> Iterator[tuple[str, Callable[[], World]]]:
    """Every event that is possible now, and how it changes the world."""
    yield from of_the_group(world, rules)
    for who in range(len(world.members)):
        yield from of_the_save(world, who, rules)
        yield from of_a_member(world, who, rules)
    yield from forming(world, rules)
    if rules.progress and world.faults and any(not s.is_complete for s in world.machine.saves.values()):
        still = world._replace(faults=world.faults - 1)
        yield "a save stands still for too long", lambda: tell(still, Tick(now_s=61.0))
    trains = any(m.life == IN for m in world.members)
    if world.requests and not world.asked and trains:
        yield "a save is asked for", lambda: world._replace(requests=world.requests - 1, asked=True)
    if rules.stops and not world.stop and trains:
        yield "a stop is asked for", lambda: world._replace(stop=True)


def check_end(world: World, rules: Rules) -> None:
    """Nothing can happen any more: nobody may be left waiting for something."""
    machine = world.machine
    living = [m for m in world.members if m.life != DEAD]
    over = world.generation == rules.generations  # where the search ends, not the run
    if machine.saves:
        raise Broken("a save is undecided for ever")
    if machine.discarding:
        raise Broken("files stay for ever")
    if any(not m.slot.is_free for m in living if m.life != DONE):
        raise Broken("a member waits for its save for ever")
    stuck = [m for m in living if m.life not in (DONE, WAITS) or (m.life == WAITS and not over)]
    done = any(m.life == DONE for m in living)
    if stuck and not (done and all(m.life == WAITS for m in stuck)):
        raise Broken(f"{stuck[0].name} waits for ever ({stuck[0].life})")
    for member in living:
        if member.life == DONE and member.key not in world.committed:
            parent = world.machine.parents.get(member.key.generation) if member.key else None
            if parent not in world.committed:
                raise Broken("a member left, and its last state is in no point")
