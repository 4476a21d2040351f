"""What the launch machine asks of its driver: what follows from what it was told, to be carried out in order.

Pure values without behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.coordinator.ended_by import A_FAILURE
from orchestrator.elastic.formation import Form
from orchestrator.history.event_kinds import EventKind
from orchestrator.records.membership import GenerationView, Refusal, RunOver
from orchestrator.records.run_status import MemberInfo
from orchestrator.resume.commit_events import VoterGone


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
    """Have this member's process killed: it was left out. It may be dead already, or out of reach."""

    member: MemberInfo
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """This member waits to join and is not needed any more, because its node is about to go: answer that its
    part is over.
    """

    member: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Warn:
    """Notify the user."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Say:
    """Tell the user; nothing is wrong."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The run has ended: write it down. Everybody who waits is answered by actions of their own. `by`: who
    caused it (see `ended_by`).
    """

    outcome: str
    reason: str
    by: str = A_FAILURE


@dataclass(frozen=True, kw_only=True, slots=True)
class Fenced:
    """A newer attempt exists: acknowledge nothing, write nothing."""

    reason: str


# `Form`: journal the generation durably, then call `formed`; `VoterGone` is for the commits
Action = Answer | Note | Kill | Leave | Warn | Say | End | Fenced | Form | VoterGone
