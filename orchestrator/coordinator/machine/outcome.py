"""Names the cause of a launch's end, for its end record and the journal."""

from __future__ import annotations

from orchestrator.planning.schedule import Budgets
from orchestrator.records.steps import StateKey, StepRecord

# causes of an end that are not people
A_FAILURE, THE_BUDGET, THE_DATA = "a failure", "the budget", "the end of the data"


def ended_by(outcome: str, stop_by: str, budgets: Budgets, last: StepRecord | None) -> str:
    """Returns the cause of an end, for people.

    It is the origin of the stop request (`stop_by`; empty if no longer known), the budget, the end of the
    data, or a failure.
    """
    if outcome == "failed":
        return A_FAILURE
    if outcome == "stopped":
        return stop_by
    return THE_BUDGET if _is_spent(budgets, last) else THE_DATA


def is_last(key: StateKey, last: StepRecord | None, budgets: Budgets, stopping: bool) -> bool:
    """Whether no step follows the state `key`, as far as is known. `last` is the newest step.

    An end of the data is not known here, because workers find it first. `stopping`: a stop was requested.
    """
    return last is not None and key >= last.key and (stopping or _is_spent(budgets, last))


def _is_spent(budgets: Budgets, last: StepRecord | None) -> bool:
    tokens, samples = (last.consumed_tokens, last.consumed_samples) if last else (0, 0)
    spent = budgets.stop_tokens is not None and tokens >= budgets.stop_tokens
    return spent or (budgets.stop_samples is not None and samples >= budgets.stop_samples)


def end_text(reason: str, step: int, *, trained: bool) -> str:
    """Describes for people how a launch that did not fail ended.

    `step` is the label of the last finished step, of whichever launch. `trained`: whether this launch has
    done any.
    """
    return f"{reason} at step {step}" + ("" if trained else ", and this start trained no step")
