"""A member's request to train with others, and the coordinator's answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import LossHistory, StateKey, StepRecord


class Source(IntEnum):
    """Where a member has a shard of a state, in the order of preference.

    First what needs no further copy, then what is in its own memory, then what it keeps for a neighbour.
    """

    LIVE = 0  # the tensors that it trains
    # received when its generation agreed on a state, before it knew that all members have theirs
    RECEIVED = 1
    PREPARED = 2  # the state before with the reduced gradient of this step: as good as live where another
    # member is (membership rule 3)
    STAGED = 3  # its own memory point
    NEIGHBOUR = 4  # a neighbour's memory point

    @property
    def is_own(self) -> bool:
        """Whether it is in the tensors that the member trains, or will be when it continues that state."""
        return self in (Source.LIVE, Source.RECEIVED, Source.PREPARED)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldShard:
    """A member can give shard `shard` of the `num_shards` of the state `key`. Under replicate there is one.

    Only whole copies are listed: a copy is removed from the member's list before its first byte is
    overwritten, and added after the last byte has arrived and was verified. `cursor` is that of the state;
    None if unknown, as with a prepared step.
    """

    key: StateKey
    shard: int
    num_shards: int
    source: Source
    cursor: Cursor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSource:
    """A member of the group that can give a shard of the parent's state, and its source."""

    rank: int
    source: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberState:
    """What a member brings when it joins.

    `key`, `cursor`: the state it trains (None: blank).
    `leaves`: (attempt, generation) it was in, None at first.
    `prepared`: the step whose summary it waited for.
    `saving`: the newest save that it began and did not report as failed. Its vote or its report may be still
    to come, and until then it may be writing its part. Every older save is settled.
    `records`: all that were not acknowledged.
    `reason`: why the last generation ended, for the journal.
    `holdings`: everything that it can give, including the state it trains; empty: only the whole of that
    state.
    `unsaved`: the last generation ended because the save of the run's last state was given up.
    """

    key: StateKey | None
    cursor: Cursor | None
    leaves: tuple[int, int] | None
    prepared: StateKey | None
    saving: StateKey | None
    records: tuple[StepRecord, ...]
    reason: str
    holdings: tuple[HeldShard, ...] = ()
    unsaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """A member asks to be in the next generation. `key` is its state's key, None if blank.

    `leaves` is the (attempt, generation) it was in, None for a newcomer. `prepared` is the key of the step
    whose summary it had entered without learning the result (its reduced gradient is kept): `StateKey(step =
    key.step + 1)` in the generation it leaves. `holdings`, `unsaved`: see `MemberState`.
    """

    member: str
    launch: str
    actor_id: str
    node_id: str
    host: str
    port: int
    key: StateKey | None
    leaves: tuple[int, int] | None
    prepared: StateKey | None
    cursor: Cursor | None
    records: tuple[StepRecord, ...] = ()
    reason: str = ""
    pid: int = 0  # of the member's process, so that its node's agent can kill it if it is left out
    idle_s: float = 0.0  # how long ago its last step was done when it asked; 0 for a newcomer
    unreached: tuple[str, ...] = ()  # members whose ports it failed to reach, when its last view had `probe`
    saving: StateKey | None = None  # see `MemberState`
    holdings: tuple[HeldShard, ...] = ()
    unsaved: bool = False
    starved: bool = False  # for most of the time since its last join it needed a CPU and got none


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineProof:
    """The facts that a worker presents about its machine before it joins.

    They are a file that it has written into the run's storage, with a random token in it, and its clock
    (seconds since 1970).
    """

    probe: str
    token: str
    unix_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit:
    """The coordinator's answer: the machine cannot take part in the run. `code` as in `OrchestratorError`."""

    code: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationView:
    """One membership of the training group, as one member sees it.

    `parent` is the state or point it continues (None: from nothing). `source_rank` holds the parent's state
    in memory (None: all members load `point`, or build the initial state if that is None too). A member whose
    own key equals the parent, or that is `prepared` for exactly that step, holds its shard of the parent.

    `sources[s]` are all members that can give shard s of the parent, ordered by `Source`, of len(sources)
    shards; empty if `source_rank` is None. `keep` is a memory point that is complete among the members: its
    copies must not be overwritten before a newer one is whole on every rank. `nodes[rank]` is a number for
    the node of each rank, `own_host` the host under which the others reach this member. `evaluated` is the
    newest step whose evaluation was recorded when the generation formed, −1 if there is none. `losses` is the
    history before the parent, if a policy about losses needs it (`planning.loss_policy`).
    """

    attempt: int
    generation: int
    rank: int
    world_size: int
    members: tuple[str, ...]
    host: str  # of rank 0's store
    port: int
    parent: StateKey | None
    source_rank: int | None
    point: str | None
    cursor: Cursor | None
    step: int  # the label of the last finished step
    launch: str
    # not empty: form no group, but try these (host, port) of all members, by rank, and join again
    probe: tuple[tuple[str, int], ...] = ()
    sources: tuple[tuple[ShardSource, ...], ...] = ()
    keep: StateKey | None = None
    nodes: tuple[int, ...] = ()
    own_host: str = ""
    evaluated: int = -1
    losses: LossHistory | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlRequests:
    """The coordinator's requests to a running generation.

    `ended`: this generation is over (also: it is unknown, join again). `resize`: the re-form is planned, to
    admit or release members. The state is then saved before it, if that delays no member.
    """

    ended: bool
    save: bool
    stop: bool
    reform: bool
    acknowledged_step: int
    resize: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The coordinator's answer to a member that may not take part: the member exits."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StillWaiting:
    """The coordinator's answer to a call that it cannot answer yet: it is alive, ask again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOver:
    """The coordinator's answer to a member that joins when the run has ended: the member leaves."""

    reason: str
