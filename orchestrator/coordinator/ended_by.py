"""How a launch ended, and who caused it, as its end record and the journal name it. Pure."""

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


def end_text(reason: str, step: int, *, trained: bool) -> str:
    """How a launch ended that was not failed, for people: `step` is the label of the last step done, by
    whichever launch; `trained`: whether this one has done any.
    """
    return f"{reason} at step {step}" + ("" if trained else ", and this start trained no step")
