"""A model of members, network, journal and points around the real `Rendezvous`, and a search over all their
interleavings.

What members do is modelled by the identity of their weights: the tuple of the generations that trained each
step. With fast numerics another generation gives other bits, so two histories are equal only if they are the
same history. It follows lab/model_generations.py, but every decision about who trains, and from which state,
is made by the class under test.

With `sharded` every member of a generation holds a shard of its own, and after every step that finds the last
one sealed the group makes a memory point, of which each member has a copy and its neighbour another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import NamedTuple

from orchestrator.elastic.formation import (
    Action,
    Form,
    Formation,
    GroupSize,
    JoinAnswer,
    LeaveOut,
    RendezvousSettings,
    StopRun,
)
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.records.membership import GenerationView, HeldShard, JoinRequest, Source
from orchestrator.records.steps import StateKey
from tests.elastic.shared_rendezvous import SharedRendezvous, shared

Identity = tuple[int, int]  # (attempt, generation)
History = tuple[Identity, ...]  # which generation trained each step
Formed = tuple[Identity, StateKey | None, int]  # a generation, its parent, its first step
Records = frozenset[tuple[Identity, int]]  # a generation, a step that it trained
TORN: Identity = (-1, -1)
LONG = (1e3, 1e6, 1e9)  # each is longer after the one before than any time-out
STEP_LIMIT = 1e4  # how long a member says that it may still be in its step

# what a member does: trains in its generation, was thrown out of it, waits for an answer, is cut off, is
# dead, or knows that its generation is over and is still in a step
IN, OUT, WAITS, AWAY, DEAD, BUSY = "in", "out", "waits", "away", "dead", "busy"


class Copy(NamedTuple):
    """A shard of a memory point; see `HeldShard`."""

    key: StateKey
    history: History
    shard: int
    num_shards: int
    source: Source


class Received(NamedTuple):
    """What came when a generation agreed on its state; whether all have theirs was not heard."""

    key: StateKey
    history: History
    shard: tuple[int, int]


class Member(NamedTuple):
    """One of the processes; `slot` is its node. `leaves` is the generation it was answered last. `shard`:
    which of how many it trains. `unsaved`: as it says when it joins.
    """

    life: str
    name: str
    history: History | None
    key: StateKey | None
    prepared: bool
    leaves: Identity | None
    shard: tuple[int, int] = (0, 1)
    copies: tuple[Copy, ...] = ()
    unsaved: bool = False
    received: Received | None = None


class Point(NamedTuple):
    """A committed, or staged and voted, point."""

    key: StateKey
    history: History


class Journal:
    """The generations in the order in which they were formed. All worlds until the next one share it, so that
    what their states lead back to is looked up once.
    """

    def __init__(self, entries: tuple[Formed, ...] = ()) -> None:
        self.entries = entries
        self.table = {entry[0]: entry for entry in entries}
        self._found: dict[tuple[frozenset[Identity], Records], tuple[frozenset[Formed], Records]] = {}

    def back_from(self, ends: frozenset[Identity], records: Records) -> tuple[frozenset[Formed], Records]:
        """The entries that `ends` lead back to, and those of `records` that belong to them."""
        known = self._found.get((ends, records))
        if known is None:
            found: set[Identity] = set()
            for end in ends:
                at: Identity | None = end
                while at is not None and at not in found:
                    found.add(at)
                    parent = self.table[at][1]
                    at = None if parent is None else (parent.attempt, parent.generation)
            known = frozenset(self.table[i] for i in found), frozenset(r for r in records if r[0] in found)
            self._found[ends, records] = known
        return known


class World(NamedTuple):
    """Everything outside the rendezvous, and the rendezvous."""

    members: tuple[Member, ...]
    parents: Journal
    records: Records  # journal: step records
    points: frozenset[Point]  # without those that a newer one goes on from: who keeps that one keeps them
    pending: Point | None  # voted by all, COMMIT not written
    faults: int  # how many are left
    machine: SharedRendezvous
    stuck: bool = False  # those who train wait for a host that lost its power
    making: tuple[int, StateKey, History] | None = None  # the memory point under way, and how far it is
    keep: StateKey | None = None  # the memory point that those who train do not overwrite
    sealed: tuple[History, int] | None = None  # the newest that was sealed; members that were lost since


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The bounds of the search, and the wrong versions that do not lie in the rendezvous itself."""

    num_members: int = 3
    generations: int = 3
    steps: int = 2
    attempts: int = 2
    faults: int = 3
    min_workers: int = 1
    chained_parents: bool = True  # False: a generation supersedes every record at or after its first step
    receiver_is_blank: bool = True  # False: state is received over the old one
    gives_up: bool = True  # False: a voted save is committed whatever was formed meanwhile
    power_losses: bool = False  # True: hosts die, too, and close no connection
    hear_the_end: bool = True  # False: whoever waits for a host without power waits until its time is over
    sharded: bool = False
    cuts_off: bool = True  # members are cut off, too, and come back
    saves: bool = True
    last_saves: bool = False  # True: that of the last state is given up, again and again
    keeps: bool = True  # False: a new generation keeps no memory point until it has its own
    settings: RendezvousSettings = RendezvousSettings()
    machine: type[Rendezvous] = Rendezvous


class Broken(Exception):  # noqa: N818 - it is what the search looks for
    """A rule does not hold; the text says which."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a search found: the rule that broke and the events that lead there (empty: none), and how many
    states it saw.
    """

    broken: str
    trace: tuple[str, ...]
    states: int


def search(rules: Rules, limit: int = 1_000_000) -> Result:
    """Visits every state within the bounds, breadth first, so that a trace found is a shortest one."""
    start = first_world(rules)
    first, alike = identity_of(start)
    try:
        return _visited(start, first, alike, rules, limit)
    finally:
        start.machine.forget()


def _visited(start: World, first: int, alike: list[int], rules: Rules, limit: int) -> Result:
    came: dict[int, tuple[int, str] | None] = {first: None}
    todo: deque[tuple[int, World, list[int]]] = deque([(first, start, alike)])
    while todo:
        known, world, alike = todo.popleft()
        try:
            for event, after in events(world, rules, alike):
                key, alike_then = identity_of(after)
                if key not in came:
                    came[key] = (known, event)
                    todo.append((key, after, alike_then))
        except Broken as broken:
            return Result(str(broken.args[0]), (*trace(came, known), str(broken.args[1])), len(came))
        assert len(came) < limit, f"more than {limit} states within {rules}"
    return Result("", (), len(came))


def kinds(members: tuple[Member, ...], told: dict[str, int]) -> list[int]:
    """A number for each member, equal for members that differ in nothing but their names."""
    return [hash((*m[:1], *m[2:], told.get(m.name))) for m in members]


def reachable(world: World) -> tuple[frozenset[Formed], Records]:
    """The journal's entries that a state which still exists may ever lead back to; the others no longer
    matter.
    """
    keys = [m.key for m in world.members if m.key is not None] + [p.key for p in world.points]
    keys += [m.received.key for m in world.members if m.received is not None]
    if world.pending is not None:
        keys.append(world.pending.key)
    return world.parents.back_from(frozenset([(k.attempt, k.generation) for k in keys]), world.records)


def trace(came: dict[int, tuple[int, str] | None], at: int) -> tuple[str, ...]:
    """The events that lead to the state `at`."""
    events_so_far: list[str] = []
    step = came[at]
    while step is not None:
        events_so_far.append(step[1])
        step = came[step[0]]
    return tuple(reversed(events_so_far))


def identity_of(world: World) -> tuple[int, list[int]]:
    """A number that is equal for states that differ only in the names of the members (64 bits, so that a
    million states fit into memory), and the `kinds` of the members.
    """
    told, names = world.machine.told, [m.name for m in world.members]
    slots = kinds(world.members, told)
    identity = hash(
        (
            tuple(sorted(slots)),
            tuple(sorted([facts for name, facts in told.items() if name not in names])),
            world.machine.everyone,
            (
                len(world.parents.entries),
                *reachable(world),
                world.points,
                world.pending,
                world.faults,
                world.stuck,
                (world.making, world.keep, world.sealed),
            ),
        )
    )
    return identity, slots


def first_world(rules: Rules) -> World:
    """All members train in generation 1, from nothing."""
    machine = new_machine(rules, 1)
    members = tuple(
        Member(WAITS, f"m{i}.{rules.faults}", None, None, False, None) for i in range(rules.num_members)
    )
    for slot, member in enumerate(members):
        assert machine.join(request(slot, member), 0.0) is None, "a newcomer waits"
    (form,) = machine.tick(0.0)
    assert isinstance(form, Form), f"all have come: {form}"
    world = World(members, Journal(), frozenset(), frozenset(), None, rules.faults, shared(machine, {}))
    (only,) = (
        after for name, after in outcomes(world, form.formation, rules) if name.endswith("agreed by all")
    )
    return only


def new_machine(rules: Rules, attempt: int) -> Rendezvous:
    """The rendezvous of an attempt; what the older attempt journalled about its generation is not told (the
    harder case).
    """
    n = rules.num_members
    return rules.machine(
        attempt=attempt,
        launch="l",
        size=GroupSize(min_workers=rules.min_workers, max_workers=n, expected=n),
        settings=rules.settings,
    )


@cache
def next_step(key: StateKey) -> StateKey:
    """The key of the state one step after it, in the same generation."""
    return StateKey(attempt=key.attempt, generation=key.generation, step=key.step + 1)


def request(slot: int, member: Member) -> JoinRequest:
    """The join of a member as it is now."""
    prepared = None
    if member.prepared and member.key is not None:
        prepared = next_step(member.key)
    return JoinRequest(
        member=member.name,
        launch="l",
        actor_id=member.name,
        node_id=f"n{slot}",
        host="h",
        port=1,
        key=member.key,
        leaves=member.leaves,
        prepared=prepared,
        cursor=None,
        holdings=held_by(member) if member.shard[1] > 1 or member.copies or member.received else (),
        unsaved=member.unsaved,
    )


def held_by(member: Member) -> tuple[HeldShard, ...]:
    """All that a member can give."""
    held = [
        HeldShard(key=c.key, shard=c.shard, num_shards=c.num_shards, source=c.source) for c in member.copies
    ]
    if member.key is not None:
        shard, num = member.shard
        held.append(HeldShard(key=member.key, shard=shard, num_shards=num, source=Source.LIVE))
        if member.prepared:
            held.append(
                HeldShard(key=next_step(member.key), shard=shard, num_shards=num, source=Source.PREPARED)
            )
    if member.received is not None:
        shard, num = member.received.shard
        held.append(HeldShard(key=member.received.key, shard=shard, num_shards=num, source=Source.RECEIVED))
    return tuple(held)


# ---- what may happen
def events(world: World, rules: Rules, alike: list[int]) -> Iterator[tuple[str, World]]:
    """Every event that is possible now, and the world after it."""
    late = [i for i, m in enumerate(world.members) if m.life == OUT]
    if late and not world.faults:
        # nothing can happen to them, and no generation forms before they have come: the order does not matter
        yield joined(world, late[0])
        return
    yield from of_the_group(world, rules, alike)
    if world.pending is not None:
        yield "COMMIT", commit(world, world.pending)
    for slot, member in enumerate(world.members):
        if alike.index(alike[slot]) == slot:
            yield from of_a_member(world, slot, member, rules.cuts_off)
    yield from forming(world, rules)
    if world.faults and world.machine.attempt < rules.attempts:
        yield "coordinator restarts", restarted(world, rules)


def of_the_group(world: World, rules: Rules, alike: list[int]) -> Iterator[tuple[str, World]]:
    """A step of the running generation, or its end by what the coordinator wants of it."""
    inside = [i for i, m in enumerate(world.members) if m.life == IN]
    if not inside:
        return
    first = world.members[inside[0]]
    assert first.history is not None, "who trains holds a state"
    assert first.leaves is not None, "who trains was answered"
    machine = world.machine
    if any(m.life == WAITS for m in world.members):
        _, machine = ticked(machine, LONG[0])  # whoever waits has waited long enough to interrupt
    wanted = machine.control_requests(*first.leaves, 0)
    stepped = len(first.history) > world.parents.table[first.leaves][2]
    if wanted.reform and (stepped or not rules.last_saves):  # else sooner than any: a superset
        yield "all leave at the step boundary", thrown_out(world, inside)
    if world.stuck:
        yield from out_of_the_stuck(world, inside, wanted.ended and rules.hear_the_end)
        return
    if wanted.ended:
        yield "the generation is aborted", thrown_out(world, inside)
    if world.making is not None and world.making[0] < WHOLE:
        yield f"the memory point of step {len(world.making[2])} is further", further(world, inside)
    if rules.power_losses and world.faults and len(inside) > 1:
        yield from power_losses(world, inside, alike)
    if len(first.history) >= rules.steps:
        yield from last_saves(world, inside, alike, rules)
        return
    for applied in subsets(inside, alike):
        whole = len(applied) == len(inside)
        if not whole and not world.faults:
            continue
        after = summed_up(world, inside, applied)
        names = "all" if whole else str([world.members[i].name for i in applied])
        yield f"the summary of step {len(first.history)} reaches {names}", after
        # a restarted coordinator takes no vote of an older attempt's generation (rule 10)
        if rules.saves and whole and world.pending is None and first.leaves[0] == machine.attempt:
            trained = after.members[inside[0]]
            assert trained.key is not None, "who trained holds a state"
            assert trained.history is not None, "who trained holds a state"
            yield (
                f"step {len(first.history)} by all, who vote for a point",
                after._replace(pending=Point(trained.key, trained.history)),
            )


def last_saves(
    world: World, inside: list[int], alike: list[int], rules: Rules
) -> Iterator[tuple[str, World]]:
    """The save of the last state is given up. Some know it as that, the others only that their group ends."""
    for knowing in filter(None, subsets(inside, alike) if rules.last_saves else ()):
        after = thrown_out(world, inside)
        told = {i: after.members[i]._replace(unsaved=True) for i in knowing}
        names = [world.members[i].name for i in knowing]
        yield f"the last save is given up, as {names} say", of_members(after, told)


def power_losses(world: World, inside: list[int], alike: list[int]) -> Iterator[tuple[str, World]]:
    """One host loses its power, and is said to be dead. It closes no connection: the others wait for it, in
    the step's gradient, or some of them in its summary, which has reached the rest.
    """
    for victim in inside:
        if alike.index(alike[victim]) != victim:
            continue
        name = world.members[victim].name
        machine = without(world.machine, name)
        rest = [i for i in inside if i != victim]
        before = world._replace(machine=machine, faults=world.faults - 1, stuck=True)
        gone = Member(DEAD, "", None, None, False, None)
        yield f"{name} loses its power in a gradient", of_members(before, {victim: gone})
        for applied in subsets(rest, alike):
            members = {i: after_summary(world.members[i], i in applied) for i in rest}
            names = [world.members[i].name for i in applied]
            yield (
                f"{name} loses its power in a summary, which reaches {names}",
                of_members(before, {**members, victim: gone}),
            )


def out_of_the_stuck(world: World, inside: list[int], heard: bool) -> Iterator[tuple[str, World]]:
    """Who waits for a host without power is called off when its end is heard, or waits until its time is
    over; one of them may still compute then, and says so.
    """
    if not heard:
        yield "a collective's time is over", thrown_out(world, inside)
        return
    yield "the generation is called off", thrown_out(world, inside)
    for slot in inside:
        name, member = world.members[slot].name, world.members[slot]
        _, machine = world.machine.after(
            ("busy", name), lambda m, name=name: m.extend_deadline(name, STEP_LIMIT)
        )
        after = thrown_out(world, inside)._replace(machine=machine)
        yield (
            f"the generation is called off, {member.name} still computes and says so",
            of_members(after, {slot: member._replace(life=BUSY)}),
        )


def of_members(world: World, changed: dict[int, Member]) -> World:
    """The world with these members; nobody else notices."""
    return world._replace(members=tuple(changed.get(i, m) for i, m in enumerate(world.members)))


def after_summary(member: Member, applied: bool) -> Member:
    """A member that the summary of its step has reached, or that waits for it."""
    assert member.history is not None, "who trains holds a state"
    assert member.key is not None, "who trains holds a state"
    assert member.leaves is not None, "who trains was answered"
    if not applied:
        return member._replace(prepared=True)
    return member._replace(history=(*member.history, member.leaves), key=next_step(member.key))


def summed_up(world: World, inside: list[int], applied: tuple[int, ...]) -> World:
    """The summary of the next step reaches `applied`; the others entered it and keep their gradient."""
    members = list(world.members)
    for i in inside:
        members[i] = after_summary(members[i], i in applied)
    if world.making is not None and world.making[0] == WHOLE:
        # all had said so in what was summed up, whoever hears of it; who does begins the next one
        _, keep, history = world.making
        world = world._replace(sealed=(history, 0), making=None, keep=keep)
        for i in applied:
            members[i] = members[i]._replace(copies=kept(members[i], keep))
        trained = members[applied[0]] if len(applied) == len(inside) else None
        if trained is not None and trained.key is not None and trained.history is not None:
            world = world._replace(making=(0, trained.key, trained.history))
    if len(applied) == len(inside):
        trained = members[inside[0]]
        assert trained.leaves is not None, "who trains was answered"
        assert trained.history is not None, "who trains holds a state"
        # reported at once, unless the coordinator did not form the generation: then members bring it along
        reported = trained.leaves[0] == world.machine.attempt
        record = {(trained.leaves, len(trained.history) - 1)} if reported else set()
        return world._replace(members=tuple(members), records=world.records | record)
    after = world._replace(members=tuple(members), faults=world.faults - 1)
    return thrown_out(after, inside)


OWN, SOME, WHOLE = 1, 2, 3  # own copies are whole; a neighbour's copy; all


def further(world: World, inside: list[int]) -> World:
    """The copies of the memory point under way: those of the own shards, one of a neighbour, all others."""
    assert world.making is not None, "asked while one is under way"
    stage, key, history = world.making
    stage += 1
    members = list(world.members)
    for i in inside:
        shard, num = members[i].shard
        source = Source.STAGED if stage == OWN else Source.NEIGHBOUR
        given = shard if stage == OWN else (shard - 1) % num
        if (stage == SOME and shard != 0) or (stage == WHOLE and shard == 0):
            continue
        copy = Copy(key, history, given, num, source)
        members[i] = members[i]._replace(copies=(*members[i].copies, copy))
    return world._replace(members=tuple(members), making=(stage, key, history))


def kept(member: Member, keep: StateKey | None) -> tuple[Copy, ...]:
    """The copies that are left when the next memory point has begun to overwrite the others."""
    return tuple(copy for copy in member.copies if copy.key == keep)


def thrown_out(world: World, slots: list[int]) -> World:
    """These members' generation is over for them; they will join again."""
    members = tuple(m._replace(life=OUT) if i in slots else m for i, m in enumerate(world.members))
    return world._replace(members=members, stuck=False)


def of_a_member(
    world: World, slot: int, member: Member, cuts_off: bool = True
) -> Iterator[tuple[str, World]]:
    """What happens to one member: it joins, dies, is cut off, comes back, or is replaced by a new process."""
    if member.life == OUT:
        yield joined(world, slot)
    if member.life == BUSY:
        yield f"{member.name} has computed", of_members(world, {slot: member._replace(life=OUT)})
    if member.life == AWAY:
        # it does not know whether its last join was answered: it gets that now, or joins, or asks in vain
        answer, machine = asked(world.machine, slot, member)
        if isinstance(answer, GenerationView):
            late = member._replace(life=OUT, leaves=(answer.attempt, answer.generation))
            yield f"{member.name} is back and hears of a group that is gone", put(world, slot, late, machine)
        elif answer is None:
            yield f"{member.name} is back and joins", put(world, slot, member._replace(life=WAITS), machine)
    if member.life == DEAD:
        name = f"m{slot}.{world.faults}"  # a new one: the process before was killed by a fault
        fresh = Member(WAITS, name, None, None, False, None)
        _, machine = asked(world.machine, slot, fresh)
        yield f"{name} is started and joins", put(world, slot, fresh, machine)
    elif world.faults:
        machine = without(world.machine, member.name)
        dead = Member(DEAD, "", None, None, False, None)
        yield f"{member.name} dies", put(world, slot, dead, machine, fault=True)
        if member.life != AWAY and cuts_off:
            gone = member._replace(life=AWAY)
            yield f"{member.name} is cut off", put(world, slot, gone, fault=True)


def joined(world: World, slot: int) -> tuple[str, World]:
    """A member that was thrown out of its generation asks for the next one."""
    member = world.members[slot]
    answer, machine = asked(world.machine, slot, member)
    if answer is not None:
        raise Broken("a fresh join was not taken", f"{member.name} joins")
    return f"{member.name} joins", put(world, slot, member._replace(life=WAITS), machine)


def asked(machine: SharedRendezvous, slot: int, member: Member) -> tuple[JoinAnswer | None, SharedRendezvous]:
    """A member joins."""
    return machine.after(("join", slot, member), lambda m: m.join(request(slot, member), 0.0))


def without(machine: SharedRendezvous, name: str) -> SharedRendezvous:
    """A member is said to be dead."""
    return machine.after(("dead", name), lambda m: m.dead(name, 0.0))[1]


def ticked(machine: SharedRendezvous, now: float) -> tuple[list[Action], SharedRendezvous]:
    """The coordinator's tick."""
    return machine.after(("tick", now), lambda m: m.tick(now))


def formed(machine: SharedRendezvous, generation: int) -> SharedRendezvous:
    """The formation is in the journal."""
    return machine.after(("formed", generation), lambda m: m.formed(generation, 0.0))[1]


def put(
    world: World,
    slot: int,
    member: Member,
    machine: SharedRendezvous | None = None,
    *,
    fault: bool = False,
) -> World:
    """The world with another member in `slot`; a group that loses a member is at its end, all others see a
    failing collective.
    """
    members, stuck = [*world.members[:slot], member, *world.members[slot + 1 :]], world.stuck
    if world.members[slot].life == IN:
        members, stuck = [m._replace(life=OUT) if m.life == IN else m for m in members], False
    sealed = world.sealed and (world.sealed[0], world.sealed[1] + fault)
    return world._replace(
        members=tuple(members),
        faults=world.faults - fault,
        machine=machine or world.machine,
        stuck=stuck,
        sealed=sealed,
    )


def commit(world: World, point: Point) -> World:
    """COMMIT is written: the records of its chain, which came with the votes, are durable before it (rule
    14).
    """
    points = world.points | {point}
    newest = max(points, key=lambda p: p.key)
    points = frozenset(p for p in points if p == newest or newest.history[: len(p.history)] != p.history)
    _, machine = world.machine.after(
        ("point", newest.key), lambda m: m.set_newest_point(newest.key, None, newest.key.point_name)
    )
    records = world.records | {(g, t) for t, g in enumerate(point.history)}
    return world._replace(points=points, pending=None, records=records, machine=machine)


def restarted(world: World, rules: Rules) -> World:
    """A new attempt; it adopts only what storage holds, and asks the members to join again (rule 10)."""
    machine = new_machine(rules, world.machine.attempt + 1)
    newest = max(world.points, key=lambda p: p.key, default=None)
    if newest is not None:
        machine.set_newest_point(newest.key, None, newest.key.point_name)
    members = tuple(m._replace(life=OUT) if m.life == WAITS else m for m in world.members)
    return world._replace(
        members=members, pending=None, faults=world.faults - 1, machine=world.machine.another(machine)
    )


# ---- forming
def forming(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    """The coordinator's tick, at once or after a long time in which nobody came."""
    if not world.stuck and not any(m.life == WAITS for m in world.members):
        return
    for now in (0.0, *patience(world, rules)):
        actions, machine = ticked(world.machine, now)
        lives = {m.name: m.life for m in world.members}
        if any(isinstance(a, LeaveOut) and lives.get(a.member) in (IN, OUT, BUSY) for a in actions):
            raise Broken("a member that lives is given up", f"after {now:g} s")
        if any(isinstance(a, StopRun) for a in actions):
            if rules.last_saves:  # too few faults for a stop
                raise Broken("a run is stopped because its last save fails", f"after {now:g} s")
            return
        form = next((a for a in actions if isinstance(a, Form)), None)
        if form is None:
            if not actions:
                return  # a generation runs
            continue
        tried = world._replace(machine=machine)
        when = " after a long time" if now else ""
        for name, after in outcomes(tried, form.formation, rules):
            yield name + when, after
        return
    enough = sum(m.life == WAITS for m in world.members) >= rules.min_workers
    if enough and all(m.life in (WAITS, DEAD, AWAY) for m in world.members):
        raise Broken("all that can come have joined, and no generation forms", "waiting for ever")


def patience(world: World, rules: Rules) -> tuple[float, ...]:
    """How much time may go by now. A member that is slow to come is not told apart from one that is cut off,
    so it comes first, as does one that hears of its generation's end; one that computes has its limit.
    """
    generation = next((m.leaves for m in world.members if m.life == IN), None)
    hears = world.stuck and generation is not None and rules.hear_the_end
    if hears and generation is not None and world.machine.control_requests(*generation, 0).ended:
        return ()
    lives = [m.life for m in world.members]
    if OUT in lives:
        return ()
    return tuple(now for now in LONG if now < STEP_LIMIT) if BUSY in lives else LONG


def outcomes(world: World, formation: Formation, rules: Rules) -> Iterator[tuple[str, World]]:
    """The formation is journalled and answered; then any part of the group agrees on its state, or some
    member dies meanwhile.

    One generation more than the bound is formed and checked, but it does nothing.
    """
    slot_of = {m.name: i for i, m in enumerate(world.members) if m.name}
    group = [slot_of[name] for name in formation.members if name in slot_of]
    identity = (formation.attempt, formation.generation)
    # joiners bring their unacknowledged records
    brought = {(g, t) for i in group for t, g in enumerate(world.members[i].history or ()) if g != TORN}
    parents = Journal((*world.parents.entries, (identity, formation.parent, formation.step)))
    pending = world.pending
    if rules.gives_up and pending and not on_path(world, pending.key, formation.parent):
        pending = None
    origin = formation.source or formation.point or "nothing"
    title = f"generation {identity} of {list(formation.members)} from {origin}"
    world = world._replace(
        parents=parents, records=world.records | brought, pending=pending, making=None, keep=None
    )
    base = base_of(world, formation, title, rules)
    check(world, formation, base, rules, title)
    if len(world.parents.entries) > rules.generations:
        return

    if world.faults:
        if world.machine.attempt < rules.attempts:
            yield f"{title}: journalled, the coordinator dies before it answers", restarted(world, rules)
        for i in group:
            machine = formed(without(world.machine, world.members[i].name), formation.generation)
            dead = Member(DEAD, "", None, None, False, None)
            yield (
                f"{title}: {world.members[i].name} dies while it is formed",
                put(world, i, dead, machine, fault=True),
            )
    alike = kinds(world.members, world.machine.told)
    world = world._replace(machine=formed(world.machine, formation.generation))
    can = [i for i in group if world.members[i].life == WAITS]
    if len(can) == len(group):
        yield f"{title}: agreed by all", agreed(world, formation, base, group, group, rules)
    if world.faults or len(can) < len(group):
        for some in subsets(can, alike):
            if len(some) < len(group):
                names = [world.members[i].name for i in some]
                # who hears of it hears that all have received; until then any of them may have
                for got in [tuple(can)] if some else subsets(can, alike):
                    have = "" if some else f", {[world.members[i].name for i in got]} have received"
                    yield (
                        f"{title}: agreed by {names} only{have}",
                        agreed(world, formation, base, can, list(some), rules, got),
                    )


def base_of_shards(world: World, formation: Formation, title: str) -> History:
    """The weights that all shards make up: each is where the formation says, and they are of one history."""
    by_name = {m.name: m for m in world.members}
    found: set[History] = set()
    for shard, sources in enumerate(formation.sources):
        if not sources:
            raise Broken("what is continued is not complete", title)
        for source in sources:
            member = by_name.get(formation.members[source.rank])
            place = (shard, len(formation.sources))
            held = None
            if member is not None and member.history is not None and member.shard == place:
                if source.source is Source.LIVE and member.key == formation.parent:
                    held = member.history
                prepared = member.prepared and member.key is not None and member.leaves is not None
                if (
                    source.source is Source.PREPARED
                    and prepared
                    and next_step(member.key) == formation.parent
                ):
                    held = (*member.history, member.leaves)
            if source.source is Source.RECEIVED:
                held = received_by(member, formation.parent, place)
            if member is not None and source.source in (Source.STAGED, Source.NEIGHBOUR):
                copies = [
                    c for c in member.copies if (c.key, c.shard, c.num_shards) == (formation.parent, *place)
                ]
                held = copies[0].history if copies else None
            if held is None:
                raise Broken("a giver does not hold the shard", title)
            found.add(held)
    if len(found) > 1:
        raise Broken("shards of two histories are joined", title)
    return found.pop()


def received_by(
    member: Member | None, parent: StateKey | None, shard: tuple[int, int] = (0, 1)
) -> History | None:
    """The weights of what it received, if that is this shard of `parent`."""
    came = None if member is None else member.received
    return came.history if came is not None and (came.key, came.shard) == (parent, shard) else None


def base_of(world: World, formation: Formation, title: str, rules: Rules) -> History:
    """The weights that the formation starts from."""
    if rules.sharded and formation.sources:
        return base_of_shards(world, formation, title)
    if formation.source is not None:
        source = next((m for m in world.members if m.name == formation.source), None)
        live = source.history if source is not None and source.key == formation.parent else None
        held = received_by(source, formation.parent) if live is None else live
        if held is None:
            raise Broken("the source does not hold the parent's state", title)
        if formation.members[0] != formation.source:
            raise Broken("the source is not rank 0", title)
        return held
    if formation.parent is None:
        return ()
    return next(p.history for p in world.points if p.key == formation.parent)


def check(world: World, formation: Formation, base: History, rules: Rules, title: str) -> None:
    """What must hold whenever a generation is formed."""
    if TORN in base:
        raise Broken("torn weights in use", title)
    if len(base) != formation.step:
        raise Broken("the step label is not the number of steps in the weights", title)
    history = chained(world) if rules.chained_parents else superseding(world)
    if any(history.get(t) != g for t, g in enumerate(base)):
        raise Broken("weights and journal disagree", title)
    for key, there in whole_in_tensors(world):
        if (formation.parent is None or key > formation.parent) and base[: len(there)] != there:
            raise Broken("what is whole among the members is not continued", title)
    if world.sealed is not None and world.sealed[1] <= 1 and base[: len(world.sealed[0])] != world.sealed[0]:
        raise Broken("a step before the sealed memory point is lost to one failure", title)
    for point in world.points:
        if base[: len(point.history)] != point.history:
            raise Broken("the history goes on without a committed point", title)


def whole_in_tensors(world: World) -> list[tuple[StateKey, History]]:
    """The states of which those who wait have every shard, trained or received."""
    there: dict[tuple[StateKey, History, int], set[int]] = {}
    for member in world.members:
        if member.life != WAITS:
            continue
        if member.key is not None and member.history is not None:
            shard, num_shards = member.shard
            there.setdefault((member.key, member.history, num_shards), set()).add(shard)
        if member.received is not None:
            shard, num_shards = member.received.shard
            there.setdefault((*member.received[:2], num_shards), set()).add(shard)
    return [(key, history) for (key, history, n), shards in there.items() if len(shards) == n]


def on_path(world: World, key: StateKey, parent: StateKey | None) -> bool:
    """Does the history that ends in `parent` contain the state `key`?"""
    while parent is not None:
        at = (parent.attempt, parent.generation)
        if at == (key.attempt, key.generation):
            return key.step <= parent.step
        parent = world.parents.table[at][1]
    return False


def chained(world: World) -> dict[int, Identity]:
    """Which generation trained each step before the newest generation's first, by following the parents back
    (rule 2).
    """
    history: dict[int, Identity] = {}
    parent = world.parents.entries[-1][1]
    while parent is not None:
        at = (parent.attempt, parent.generation)
        _, before, first = world.parents.table[at]
        for t in range(first, parent.step):
            if (at, t) in world.records:
                history[t] = at
        parent = before if before is None or before.step == first else None
    return history


def superseding(world: World) -> dict[int, Identity]:
    """The wrong reading: a generation that starts at step s supersedes every record at or after s of earlier
    ones.
    """
    history: dict[int, Identity] = {}
    for number, (identity, _, _) in enumerate(world.parents.entries):
        for g, t in world.records:
            if g == identity and all(first > t for _, _, first in world.parents.entries[number + 1 :]):
                history[t] = identity
    return history


def agreed(
    world: World,
    formation: Formation,
    base: History,
    group: list[int],
    some: list[int],
    rules: Rules,
    got: tuple[int, ...] = (),
) -> World:
    """The members of `some` have agreed on the state; if that is everybody the group runs, else it failed.
    Those of `got` have received it.
    """
    identity = (formation.attempt, formation.generation)
    key = StateKey(attempt=identity[0], generation=identity[1], step=formation.step)
    whole = len(some) == len(formation.members)
    members = list(world.members)
    for i in group:
        m = members[i]
        shard = (formation.members.index(m.name), len(formation.members)) if rules.sharded else (0, 1)
        if i in some:
            copies = kept(m, formation.keep if rules.keeps else None) if rules.sharded else ()
            members[i] = Member(IN if whole else OUT, m.name, base, key, False, identity, shard, copies)
            continue
        if m.received is not None and m.received.key == formation.parent:
            m = m._replace(key=m.received.key, history=m.received.history, shard=m.received.shard)
        m = m._replace(received=Received(key, base, shard) if i in got else None)
        mine = m.key is not None and m.key == formation.parent
        last = (
            m.prepared
            and m.key is not None
            and formation.source is not None
            and next_step(m.key) == formation.parent
        )
        if rules.sharded and not last:  # all keep what they came with
            members[i] = m._replace(life=OUT, prepared=False, leaves=identity)
        elif mine or last:  # it needed no copy: its state is whole, only its name is the old one
            members[i] = m._replace(
                life=OUT, history=base, key=formation.parent, prepared=False, leaves=identity
            )
        elif rules.receiver_is_blank or m.history is None:
            members[i] = Member(OUT, m.name, None, None, False, identity, received=m.received)
        else:
            torn = tuple(TORN for _ in m.history)
            members[i] = Member(OUT, m.name, torn, m.key, False, identity)
    makes = rules.sharded and whole and len(formation.members) > 1
    return world._replace(
        members=tuple(members),
        faults=world.faults - (not whole and len(group) == len(formation.members)),
        making=(0, key, base) if makes else None,
        keep=formation.keep if makes and rules.keeps else None,
    )


def subsets(slots: list[int], alike: list[int]) -> Iterator[tuple[int, ...]]:
    """All subsets, the largest first; of those that differ only in members of one kind, one."""
    seen = set()
    for size in range(len(slots), -1, -1):
        for some in combinations(slots, size):
            key = tuple(sorted(alike[i] for i in some))
            if key not in seen:
                seen.add(key)
                yield some
