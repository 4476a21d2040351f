"""The values of the rendezvous: its settings, its answers to a join, its decisions, and generations.

`PendingRequests` are repeated to every generation at its next step boundary until they are done.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import ControlRequests, GenerationView, JoinRequest, ShardSource
from orchestrator.records.steps import StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousSettings:
    """Times (seconds) and counts of the rendezvous. The defaults are those of docs/membership.md.

    - `start_grace_s`: how long a group without survivors waits for the expected number, from its first join.
    - `missing_grace_s`: the minimum time that a live member of an ended generation has to join (two median
      steps if that is more).
    - `forming_s`: how long members try to form; also a blamed newcomer's first delay, doubled each time up to
      `longest_delay_s`.
    - `join_debounce_s`: a joiner interrupts a running generation once no other has joined for this long, at
      the latest after five times as long.
    - `same_step_failures`: this many consecutive generations that lost a member at one step stop the run.
    - `forming_failures`: this many consecutive generations that ended before their first step, with no member
      lost and none to blame, stop the run.
    """

    start_grace_s: float = 60.0
    missing_grace_s: float = 10.0
    forming_s: float = 10.0
    longest_delay_s: float = 640.0
    join_debounce_s: float = 0.2
    same_step_failures: int = 3
    forming_failures: int = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSize:
    """How many workers a group may have.

    `min_workers` to `max_workers` train. A group without survivors (a start, or after all died) waits for
    `expected` workers.
    """

    min_workers: int
    max_workers: int
    expected: int

    def __post_init__(self) -> None:
        low, high = self.min_workers, self.max_workers
        assert 1 <= low <= high, f"1 <= min {low} <= max {high}"

    @classmethod
    def fixed(cls, num_workers: int) -> GroupSize:
        """The size of a group that always has `num_workers`."""
        return cls(min_workers=num_workers, max_workers=num_workers, expected=num_workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviousGeneration:
    """The newest generation that an older attempt of this launch journalled, `members` by rank.

    A restarted coordinator waits for these members. `ended`: others of the generation are known to have died.
    It cannot continue then, and its live members may wait for the dead ones.
    """

    attempt: int
    generation: int
    members: tuple[str, ...]
    ended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestPoint:
    """The newest committed point on the lineage, as passed to `set_newest_point`."""

    key: StateKey
    cursor: Cursor | None
    name: str


# ---- answers to a join
@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """This member has no place here. It exits; `reason` has the cause."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ignored:
    """A late copy of an older call, which changed nothing.

    A member that still waits for an answer asks again, with fresh arguments.
    """

    reason: str


JoinAnswer = Refused | Ignored | GenerationView


# ---- decisions
@dataclass(frozen=True, kw_only=True, slots=True)
class Formation:
    """The next generation. The coordinator journals it, calls `formed`, and then answers its members with
    `view_for`.

    - `members` are in the order of ranks; `newcomers` are those that were not in the previous generation.
    - `parent` is the state that it continues (None: from nothing). If members hold it, `source`, which has
      some or all of it, is rank 0, and `sources[s]` are all members that can give shard s of it, of
      len(sources) shards. If `source` is None, the point `point` holds it. `cursor` belongs to the parent.
    - `keep`: the memory point whose copies stay until there is a newer one (`GenerationView`).
    - `step` is the label from which this generation counts: `parent.step`, unless `rebase` changed it.
    - `probe_ports`: two consecutive generations failed before their first step with no member to blame, so
      members should probe each other's ports first.
    - `save_only`: formed below the minimum, so that nothing is lost while the group waits. Its
      `control_requests` ask for a save and a re-form from its first step on.
    """

    attempt: int
    generation: int
    members: tuple[str, ...]
    parent: StateKey | None
    source: str | None
    point: str | None
    cursor: Cursor | None
    step: int
    newcomers: tuple[str, ...]
    probe_ports: bool
    save_only: bool
    sources: tuple[tuple[ShardSource, ...], ...] = ()
    keep: StateKey | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Form this generation. No other decision is made until `Rendezvous.formed` is called."""

    formation: Formation


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveOut:
    """Kill this unresponsive member through its node's agent.

    It is not waited for, whether or not the kill succeeds.
    """

    member: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """No generation can be formed since `since` (seconds), because of `reason`.

    Every tick returns it while that is so. `needed`: the minimum of members if fewer are `there`; else 0.
    """

    reason: str
    since: float
    needed: int = 0
    there: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRun:
    """End the run with `reason`; `outcome` is failed or stopped.

    Final: no other decision follows it. `code`: that of the error with which the run failed.
    """

    reason: str
    outcome: str = "failed"
    code: str | None = None


Action = Form | LeaveOut | Waiting | StopRun


# ---- inside the rendezvous
@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A member that waits for the next generation: its newest request, and when it first arrived."""

    request: JoinRequest
    since: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A generation that was formed and answered, with the requests it was formed from.

    Formation and requests are unknown for a generation of an older attempt.
    """

    attempt: int
    number: int
    members: tuple[str, ...]
    formation: Formation | None
    requests: dict[str, JoinRequest] = field(default_factory=dict, hash=False)
    ranks: dict[str, int] = field(init=False, hash=False, compare=False, repr=False)  # member -> rank

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", {member: rank for rank, member in enumerate(self.members)})

    @property
    def identity(self) -> tuple[int, int]:
        """(attempt, number), as in `JoinRequest.leaves`."""
        return self.attempt, self.number

    @property
    def newcomers(self) -> tuple[str, ...]:
        """Members that were not in the previous generation."""
        return self.formation.newcomers if self.formation else ()

    @property
    def start(self) -> int:
        """The step label it started from; -1 if unknown, so that any step is progress."""
        return self.formation.step if self.formation else -1


NOTHING = ControlRequests(ended=False, save=False, stop=False, reform=False, acknowledged_step=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRequests:
    """`stop`: save and stop. `save`: the name of the requested save. `saves_done`: those that have begun."""

    stop: bool = False
    save: str | None = None
    saves_done: frozenset[str] = frozenset()

    def on_save(self, request: str) -> PendingRequests:
        """Requests a save as `request`. One that has begun is not started again."""
        return self if request in self.saves_done else replace(self, save=request)

    def on_save_answered(self, request: str) -> PendingRequests:
        """The save requested as `request` has begun."""
        save = None if self.save == request else self.save
        return replace(self, save=save, saves_done=self.saves_done | {request})

    def of_running(
        self, *, save_only: bool, reform: bool, leaving_saves: bool, in_time: bool, over: bool
    ) -> ControlRequests:
        """Computes the requests to the running generation.

        `save_only`: it was formed only for a save. `reform`: other members wait to be admitted, or some wait
        to leave, with `leaving_saves` after a save. `in_time`: a save will be committed before any of them is
        gone. `over`: the run was stopped.

        A stop also makes the members meet again, and thus replaces a re-form. A re-form waits for the save
        that is requested together with it. A save that the re-form does not need comes after it. The
        exception is the save before a `resize`, for which nothing waits.
        """
        reform = reform and not self.stop
        return ControlRequests(
            ended=over,
            save=save_only or (leaving_saves if reform else self.save is not None),
            stop=self.stop,
            reform=reform,
            acknowledged_step=0,
            resize=reform and in_time,
        )
