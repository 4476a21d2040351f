"""Makes a launch leave nodes that are about to be removed, and reports about it.

A part of the launch machine, pure. `elastic.drain` decides the course, and the rendezvous which members
may go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from orchestrator.coordinator.machine.launch_actions import Action, Note, Say, Warn
from orchestrator.elastic.drain import DrainCourse, DrainDecision, Draining, SaveTimes, fits
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.history import sentences
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.run_status import MemberInfo


class Leaving:
    """The notices of one attempt: those of draining nodes, and that of a stop with a deadline."""

    def __init__(self, rendezvous: Rendezvous, sharded: bool) -> None:
        self.times = SaveTimes()
        self._rendezvous = rendezvous
        self._draining = Draining(sharded, rendezvous.min_workers)
        self._hosts: dict[str, str] = {}

    def noticed(self, node: str, host: str, grace_s: float, now: float) -> list[Action]:
        """A node will be removed in `grace_s` seconds (inf: when it is idle).

        A repeated notice corrects that time, and is not journalled.
        """
        self._hosts[node] = host
        new = self._draining.noticed(node, now + grace_s)
        self._rendezvous.drain(self._draining.nodes)
        note = Note(
            kind=EventKind.DRAIN_NOTICE, fields={"node": node, "host": host, "grace_s": _finite(grace_s)}
        )
        return [note] if new else []

    def save_given_up(self, now: float) -> list[Action]:
        """A save was given up."""
        if self._draining.course is not DrainCourse.SAVE_AND_LEAVE or not self._draining.failed(now):
            return []
        return self._stay("the save for it was given up")

    def tick(self, infos: Mapping[str, MemberInfo], step_s: float, now: float) -> tuple[list[Action], bool]:
        """Returns the actions, and whether to request a save that is not waited for.

        To be called before the rendezvous' tick.
        """
        if not self._draining.nodes:
            return [], False
        actions = list[Action]()
        if self._draining.is_late(now) and self._draining.failed(now):
            actions += self._stay("it took too long")
        decided = self._draining.decide(self._rendezvous.placed, self.times.estimate_s, step_s, now)
        if decided is not None:
            actions += self._told(decided, infos, step_s)
        course = self._draining.course
        if course in (DrainCourse.LEAVE, DrainCourse.SAVE_AND_LEAVE):
            in_time = self._draining.in_time(self.times.estimate_s, step_s, now)
            self._rendezvous.leave(course is DrainCourse.SAVE_AND_LEAVE, in_time)
        else:
            self._rendezvous.stay()
        return actions, decided is not None and decided.course is DrainCourse.SAVE

    def stop(self, by: str, grace_s: float, step_s: float) -> list[Action]:
        """A stop was requested, and its origin kills the launch in `grace_s` seconds (inf: unknown)."""
        save_s = self.times.estimate_s
        if math.isinf(grace_s):
            return []
        text = sentences.stop_within(by, grace_s, save_s, fits(grace_s, save_s, step_s))
        return [Say(text=text) if fits(grace_s, save_s, step_s) else Warn(text=text)]

    def _stay(self, why: str) -> list[Action]:
        self._rendezvous.stay()
        return [Warn(text=sentences.cannot_leave(why))]

    def _told(self, decided: DrainDecision, infos: Mapping[str, MemberInfo], step_s: float) -> list[Action]:
        hosts = [self._hosts[node] for node in decided.nodes]
        num_workers = sum(info.node_id in decided.nodes for info in infos.values())
        text = sentences.drained(decided.course, hosts, num_workers, decided.grace_s, decided.save_s)
        note = Note(
            kind=EventKind.DRAIN_COURSE,
            fields={
                "course": str(decided.course),
                "nodes": list(decided.nodes),
                "grace_s": _finite(decided.grace_s),
                "save_s": decided.save_s,
                "fits": fits(decided.grace_s, decided.save_s, step_s),
            },
        )
        return [note, Warn(text=text) if decided.course is DrainCourse.SAVE else Say(text=text)]


def _finite(seconds: float) -> float | None:
    """Returns the value for the journal."""
    return None if math.isinf(seconds) else seconds
