"""The records of claims and generations: which launch may write a run's history, and what it continues.

They are values. `lineage` makes a history of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.errors import OrchestratorError
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.planning.resume.identity import Difference
from orchestrator.planning.resume.skipping import Skip
from orchestrator.planning.resume.source_lists import RestartRequest, SourceLists
from orchestrator.planning.schedule import Budgets
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey

GenerationId = tuple[int, int]  # (attempt, generation)
ORIGIN = 0  # the attempt of a fork's initial state: claims are numbered from 1
INCONSISTENT = "history.inconsistent"  # the code of the error for records that contradict each other


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """`attempts/<number>.json`, created exclusively: it fences all older attempts.

    `launch` is a random id of the driver process. `pid` is that process on `host` (0: unknown, or not a
    driver's claim). With `machine` and `pid_start` it identifies one process for all time
    (`orchestrator.cluster.machine`; empty: unknown). `why` is start, fork, resume, rewind or
    coordinator_restarted. `created` is for display (ISO 8601); no decision uses it. `run_id` is that of
    run.json.
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
    """The resume point of another run that a fork continues.

    It has that run's folder (absolute) and id, the point's name there, and the digest of its weights.
    """

    run: str
    run_id: str
    point: str
    weights_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The initial state of a fork, taken from the other run at that point.

    It has the counts of what was trained, the budgets, the encoders, and the lists of its sources.
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
        """The key of that state in the fork whose claim `attempt` took it over."""
        return StateKey(attempt=ORIGIN, generation=attempt, step=self.step)

    def start(self, attempt: int) -> GenerationStart:
        """That state as the beginning of a history.

        Its attempt is `ORIGIN`, and its generation is the number of the claim that took it over, so that no
        two claims write the same point.
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
    """`attempts/<attempt>.parent.json`, written after the claim: what the attempt continues and inherits.

    `parent` is a point's key, None for a fresh start. A point of an older attempt that is not in `inherited`
    is an orphan, whenever its COMMIT appears. `encoders` record which encoder makes which documents,
    including the parent's past (empty: the run's first encoder, for all). `origin` is that of a fork, in its
    first claim with a parent file; `parent` is then the key of `origin.start(attempt)`. `skip` defines the
    samples that are left out after the parent, by every generation that continues it. `sources` record which
    list of a source's files each epoch reads, including the parent's past (empty: those of the first start,
    in older claims). A cursor in a list before a source's newest start continues at that start
    (`planning.resume.source_lists.moved`). `restart` is the request for such a start. `journals` has, for
    older attempts, the least number of lines of their journals: so many were there before this claim.

    Raises `OrchestratorError` for a record that no history can contain: a parent that is not inherited or not
    of an older attempt, and a fork whose parent is not its origin.
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
    journals: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if why := self._contradiction():
            raise OrchestratorError(f"the claim of attempt {self.attempt} {why}", code=INCONSISTENT)

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
        """The beginning of the fork's history, if this is the claim that took it over."""
        return self.origin.start(self.attempt) if self.origin is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationStart:
    """A generation's journal record, durable before it is sent to members.

    `parent` is the state that it continues, None: nothing. `step` is the label of the last finished step as
    this generation counts, which differs from `parent.step` if labels were re-based. The counts are the
    parent's. World size, batch size and seq_len are those of the generation. `cause` is one of
    `elastic.roster.GenerationCause` ("": written before causes existed). `copies` is the number of members
    that hold a whole state during training, so that all but one of them may die without losing a step (None:
    not recorded). If the state is cut into `num_shards`, it is the number that hold each shard.

    Raises `OrchestratorError` for a record that no history can contain: a parent that is not older, and
    counts without a parent (except at the origin of a fork).
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
                    f"{what} begins from nothing at (samples, tokens, targets) = {counts}", code=INCONSISTENT
                )
        elif (self.parent.attempt, self.parent.generation) >= self.id:
            raise OrchestratorError(
                f"{what} names the parent {self.parent.point_name}, which is not older than itself",
                code=INCONSISTENT,
            )

    @property
    def id(self) -> GenerationId:
        """(attempt, generation)."""
        return self.attempt, self.generation
