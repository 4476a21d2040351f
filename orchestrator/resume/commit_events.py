"""What the commit machine is notified of (events) and what it asks for (actions).

Store actions are carried out by `store_actions.PointCommitter`, which answers each with an event; answers are
the coordinator's to give.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.resume.points import ReplicasDiffer


# ---------------------------------------------------------------------- events
@dataclass(frozen=True, kw_only=True, slots=True)
class VoteCast:
    """A rank's part of a save is written and synced. A repeated vote is only answered again."""

    vote: Vote
    now_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PartGrows:
    """A rank is at work on its part of the save of `key`. `moved`: more of it is written than when it said so
    last. A late or repeated one does no harm.
    """

    key: StateKey
    rank: int
    world_size: int
    moved: bool
    now_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFailed:
    """A rank could not write its part of the save of `key`, and has stopped writing it."""

    key: StateKey
    rank: int
    world_size: int
    reason: str
    now_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VoterGone:
    """The member that was `rank` of `generation` is dead, or left it and says itself that it has voted for or
    reported every save that it began in it but `saving`, if that is one. That vote or report is still to
    come, and until then it may be writing its part.

    `writing`: it is waited for no longer, but may live, and what it writes nobody knows.
    """

    generation: int
    rank: int
    saving: StateKey | None = None
    writing: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationFormed:
    """`generation` of this attempt continues `parent` (None: from nothing). Its journal record is durable."""

    generation: int
    parent: StateKey | None


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalDurable:
    """Every step record of the chain up to `key` is on disk."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitWritten:
    """COMMIT of `key` is on disk. `mean_loss` is that of the steps since the point before, None: unknown."""

    key: StateKey
    mean_loss: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimChecked:
    """Whether a newer claim exists: the answer to the `CheckNewerClaim` of the same key. `lost` says how it
    shows that the run's folder was deleted or replaced; empty if it was not. `quarantined`: the points that
    are marked as damaged; None: that could not be listed.
    """

    key: StateKey | None
    newer: bool
    lost: str = ""
    quarantined: frozenset[str] | None = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """A point was read back whole; every digest was right if `healthy`."""

    name: str
    healthy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Deleted:
    """These points are gone; `failed` ones are not, and are tried again later. `reason`: why storage did not
    delete the first of these; empty where something else keeps them (a pin, a newer claim).
    """

    names: tuple[str, ...]
    failed: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """An action for the save of `key` failed; whether it had an effect is unknown."""

    key: StateKey
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time goes on (seconds, any origin, the same clock as `VoteCast`)."""

    now_s: float


Event = (
    VoteCast
    | PartGrows
    | PartFailed
    | VoterGone
    | GenerationFormed
    | JournalDurable
    | CommitWritten
    | ClaimChecked
    | Verified
    | Deleted
    | Failed
    | Tick
)


# ---------------------------------------------------------------------- actions
@dataclass(frozen=True, kw_only=True, slots=True)
class FlushJournal:
    """Journal the voters' records, make the chain up to `key` durable, then answer `JournalDurable` or
    `Failed`.
    """

    key: StateKey
    records: tuple[StepRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckNewerClaim:
    """Ask by name for the next claim, and look whether the folder is still that of the run, then answer
    `ClaimChecked` with the same key, or `Failed`.
    """

    key: StateKey | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteCommit:
    """Write the coordinator's documents and COMMIT, then answer `CommitWritten` or `Failed`."""

    key: StateKey
    votes: tuple[Vote, ...]
    parent: StateKey | None
    started_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyPoint:
    """Read a point back, then answer `Verified`."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletePoints:
    """Delete these points, each COMMIT first, then answer `Deleted`."""

    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscardSave:
    """Delete the files of a save whose COMMIT was never begun. No answer."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledge:
    """Notify these ranks of the save's generation that the point is committed. `late`: that was decided, and
    told, before; only these ranks ask still.
    """

    key: StateKey
    ranks: tuple[int, ...]
    late: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """Notify these ranks that the save will not be acknowledged, and why; who wanted to leave with it saves
    again. `late`: as in `Acknowledge`. `by_storage`: a write failed, and no member was lost. `differ`: the
    ranks hold different states, so that none of theirs may be continued.
    """

    key: StateKey
    ranks: tuple[int, ...]
    reason: str
    late: bool = False
    by_storage: bool = False
    differ: ReplicasDiffer | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletesFail:
    """Say that the point `name` could not be deleted, and what that means; those after it are not told."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletesWork:
    """Say that points are deleted again: `name` is."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """A newer claim exists, or the run's folder is gone: acknowledge nothing, delete nothing, end the members
    and exit. `reason` says why.
    """

    reason: str


StoreAction = FlushJournal | CheckNewerClaim | WriteCommit | VerifyPoint | DeletePoints | DiscardSave
Answer = Acknowledge | GiveUp | DeletesFail | DeletesWork | Fence
Action = StoreAction | Answer
