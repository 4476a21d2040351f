"""Which samples a step trains, and what of them one rank gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:  # the arrays are loaded by who makes them
    from orchestrator.records.arrays import Int32Array


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """Which samples a step trains: [first_sample, first_sample + num_samples), holding `num_tokens`
    positions, all of them full but possibly the last sample, which is shortened (and padded) where a token
    budget is no multiple of seq_len.
    """

    first_sample: int
    num_samples: int
    num_tokens: int
    seq_len: int

    def __reduce__(self) -> tuple[Callable[..., StepRange], tuple[int, int, int, int]]:
        # they are sent by the dozen, and a dataclass with slots finds its fields anew for each
        return _step_range, (self.first_sample, self.num_samples, self.num_tokens, self.seq_len)


def _step_range(first_sample: int, num_samples: int, num_tokens: int, seq_len: int) -> StepRange:
    return StepRange(
        first_sample=first_sample, num_samples=num_samples, num_tokens=num_tokens, seq_len=seq_len
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSlice:
    """One rank's share of one step: samples [start, stop) as contiguous token runs, and what holds for the
    whole step.

    `step` says what the step really trains: fewer samples than asked for where the data ends (0: there is no
    more).
    """

    step: StepRange
    start: int
    stop: int
    source_numbers: Int32Array  # (stop - start,)
    input_ids: Int32Array  # (stop - start, seq_len)
    labels: Int32Array  # (stop - start, seq_len), -100 = no loss
    document_ids: Int32Array  # (stop - start, seq_len), -1 = padding
    step_targets: int  # target tokens of the whole step
    step_digest: int  # unsigned 64 bit, of the whole step, as the feed computed it
    cursor: Cursor  # after the step
    end_of_data: bool  # nothing follows this step

    @property
    def first_index(self) -> int:
        """Index of its first sample: `start` counts the trained ones alone."""
        return self.start + self.cursor.skipped_samples
