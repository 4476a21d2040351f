"""Which step follows a cursor, and which of those after it are announced to the feed.

Pure: a job's budgets and sizes; it knows neither rank nor feed.
"""

from __future__ import annotations

from orchestrator.planning import batches
from orchestrator.records.batches import StepRange
from orchestrator.records.cursor import Cursor
from orchestrator.trainer.job import TrainJob

# A feed is notified of so many coming steps, and fetches as many as it has room for: small steps are fetched
# more at a time, for each answer has its price.
STEPS_AHEAD, SMALL_STEPS_AHEAD, SMALL_STEPS_TOKENS = 8, 32, 1 << 23


def next_range(job: TrainJob, cursor: Cursor) -> StepRange | None:
    """The step that follows `cursor`; None: a stop is reached there. Where the data end is not known here."""
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
    """The next steps after `cursor`, to the stop, as long as the data do not end; some of them."""
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
