"""How a launch stands, as the coordinator tells it: who trains, how the group changed, where it stalls."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Damage
from orchestrator.records.steps import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberInfo:
    """Where a member lives, for whoever has to kill it or to ask whether it lives."""

    member: str
    actor_id: str  # Ray's, "" outside it
    node_id: str
    pid: int
    host: str = ""  # its address; "" where an older version did not note it


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMember:
    """A worker as people name it: its rank in the newest generation that it was in (None: in none yet), its
    host's address ("": not known) and its process (0: not known).
    """

    rank: int | None
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A worker that ended without having been asked to, and why."""

    worker: GroupMember
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChange:
    """How a generation differs from the one before it: who was lost, who came, how long nobody trained.

    `wanted`: how many workers the launch aims at. `step` is the label of the last step done, `step_before` of
    the newest that was known to be done before: if that is greater, the steps between are trained again.
    `paused_s` counts from the newest step that the generation before finished, else from when that one was
    formed, to the forming; None where nobody trained before. `reason` says why the generation before ended,
    as a survivor saw it ("": nobody trained before). `restarted`: by a coordinator that was restarted.
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
    """What a worker's loop does that has finished no step for long: it waits for its peers in a collective
    (`PEERS`), for data (`DATA`), or runs `CODE`. `place`: the innermost line of code, the user's if there is
    one. `since_s`: how long ago it finished a step or changed its phase. `unreached`: the ranks whose ports
    it tried in vain, while all waited for each other.
    """

    kind: str
    place: str
    since_s: float
    unreached: tuple[int, ...] = ()


PEERS, DATA, CODE = "peers", "data", "code"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A worker of a group that stands still. `state`: what its process does
    (`cluster.machine.process_state`); None: its node's agent did not answer. `doing`: what it said itself.
    """

    worker: GroupMember
    state: str | None
    doing: Doing | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Nobody finished a step for `quiet_s`; `median_s` is the usual step. `held`: all workers, looked at.
    `stopping`: a stop was asked for, so that what is left to do is to save.
    """

    quiet_s: float
    median_s: float
    held: tuple[Held, ...]
    stopping: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What the coordinator reports to the supervisor: counts, the last step, the newest committed point, and
    how the run ended if it did. `warnings` are texts for the user, each reported once.

    `ended` is None while it runs, else `done`, `stopped` or `failed`; `reason` says why. `version` changes
    whenever anything else does.
    """

    version: int
    attempt: int
    generation: int
    world_size: int
    last_step: StepRecord | None
    newest_point: str | None
    committed: Cursor  # of that point, zeros without one
    waiting_since: float | None  # seconds that the run has been below its minimum
    ended: str | None
    reason: str
    left_out: tuple[MemberInfo, ...]
    members: tuple[MemberInfo, ...]  # by rank
    failures: tuple[tuple[int, str], ...]  # (step, what) of every failure of this launch
    warnings: tuple[str, ...] = ()  # saves given up, damage found, trouble with storage
    stopping: bool = False
    changes: tuple[GroupChange, ...] = ()  # generations that were formed
    lost: tuple[Loss, ...] = ()  # since the newest generation was formed
    notices: tuple[str, ...] = ()  # what else the user must hear: who asked for a save or a stop
    pid: int = 0  # of the coordinator's process
    loading: tuple[int, int] = (
        0,
        0,
    )  # bytes of a point that members have read since the last step, of how many
    damages: tuple[Damage, ...] = ()  # what members found wrong with a point that they were to load
    doing: tuple[tuple[str, Doing], ...] = ()  # by member, since the newest step
    missing: tuple[MemberInfo, ...] = ()  # members of a generation that ended, while they are waited for
    resting: tuple[str, ...] = ()  # nodes on which no worker is started for a while: it could not work
