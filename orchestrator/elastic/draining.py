"""Nodes that are about to be taken away: whether the group leaves them now, and whether it saves before, so
that nothing is lost in the time that is left.

Pure: no Ray, no clock (seconds of one monotonic clock). Who holds which part of the state, the rendezvous
knows; how long saves take comes in with each question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

MARGIN_S = 2.0  # for what nobody measured: forming, hearing of a commit
HOLD_LIMIT_S = 120.0  # how long training waits at most for the point with which a node is left
_LATE_FACTOR = 3.0  # so many times what leaving takes before the deadline, a group leaves that has no others
_SLOWER = 1.5  # a save may take so many times what the slowest of the last ones did
_KEPT = 3
_FIRST_RETRY_S, _MOST_RETRY_S = 5.0, 320.0


class Course(StrEnum):
    """What the group does about nodes that are about to go. The texts stand in journals."""

    STAY = "stay"  # too few workers elsewhere: trains on while there is time
    LEAVE = "leave"  # re-forms at the next step; the others hold the whole state
    SAVE_AND_LEAVE = "save and leave"  # re-forms once the point of that step is committed
    SAVE = "save"  # a save hardly fits: it is begun, and nobody waits for it


_LEAVING = (Course.LEAVE, Course.SAVE_AND_LEAVE)


class SaveTimes:
    """How long the last saves took, from their begin to their commit (seconds)."""

    def __init__(self) -> None:
        self._last: tuple[float, ...] = ()

    def took(self, seconds: float) -> None:
        """A save was committed."""
        self._last = (*self._last[1 - _KEPT :], seconds)

    @property
    def estimate_s(self) -> float | None:
        """How long the next one may take: half as long again as the slowest of the last three. None: this
        attempt has committed none.
        """
        return _SLOWER * max(self._last) if self._last else None


def time_to_leave_s(save_s: float | None, step_s: float) -> float:
    """How long it takes to leave nodes with a save (`save_s`: its estimate): the step at hand, the save, and
    a margin.
    """
    return 2 * step_s + (save_s or 0.0) + MARGIN_S


def fits(grace_s: float, save_s: float | None, step_s: float) -> bool:
    """Whether a save that is asked for now is committed in `grace_s`, as far as that can be known: where no
    save was measured yet it is tried.
    """
    return save_s is None or time_to_leave_s(save_s, step_s) <= grace_s


def choose(
    *, grace_s: float, save_s: float | None, step_s: float, needs_save: bool, enough_elsewhere: bool
) -> Course:
    """What to do with `grace_s` left (inf: the nodes go when they are idle).

    `needs_save`: workers elsewhere may not hold the whole state. `enough_elsewhere`: they are as many as the
    run needs to train. If they are not, leaving at once would only end training sooner, so the group stays
    until three times what leaving takes is left, or, where no save was measured, leaves at once.
    """
    late_s = math.inf if save_s is None else _LATE_FACTOR * time_to_leave_s(save_s, step_s)
    if not enough_elsewhere and (math.isinf(grace_s) or grace_s > late_s):
        return Course.STAY
    if not needs_save:
        return Course.LEAVE
    return Course.SAVE_AND_LEAVE if fits(grace_s, save_s, step_s) else Course.SAVE


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where the members of the running generation are: on nodes that drain (`leaving`, their nodes), and how
    many elsewhere.
    """

    leaving: tuple[str, ...]
    num_elsewhere: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """A course was taken; `grace_s` is what was left of the nodes' time, `nodes` those meant."""

    course: Course
    nodes: tuple[str, ...]
    grace_s: float
    save_s: float | None


class Draining:
    """The notices of one attempt, and how far the group has come with leaving.

    Guarantees: while a node with members drains, some course is taken, and no course keeps training waiting
    beyond its `until`, which is never after the deadline; where a save that was waited for fails, or takes
    longer, all go on together and it is tried again after 5, 10, 20, ... 320 s.
    """

    def __init__(self, sharded: bool, min_workers: int) -> None:
        """`sharded`: no member holds the whole state, as far as the configuration says."""
        self._sharded, self._min = sharded, min_workers
        self._deadlines: dict[str, float] = {}
        self._course: Course | None = None
        self._for: tuple[str, ...] = ()  # the nodes that the course was taken for
        self._until = math.inf
        self._not_before, self._retry_s = -math.inf, _FIRST_RETRY_S

    @property
    def nodes(self) -> Mapping[str, float]:
        """The nodes that drain, and when each goes (inf: that is not known)."""
        return self._deadlines

    @property
    def course(self) -> Course | None:
        """What is being done; None: nothing, now."""
        return self._course

    def noticed(self, node: str, deadline: float) -> bool:
        """A node goes at `deadline`. Whether that is new."""
        new = node not in self._deadlines
        self._deadlines[node] = deadline
        return new

    def decide(self, placed: Placed, save_s: float | None, step_s: float, now: float) -> Decided | None:
        """The course that is taken now, None while the one before holds."""
        if not placed.leaving:
            self._end()
            return None
        nodes = tuple(sorted(set(placed.leaving)))
        if self._course in _LEAVING or now < self._not_before:
            return None
        if self._course is Course.SAVE and set(nodes) <= set(self._for):
            return None
        grace_s = min(self._deadlines[node] for node in nodes) - now
        course = choose(
            grace_s=grace_s,
            save_s=save_s,
            step_s=step_s,
            needs_save=self._sharded or not placed.num_elsewhere,
            enough_elsewhere=placed.num_elsewhere >= self._min,
        )
        same = course is self._course and set(nodes) <= set(self._for)
        self._course, self._for = course, nodes
        limit_s = 2 * step_s + max(HOLD_LIMIT_S, 2 * (save_s or 0.0))
        self._until = now + min(limit_s, grace_s) if course in _LEAVING else math.inf
        return None if same else Decided(course=course, nodes=nodes, grace_s=grace_s, save_s=save_s)

    def in_time(self, save_s: float | None, step_s: float, now: float) -> bool:
        """Whether a save that is asked for now is committed before the nodes that the course is for go; see
        `fits`.
        """
        deadline = min((self._deadlines[node] for node in self._for), default=math.inf)
        return fits(deadline - now, save_s, step_s)

    def failed(self, now: float) -> bool:
        """The nodes cannot be left now. Whether that was being tried."""
        if self._course not in _LEAVING:
            return False
        self._course, self._until = None, math.inf
        self._not_before, self._retry_s = now + self._retry_s, min(2 * self._retry_s, _MOST_RETRY_S)
        return True

    def is_late(self, now: float) -> bool:
        """Training has waited for the save as long as it may: all go on together."""
        return now >= self._until

    def _end(self) -> None:
        self._course, self._for, self._until = None, (), math.inf
        self._not_before, self._retry_s = -math.inf, _FIRST_RETRY_S
