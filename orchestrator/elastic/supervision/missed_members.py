"""Asks the nodes' agents whether missing members could run, and excuses those that could not.

See membership rule 17.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from orchestrator.cluster.machine import ProcessLook, starved_s
from orchestrator.records.run_status import MemberInfo

LOOK_EVERY_S = 1.0
ANSWER_S = 2.0  # an agent without an answer for this long is itself starved, or its node is unreachable
AGENT_LIMIT_S = 20.0  # the longest time for which that excuses its members


class StartedGroup(Protocol):
    """The methods of a node group that are used here."""

    def cpu_time_of(self, pids: Sequence[int]) -> Any:
        """Returns a reference to its agent's answer, by pid."""


@dataclass(kw_only=True, slots=True)
class _Asked:
    """A pending call to an agent. `excused_s`: the time granted because it did not answer."""

    members: tuple[MemberInfo, ...]
    answer: Any
    since: float
    excused_s: float = 0.0


@dataclass(kw_only=True)
class MissedMembers:
    """Watches missing members. `excuse` is called with a member and the seconds for which it could
    not run.
    """

    excuse: Callable[[str, float], None]
    clock: Callable[[], float] = time.monotonic
    _asked: dict[str, _Asked] = field(default_factory=dict)  # by node
    _looks: dict[str, ProcessLook] = field(default_factory=dict)  # by member
    _next: float = 0.0

    def watch(self, missing: Sequence[MemberInfo], groups: Mapping[str, StartedGroup]) -> None:
        """Polls the agents. To be called often; never waits."""
        now = self.clock()
        for node, asked in list(self._asked.items()):
            self._hear(node, asked, now)
        names = {info.member for info in missing}
        self._looks = {member: look for member, look in self._looks.items() if member in names}
        if not missing or now < self._next:
            return
        self._next = now + LOOK_EVERY_S
        for node in {info.node_id for info in missing} & set(groups) - set(self._asked):
            members = tuple(info for info in missing if info.node_id == node)
            answer = groups[node].cpu_time_of([info.pid for info in members])
            self._asked[node] = _Asked(members=members, answer=answer, since=now)

    def _hear(self, node: str, asked: _Asked, now: float) -> None:
        if not ray.wait([asked.answer], timeout=0)[0]:
            silent_s = now - asked.since
            granted_s = min(silent_s, AGENT_LIMIT_S) if silent_s > ANSWER_S else 0.0
            if granted_s > asked.excused_s:
                for info in asked.members:
                    self.excuse(info.member, granted_s - asked.excused_s)
                asked.excused_s = granted_s
            return
        del self._asked[node]
        try:
            looks: dict[int, ProcessLook | None] = ray.get(asked.answer)
        except RayError:
            return  # the agent has ended, and its workers with it
        for info in asked.members:
            look = looks.get(info.pid)
            if look is None:
                continue
            before = self._looks.get(info.member)
            self._looks[info.member] = look
            seconds = 0.0 if before is None else starved_s(before, look) - asked.excused_s
            if seconds > 0:
                self.excuse(info.member, seconds)
