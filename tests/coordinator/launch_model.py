"""A model of everything around the launch machine and the commit machine (members, their collectives, the
network, storage, what Ray says of who is dead) that drives the real ones through random histories.

The weights are modelled as the tuple of generations that trained each step, so two histories are equal only
if they are the same history. Every random choice comes from one seed: a seed that breaks a rule is a test.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from orchestrator.checkpoint.commit import commit_events as commit
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.checkpoint.points.points import newest_first
from orchestrator.coordinator.machine.launch_actions import Action, Answer, End, Fenced, Kill, Note
from orchestrator.coordinator.machine.launch_history import EarlierCoordinator
from orchestrator.coordinator.machine.launch_machine import LaunchMachine
from orchestrator.elastic.failure import Failure, FailureBudget, StorageOutage
from orchestrator.elastic.formation import Form, Formation, GroupSize, PreviousGeneration
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.history.claims.claims import Claim, ClaimParent, GenerationStart
from orchestrator.history.claims.lineage import Lineage, effective_history
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import SAVE, STOP, STOP_NOW, Request
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import (
    ControlRequests,
    GenerationView,
    JoinRequest,
    Refusal,
    RunOver,
)
from orchestrator.records.points import Vote
from orchestrator.records.run_status import MemberInfo
from orchestrator.records.steps import StateKey, StepRecord

Content = tuple[tuple[int, int], ...]
STORAGE_LIMIT_S = 60.0  # short enough to be reached within a history
WRITES = (0.0, 0.05, 0.01)  # in the background: not at all, soon, or after several generations
STEP_LIMIT_S = 100.0  # how long a member says that it may still compute
MAX_FAILURES = 2
OURS = (  # errors of ours, of which one by one, or all of a group at once, may report one
    *("StorageError", "DataIdentityError", "DataError", "FencedError", "TrainingError", "ConfigError"),
    *("ResumePointError", "UnreachableNodeError", "ElasticError", "UnsavedError"),
)
FOREIGN = ("ValueError", "OutOfMemoryError")  # of the user's code, or of the machine
ROUNDS = 400  # in which a world without faults must come to its end


class BrokenError(Exception):
    """A rule does not hold; the text says which."""


class CrashError(Exception):
    """The coordinator's process dies here."""


def need(holds: object, rule: str) -> None:
    if not holds:
        raise BrokenError(rule)


def record_of(key: StateKey, content: Content) -> StepRecord:
    return StepRecord(
        attempt=key.attempt,
        generation=key.generation,
        step=key.step,
        consumed_samples=key.step,
        consumed_tokens=key.step,
        target_tokens=key.step,
        loss=float(hash(content) % 1000),
        grad_norm=0.0,
        lr=0.0,
        digest=str(hash(content)),
        step_s=1.0,
        data_wait_s=0.0,
        save_blocked_s=0.0,
    )


@dataclass(eq=False)
class Member:
    """A process. `mode`: joins (will ask), waits (has asked), trains, leaves (its last save is undecided),
    finishes (will say so), fails (its report of an error is under way), ends (it is reported), over.
    """

    name: str
    launch: str
    alive: bool = True
    frozen: bool = False
    computes_until: float = float("-inf")  # it has heard that its generation is over, and has said this
    mode: str = "joins"
    key: StateKey | None = None
    content: Content = ()
    committed: bool = False
    prepared: tuple[StateKey, Content] | None = None
    leaves: tuple[int, int] | None = None
    group: Group | None = None
    records: dict[StateKey, StepRecord] = field(default_factory=dict)
    writing: StateKey | None = None
    reporting: StateKey | None = None  # its report that it could not write its part is under way
    begun: StateKey | None = None  # the newest save that it began
    voted: StateKey | None = None  # what it says when it joins, see `MemberState.saving`
    votes: dict[StateKey, bool | None] = field(default_factory=dict)
    unsaved: bool = False  # what it says when it joins, see `MemberState.unsaved`
    reason: str = ""
    request: JoinRequest | None = None
    error: str = ""
    given_up: bool = False  # Ray has called its node dead, and it lives

    @property
    def acts(self) -> bool:
        return self.alive and not self.frozen

    @property
    def saves(self) -> bool:
        """Whether a save of it is undecided, as far as it knows."""
        return bool(self.writing or self.reporting or None in self.votes.values())


@dataclass(eq=False)
class Group:
    """A generation as its collectives see it: `control` are the control bits of each step."""

    views: dict[str, GenerationView]
    content: Content
    left: set[str] = field(default_factory=set)
    agreed: set[str] = field(default_factory=set)
    entered: dict[int, set[str]] = field(default_factory=dict)
    control: dict[int, ControlRequests] = field(default_factory=dict)

    @property
    def view(self) -> GenerationView:
        return next(iter(self.views.values()))


@dataclass(eq=False)
class Coordinator:
    """One process: the two machines, and what it has not made durable."""

    attempt: int
    launch: str
    machine: LaunchMachine
    commits: CommitMachine
    alive: bool = True
    written_end: bool = False
    pending: list[Callable[[], None]] = field(default_factory=list)
    forming: Formation | None = None
    forming_since: float = 0.0
    newest: StateKey | None = None


class World:
    """Storage and processes, and what may happen to them. `machine`, `commits`: the classes under test.

    In two of three worlds members write `in_background`: they train on, leave and join while they write, and
    begin no save while one of any of them is undecided.
    """

    def __init__(self, seed: int, machine: type[LaunchMachine], commits: type[CommitMachine]) -> None:
        self.random = random.Random(seed)
        self.machine_class, self.commits_class = machine, commits
        self.writes = WRITES[seed % 3]  # how often a write comes to its end
        self.in_background = self.writes > 0.0
        self.now, self.names = 0.0, itertools.count()
        self.size = self.random.randint(1, 4)
        self.minimum = self.random.randint(1, self.size)
        self.keep = self.random.choice([1, 2, 3])
        self.steps = self.random.randint(3, 9)  # of the whole run
        self.storage_works = True
        self.points_work = True  # where points lie, which may fail although the journal works
        # storage
        self.claims: dict[int, str] = {}
        self.parents: dict[int, ClaimParent] = {}
        self.generations: list[GenerationStart] = []
        self.journal: dict[StateKey, StepRecord] = {}
        self.failures: list[tuple[int, Failure]] = []
        self.known_dead: set[object] = set()
        self.finished: dict[str, tuple[str, int]] = {}
        self.left_out: set[str] = set()
        self.reported: set[str] = set()  # their errors, durably
        self.points: dict[str, tuple[StateKey, Content]] = {}
        self.deleted: set[str] = set()
        self.acknowledged: list[str] = []
        self.ends: dict[int, tuple[str, str]] = {}
        # processes
        self.members: list[Member] = []
        self.groups: dict[tuple[int, int], Group] = {}
        self.messages: list[tuple[str, Member, object]] = []
        self.contents: dict[StateKey, Content] = {}
        self.deaths: dict[str, int] = {}  # members, with the highest step when it was noticed
        self.highest = 0
        self.num = {"steps": 0, "commits": 0, "restarts": 0, "ends": 0, "generations": 0, "rewinds": 0}
        self.num["saves given up"] = 0
        self.stop_asked = self.supervisor_stops = False
        self.requests: list[str] = []  # to this launch: what is asked for, by number
        self.heard: dict[int, StateKey | None] = {}  # by number: what was trained when it was heard last
        self.answered: set[int] = set()  # durably
        self.num["answered"] = self.num["saved as asked"] = 0
        self.has_errors = seed % 5 == 4
        self.num["errors"] = self.num["given up by Ray"] = 0
        self.all_have_come = False  # since time went on last, those who can
        self.coordinator = self.new_launch(rewind=False)

    # ------------------------------------------------------------ claims
    def survey(self) -> tuple[Lineage, list[str]]:
        claims = [Claim(number=n, launch=x, why="x", host="h", created="") for n, x in self.claims.items()]
        lineage = effective_history(claims, self.parents.values(), self.generations, self.journal.values())
        need(not lineage.errors, f"the history contradicts itself: {lineage.errors}")
        names = newest_first(self.points)[::-1]
        return lineage, [name for name in names if lineage.on_lineage(self.points[name][0])]

    def new_launch(self, rewind: bool) -> Coordinator:
        number = max(self.claims, default=0) + 1
        self.claims[number] = launch = f"launch-{number}"
        _, names = self.survey()
        self.check_acknowledged(names)
        if rewind and len(names) > 1:
            self.num["rewinds"] += 1
            names = names[: self.random.randint(1, len(names) - 1)]
            # what lies after the point that is gone back to is off the lineage from here on
            self.acknowledged = [name for name in self.acknowledged if name in names]
        self.stop_asked = self.supervisor_stops = False
        self.requests, self.heard, self.answered = [], {}, set()
        self.members, self.groups = [], {}
        self.messages = []
        self.deaths, self.highest, self.finished = {}, 0, {}
        made = self.claimed(number, launch, names, None, (), number)
        for _ in range(self.size):
            self.start_member(launch)
        return made

    def claimed(
        self,
        number: int,
        launch: str,
        names: list[str],
        previous: PreviousGeneration | None,
        failures: tuple[Failure, ...],
        first: int,
    ) -> Coordinator:
        point = names[-1] if names else None
        key = self.points[point][0] if point else None
        self.parents[number] = ClaimParent(attempt=number, parent=key, inherited=tuple(names))
        rendezvous = Rendezvous(
            attempt=number,
            launch=launch,
            size=GroupSize(min_workers=self.minimum, max_workers=self.size, expected=self.size),
            previous=previous,
            first_attempt=first,
        )
        if point and key:
            rendezvous.set_newest_point(key, Cursor(), point)
        older = [record for record in self.journal.values() if record.attempt >= first]
        machine = self.machine_class(
            rendezvous,
            FailureBudget(MAX_FAILURES, failures, key.step if key else 0),
            StorageOutage(STORAGE_LIMIT_S),
            earlier=EarlierCoordinator(
                last_step=max(older, key=lambda record: record.key, default=None),
                previous=previous,
                finished=tuple((member, *part) for member, part in self.finished.items()),
                members=tuple(info_of(m) for m in self.members if previous and m.name in previous.members),
                answered=tuple(sorted(self.answered)),
                reported=tuple(sorted(self.reported)),
            ),
            saved=key,
        )
        commits = self.commits_class(
            attempt=number,
            kept=KeptPoints(keep_latest=self.keep, names=tuple(names), pinned=point),
            vote_limit_s=1e9,
        )
        return Coordinator(attempt=number, launch=launch, machine=machine, commits=commits, newest=key)

    def restart(self) -> None:
        """The coordinator's process dies and is started again; calls under way fail, and are made anew."""
        old, self.coordinator.alive = self.coordinator, False
        self.num["restarts"] += 1
        for member in self.members:
            if member.mode == "waits":
                member.mode = "joins"
        again: list[tuple[str, Member, object]]
        again = [x for x in self.messages if x[0] in ("vote", "failed save") and x[1].alive]
        for member in self.members:
            again += [("vote", member, key) for key, answer in member.votes.items() if answer is None]
            again += [("finished", member, member.key)] if member.mode == "finishes" else []
            again += [("error", member, member.error)] if member.mode in ("fails", "ends") else []
        self.messages = again
        if old.machine.ended is not None:
            old.alive = True  # the driver has heard of the end
            return
        first = min(number for number, launch in self.claims.items() if launch == old.launch)
        number = max(self.claims) + 1
        self.claims[number] = old.launch
        _, names = self.survey()
        self.check_acknowledged(names)
        mine = [g for g in self.generations if first <= g.attempt < number]
        last = max(mine, key=lambda g: g.id, default=None)
        live = tuple(m for m in last.members if m not in self.known_dead) if last else ()
        previous = last and PreviousGeneration(
            attempt=last.attempt, generation=last.generation, members=live, ended=live != last.members
        )
        failures = tuple(failure for attempt, failure in self.failures if attempt >= first)
        self.coordinator = self.claimed(number, old.launch, names, previous, failures, first)

    def check_acknowledged(self, names: list[str]) -> None:
        for name in self.acknowledged:
            there = name in names or name in self.deleted
            need(there, f"the acknowledged point {name} is not on the lineage")

    # ------------------------------------------------------------ the coordinator's shell
    def carry_out(self, actions: list[Action]) -> None:
        shell = self.coordinator
        for action in actions:
            match action:
                case Answer():
                    self.answer(action)
                case Note():
                    shell.pending.append(lambda n=action: self.note(shell.attempt, n))
                case Kill():
                    self.left_out.add(action.member.member)
                    self.check_kill(action.member.member)
                    for member in self.members:
                        if member.name == action.member.member and self.random.random() < 0.5:
                            self.die(member)
                case End():
                    self.check_end(action)
                    self.write_end(shell)
                case Fenced():
                    raise BrokenError("fenced although nobody else claimed")
                case commit.VoterGone():
                    self.tell_commits(action)

    def check_kill(self, name: str) -> None:
        """Whoever could have come, or said that it computes, before time went on, is not given up."""
        (member,) = (m for m in self.members if m.name == name)
        group, attempt = member.group, self.coordinator.attempt
        if not self.all_have_come or group is None or group.view.attempt != attempt:
            return
        trains = member.acts and member.mode in ("trains", "meets") and member.writing is None
        late = float("-inf") < member.computes_until <= self.now
        need(late or not trains, f"{name}, which lives, is given up and killed")

    def note(self, attempt: int, note: Note) -> None:
        """A line of the journal that a restarted coordinator reads back."""
        match note.fields:
            case {"request": int() as number, "outcome": str() as outcome, "point": str() as point}:
                self.check_answer(number, outcome, point)
            case {"member": str() as member, "reason": str() as reason, "step": int() as step}:
                self.finished[member] = (reason, step)
            case {"member": str() as member} if note.kind == EventKind.MEMBER_FAILED:
                self.known_dead.add(member)
                self.reported.add(member)
            case {"member": _} if note.kind != EventKind.MEMBER_DEAD:
                pass
            case {"step": int() as step, "reason": str() as reason}:
                self.failures.append((attempt, Failure(step=step, reason=reason)))
            case {"member": str() as member}:
                self.known_dead.add(member)

    def check_answer(self, number: int, outcome: str, point: str) -> None:
        need(number not in self.answered, f"request {number} is answered twice")
        self.answered.add(number)
        self.num["answered"] += 1
        trained = self.heard[number]
        if self.requests[number - 1] != SAVE or outcome != "done":
            return
        self.num["saved as asked"] += 1
        need(point in self.points or point in self.deleted, f"request {number} is met by no point: {point}")
        lineage, _ = self.survey()
        if trained is not None and lineage.on_lineage(trained) and point in self.points:
            content, held = self.contents[trained], self.points[point][1]
            need(held[: len(content)] == content, f"{point} lacks what was trained before request {number}")

    def answer(self, action: Answer) -> None:
        member = next(m for m in self.members if m.name == action.member)
        if not member.alive or member.mode != "waits":
            return
        match action.answer:
            case GenerationView():
                group = self.groups[action.answer.attempt, action.answer.generation]
                if member.name in group.left:
                    return  # an answer that came too late: it will join again
                member.mode, member.group, member.unsaved = "trains", group, False
                member.leaves = (action.answer.attempt, action.answer.generation)
            case RunOver():
                member.mode = "over"
            case Refusal() if member.given_up:
                self.fail(member, "FencedError")
            case _:
                raise BrokenError(f"{member.name} is refused: {action.answer}")

    def check_end(self, end: End) -> None:
        self.num["ends"] += 1
        code = self.coordinator.machine.code
        need((code is not None) == (end.outcome == "failed"), f"{end} has the code {code}")
        unsaved = any(text in end.reason for text in ("nothing is to be saved", "stopped at once"))
        if end.outcome in ("done", "stopped") and not unsaved:
            there = [m for m in self.members if m.alive and m.name not in self.left_out]
            holders = [m for m in there if m.key and m.mode != "over"]
            saved = {content for _, content in self.points.values()}
            newest = [m for m in holders if m.key == newest_key(holders) and m.content]
            lost = [m.name for m in newest if not any(c[: len(m.content)] == m.content for c in saved)]
            need(not lost, f"ended as {end.outcome}, and the state of {lost} is in no point")
        if end.outcome == "done":
            longest = max((len(content) for _, content in self.points.values()), default=0)
            need(longest == self.steps, f"done after {longest} of {self.steps} steps")
        if end.outcome == "failed" and end.reason.startswith("error"):
            self.check_error(end.reason)
        if "failures" in end.reason:
            first = min(n for n, launch in self.claims.items() if launch == self.coordinator.launch)
            newest = max((key for key in self.journal if key.attempt >= first), default=None)
            recent = [step for step in self.deaths.values() if newest is None or step >= newest.step - 1]
            need(len(recent) > MAX_FAILURES, f"a healthy run is stopped: {end.reason}")

    def check_error(self, reason: str) -> None:
        """A reported error ends the run only if nobody is left who could go on, or a start has too few."""
        first = min(n for n, launch in self.claims.items() if launch == self.coordinator.launch)
        trained = any(attempt >= first for attempt, _ in self.groups)
        left = [
            m.name
            for m in self.members
            if m.alive and m.mode in ("waits", "finishes", *IN_GROUP) and not m.given_up
            if m.name not in self.left_out and ("join", m, m.request) not in self.messages
        ]
        few = not trained and len(left) < self.minimum
        need(few or not left, f"{reason} ends the run of {left}")

    def flush(self) -> bool:
        if not self.storage_works:
            return False
        for write in self.coordinator.pending:
            write()
        self.coordinator.pending = []
        return True

    def take(self, records: Iterator[StepRecord]) -> None:
        for record in records:
            self.coordinator.pending.append(lambda r=record: self.journal.setdefault(r.key, r) and None)
            self.coordinator.machine.recorded(record, self.now)

    def tell_commits(self, event: commit.Event) -> None:
        shell, todo = self.coordinator, deque([event])
        while todo:
            shell.commits, actions = shell.commits.on(todo.popleft())
            for action in actions:
                if self.random.random() < 0.004:
                    raise CrashError
                if (answer := self.perform(action)) is not None:
                    todo.append(answer)

    def perform(self, action: commit.Action) -> commit.Event | None:
        match action:
            case commit.FlushJournal():
                self.take(iter(action.records))
                if self.flush() and self.covers(action.key):
                    return commit.JournalDurable(key=action.key)
                return commit.Failed(key=action.key, reason="journal")
            case commit.CheckNewerClaim():
                if self.storage_works:
                    return commit.ClaimChecked(key=action.key, newer=False)
                return commit.Failed(key=action.key, reason="storage") if action.key else None
            case commit.WriteCommit():
                return self.write_commit(action)
            case commit.VerifyPoint():
                return commit.Verified(name=action.name, healthy=action.name in self.points)
            case commit.DeletePoints():
                self.delete(action.names)
                return commit.Deleted(names=action.names)
            case commit.DiscardSave():
                need(action.name not in self.points, f"the files of the committed {action.name} are deleted")
                # what a machine writes that Ray has given up is removed by the next launch
                able = [m for m in self.members if m.alive and not m.given_up]
                writers = [m.name for m in able if name_of(m.writing) == action.name]
                need(not writers, f"the files of {action.name} are deleted while {writers} write them")
            case commit.Acknowledge():
                self.acknowledge(action)
            case commit.GiveUp():
                self.save_failed(action)
                self.decided(action.key, action.ranks, False)
            case commit.Fence():
                raise BrokenError("fenced although nobody else claimed")
        return None

    def save_failed(self, action: commit.GiveUp) -> None:
        """Whyever it was given up, and however many were: training goes on."""
        machine = self.coordinator.machine
        before = machine.ended
        self.carry_out(machine.save_given_up(action.key, action.reason, self.now))
        need(machine.ended == before, f"a save was given up ({action.reason}), and the run ends")
        self.num["saves given up"] += 1

    def write_commit(self, action: commit.WriteCommit) -> commit.Event:
        key, name, fate = action.key, action.key.point_name, self.random.random()
        if not (self.storage_works and self.points_work) or fate < 0.03:
            return commit.Failed(key=key, reason="before")
        world_size = action.votes[0].world_size
        need(sorted(v.rank for v in action.votes) == list(range(world_size)), f"votes of {name} are missing")
        need(name not in self.points and name not in self.deleted, f"{name} is written twice")
        older = [at.point_name for at in self.coordinator.commits.saves if at < key]
        need(not older, f"COMMIT of {name} is written while {older} are undecided")
        self.points[name] = (key, self.contents[key])
        self.num["commits"] += 1
        return commit.Failed(key=key, reason="after") if fate < 0.06 else commit.CommitWritten(key=key)

    def delete(self, names: tuple[str, ...]) -> None:
        lineage, before = self.survey()
        for name in names:
            need(lineage.on_lineage(self.points[name][0]), f"retention deletes {name}, which is an orphan")
            del self.points[name]
            self.deleted.add(name)
        left = [name for name in before if name in self.points]
        need(len(left) >= min(self.keep, len(before)), f"retention leaves {left} of {before}")
        parent = name_of(self.parents[self.coordinator.attempt].parent)
        if parent in names:
            newer = before[before.index(parent) + 1 :]
            need(len(newer) >= 2, f"the parent {parent} is deleted, and only {newer} are newer")

    def acknowledge(self, action: commit.Acknowledge) -> None:
        name, shell = action.key.point_name, self.coordinator
        need(name in self.points or name in self.deleted, f"{name} is acknowledged without a COMMIT")
        if name not in self.acknowledged:
            self.acknowledged.append(name)
        if not action.late:
            self.carry_out(shell.machine.committed(action.key))
        if shell.newest is None or action.key > shell.newest:
            shell.newest = action.key
            shell.machine.rendezvous.set_newest_point(action.key, Cursor(), name)
        self.decided(action.key, action.ranks, True)

    def decided(self, key: StateKey, ranks: tuple[int, ...], committed: bool) -> None:
        group = self.groups[key.attempt, key.generation]
        for member in self.members:
            view = group.views.get(member.name)
            if view is not None and view.rank in ranks and key in member.votes:
                member.votes[key] = committed
                member.committed = member.committed or (committed and member.key == key)

    def covers(self, key: StateKey) -> bool:
        generations = {g.id: g for g in self.generations}
        at: StateKey | None = key
        while at is not None and at.attempt == self.coordinator.attempt:
            generation = generations[at.attempt, at.generation]
            labels = range(generation.step + 1, at.step + 1)
            keys = [StateKey(attempt=at.attempt, generation=at.generation, step=s) for s in labels]
            if any(k not in self.journal for k in keys):
                return False
            at = generation.parent
        return True

    def tick(self) -> None:
        shell = self.coordinator
        if shell.machine.ended is None:
            self.beat(shell)
        elif not shell.written_end:
            self.write_end(shell)

    def write_end(self, shell: Coordinator) -> None:
        shell.written_end = self.flush()
        if shell.written_end:
            assert shell.machine.ended is not None
            self.ends[shell.attempt] = shell.machine.ended
            left = set(range(1, shell.machine.next_request)) - self.answered
            need(not left, f"the run has ended, and the requests {left} were never answered")

    def hear(self, shell: Coordinator) -> None:
        """What the coordinator reads in storage."""
        number = shell.machine.next_request
        if self.storage_works and number <= len(self.requests) and shell.machine.ended is None:
            self.heard[number] = shell.machine.last_step.key if shell.machine.last_step else None
            what = self.requests[number - 1]
            asked = Request(number=number, launch=shell.launch, what=what, by="u@h", created="")
            self.carry_out(shell.machine.asked(asked))

    def beat(self, shell: Coordinator) -> None:
        self.hear(shell)
        for action in shell.machine.tick(self.now):
            if isinstance(action, Form):
                shell.forming, shell.forming_since = action.formation, self.now
                self.journal_generation(action.formation)
            else:
                self.carry_out([action])
        began = shell.forming_since if shell.forming else self.now
        if not self.flush():
            self.carry_out(shell.machine.storage_failed("no space", began))
        else:
            self.carry_out(shell.machine.storage_worked())
            if shell.forming is not None:
                formation, shell.forming = shell.forming, None
                self.form(formation)
            self.tell_commits(commit.Tick(now_s=self.now))
        over = shell.machine.ended is not None
        need(not (over and shell.machine.waiting), "somebody waits for a run that has ended")

    def journal_generation(self, f: Formation) -> None:
        start = GenerationStart(
            attempt=f.attempt,
            generation=f.generation,
            parent=f.parent,
            step=f.step,
            consumed_samples=f.step,
            consumed_tokens=f.step,
            target_tokens=f.step,
            world_size=len(f.members),
            global_batch_size=1,
            seq_len=1,
            members=f.members,
        )
        self.coordinator.pending.append(lambda: self.generations.append(start))

    def form(self, f: Formation) -> None:
        if self.random.random() < 0.03:
            raise CrashError
        need(len(f.members) >= self.minimum or f.save_only, "a group below the minimum trains")
        self.tell_commits(commit.GenerationFormed(generation=f.generation, parent=f.parent))
        if self.random.random() < 0.03:
            self.die(self.random.choice(self.members))
        content: Content = ()
        if f.parent is not None:
            need(f.source is not None or f.point in self.points, f"formed from {f.point}, which is gone")
            content = self.contents[f.parent] if f.source else self.points[f.point or ""][1]
        actions = self.coordinator.machine.formed(f, self.now)
        views = {a.member: a.answer for a in actions if isinstance(a, Answer)}
        if views:
            self.num["generations"] += 1
            self.groups[f.attempt, f.generation] = group = Group(views, content)  # type: ignore[arg-type]
            group.left.update(m.name for m in self.of(group) if not m.alive)
        self.carry_out(actions)

    # ------------------------------------------------------------ members
    def start_member(self, launch: str) -> None:
        self.members.append(Member(name=f"m{next(self.names)}", launch=launch))

    def die(self, member: Member, closes: bool = True) -> None:
        """`closes`: its connections do, so that its group hears of it; without power they do not."""
        if member.alive and member.mode != "over":
            self.deaths[member.name] = self.highest
        member.alive = False
        if member.group and closes:
            member.group.left.add(member.name)

    def leave(self, member: Member) -> None:
        if member.group:
            member.group.left.add(member.name)
        member.group, member.mode = None, "joins"
        member.writing = member.writing if self.in_background else None
        member.computes_until = float("-inf")

    def set_state(self, member: Member, key: StateKey, content: Content) -> None:
        need(self.contents.setdefault(key, content) == content, f"there are two states {key}")
        member.key, member.content, member.committed = key, content, False

    def send_join(self, member: Member) -> None:
        request = JoinRequest(
            member=member.name,
            launch=member.launch,
            actor_id=member.name,
            node_id=f"node-{member.name}",
            host="h",
            port=1,
            key=member.key,
            leaves=member.leaves,
            prepared=member.prepared[0] if member.prepared else None,
            cursor=Cursor() if member.key else None,
            records=tuple(member.records.values()),
            saving=member.voted,
            unsaved=member.unsaved,
        )
        member.mode, member.request = "waits", request
        self.messages += [("join", member, request)] * (2 if self.random.random() < 0.05 else 1)

    def deliver(self) -> None:
        kind, member, what = self.messages.pop(self.random.randrange(len(self.messages)))
        machine = self.coordinator.machine
        if kind == "join":
            assert isinstance(what, JoinRequest), what
            if member.mode == "waits" and what is member.request:
                self.take(iter(what.records))
                self.carry_out(machine.join(what, self.now))
        elif kind == "vote":
            assert isinstance(what, StateKey), what
            self.deliver_vote(member, what)
        elif kind == "failed save":
            assert isinstance(what, StateKey), what
            machine.voted(what)
            member.reporting = None
            member.voted = None if self.in_background and member.voted == what else member.voted
            size = len(self.groups[what.attempt, what.generation].views)
            rank = self.groups[what.attempt, what.generation].views[member.name].rank
            self.tell_commits(
                commit.PartFailed(key=what, rank=rank, world_size=size, reason="disk", now_s=self.now)
            )
        elif kind == "report":
            assert isinstance(what, StateKey), what
            self.take(iter([record_of(what, self.contents[what])]))
            if what.attempt == self.coordinator.attempt:
                machine.rendezvous.applied(what.generation, what.step, self.now)
        elif kind == "finished":
            assert isinstance(what, StateKey), what
            self.carry_out(machine.finished(member.name, what, member.reason, self.now))
            if member.mode != "finishes":
                pass  # it failed meanwhile
            elif self.flush() or machine.ended is not None:
                member.mode = "over"
            else:
                self.messages.append(("finished", member, what))

        elif kind == "error":
            assert isinstance(what, str), what
            member.mode = "ends" if member.mode == "fails" else member.mode
            text, ours = f"error: {what}", what in OURS
            code = f"code.{what}" if ours else None
            self.carry_out(machine.failed(member.name, what, text, ours, None, self.now, code))

    def fail(self, member: Member, kind: str) -> None:
        """An error ends it; what it had begun to write it may still write."""
        self.num["errors"] += 1
        self.deaths[member.name] = self.highest
        self.leave(member)
        member.mode, member.error = "fails", kind
        self.messages += [("error", member, kind)] * (2 if self.random.random() < 0.1 else 1)

    def end_failed(self) -> None:
        """The processes that may end do: others take their place."""
        machine = self.coordinator.machine
        for member in self.members:
            if member.alive and member.mode == "ends" and machine.may_end(member.name, self.now):
                self.die(member)

    def error(self, live: list[Member]) -> None:
        """One reports an error, or all of a group the same, or Ray gives up the node of one that lives."""
        x, groups = self.random.random(), [m.group for m in live if m.group]
        able = [m for m in live if m.mode not in ("fails", "ends")]
        if x < 0.4 and able:
            self.fail(self.random.choice(able), self.random.choice([*OURS, *FOREIGN]))
        elif x < 0.6 and groups:
            kind = self.random.choice([*OURS, *FOREIGN])
            for member in self.of(self.random.choice(groups)):
                if member in able:
                    self.fail(member, kind)
        elif x < 0.8 and able:
            member = self.random.choice(able)
            if member.name in self.coordinator.machine.infos and self.coordinator.machine.ended is None:
                self.num["given up by Ray"] += 1
                member.given_up, self.deaths[member.name] = True, self.highest
                member.mode = "joins" if member.mode == "waits" else member.mode  # it asks again
                self.carry_out(self.coordinator.machine.dead(member.name, "its node died", self.now))
        else:
            self.end_failed()

    def deliver_vote(self, member: Member, key: StateKey) -> None:
        if key.attempt != self.coordinator.attempt:
            member.votes[key] = False
            return
        group = self.groups[key.attempt, key.generation]
        self.take(iter(member.records.values()))
        self.coordinator.machine.voted(key)
        vote = Vote(
            key=key,
            rank=group.views[member.name].rank,
            world_size=len(group.views),
            cursor=Cursor(),
            optimizer_steps=key.step,
            files=(),
            tensors=(),
            save_blocked_s=0.0,
            records=tuple(member.records.values()),
        )
        self.tell_commits(commit.VoteCast(vote=vote, now_s=self.now))

    # ------------------------------------------------------------ a group
    def of(self, group: Group) -> list[Member]:
        return [m for name in group.views for m in self.members if m.name == name]

    def advance(self, group: Group) -> bool:
        """One thing happens in a group; whether anything could."""
        if not group.agreed:
            return self.agree(group)
        able = [m for m in self.of(group) if m.acts and m.group is group and m.name in group.agreed]
        self.random.shuffle(able)
        return any(self.act(group, member) for member in able)

    def agree(self, group: Group) -> bool:
        members, view = self.of(group), group.view
        if any(m.name in group.left or not m.acts or m.group is not group for m in members):
            return False
        for m in members:
            if m.prepared and m.prepared[0] == view.parent:
                self.set_state(m, *m.prepared)
            m.prepared = None
        holders = [m for m in members if view.parent is not None and m.key == view.parent]
        need(view.source_rank is None or members[0] in holders, "rank 0 does not hold the parent")
        for m in holders:
            need(m.content == group.content, f"{m.name} holds another state {view.parent}")
        if self.random.random() < 0.1:
            for m in members:
                if m not in holders:
                    m.key = None
            self.die(self.random.choice(members))
            return True
        committed = view.point is not None or any(m.committed for m in holders)
        key = StateKey(attempt=view.attempt, generation=view.generation, step=view.step)
        for m in members:
            self.set_state(m, key, group.content)
            m.committed = committed
            group.agreed.add(m.name)
        return True

    def act(self, group: Group, member: Member) -> bool:
        assert member.key is not None, "it has agreed"
        if member.writing is not None and not self.in_background:
            return self.write_part(member)
        if member.mode == "leaves":
            return self.try_to_leave(group, member)
        if member.mode != "trains":
            return False
        done = member.key.step - group.view.step
        wanted = group.control.get(member.key.step)
        if len(member.content) == self.steps or (done and wanted is not None and wanted.stop):
            member.mode, member.reason = "leaves", "done" if len(member.content) == self.steps else "stopped"
            begun = member.voted == member.key or bool(wanted and wanted.save and done)
            if not (member.committed or begun or self.in_background):
                member.writing = member.key
            return True
        return self.train(group, member)

    def train(self, group: Group, member: Member) -> bool:
        assert member.key is not None, "it has agreed"
        view, step = group.view, member.key.step + 1
        key = StateKey(attempt=view.attempt, generation=view.generation, step=step)
        members = self.of(group)
        if step not in group.entered:  # the gradient's collectives: all take part
            here = (m.acts and m.group is group and m.mode == "trains" for m in members)
            writes = any(m.writing for m in members) and not self.in_background
            ready = all(here) and not group.left and not writes
            if not ready or any(m.key is None or m.key.step != step - 1 for m in members):
                return False
            group.entered[step] = set()
        if member.name not in group.entered[step]:
            group.entered[step].add(member.name)
            member.prepared = (key, (*member.content, (view.attempt, view.generation)))
            return True
        if len(group.entered[step]) < len(members) or member.prepared is None:
            return False
        if step not in group.control:
            group.control[step] = self.control_requests(group)
        if self.random.random() < 0.02:
            self.leave(member)  # the summary is lost on the way to it, although others have it
            return True
        self.set_state(member, *member.prepared)
        member.prepared = None
        member.records[key] = record_of(key, member.content)
        self.num["steps"] += 1
        self.highest = max(self.highest, step)
        if group.views[member.name].rank == 0 and self.random.random() < 0.8:
            self.messages.append(("report", member, key))
        if group.control[step].save:
            self.begin_save(member)
        if group.control[step].reform and not group.control[step].stop:
            member.mode = "meets"
        return True

    def control_requests(self, group: Group) -> ControlRequests:
        """What rank 0 has heard of the control requests, and its own saves."""
        view = group.view
        quiet = ControlRequests(ended=False, save=False, stop=False, reform=False, acknowledged_step=-1)
        heard = quiet
        if self.coordinator.alive and self.random.random() < 0.9:
            heard = self.coordinator.machine.control_requests(view.attempt, view.generation, -1)
        save = heard.save or self.random.random() < 0.25
        save = save and not (self.in_background and any(m.saves for m in self.of(group)))
        return ControlRequests(
            ended=False, save=save, stop=heard.stop, reform=heard.reform, acknowledged_step=-1
        )

    def begin_save(self, member: Member) -> None:
        assert member.key is not None, "it has agreed"
        member.writing = member.begun = member.key
        if self.in_background:
            member.voted = member.key

    def write_behind(self) -> bool:
        """Some member that writes in the background comes to an end with it, wherever it is."""
        writers = [m for m in self.members if m.acts and m.writing] if self.in_background else []
        return bool(writers) and self.write_part(self.random.choice(writers))

    def write_part(self, member: Member) -> bool:
        key, member.writing = member.writing, None
        assert key is not None, "it writes"
        if (self.storage_works and self.points_work) or self.random.random() < 0.3:
            member.voted = key
            member.votes[key] = None
            self.messages += [("vote", member, key)] * (2 if self.random.random() < 0.1 else 1)
        else:
            member.reporting = key
            self.messages.append(("failed save", member, key))
        return True

    def try_to_leave(self, group: Group, member: Member) -> bool:
        if member.saves if self.in_background else None in member.votes.values():
            return False
        if self.in_background and not member.committed and member.begun != member.key:
            self.begin_save(member)
        elif member.committed:
            member.mode = "finishes"
            self.messages.append(("finished", member, member.key))
        else:
            self.leave(member)
            member.unsaved = True
        return True

    # ------------------------------------------------------------ what happens
    def event(self) -> None:
        try:
            self.happen()
        except CrashError:
            self.restart()

    def happen(self) -> None:
        x, live = self.random.random(), [m for m in self.members if m.alive and m.mode != "over"]
        if self.has_errors and self.random.random() < 0.05:
            self.error(live)
        elif self.coordinator.written_end and self.random.random() < 0.05:
            self.coordinator = self.new_launch(rewind=self.random.random() < 0.5)
        elif x < 0.25 and self.messages:
            self.deliver()
        elif x < 0.40:
            for member in self.random.sample(live, len(live)):
                if member.mode == "joins" and member.acts:
                    self.send_join(member)
                    break
        elif x < 0.40 + self.writes and self.write_behind():
            pass
        elif x < 0.75 and self.groups:
            any(self.advance(self.groups[at]) for at in sorted(self.groups)[-2:][::-1])
        elif x < 0.82:
            self.notice(self.random.choice(live) if live else None)
        elif x < 0.91:
            seconds = self.random.choice([0.05, 0.3, 1.0, 5.0, 12.0, 61.0])
            self.all_have_come = seconds > 10.0 and self.random.random() < 0.5
            if self.all_have_come:
                self.let_all_come()
            self.now += seconds
            self.tick()
            self.all_have_come = False
        else:
            self.fault(live)

    def let_all_come(self) -> None:
        """Time enough for every member that is not frozen to hear that its generation is over, to join, and
        for what it sent to arrive; some still compute, and say so.
        """
        for _ in range(2):  # whoever comes first ends the generation for the others, who then hear of it
            for member in self.members:
                self.let_come(member)
            for _ in range(len(self.messages)):
                self.deliver()

    def let_come(self, member: Member) -> None:
        inside = member.acts and member.mode in IN_GROUP and self.hears_end(member)
        if inside and member.computes_until == float("-inf") and self.random.random() < 0.3:
            member.computes_until = self.now + STEP_LIMIT_S
            self.coordinator.machine.busy(member.name, member.computes_until)
        if member.computes_until <= self.now:
            self.notice(member)
        if member.acts and member.mode == "joins":
            self.send_join(member)

    def hears_end(self, member: Member) -> bool:
        """Every member keeps a call open at the coordinator, whatever its group waits for."""
        if not self.coordinator.alive or member.group is None:
            return False
        view = member.group.views[member.name]
        return self.coordinator.machine.control_requests(view.attempt, view.generation, -1).ended

    def notice(self, member: Member | None) -> None:
        """A member sees that its group is over, by a collective, by the coordinator, or by a re-form."""
        if member is None or not member.acts or member.group is None or member.mode not in IN_GROUP:
            return
        if member.writing is not None and not self.in_background:
            return  # a part is written to its end
        over = member.mode == "meets" or bool(member.group.left)
        saved = member.mode == "leaves" and member.committed
        if over or (self.hears_end(member) and not saved):
            self.leave(member)

    def fault(self, live: list[Member]) -> None:
        x, machine = self.random.random(), self.coordinator.machine
        if x < 0.25 and live:
            self.die(self.random.choice(live), closes=self.random.random() < 0.5)
        elif x < 0.5:
            self.look_for_the_dead()
            if machine.ended is None and sum(m.alive for m in self.members) < self.size:
                self.start_member(self.coordinator.launch)
        elif x < 0.6 and live:
            self.random.choice(live).frozen = True
        elif x < 0.75:
            for member in live:
                member.frozen = member.frozen and self.random.random() < 0.5
        elif x < 0.85 and self.num["restarts"] < 4:
            self.restart()
        elif x < 0.90:
            self.storage_works = not self.storage_works
        elif x < 0.94:
            self.points_work = not self.points_work
        elif x < 0.95 and machine.ended is None:
            machine.request_stop()
            self.stop_asked = self.supervisor_stops = True
        elif x < 0.96:
            self.requests.append(STOP_NOW if self.random.random() < 0.2 else STOP)
            self.stop_asked = True
        else:
            self.requests.append(SAVE)

    def look_for_the_dead(self) -> None:
        machine = self.coordinator.machine
        asked = {info.member for info in machine.to_ask(bool(self.coordinator.commits.saves), self.now)}
        for member in self.members:
            if not member.alive and member.name in asked:
                self.deaths[member.name] = self.highest
                self.carry_out(machine.dead(member.name, "gone", self.now))

    # ------------------------------------------------------------ no more faults
    def settle(self) -> str:
        """Nothing fails any more: the run must come to its end. Returns its outcome."""
        self.storage_works = self.points_work = True
        self.random = Calm(0)
        for _ in range(ROUNDS):
            machine = self.coordinator.machine
            if machine.ended is not None and self.coordinator.written_end:
                return machine.ended[0]
            self.event_free_round(machine)
        modes = [(m.name, m.mode, m.alive, m.key and m.key.step) for m in self.members if m.alive]
        raise BrokenError(f"the run does not end: stop asked {self.stop_asked}, members {modes}")

    def event_free_round(self, machine: LaunchMachine) -> None:
        for member in self.members:
            member.frozen = False
        if machine.stopping and not self.stop_asked:
            raise BrokenError("a stop that nobody asked for")
        if self.supervisor_stops and not machine.stopping:
            machine.request_stop()  # as the supervisor does until it hears that it is known
        self.end_failed()
        self.look_for_the_dead()
        alive = [m for m in self.members if m.alive and m.mode != "over"]
        if machine.ended is None and not self.stop_asked and len(alive) < self.size and not machine._finished:
            self.start_member(self.coordinator.launch)
        for member in alive:
            if member.mode == "joins":
                self.send_join(member)
        self.write_and_deliver()
        for at in sorted(self.groups)[-2:]:
            while self.advance(self.groups[at]):
                self.write_and_deliver()
        for member in alive:
            self.notice(member)
        self.now += 3.0
        self.tick()

    def write_and_deliver(self) -> None:
        while self.messages or self.write_behind():
            if self.messages:
                self.deliver()


IN_GROUP = ("trains", "meets", "leaves")


class Calm(random.Random):
    """Chooses, but no fault."""

    def random(self) -> float:
        return 0.5


def info_of(member: Member) -> MemberInfo:
    return MemberInfo(member=member.name, actor_id=member.name, node_id="n", pid=0)


def name_of(key: StateKey | None) -> str | None:
    return key.point_name if key else None


def newest_key(members: list[Member]) -> StateKey | None:
    return max((m.key for m in members if m.key is not None), default=None)


def walk(
    seed: int,
    machine: type[LaunchMachine] = LaunchMachine,
    commits: type[CommitMachine] = CommitMachine,
    world: type[World] = World,
) -> tuple[World, str]:
    """A random history of the world `seed`, then its end without faults: the world and the outcome. Raises
    `BrokenError` where a rule does not hold.
    """
    made = world(seed, machine, commits)
    for _ in range(random.Random(seed).randint(60, 500)):
        made.event()
    return made, made.settle()
