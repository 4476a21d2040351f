"""The values of the rendezvous: its settings, its answers to a join, its decisions, and what a generation is.

Pure values without behaviour; it knows no Ray, no torch, no clock and no storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView, JoinRequest, ShardSource
from orchestrator.records.steps import StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousSettings:
    """Times (seconds) and counts of the rendezvous; the defaults are those of docs/membership.md.

    - `start_grace_s`: how long a group without survivors waits, from its first join, for the expected number.
    - `missing_grace_s`: the least time that a live member of an ended generation has to come (two median
      steps if that is more).
    - `forming_s`: how long members try to form; also a blamed newcomer's first delay, doubled each time up to
      `longest_delay_s`.
    - `join_debounce_s`: a joiner interrupts a running generation once nobody else has joined for this long,
      at the latest after five times as long.
    - `same_step_failures`: so many generations in a row that lost a member at one step stop the run.
    - `forming_failures`: so many generations in a row that ended before their first step, with nobody lost
      and nobody to blame, stop the run.
    """

    start_grace_s: float = 60.0
    missing_grace_s: float = 10.0
    forming_s: float = 10.0
    longest_delay_s: float = 640.0
    join_debounce_s: float = 0.2
    same_step_failures: int = 3
    forming_failures: int = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviousGeneration:
    """The newest generation that an older attempt of this launch journalled, `members` by rank.

    They are whom a restarted coordinator waits for. `ended`: others of it are known to have died, so that it
    cannot go on, and those who live may wait for them.
    """

    attempt: int
    generation: int
    members: tuple[str, ...]
    ended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestPoint:
    """The newest committed point on the lineage, as `set_newest_point` was given it."""

    key: StateKey
    cursor: Cursor | None
    name: str


# ---- answers to a join
@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """This member has no place here; it exits and `reason` says why."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ignored:
    """A late copy of an older call: nothing changed. Who still waits for an answer asks again, with fresh
    arguments.
    """

    reason: str


JoinAnswer = Refused | Ignored | GenerationView


# ---- decisions
@dataclass(frozen=True, kw_only=True, slots=True)
class Formation:
    """The next generation: journal it, call `formed`, then answer each of its members with `view_for`.

    - `members` by rank; `newcomers` are those that were not in the generation before.
    - `parent` is the state that it continues (None: from nothing). Members hold it: `source`, who has some
      or all of it, is rank 0, and `sources[s]` are all who can give shard s of it, of len(sources) shards.
      Where `source` is None the point `point` holds it. `cursor` belongs to the parent.
    - `keep`: the memory point whose copies stay until there is a newer one (`GenerationView`).
    - `step` is the label from which this generation counts: `parent.step`, unless `rebase` changed it.
    - `probe_ports`: two generations in a row failed before their first step with nobody to blame, so members
      should try each other's ports first.
    - `save_only`: formed below the minimum, so that nothing is lost while the group waits; its
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
    """Form this generation. Nothing else is decided until `Rendezvous.formed` is called."""

    formation: Formation


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveOut:
    """Kill this unresponsive member by its node's agent. It is not waited for, whether the kill succeeds or
    not.
    """

    member: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """No generation can be formed since `since` (seconds), because of `reason`; said by every tick while it
    holds. `needed`: the minimum of members, where fewer than that are `there`; else 0.
    """

    reason: str
    since: float
    needed: int = 0
    there: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRun:
    """End the run with `reason`; `outcome` is failed or stopped. Final: whoever said it says nothing else
    after it.
    """

    reason: str
    outcome: str = "failed"


Action = Form | LeaveOut | Waiting | StopRun


# ---- inside the rendezvous
@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A member that waits for the next generation: its newest request, and when it first came."""

    request: JoinRequest
    since: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A generation that was formed and answered, with the requests it was formed from.

    Formation and requests are not known for one of an older attempt.
    """

    attempt: int
    number: int
    members: tuple[str, ...]
    formation: Formation | None
    requests: dict[str, JoinRequest] = field(default_factory=dict, hash=False)
    ranks: dict[str, int] = field(init=False, hash=False, compare=False, repr=False)  # of each member

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", {member: rank for rank, member in enumerate(self.members)})

    @property
    def identity(self) -> tuple[int, int]:
        """(attempt, number), as `JoinRequest.leaves` names it."""
        return self.attempt, self.number

    @property
    def newcomers(self) -> tuple[str, ...]:
        """Members that were not in the generation before."""
        return self.formation.newcomers if self.formation else ()

    @property
    def start(self) -> int:
        """The step label it started from; -1 where it is not known, so that any step is progress."""
        return self.formation.step if self.formation else -1
