"""The actions that the launch machine returns to its driver, to be carried out in order."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.checkpoint.commit.commit_events import VoterGone
from orchestrator.coordinator.machine.outcome import A_FAILURE
from orchestrator.elastic.formation import Form
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.records.membership import GenerationView, Refusal, RunOver
from orchestrator.records.run_status import MemberInfo


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
