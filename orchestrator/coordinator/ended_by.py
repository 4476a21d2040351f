"""How a launch ended, and who caused it, as its end record and the journal name it. Pure."""

from __future__ import annotations

from orchestrator.planning.schedule import Budgets
from orchestrator.records.steps import StateKey, StepRecord

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
    return THE_BUDGET if _is_spent(budgets, last) else THE_DATA


def is_last(key: StateKey, last: StepRecord | None, budgets: Budgets, stopping: bool) -> bool:
    """Whether no step follows the state `key`, as far as is known: not where the data end, which workers hear
    first. `last` is the newest step; `stopping`: a stop was asked for.
    """
    return last is not None and key >= last.key and (stopping or _is_spent(budgets, last))


def _is_spent(budgets: Budgets, last: StepRecord | None) -> bool:
    tokens, samples = (last.consumed_tokens, last.consumed_samples) if last else (0, 0)
    spent = budgets.stop_tokens is not None and tokens >= budgets.stop_tokens
    return spent or (budgets.stop_samples is not None and samples >= budgets.stop_samples)


def end_text(reason: str, step: int, *, trained: bool) -> str:
    """How a launch ended that was not failed, for people: `step` is the label of the last step done, by
    whichever launch; `trained`: whether this one has done any.
    """
    return f"{reason} at step {step}" + ("" if trained else ", and this start trained no step")
