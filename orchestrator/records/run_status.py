"""The status of a launch as the coordinator reports it: members, changes of the group, stalls."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Damage
from orchestrator.records.steps import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberInfo:
    """Where a member runs, for killing it or checking whether it lives."""

    member: str
    actor_id: str  # Ray's, "" outside it
    node_id: str
    pid: int
    host: str = ""  # its address; "" if an older version did not record it


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMember:
    """A worker as named for people.

    Its rank in the newest generation that it was in (None: in none yet), its host's address ("": unknown) and
    its process (0: unknown).
    """

    rank: int | None
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A worker that ended unexpectedly, and why."""

    worker: GroupMember
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChange:
    """How a generation differs from the previous one: losses, newcomers, and the pause of training.

    `wanted`: the number of workers that the launch aims at.
    `step`: the label of the last finished step; `step_before`: of the newest step known to be done before. If
    that is greater, the steps between are trained again.
    `paused_s`: from the newest step that the previous generation finished, else from when that one was
    formed, to the forming; None if nothing was trained before.
    `reason`: why the previous generation ended, as a survivor saw it ("": nothing was trained before).
    `restarted`: by a coordinator that was restarted.
    """

    attempt: int
    generation: int
    world_size: int
    wanted: int
    step: int
    step_before: int
    lost: tuple[Loss, ...]
    joined: tuple[GroupMember, ...]
    paused_s: float | None
    reason: str
    restarted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """What a worker's loop does that has finished no step for long.

    It waits for its peers in a collective (`PEERS`), for data (`DATA`), runs `CODE`, or evaluates. `place`:
    the innermost line of code, the user's if there is one. `since_s`: how long ago it finished a step or
    changed its phase. `unreached`: the ranks whose ports it failed to reach, while all waited for each other.
    """

    kind: str
    place: str
    since_s: float
    unreached: tuple[int, ...] = ()


PEERS, DATA, CODE, EVALUATES = "peers", "data", "code", "evaluates"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A worker of a group that stands still.

    `state`: what its process does (`cluster.machine.process_state`); None: its node's agent did not answer.
    `doing`: what it reported itself.
    """

    worker: GroupMember
    state: str | None
    doing: Doing | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """No step was finished for `quiet_s`; `median_s` is the median step.

    `held`: all workers, inspected. `stopping`: a stop was requested, so that only the save remains.
    """

    quiet_s: float
    median_s: float
    held: tuple[Held, ...]
    stopping: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The coordinator's report to the supervisor.

    It has counts, the last step, the newest committed point, and how the run ended if it did. `warnings` are
    texts for the user, each reported once. `ended` is None while the run continues, else `done`, `stopped` or
    `failed`; `reason` has the cause, and `code` the code of the error that it is. `version` changes whenever
    anything else does.
    """

    version: int
    attempt: int
    generation: int
    world_size: int
    last_step: StepRecord | None
    newest_point: str | None
    committed: Cursor  # of that point, zeros without one
    waiting_since: float | None  # seconds for which the run has been below its minimum
    ended: str | None
    reason: str
    left_out: tuple[MemberInfo, ...]
    members: tuple[MemberInfo, ...]  # by rank
    failures: tuple[tuple[int, str], ...]  # (step, reason) of every failure of this launch
    warnings: tuple[str, ...] = ()  # saves given up, damage found, trouble with storage
    stopping: bool = False
    changes: tuple[GroupChange, ...] = ()  # generations that were formed
    lost: tuple[Loss, ...] = ()  # since the newest generation was formed
    notices: tuple[str, ...] = ()  # other messages for the user: the origin of a save or stop request
    pid: int = 0  # of the coordinator's process
    loading: tuple[int, int] = (
        0,
        0,
    )  # bytes of a point that members have read since the last step, and the total
    damages: tuple[Damage, ...] = ()  # what members found wrong with a point that they were to load
    doing: tuple[tuple[str, Doing], ...] = ()  # by member, since the newest step
    missing: tuple[MemberInfo, ...] = ()  # members of an ended generation that are waited for
    code: str | None = None  # of the error with which the run has failed
    resting: tuple[str, ...] = ()  # nodes that get no worker for a while, because one could not work there
