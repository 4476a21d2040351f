"""The arguments and the result of the training loop, and its interfaces to membership and data.

The values can be pickled. Importing this module imports neither torch nor the configuration module.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from orchestrator.errors import OrchestratorError
from orchestrator.planning import batches
from orchestrator.planning.schedule import Budgets
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import ControlRequests, GenerationView, MemberState
from orchestrator.records.points import Vote
from orchestrator.records.steps import BatchSlice, EvalRecord, StateKey, StepRange, StepRecord

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

    from orchestrator.config.schema import EvalConfig, ResumeConfig
    from orchestrator.config.sections import ModelConfig, TrainConfig

DONE, STOPPED, LEFT = "done", "stopped", "left"  # reasons of an outcome
FAILED = "failed"  # the reason for callbacks where there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """The job settings that the loop uses. They are equal on every member (`config_digest` proves it).

    `device`: `cpu`, `cuda` or `cuda:N`.
    `forming_limit_s`: how long a group may take to form.
    `collective_limit_s`: the shortest time that a collective waits for a silent peer. The limit is five times
    the last step if that is longer, and `PHASE_LIMITS_S` in the very first step and where a peer may
    be loading or saving.
    `document_attention`: tokens attend only to their own document.
    `seq_len`: the positions of a sample, which has `rows_per_sample` rows.
    `num_shards`: the number of parts of the state (`planning.state.state_layout.layout_of`); 1: replicate.
    `until_tokens`: the launch stops after the step that reaches this many tokens, even if the budgets allow
    more.
    `run_uri`: the run's folder, for callbacks.
    `sources`: their names by number, for the metric of each. `document_losses`: how many documents of a step
    are recorded.
    `weights_by_name`: how first weights are drawn, see `trainer.state.first_weights.FirstWeights`.
    """

    model: ModelConfig
    train: TrainConfig
    resume: ResumeConfig
    eval: EvalConfig
    seq_len: int
    budgets: Budgets
    config_digest: str
    device: str = "cpu"
    document_attention: bool = False
    digest_every_steps: int | None = None
    num_shards: int | None = 1
    until_tokens: int | None = None
    forming_limit_s: float = 10.0
    collective_limit_s: float = 60.0
    run_uri: str = ""
    sources: Mapping[int, str] = field(default_factory=dict)
    document_losses: int = 0
    rows_per_sample: int = 1
    weights_by_name: bool = True

    @property
    def row_len(self) -> int:
        """The positions of a row."""
        return self.seq_len // self.rows_per_sample

    @property
    def invariant(self) -> bool:
        """Whether the gradient is combined in the fixed tree (`train.numerics`).

        `auto` is invariant on a CPU, and fast on a GPU or where the state is sharded.
        """
        auto = self.train.numerics == "auto" and self.num_shards == 1
        return not self.device.startswith("cuda") if auto else self.train.numerics == "invariant"

    def stops_at(self, cursor: Cursor) -> bool:
        """Whether the cursor has reached the place at which the launch is to stop."""
        return self.until_tokens is not None and cursor.consumed_tokens >= self.until_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the loop ended for this member.

    `done` and `stopped`: the state `key` is committed. `left`: the run was over for this member.
    """

    reason: str
    key: StateKey | None
    cursor: Cursor


# ------------------------------------------------------------------------------------------------------ steps
# The number of upcoming steps that a feed is notified of. The feed fetches as many as it has room for. Small
# steps are announced in larger numbers, because each reply has a fixed cost.
STEPS_AHEAD, SMALL_STEPS_AHEAD, SMALL_STEPS_TOKENS = 8, 32, 1 << 23


def next_range(job: TrainJob, cursor: Cursor) -> StepRange | None:
    """The step after `cursor`; None if a stop is reached there. Does not consider the end of the data."""
    if job.stops_at(cursor):
        return None
    return batches.next_range(
        cursor.consumed_samples,
        cursor.consumed_tokens,
        job.train.global_batch_size,
        job.seq_len,
        job.budgets.stop_tokens,
        job.budgets.stop_samples,
    )


def coming_ranges(job: TrainJob, cursor: Cursor) -> list[StepRange]:
    """The next steps after `cursor`, up to the stop and the announcement limit. Assumes that the data do not
    end.
    """
    found, num_tokens = list[StepRange](), 0
    while (step := next_range(job, cursor)) is not None:
        num_tokens += step.num_tokens
        limit = SMALL_STEPS_AHEAD if num_tokens <= SMALL_STEPS_TOKENS else STEPS_AHEAD
        if len(found) >= limit:
            break
        found.append(step)
        cursor = Cursor(
            consumed_samples=cursor.consumed_samples + step.num_samples,
            consumed_tokens=cursor.consumed_tokens + step.num_tokens,
        )
    return found


# ----------------------------------------------------------------------------------------------------- phases
STEP, FORMING, LOAD, FEED_WAIT, SAVE_WAIT = "step", "forming", "load", "feed wait", "save wait"
EVAL = "evaluating"  # a batch of an evaluation
BETWEEN = "between steps"  # a step has just finished
# The member knows that its generation is over and is still in a step (it computes, compiles or waits for
# NCCL). It reports how long that may take.
ENDING = "ending a step"
# A save or a load may take longer than a rendezvous waits for unresponsive members (membership rule 23).
# A group forms in four stages (store, rendezvous, process group, comparison) of at most 10 s each.
PHASE_LIMITS_S = {STEP: 0.0, BETWEEN: 0.0, FORMING: 45.0, LOAD: 900.0, FEED_WAIT: 900.0, SAVE_WAIT: 900.0}
PHASE_LIMITS_S[EVAL] = 900.0  # of one batch, whose documents may have to be read and tokenized first

# the limit of a step in which blocks may be compiled: the first, and any with a new shape
COMPILE_LIMIT_S = 1800.0


def step_limit_s(least_s: float, last_step_s: float | None, may_compile: bool) -> float:
    """Returns the seconds that a collective waits for a silent peer: five times the last step, at least
    `least_s`.

    `last_step_s` None: some member's process makes its first step, of unknown duration. `may_compile`: a peer
    may be compiling, in any step, because it can get shapes that others do not.
    """
    limit_s = PHASE_LIMITS_S[SAVE_WAIT] if last_step_s is None else max(least_s, 5 * last_step_s)
    return max(limit_s, COMPILE_LIMIT_S) if may_compile else limit_s


# ---------------------------------------------------------------------------------------- membership and data
STORE_TIMEOUT_S = 10.0


def open_store(host: str) -> TCPStore:
    """Opens this member's own store, on a port that the system chooses (`.port`), as master.

    A member has one such store for its whole life.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        host,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
    )


def connect_store(own: TCPStore, view: GenerationView) -> Store:
    """Connects to the store of the generation's rank 0, with keys under launch/attempt/generation.

    Raises `RuntimeError` if it cannot be reached.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store: Store = own
    if view.rank != 0:
        store = TCPStore(
            view.host,
            view.port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
        )
    return PrefixStore(f"{view.launch}/{view.attempt}/{view.generation}", store)


class Membership(Protocol):
    """The members that train together. `member` is this process's random name."""

    member: str

    def join(self, state: MemberState) -> GenerationView | None:
        """Blocks until this member is in a new generation. None: the run is over for it, and it leaves."""

    def connect_store(self, view: GenerationView) -> Store:
        """Returns the store through which the generation's process group forms."""

    def control_requests(self, view: GenerationView) -> ControlRequests:
        """Returns the latest known requests of the coordinator for this generation. Never blocks.

        Rank 0 copies them into the summary. The other ranks use only `ended`. `acknowledged_step` is a label
        of this generation: all its records up to that step are durable, and so are all records of earlier
        generations. A value below the generation's first step has no meaning.
        """

    def when_ended(self, view: GenerationView, act: Callable[[], None]) -> None:
        """Registers `act`, which is called from any thread as soon as the end of the generation is known.

        It is called at once if the end is already known. There is one act per generation.
        """

    def step_limit(self, seconds: float) -> None:
        """Sets how long a step of this member may take from now on, with everything that it waits for.

        If its generation ends meanwhile, the other members wait this long for it. Never blocks.
        """

    def phase(self, name: str) -> None:
        """Reports this member's current phase (one of `PHASE_LIMITS_S`). Never blocks.

        The other members derive from it how long to wait for this one.
        """

    def loading(self, done_bytes: int, num_bytes: int) -> None:
        """Reports how many bytes of the point this member has read, of all that it reads. Never blocks."""

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        """Reports the records of new steps. Never blocks. Called by rank 0 only."""

    def digest(self, view: GenerationView, key: StateKey, weights_digest: str) -> None:
        """Reports the digest of the weights of `key`, this generation's newest state. Never blocks.

        The report may be lost. Called by rank 0 only.
        """

    def computed_with(self, blocks: str, attention: str, kernels: Callable[[], bytes | None]) -> None:
        """Reports how the model is computed: `blocks` is `compiled`, `liger` or `eager`, `attention` the name
        in transformers (empty: the model of a factory).

        `kernels` returns copies of compiled kernels for later members, None if there are none. It is called
        in a thread if they are wanted. Never blocks, and may be lost. Called by rank 0 only.
        """

    def evaluated(self, view: GenerationView, record: EvalRecord, is_last: bool) -> None:
        """Reports the evaluation of one part; `is_last`: all parts are evaluated. Never blocks. Called by
        rank 0 only.

        If the report is lost with this member, a later generation evaluates again.
        """

    def send_reports(self) -> bool:
        """Waits until the coordinator has everything that this member has reported.

        Returns whether all evaluations are durable. A restarted coordinator does not take those of a
        generation before it. Raises what the loop's own calls raise if the coordinator stays away.
        """

    def callback_failed(self, text: str, stops: bool) -> None:
        """Reports an error of a callback; `stops`: it is to save and stop the run. Never blocks.

        May be called from any thread.
        """

    def vote(self, vote: Vote) -> Future[bool]:
        """Sends a vote. True: the point is committed. False: the save was given up. Never blocks.

        An exception of the future ends the member.
        """

    def save_failed(self, view: GenerationView, key: StateKey, error: OrchestratorError) -> Future[bool]:
        """Reports that this rank has no part of the save of `key` and will not write one.

        The rank is that of `view`. The save is to be given up, and the member continues to train. Never
        blocks. The future is False once that is known. An exception of the future ends the member.
        """

    def is_given_up(self, view: GenerationView, key: StateKey, progress: Callable[[], int]) -> bool:
        """Whether it is known that the save of `key` will not be committed.

        This member began the save as that of `view`. Never blocks. Called repeatedly while that save is not
        answered. `progress` grows while the part is written. It may be called from any thread until the
        save's vote or report is given.
        """

    def finished(self, key: StateKey, reason: str) -> None:
        """Reports that this member's part is over: `done` (budget or data exhausted) or `stopped` (save and
        stop).

        `key` is in a committed point, or is the parent that the generation began with.
        """


class Feed(Protocol):
    """The source of training samples. Its answers depend only on the sample range, not on the caller or the
    time.
    """

    def open(self, view: GenerationView, cursor: Cursor) -> None:
        """Starts a new generation, which continues at `cursor`. Idempotent.

        Prefetched slices are dropped unless they still belong to this rank.
        """

    def prefetch(self, steps: Sequence[StepRange], rank: int, world_size: int, micro_batch_size: int) -> None:
        """Announces the slices that will probably be requested next, in this order. Never blocks and never
        fails.

        The feed fetches as many of them as it chooses.
        """

    def get(
        self, step: StepRange, rank: int, world_size: int, micro_batch_size: int, cursor: Cursor
    ) -> BatchSlice:
        """Returns this rank's share of `step`; blocks until it is available.

        `cursor` is that of the last applied step. A feeder that has lost its place is reopened there. At the
        end of the data the answer's `step` is smaller than requested, with 0 samples if nothing is left.

        Raises `FeedError` if the share cannot be served. Raises `RuntimeError` if the generation has ended
        for the others; the loop then leaves it.
        """
