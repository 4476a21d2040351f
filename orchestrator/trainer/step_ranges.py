"""Computes the step after a cursor, and the following steps that are announced to the feed."""

from __future__ import annotations

from orchestrator.planning import batches
from orchestrator.records.batches import StepRange
from orchestrator.records.cursor import Cursor
from orchestrator.trainer.interfaces.job import TrainJob

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
