"""Tracks the members of the training group, its losses, and the cause of each generation, for reports.

Pure bookkeeping: the rendezvous makes the decisions. Charts and lists of a run group by `GenerationCause`.
The sentences for people are in `history.sentences`. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from enum import StrEnum

from orchestrator.history.claims.claim_files import RESTARTED, RESUME, REWIND
from orchestrator.records.membership import JoinRequest
from orchestrator.records.run_status import GroupChange, GroupMember, Loss, MemberInfo


class GenerationCause(StrEnum):
    """The values are stored in the journals of runs and must not change. Readers ignore unknown ones."""

    START = "start"  # the first generation of a run's first attempt
    RESUME = "resume"  # the first generation of a start command that continues the run
    REWIND = "rewind"  # the same, from an older point
    COORDINATOR_RESTARTED = "coordinator restarted"
    NODE_LOST = "node lost"
    NODE_DRAINED = "node drained"  # its workers left before it was taken away
    LEFT_OUT = "left out"  # a worker stopped responding and was killed
    WORKER_LOST = "worker lost"
    WORKER_JOINED = "worker joined"
    STORAGE = "storage"  # saves were given up because writes failed, and the group met again to save
    RE_FORMED = "re-formed"  # no member was lost or joined: connections broke, or a save was given up


_LOSSES = (
    GenerationCause.NODE_LOST,
    GenerationCause.LEFT_OUT,
    GenerationCause.WORKER_LOST,
    GenerationCause.NODE_DRAINED,
)


def first_cause(why: str) -> GenerationCause:
    """Returns the cause of an attempt's first generation. `why` is from the attempt's claim."""
    known = {
        RESTARTED: GenerationCause.COORDINATOR_RESTARTED,
        RESUME: GenerationCause.RESUME,
        REWIND: GenerationCause.REWIND,
    }
    return known.get(why, GenerationCause.START)


def next_cause(lost: Collection[GenerationCause], joined: bool, storage_failed: bool) -> GenerationCause:
    """Returns the cause of a later generation.

    `lost` has the cause of each loss since the previous generation. A member that was lost with its node
    counts as lost for that reason, whatever else was observed of it.
    """
    for cause in _LOSSES:
        if cause in lost:
            return cause
    if joined:
        return GenerationCause.WORKER_JOINED
    return GenerationCause.STORAGE if storage_failed else GenerationCause.RE_FORMED


class Roster:
    """Tracks joins, losses and formed generations; returns each generation's `GroupChange`."""

    def __init__(self, wanted: int, previous: Sequence[MemberInfo] = (), why: str = "") -> None:
        """`wanted`: the number of workers that the launch aims at.

        `previous`: the members, by rank, of the generation that is training while a restarted coordinator
        takes over; empty for a launch's first coordinator. `why`: as in the attempt's claim.
        """
        self._wanted = wanted
        self._restarted = bool(previous)
        self._places = {info.member: (info.host, info.pid) for info in previous}
        self._ranks = {info.member: rank for rank, info in enumerate(previous)}
        self._stepped_at: dict[str, float] = {}  # members that trained before -> end of their last step
        self._lost: dict[str, Loss] = {}
        self._causes: dict[str, GenerationCause] = {}  # of lost members
        self._nodes: dict[str, str] = {}  # member -> node
        self._storage_failed = False
        self._first: GenerationCause | None = first_cause(why)  # until a generation was formed
        self._reason = ""
        self._formed_at = -math.inf  # of the newest generation; unknown for one before this coordinator

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The members that were lost since the newest generation was formed."""
        return tuple(self._lost.values())

    def came(self, request: JoinRequest, now: float) -> None:
        """A member asks for the next generation. A repeated request changes nothing."""
        self._places[request.member] = (request.host, request.pid)
        self._nodes[request.member] = request.node_id
        self._lost.pop(request.member, None)  # was left out and has returned
        self._causes.pop(request.member, None)
        if request.leaves is not None and request.member not in self._stepped_at:
            self._stepped_at[request.member] = now - request.idle_s
            self._reason = self._reason or request.reason

    def gone(self, member: str, reason: str, cause: GenerationCause = GenerationCause.WORKER_LOST) -> None:
        """A member ended unexpectedly. The first reason is kept."""
        if member in self._places and member not in self._lost:
            self._lost[member] = Loss(worker=self._named(member), reason=reason)
            self._causes[member] = cause
        self._stepped_at.pop(member, None)

    def node_gone(self, node: str) -> None:
        """The cluster has lost a node. Members that were lost on it were lost with it."""
        for member in self._lost:
            if self._nodes.get(member) == node:
                self._causes[member] = GenerationCause.NODE_LOST

    def storage_failed(self, failed: bool) -> None:
        """Records whether the newest save was given up because a write failed."""
        self._storage_failed = failed

    def cause(self, members: Sequence[str]) -> GenerationCause:
        """Returns why a generation of these members is about to be formed."""
        if self._first is not None:
            return self._first
        joined = any(member not in self._ranks for member in members)
        return next_cause(self._causes.values(), joined, self._storage_failed)

    def formed(
        self, attempt: int, generation: int, members: Sequence[str], step: int, step_before: int, now: float
    ) -> GroupChange:
        """Records that a generation was formed of `members`, by rank. `step` and `step_before` as in
        `GroupChange`.

        The pause before it is counted from the last step of the previous one, else from when that was formed.
        """
        old, lost = self._ranks, tuple(self._lost.values())
        self._ranks = {member: rank for rank, member in enumerate(members)}
        trained = [self._stepped_at[member] for member in members if member in self._stepped_at]
        change = GroupChange(
            attempt=attempt,
            generation=generation,
            world_size=len(members),
            wanted=self._wanted,
            step=step,
            step_before=max(step, step_before),
            lost=lost,
            joined=tuple(self._named(member) for member in members if member not in old),
            paused_s=now - max(*trained, self._formed_at) if trained else None,
            reason=self._reason,
            restarted=self._restarted,
        )
        for member in self._lost:
            self._places.pop(member, None)
        self._lost, self._stepped_at, self._reason, self._restarted = {}, {}, "", False
        self._causes, self._first, self._storage_failed = {}, None, False
        self._formed_at = now
        return change

    def _named(self, member: str) -> GroupMember:
        host, pid = self._places.get(member, ("", 0))
        return GroupMember(rank=self._ranks.get(member), host=host, pid=pid)
