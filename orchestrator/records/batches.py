"""The samples that a step trains, and one rank's share of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:  # loaded only by code that makes arrays
    from orchestrator.records.arrays import Int32Array


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """The samples of a step: [first_sample, first_sample + num_samples), with `num_tokens` positions.

    All samples are full except possibly the last one, which is shortened (and padded) if a token budget is
    not a multiple of seq_len.
    """

    first_sample: int
    num_samples: int
    num_tokens: int
    seq_len: int

    def __reduce__(self) -> tuple[Callable[..., StepRange], tuple[int, int, int, int]]:
        # Sent by the dozen, and a dataclass with slots would look up its fields again for each one.
        return _step_range, (self.first_sample, self.num_samples, self.num_tokens, self.seq_len)


def _step_range(first_sample: int, num_samples: int, num_tokens: int, seq_len: int) -> StepRange:
    return StepRange(
        first_sample=first_sample, num_samples=num_samples, num_tokens=num_tokens, seq_len=seq_len
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSlice:
    """One rank's share of one step: samples [start, stop) as contiguous token runs, and facts of the whole
    step.

    `step` is what the step really trains: fewer samples than requested at the end of the data (0: there are
    no more).
    """

    step: StepRange
    start: int
    stop: int
    source_numbers: Int32Array  # (stop - start,)
    input_ids: Int32Array  # (stop - start, seq_len)
    labels: Int32Array  # (stop - start, seq_len), -100 = no loss
    document_ids: Int32Array  # (stop - start, seq_len), -1 = padding
    step_targets: int  # target tokens of the whole step
    step_digest: int  # unsigned 64 bit, of the whole step, as computed by the feed
    cursor: Cursor  # after the step
    end_of_data: bool  # nothing follows this step

    @property
    def first_index(self) -> int:
        """The index of its first sample: `start` counts only the trained ones."""
        return self.start + self.cursor.skipped_samples
