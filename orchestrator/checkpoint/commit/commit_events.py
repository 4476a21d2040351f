"""The events that the commit machine receives, and the actions that it returns.

`store_actions.PointCommitter` carries out store actions and answers each with an event. The coordinator
carries out answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.checkpoint.points.points import ReplicasDiffer
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey, StepRecord


# ---------------------------------------------------------------------- events
@dataclass(frozen=True, kw_only=True, slots=True)
class VoteCast:
    """A rank's part of a save is written and synced. A repeated vote is only answered again."""

    vote: Vote
    now_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PartGrows:
    """A rank is working on its part of the save of `key`.

    `moved`: more of it is written than at its last report. Late and repeated reports are harmless.
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
    """The member that was `rank` of `generation` is dead or has left it.

    A member that left states that it has voted for or reported every save that it began in the generation,
    except `saving`, if that is one. The vote or report for that save is still to come. Until then it may be
    writing its part.

    `writing`: the member is no longer waited for, but may live, and it is unknown what it writes.
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
    """COMMIT of `key` is on disk. `mean_loss` is that of the steps since the previous point; None:
    unknown.
    """

    key: StateKey
    mean_loss: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimChecked:
    """The answer to the `CheckNewerClaim` of the same key: whether a newer claim exists.

    `lost`: how it shows that the run's folder was deleted or replaced; empty if it was not. `quarantined`:
    the points that are marked as damaged; None: they could not be listed.
    """

    key: StateKey | None
    newer: bool
    lost: str = ""
    quarantined: frozenset[str] | None = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """A point was read back as a whole. `healthy`: every digest was right."""

    name: str
    healthy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Deleted:
    """These points are gone. `failed` ones are not, and are tried again later.

    `reason`: why storage did not delete the first of `failed`; empty if something else keeps them (a pin, a
    newer claim).
    """

    names: tuple[str, ...]
    failed: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """An action for the save of `key` failed. Whether it had an effect is unknown."""

    key: StateKey
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The part of `resume.keep_best_by` has this loss in the state `key`; None: it has none."""

    key: StateKey
    loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """The current time (seconds, any origin, the same clock as `VoteCast`)."""

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
    | Evaluated
    | Tick
)


# ---------------------------------------------------------------------- actions
@dataclass(frozen=True, kw_only=True, slots=True)
class FlushJournal:
    """Journal the voters' records and make the chain up to `key` durable. Answer: `JournalDurable` or
    `Failed`.
    """

    key: StateKey
    records: tuple[StepRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckNewerClaim:
    """Check by name for the next claim, and whether the folder is still the run's.

    Answer: `ClaimChecked` with the same key, or `Failed`.
    """

    key: StateKey | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteCommit:
    """Write the coordinator's documents and COMMIT. Answer: `CommitWritten` or `Failed`."""

    key: StateKey
    votes: tuple[Vote, ...]
    parent: StateKey | None
    started_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyPoint:
    """Read a point back. Answer: `Verified`."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletePoints:
    """Delete these points, each COMMIT first. Answer: `Deleted`."""

    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscardSave:
    """Delete the files of a save whose COMMIT was never begun. No answer."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledge:
    """Notify these ranks of the save's generation that the point is committed.

    `late`: that was decided and announced before; only these ranks still ask.
    """

    key: StateKey
    ranks: tuple[int, ...]
    late: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """Notify these ranks that the save will not be acknowledged, and why. Members that wanted to leave save
    again.

    `late`: as in `Acknowledge`. `by_storage`: a write failed, and no member was lost. `differ`: the ranks
    hold different states, so that none of these may be continued.
    """

    key: StateKey
    ranks: tuple[int, ...]
    reason: str
    late: bool = False
    by_storage: bool = False
    differ: ReplicasDiffer | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletesFail:
    """Report that the point `name` could not be deleted, and the consequences. Later failures are not
    reported.
    """

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletesWork:
    """Report that points are deleted again; `name` was the first."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """A newer claim exists, or the run's folder is gone. Acknowledge and delete nothing, end the members,
    exit.

    `reason` has the cause.
    """

    reason: str


StoreAction = FlushJournal | CheckNewerClaim | WriteCommit | VerifyPoint | DeletePoints | DiscardSave
Answer = Acknowledge | GiveUp | DeletesFail | DeletesWork | Fence
Action = StoreAction | Answer
