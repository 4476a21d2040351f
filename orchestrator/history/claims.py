"""Who may write a run's history, and what each writer continues: the records that claims and generations
leave behind.

They are values and decide nothing; `lineage` makes a history of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import OrchestratorError
from orchestrator.planning.differences import Difference
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.planning.manifests import SourceLists
from orchestrator.planning.restarting import RestartRequest
from orchestrator.planning.schedule import Budgets
from orchestrator.planning.skipping import Skip
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey

GenerationId = tuple[int, int]  # (attempt, generation)
ORIGIN = 0  # the attempt of the state with which a fork begins: claims are numbered from 1 on
CONTRADICTION = "history.contradiction"  # the code of the error for a record that no history can contain


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """`attempts/<number>.json`, created exclusively: it fences all older attempts. `launch` is the random id
    of the driver process's life, `pid` that process on `host` (0: unknown, or no driver's claim); `machine`
    and `pid_start` make it one process of all times (`orchestrator.cluster.machine`; empty: unknown).

    `why` is start, fork, resume, rewind or coordinator_restarted; `created` is for people (ISO 8601), nothing
    is decided by it. `run_id` is run.json's.
    """

    number: int
    launch: str
    why: str
    host: str
    created: str
    pid: int = 0
    machine: str = ""
    pid_start: str = ""
    run_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedFrom:
    """The resume point of another run that a fork continues: that run's folder (absolute) and id, the point's
    name there, and the digest of its weights.
    """

    run: str
    run_id: str
    point: str
    weights_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The state with which a fork begins: where the other run stood at that point, with what it trained, its
    budgets, who had encoded, and which lists of its sources were read.
    """

    forked_from: ForkedFrom
    step: int
    cursor: Cursor
    world_size: int
    global_batch_size: int
    seq_len: int
    budgets: Budgets
    encoders: tuple[EncoderSpan, ...] = ()
    sources: tuple[SourceLists, ...] = ()

    def key(self, attempt: int) -> StateKey:
        """The key of that state in the fork, which the claim `attempt` took over."""
        return StateKey(attempt=ORIGIN, generation=attempt, step=self.step)

    def start(self, attempt: int) -> GenerationStart:
        """That state as the begin of a history: attempt `ORIGIN`, with the number of the claim that took it
        over as its generation, so that no two claims write one point.
        """
        return GenerationStart(
            attempt=ORIGIN,
            generation=attempt,
            parent=None,
            step=self.step,
            consumed_samples=self.cursor.consumed_samples,
            consumed_tokens=self.cursor.consumed_tokens,
            target_tokens=self.cursor.target_tokens,
            world_size=self.world_size,
            global_batch_size=self.global_batch_size,
            seq_len=self.seq_len,
            reason=f"forked from {self.forked_from.run} at {self.forked_from.point}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimParent:
    """`attempts/<attempt>.parent.json`, written after the claim: what the attempt continues and which points
    it inherits.

    `parent` is a point's key, None for a fresh start. A point of an older attempt that is not in `inherited`
    is an orphan, whenever its COMMIT appears. `encoders` say who makes which documents, of the parent's past
    too (empty: the run's first encoder, all of them). `origin` is that of a fork, in its first claim that has
    a parent file: `parent` is then the key of `origin.start(attempt)`. `skip` says which samples are left out
    after the parent, by every generation that continues it. `sources` say which list of a source's files is
    read in which epoch, of the parent's past too (empty: those of the first start, in older claims); a cursor
    in a list before a source's newest start goes on at that (`planning.manifests.moved`). `restart` is what
    asked for such a start.

    Raises `OrchestratorError` for what the history cannot contain: a parent that is not inherited or not of
    an older attempt, and a fork whose parent is not its origin.
    """

    attempt: int
    parent: StateKey | None
    inherited: tuple[str, ...] = ()
    budgets: Budgets | None = None
    differences: tuple[Difference, ...] = ()
    encoders: tuple[EncoderSpan, ...] = ()
    origin: Origin | None = None
    skip: Skip | None = None
    sources: tuple[SourceLists, ...] = ()
    restart: RestartRequest | None = None

    def __post_init__(self) -> None:
        if why := self._contradiction():
            raise OrchestratorError(f"the claim of attempt {self.attempt} {why}", code=CONTRADICTION)

    def _contradiction(self) -> str:
        if self.attempt <= ORIGIN:
            return "has no number of a claim, which are counted from 1"
        if self.origin is not None and self.parent != self.origin.key(self.attempt):
            parent = self.parent.point_name if self.parent else "nothing"
            return f"continues {parent}, its origin is {self.origin.key(self.attempt).point_name}"
        if self.parent is None:
            return ""
        if self.parent.attempt >= self.attempt:
            return f"continues {self.parent.point_name}, which is of no older attempt"
        if self.parent.point_name not in self.inherited:
            return f"continues {self.parent.point_name}, but did not inherit it"
        return ""

    @property
    def begins(self) -> GenerationStart | None:
        """The begin of the fork's history, if this is the claim that took it over."""
        return self.origin.start(self.attempt) if self.origin is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationStart:
    """A generation's journal record, durable before members hear of it.

    `parent` is the state that it continues, None: nothing. `step` is the label of the last step done as this
    generation counts, which differs from `parent.step` where labels were re-based. The counts are the
    parent's; world size, batch size and seq_len are what the generation trains with. `cause` is one of
    `elastic.cause.Cause` ("": written before there were causes), `copies` how many members hold a whole state
    while it trains, so that all but one of them may die without a step lost (None: not said); where it
    is cut into `num_shards`, how many hold each shard.

    Raises `OrchestratorError` for what the history cannot contain: a parent that is not older, and counts
    without a parent (but at the origin of a fork).
    """

    attempt: int
    generation: int
    parent: StateKey | None
    step: int
    consumed_samples: int
    consumed_tokens: int
    target_tokens: int
    world_size: int
    global_batch_size: int
    seq_len: int
    members: tuple[str, ...] = ()
    reason: str = ""
    cause: str = ""
    copies: int | None = None
    num_shards: int | None = None

    def __post_init__(self) -> None:
        what = f"generation {self.generation} of attempt {self.attempt}"
        counts = self.consumed_samples, self.consumed_tokens, self.target_tokens
        if self.parent is None:
            if self.attempt != ORIGIN and any(counts):
                raise OrchestratorError(
                    f"{what} begins from nothing at (samples, tokens, targets) = {counts}", code=CONTRADICTION
                )
        elif (self.parent.attempt, self.parent.generation) >= self.id:
            raise OrchestratorError(
                f"{what} names the parent {self.parent.point_name}, which is not older than itself",
                code=CONTRADICTION,
            )

    @property
    def id(self) -> GenerationId:
        """(attempt, generation)."""
        return self.attempt, self.generation
