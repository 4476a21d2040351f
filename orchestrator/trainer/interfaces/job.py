"""What the training loop is called with and returns: the job, its steps, a member's phases, and the outcome.

The values can be pickled. Importing this module imports neither torch nor the configuration module. A save or
a load may take longer than a rendezvous waits for unresponsive members (membership rule 23).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.planning import batches
from orchestrator.planning.schedule import Budgets
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey, StepRange

if TYPE_CHECKING:
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
# a group forms in four stages (store, rendezvous, process group, comparison) of at most 10 s each
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
