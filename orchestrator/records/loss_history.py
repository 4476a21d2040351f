"""What is known of the losses before a state, for the policies that decide about the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from orchestrator.records.steps import NONFINITE, SPIKE, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class LossHistory:
    """A summary of the run's history up to a state. It follows from the records of its steps alone.

    `recent`: (loss, norm of the gradient) of the newest steps that moved the weights and have a loss, oldest
    first. `num_nonfinite`, `num_spikes`: the steps that were skipped for these causes. `is_skipped`: the
    step that led to the state was skipped.
    """

    recent: tuple[tuple[float, float], ...] = ()
    num_nonfinite: int = 0
    num_spikes: int = 0
    is_skipped: bool = False

    def after(self, record: StepRecord, most: int) -> LossHistory:
        """Returns the history after the next step. `most`: how many values `recent` keeps."""
        return self.after_step(record.loss, record.grad_norm, record.skipped, most)

    def after_step(self, loss: float | None, grad_norm: float, skipped: str | None, most: int) -> LossHistory:
        """`after`, for the fields of the record that matter."""
        if skipped is not None:
            return replace(
                self,
                num_nonfinite=self.num_nonfinite + (skipped == NONFINITE),
                num_spikes=self.num_spikes + (skipped == SPIKE),
                is_skipped=True,
            )
        has_value = most > 0 and loss is not None and math.isfinite(loss) and math.isfinite(grad_norm)
        recent = (*self.recent, (loss, grad_norm))[-most:] if has_value and loss is not None else self.recent
        return replace(self, recent=recent, is_skipped=False)
