"""The actions that the launch machine returns to its driver, in order, and the causes of a launch's end."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.checkpoint.commit.commit_events import VoterGone
from orchestrator.elastic.formation import Form
from orchestrator.history.journal.line_format import EventKind
from orchestrator.planning.schedule import Budgets
from orchestrator.records.membership import GenerationView, Refusal, RunOver
from orchestrator.records.run_status import MemberInfo
from orchestrator.records.steps import StateKey, StepRecord

# causes of an end that are not people
A_FAILURE, THE_BUDGET, THE_DATA = "a failure", "the budget", "the end of the data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer the member's open `join`."""

    member: str
    answer: GenerationView | Refusal | RunOver


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Journal an event about a member or a failure."""

    kind: EventKind
    fields: dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Have this member's process killed, because it was left out. It may be dead already, or unreachable."""

    member: MemberInfo
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """Answer this waiting member that its part is over: its node is about to go, and it is not needed any
    more.
    """

    member: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Warn:
    """Send the user a warning."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Say:
    """Send the user a message that is not a warning."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The run has ended: write it down. All waiting members are answered by actions of their own.

    `by`: the cause (see `ended_by`).
    """

    outcome: str
    reason: str
    by: str = A_FAILURE


@dataclass(frozen=True, kw_only=True, slots=True)
class Fenced:
    """A newer attempt exists: acknowledge nothing, write nothing."""

    reason: str


# `Form`: journal the generation durably, then call `formed`. `VoterGone` is for the commits.
Action = Answer | Note | Kill | Leave | Warn | Say | End | Fenced | Form | VoterGone




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
