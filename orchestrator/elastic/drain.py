"""How a group leaves nodes that are about to be removed.

`Draining` decides when it leaves them, and whether it saves before. The aim is to lose nothing in the time
that is left. `NodeDrain` decides which members are admitted meanwhile, which may leave, and which save is
awaited. Pure: times are seconds of one monotonic clock. The caller passes how long saves take.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from orchestrator.elastic.formation import Generation
from orchestrator.elastic.membership_state import MembershipState
from orchestrator.elastic.next_formation import ParentStateSelection, held_by, holds_any
from orchestrator.records.membership import JoinRequest
from orchestrator.records.steps import StateKey
from orchestrator.storage.tries import Backoff

MARGIN_S = 2.0  # for what was not measured: forming, the notification of a commit
HOLD_LIMIT_S = 120.0  # how long training waits at most for the point that is saved before a node is left
_LATE_FACTOR = 3.0  # without other workers, a group leaves when this many times the leaving time is left
_SLOWER = 1.5  # a save may take this many times as long as the slowest of the last ones
_KEPT = 3
_RETRIES = Backoff(first_s=5.0, most_s=320.0)


class DrainCourse(StrEnum):
    """What the group does about nodes that are about to go. The values are stored in journals."""

    STAY = "stay"  # too few workers elsewhere: trains while there is time
    LEAVE = "leave"  # re-forms at the next step; the others hold the whole state
    SAVE_AND_LEAVE = "save and leave"  # re-forms once the point of that step is committed
    SAVE = "save"  # a save hardly fits: it is started, but not waited for


_LEAVING = (DrainCourse.LEAVE, DrainCourse.SAVE_AND_LEAVE)


class SaveTimes:
    """The durations of the last saves, from begin to commit (seconds)."""

    def __init__(self) -> None:
        self._last: tuple[float, ...] = ()

    def took(self, seconds: float) -> None:
        """Records the duration of a committed save."""
        self._last = (*self._last[1 - _KEPT :], seconds)

    @property
    def estimate_s(self) -> float | None:
        """The estimated duration of the next save: 1.5 times the slowest of the last three.

        None: this attempt has committed none.
        """
        return _SLOWER * max(self._last) if self._last else None


def time_to_leave_s(save_s: float | None, step_s: float) -> float:
    """Returns how long it takes to leave nodes with a save (`save_s`: its estimate).

    The time covers the current step, the save, and a margin.
    """
    return 2 * step_s + (save_s or 0.0) + MARGIN_S


def fits(grace_s: float, save_s: float | None, step_s: float) -> bool:
    """Whether a save that is requested now will be committed within `grace_s`, as far as known.

    Without a measured save the answer is yes, so that one is tried.
    """
    return save_s is None or time_to_leave_s(save_s, step_s) <= grace_s


def choose(
    *, grace_s: float, save_s: float | None, step_s: float, needs_save: bool, enough_elsewhere: bool
) -> DrainCourse:
    """Chooses the course with `grace_s` left (inf: the nodes go when they are idle).

    `needs_save`: workers elsewhere may not hold the whole state. `enough_elsewhere`: they are as many as the
    run needs to train. If they are not, leaving at once would only end training sooner. The group then stays
    until three times the leaving time is left. If no save was measured, it leaves at once.
    """
    late_s = math.inf if save_s is None else _LATE_FACTOR * time_to_leave_s(save_s, step_s)
    if not enough_elsewhere and (math.isinf(grace_s) or grace_s > late_s):
        return DrainCourse.STAY
    if not needs_save:
        return DrainCourse.LEAVE
    return DrainCourse.SAVE_AND_LEAVE if fits(grace_s, save_s, step_s) else DrainCourse.SAVE


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlacement:
    """Where the members of the running generation are.

    `leaving`: the nodes of the members on draining nodes. `num_elsewhere`: the number of the other members.
    """

    leaving: tuple[str, ...]
    num_elsewhere: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainDecision:
    """A course was chosen. `grace_s` is the time that `nodes` had left."""

    course: DrainCourse
    nodes: tuple[str, ...]
    grace_s: float
    save_s: float | None


class Draining:
    """The drain notices of one attempt, and the group's progress in leaving.

    Guarantees: while a node with members drains, some course is chosen. No course blocks training beyond its
    `until`, which is never after the deadline. If an awaited save fails or takes longer, all members continue
    together, and leaving is tried again after 5, 10, 20, ... 320 s.
    """

    def __init__(self, sharded: bool, min_workers: int) -> None:
        """`sharded`: no member holds the whole state, according to the configuration."""
        self._sharded, self._min = sharded, min_workers
        self._deadlines: dict[str, float] = {}
        self._course: DrainCourse | None = None
        self._for: tuple[str, ...] = ()  # the nodes that the course was chosen for
        self._until = math.inf
        self._not_before, self._retry_s = -math.inf, 0.0

    @property
    def nodes(self) -> Mapping[str, float]:
        """The draining nodes, and when each goes (inf: unknown)."""
        return self._deadlines

    @property
    def course(self) -> DrainCourse | None:
        """The current course; None: none."""
        return self._course

    def noticed(self, node: str, deadline: float) -> bool:
        """Records that a node goes at `deadline`. Returns whether the node is new."""
        new = node not in self._deadlines
        self._deadlines[node] = deadline
        return new

    def decide(
        self, placed: GroupPlacement, save_s: float | None, step_s: float, now: float
    ) -> DrainDecision | None:
        """Returns the course chosen now; None while the previous one is still valid."""
        if not placed.leaving:
            self._end()
            return None
        nodes = tuple(sorted(set(placed.leaving)))
        if self._course in _LEAVING or now < self._not_before:
            return None
        if self._course is DrainCourse.SAVE and set(nodes) <= set(self._for):
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
        return None if same else DrainDecision(course=course, nodes=nodes, grace_s=grace_s, save_s=save_s)

    def in_time(self, save_s: float | None, step_s: float, now: float) -> bool:
        """Whether a save that is requested now will be committed before the course's nodes go.

        See `fits`.
        """
        deadline = min((self._deadlines[node] for node in self._for), default=math.inf)
        return fits(deadline - now, save_s, step_s)

    def failed(self, now: float) -> bool:
        """Records that the nodes cannot be left now. Returns whether leaving was in progress."""
        if self._course not in _LEAVING:
            return False
        self._course, self._until = None, math.inf
        self._retry_s = _RETRIES.after(self._retry_s)
        self._not_before = now + self._retry_s
        return True

    def is_late(self, now: float) -> bool:
        """Whether training has waited for the save as long as allowed. All members then continue together."""
        return now >= self._until

    def _end(self) -> None:
        self._course, self._for, self._until = None, (), math.inf
        self._not_before, self._retry_s = -math.inf, 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDrain:
    """The draining nodes and how they are left. No member is admitted from `nodes` any more.

    `leave`: members on them are not kept either. `with_save`: the current step is saved before. `in_time`: a
    save of it will be committed before the nodes go. `decided` is the newest save that was committed or given
    up.

    Guarantee: with `leave`, members go only if the others and the newest point have all of the newest state
    without them.
    """

    nodes: frozenset[str] = frozenset()
    leave: bool = False
    with_save: bool = False
    in_time: bool = True
    decided: StateKey | None = None

    # ---- what happens
    def on_save_decided(self, key: StateKey) -> NodeDrain:
        """The save of `key` was committed or given up."""
        return replace(self, decided=max(self.decided or key, key))

    def on_leave(self, save: bool, in_time: bool) -> NodeDrain:
        """Members on the nodes are to leave. A save that was requested once stays requested."""
        return replace(self, leave=True, with_save=self.with_save or save, in_time=in_time)

    def on_stay(self) -> NodeDrain:
        """Members on the nodes continue with the others."""
        return replace(self, leave=False, with_save=False, in_time=True)

    # ---- who is in
    def elsewhere(self, requests: Iterable[JoinRequest]) -> list[JoinRequest]:
        """Returns the requests of members that are not on the nodes."""
        return [r for r in requests if r.node_id not in self.nodes]

    def candidates(self, requests: Sequence[JoinRequest], states: ParentStateSelection) -> list[JoinRequest]:
        """Returns the members that may be in the next generation.

        From a draining node only members that hold a state are admitted. If the node is to be left, they are
        admitted only while the others do not have all of the newest state.
        """
        elsewhere = self.elsewhere(requests)
        if self.leave and _have_newest(elsewhere, requests, states):
            return elsewhere
        return [r for r in requests if r.node_id not in self.nodes or holds_any(r)]

    # ---- who may leave
    def needs_save(self, requests: Sequence[JoinRequest], states: ParentStateSelection) -> bool:
        """Whether some of these are to leave and the others lack a part of the newest state."""
        elsewhere = self.elsewhere(requests)
        return self.leave and len(elsewhere) < len(requests) and not _have_newest(elsewhere, requests, states)

    def awaited_save(self, requests: Sequence[JoinRequest], states: ParentStateSelection) -> StateKey | None:
        """Returns the undecided save of the newest state of these, or None."""
        newest = states.newest(requests)[0]
        asked = [r.saving for r in requests if r.saving is not None and r.saving == newest]
        return asked[0] if asked and self._is_undecided(asked[0]) else None

    def may_go(
        self, requests: Sequence[JoinRequest], states: ParentStateSelection, is_running: bool
    ) -> tuple[str, ...]:
        """Returns the waiting members on draining nodes that are not needed.

        A member is not needed if it has no state. If the node is to be left, it is also not needed under two
        conditions. Its states are not newer than what the others have: members that have not arrived yet, or
        that would complete the state with it, may need its part. And it has no unanswered vote (rule 15).
        `is_running`: a generation trains meanwhile.
        """
        going = [r for r in requests if r.node_id in self.nodes]
        if not going:
            return ()
        theirs = states.newest(self.elsewhere(requests))[0]
        return tuple(
            r.member
            for r in going
            if not holds_any(r)
            or (
                self.leave
                and (is_running or not _is_newer(r, theirs, states))
                and not self._is_undecided(r.saving)
            )
        )

    def has_leavers(self, current: Generation, group: MembershipState) -> bool:
        """Whether a live member of the current generation is on a draining node."""
        return any(
            current.requests[m].node_id in self.nodes
            for m in current.members
            if m not in group.gone and m in current.requests
        )

    def placed(self, group: MembershipState) -> GroupPlacement:
        """Counts the members of the running generation, and waiting ones with a state, by place.

        Newcomers elsewhere are counted, too.
        """
        current, gone = group.current, group.gone
        inside = current.requests if current is not None else {}
        there = {m: r for m, r in inside.items() if current and m in current.members and m not in gone}
        there |= {m: a.request for m, a in group.waiting.items()}
        leaving = [r for r in there.values() if r.node_id in self.nodes]
        return GroupPlacement(
            leaving=tuple(r.node_id for r in leaving if r.member in inside or holds_any(r)),
            num_elsewhere=len(there) - len(leaving),
        )

    def snapshot(self) -> Hashable:
        """What later answers depend on."""
        return self.nodes, self.leave, self.with_save, self.in_time, self.nodes and self.decided

    def _is_undecided(self, key: StateKey | None) -> bool:
        return key is not None and (self.decided is None or self.decided < key)


def _have_newest(
    some: Sequence[JoinRequest], requests: Sequence[JoinRequest], states: ParentStateSelection
) -> bool:
    """Whether `some`, with the newest point, have the whole newest state of all `requests`."""
    newest, theirs = (states.newest(each)[0] for each in (requests, some))
    return states.origin(theirs) == states.origin(newest)


def _is_newer(request: JoinRequest, state: StateKey | None, states: ParentStateSelection) -> bool:
    """Whether a member has a part of a state that is newer than this one."""
    newest = max((held.key for held in held_by(request)), default=None)
    if newest is None or state is None:
        return newest is not None
    return newest > state and states.origin(newest) != states.origin(state)
