"""Whether a step is applied, skipped, or ends the run. All ranks decide the same, from the step's summary."""

from __future__ import annotations

from orchestrator.config.sections import TrainConfig
from orchestrator.planning.loss_policy import REFUSED, SKIP_STEP, judge
from orchestrator.records.steps import BatchSlice, LossHistory
from orchestrator.trainer.interfaces.step_summary import StepSummary
from orchestrator.trainer.state.sync_state import Prepared


class StepRefused(Exception):  # noqa: N818  ends the run from within a step; never leaves the loop
    """The step must not be applied. `code`: that of the error with which the run ends."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


def skip_cause(
    train: TrainConfig,
    losses: LossHistory,
    summary: StepSummary,
    world_size: int,
    batch: BatchSlice,
    prepared: Prepared,
) -> str | None:
    """Returns the cause for which the step is skipped (`planning.loss_policy`); None: it is applied.

    `losses`: before the step. Raises `StepRefused` if the run must not continue with it.
    """
    code, problem = REFUSED, summary.mismatch(world_size, batch)
    if problem is None:
        loss, wrong = summary.loss_per_unit(prepared.num_units), summary.not_finite_text()
        verdict = judge(train, losses, loss, summary.grad_norm, wrong)
        if verdict is None:
            return None
        if verdict.action == SKIP_STEP:
            return verdict.cause
        code, problem = verdict.code, verdict.text
    key = prepared.key
    raise StepRefused(
        f"step {key.step} (attempt {key.attempt}, generation {key.generation}) is not applied: {problem}",
        code,
    )
