"""Who caused the end of a launch, as its end record and the journal name it. Pure."""

from __future__ import annotations

from orchestrator.planning.schedule import Budgets
from orchestrator.records.steps import StepRecord

# who caused an end, where that is no person
A_FAILURE, THE_BUDGET, THE_DATA = "a failure", "the budget", "the end of the data"


def ended_by(outcome: str, stop_by: str, budgets: Budgets, last: StepRecord | None) -> str:
    """Who caused an end, for people: who asked for a stop (`stop_by`; empty where that is not known any
    more), the budget, the end of the data, or a failure.
    """
    if outcome == "failed":
        return A_FAILURE
    if outcome == "stopped":
        return stop_by
    tokens, samples = (last.consumed_tokens, last.consumed_samples) if last else (0, 0)
    spent = budgets.stop_tokens is not None and tokens >= budgets.stop_tokens
    spent = spent or (budgets.stop_samples is not None and samples >= budgets.stop_samples)
    return THE_BUDGET if spent else THE_DATA
