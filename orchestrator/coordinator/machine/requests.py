"""Requests to a launch from outside, and notices that nodes will be removed: pure parts of its machine.

A request to save is met by the first resume point that holds everything that was trained when the request was
received. Otherwise the end of the run answers it. `elastic.drain` decides what a launch does about nodes that
are about to be removed, and the rendezvous which members may leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.coordinator.machine.launch_actions import Action, Note, Say, Warn
from orchestrator.elastic.drain import DrainCourse, DrainDecision, Draining, SaveTimes, fits
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.history import sentences
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import SAVE, STOP, STOP_NOW, Request
from orchestrator.records.run_status import MemberInfo
from orchestrator.records.steps import StateKey

DONE, REFUSED, FAILED = "done", "refused", "failed"  # the possible outcomes of an answer
SAVE_AGAIN_S = 5.0  # after a save was given up


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestAnswer:
    """The answer to a request: `outcome` is done, refused or failed; `text` is for people.

    `point` is the resume point that meets it, "" if there is none.
    """

    request: int
    what: str
    outcome: str
    text: str
    point: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the journal's event `request answered`."""
        return asdict(self)


class Requests:
    """The requests to one launch that one coordinator receives: in the order of their numbers, each once.

    `answered` are those that an earlier coordinator of the launch has answered; the others are received
    again. `known` are the kinds that this launch supports.

    Guarantees: each received request is answered once, at the latest when the run ends. A save that is done
    names a point at or after the newest state that was known when the request was received.
    """

    def __init__(self, answered: Iterable[int] = (), known: Sequence[str] = (SAVE, STOP, STOP_NOW)) -> None:
        self._answered, self._known = frozenset(answered), known
        self._newest = 0
        self._stops: list[Request] = []
        self._saves: dict[int, StateKey] = {}  # number -> what must be saved
        self._under_way = False  # a save was requested, and is still undecided
        self._not_before = float("-inf")

    @property
    def next_number(self) -> int:
        """The number of the next request."""
        number = self._newest + 1
        while number in self._answered:
            number += 1
        return number

    def heard(
        self, request: Request, trained: StateKey | None, saved: StateKey | None
    ) -> RequestAnswer | None:
        """Receives a request; returns its answer, or None if that comes later.

        `trained` is the newest state, `saved` that of the newest resume point.
        """
        assert request.number == self.next_number, f"{request.number} is not {self.next_number}"
        self._newest = request.number
        if request.unreadable:
            return _answer(request, REFUSED, f"{request.unreadable}; ask again")
        if request.what not in self._known:
            text = f"{request.what!r} is not known to this launch; it knows: {', '.join(self._known)}"
            return _answer(request, REFUSED, text)
        if request.what != SAVE:
            self._stops.append(request)
            return None
        if trained is None and saved is None:
            return _answer(request, REFUSED, "no step is trained yet, so there is nothing to save")
        if saved is not None and (trained is None or saved >= trained):
            text = f"nothing was trained since resume point {saved.point_name}"
            return _answer(request, DONE, text, saved.point_name)
        assert trained is not None, "else it is answered above"
        self._saves[request.number] = trained
        return None

    def committed(self, key: StateKey) -> list[RequestAnswer]:
        """A resume point was committed."""
        self._under_way = False
        met = [number for number, wanted in self._saves.items() if key >= wanted]
        for number in met:
            del self._saves[number]
        name = key.point_name
        return [
            RequestAnswer(request=number, what=SAVE, outcome=DONE, text=f"saved as {name}", point=name)
            for number in met
        ]

    def save_given_up(self, now: float) -> None:
        """A save was given up. Another one is requested after `SAVE_AGAIN_S`. `now` is in seconds."""
        self._under_way, self._not_before = False, now + SAVE_AGAIN_S

    def wants_save(self, now: float) -> bool:
        """Whether a save must be requested now; True once for each."""
        if not self._saves or self._under_way or now < self._not_before:
            return False
        self._under_way = True
        return True

    def ended(self, outcome: str, reason: str) -> list[RequestAnswer]:
        """The run has ended."""
        text = reason if outcome == reason else f"{outcome}: {reason}"
        stops = [_answer(stop, FAILED if outcome == "failed" else DONE, text) for stop in self._stops]
        saves = [
            RequestAnswer(request=number, what=SAVE, outcome=FAILED, text=f"the run ended before ({text})")
            for number in self._saves
        ]
        self._stops, self._saves = [], {}
        return sorted([*stops, *saves], key=lambda answer: answer.request)


def heard_sentence(request: Request, answer: RequestAnswer | None) -> str:
    """Builds the text for the launch's user about a request, and about its answer if that is immediate."""
    if answer is None:
        return sentences.asked(request.what, request.by)
    return sentences.asked(request.what, request.by, answer.outcome, answer.text)


def _answer(request: Request, outcome: str, text: str, point: str = "") -> RequestAnswer:
    return RequestAnswer(request=request.number, what=request.what, outcome=outcome, text=text, point=point)


# --------------------------------------------------------------------------------- nodes that will be removed
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
            actions += self._announced(decided, infos, step_s)
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

    def _announced(
        self, decided: DrainDecision, infos: Mapping[str, MemberInfo], step_s: float
    ) -> list[Action]:
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
