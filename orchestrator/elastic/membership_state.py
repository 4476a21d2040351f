"""The state of membership: the newest generation, its losses, and the members that have arrived since.

It decides when the next generation may be formed, and which members are to blame for a failed one.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import replace

from orchestrator.elastic.failure import FailureBackoff
from orchestrator.elastic.formation import (
    Arrival,
    Generation,
    LeaveOut,
    PreviousGeneration,
    RendezvousSettings,
    Waiting,
)
from orchestrator.records.membership import JoinRequest
from orchestrator.records.steps import StateKey

# reasons for not waiting for a member of the current generation
DEAD, UNRESPONSIVE, LEFT = "dead", "unresponsive", "left"
SPARED = "spared"  # dead before its first step, while the others are enough


class MembershipState:
    """Tracks arrivals, losses and missing members. All times are seconds."""

    def __init__(self, settings: RendezvousSettings, previous: PreviousGeneration | None) -> None:
        self.waiting: dict[str, Arrival] = {}
        self.current: Generation | None = (
            None  # the newest whose members were answered, or the older attempt's
        )
        self.ended_at: float | None = None
        self.gone: dict[str, str] = {}  # members of `current` that are not waited for -> reason
        self.median_step_s = 0.0
        self._settings = settings
        self._deadlines: dict[str, float] = {}  # member -> time before which it is not unresponsive
        self._excused: dict[str, float] = {}  # member -> seconds of its silence in which it could not run
        self._late_s = 0.0  # seconds since the end in which the coordinator could not receive calls
        self._reached = -1  # the newest step known to be applied in `current`
        self._agreed = False  # some member is known to have agreed on its state
        self._judged = previous is not None
        if previous is not None:
            self.current = Generation(
                attempt=previous.attempt, number=previous.generation, members=previous.members, formation=None
            )

    # ---- what happens
    def arrive(self, request: JoinRequest, now: float) -> None:
        """Records a member's arrival. A repeated request replaces its earlier one."""
        self.gone.pop(request.member, None)
        self._excused.pop(request.member, None)
        earlier = self.waiting.get(request.member)
        if earlier is None or earlier.request != request:
            since = now if earlier is None else earlier.since
            self.waiting[request.member] = Arrival(request=request, since=since)

    def forget(self, member: str, why: str) -> None:
        """Records that a member is gone. The first reason is kept."""
        self.waiting.pop(member, None)
        self._deadlines.pop(member, None)
        if self.is_inside(member):
            self.gone.setdefault(member, why)

    def forgive(self, member: str) -> None:
        """Clears the list of members that a waiting member could not reach."""
        arrival = self.waiting[member]
        self.waiting[member] = replace(arrival, request=replace(arrival.request, unreached=()))

    def extend_deadline(self, member: str, until: float) -> None:
        """The member does not count as unresponsive before `until`."""
        self._deadlines[member] = until

    def excuse(self, member: str, seconds: float) -> None:
        """Extends a missing member's time by `seconds`, because its machine is busy.

        The member could not run for this long.
        """
        if self.ended_at is not None and member in self.missing:
            self._excused[member] = self._excused.get(member, 0.0) + seconds

    def judge_was_late(self, seconds: float) -> None:
        """Extends the time of every missing member by `seconds` in which no call could be received."""
        if self.ended_at is not None:
            self._late_s += seconds

    def end(self, now: float) -> None:
        """Ends the current generation, unless it has already ended."""
        if self.ended_at is None:
            self.ended_at = now
            self._excused, self._late_s = {}, 0.0

    def begin(self, generation: Generation) -> None:
        """Begins a generation whose members were answered."""
        for member in generation.members:
            del self.waiting[member]
            self._deadlines.pop(member, None)
        self.current, self.ended_at, self.gone, self._judged = generation, None, {}, False
        self._reached, self._agreed = generation.start, False

    def observe(self, key: StateKey | None, backoff: FailureBackoff) -> None:
        """Updates progress from the fact that some member holds `key`."""
        current = self.current
        if key is None or current is None or (key.attempt, key.generation) != current.identity:
            return
        self._agreed = True
        if key.step > self._reached:
            self._reached = key.step
            backoff.progressed(key.step, [current.requests[m].node_id for m in current.newcomers])

    # ---- what is so
    def is_inside(self, member: str) -> bool:
        """Whether it is or was a member of the current generation."""
        return self.current is not None and member in self.current.ranks

    @property
    def is_running(self) -> bool:
        """The current generation has not ended."""
        return self.current is not None and self.ended_at is None

    @property
    def requests(self) -> list[JoinRequest]:
        """The requests of the waiting members, in the order of their arrival."""
        return [arrival.request for arrival in self.waiting.values()]

    @property
    def num_live(self) -> int:
        """The number of waiting members, and of those of the current generation that may still join."""
        members = self.current.members if self.current else ()
        return len({m for m in members if m not in self.gone} | set(self.waiting))

    @property
    def missing(self) -> list[str]:
        """Members of the current generation that are waited for."""
        members = self.current.members if self.current else ()
        return [m for m in members if m not in self.waiting and m not in self.gone]

    def is_proven(self, member: str) -> bool:
        """Whether a member of the current generation has trained in this launch.

        It has if it was in the previous generation, or if the current one has done a step.
        """
        current = self.current
        if current is None or member not in current.ranks:
            return False
        return member not in current.newcomers or self._reached > current.start

    def num_without(self, members: Collection[str]) -> int:
        """Returns how many members are left to train without these.

        Counted are proven members that are not gone. Before the first generation all waiting members are
        counted.
        """
        if self.current is None:
            return len(set(self.waiting) - set(members))
        proven = (m for m in self.current.members if m not in self.gone and self.is_proven(m))
        return len(set(proven) - set(members))

    def is_trusted(self, member: str) -> bool:
        """Whether it is a member of the current generation, and not one of its newcomers."""
        current = self.current
        return current is not None and member in current.ranks and member not in current.newcomers

    # ---- when it closes (rule 17)
    def leave_out_unresponsive(self, now: float) -> list[LeaveOut]:
        """Gives up missing members whose time has expired."""
        left_out = []
        for member in self.missing:
            assert self.ended_at is not None, "members are missed after the end of a generation"
            until = max(self.ended_at + self._grace_s(), self._deadlines.get(member, float("-inf")))
            until += self._late_s + self._excused.get(member, 0.0)
            if now >= until:
                self.gone[member] = UNRESPONSIVE
                took, allowed = now - self.ended_at, until - self.ended_at
                reason = (
                    f"member {member} did not come for {took:.1f} s after its generation ended "
                    f"(allowed {allowed:.1f} s); it is left out and killed"
                )
                left_out.append(LeaveOut(member=member, reason=reason))
        return left_out

    def too_early(self, expected: int, now: float) -> Waiting | None:
        """Returns why the next generation cannot be formed yet; None if it can.

        With survivors it is formed once all of them have arrived. A group without survivors starts together:
        it waits for the expected number, for a limited time.
        """
        missing = self.missing
        if missing:
            since = now if self.ended_at is None else self.ended_at
            return Waiting(reason=f"the generation ended; {', '.join(missing)} still to come", since=since)
        if not self.waiting:
            return Waiting(reason="no member is there", since=now if self.ended_at is None else self.ended_at)
        if any(self.is_inside(member) for member in self.waiting):
            return None
        first = min(arrival.since for arrival in self.waiting.values())
        survivors = [a.since for a in self.waiting.values() if a.request.leaves is not None]
        until = min(survivors) + self._grace_s() if survivors else first + self._settings.start_grace_s
        if len(self.waiting) < expected and now < until:
            return Waiting(
                reason=f"{len(self.waiting)} of {expected} expected members have come", since=first
            )
        return None

    def is_unresponsive_as_a_whole(self, now: float) -> bool:
        """Whether newcomers wait while no member of an older attempt's generation has arrived.

        The start grace must have passed.
        """
        if self.current is None or self.current.formation is not None or not self.waiting:
            return False
        return now - min(a.since for a in self.waiting.values()) >= self._settings.start_grace_s

    def _grace_s(self) -> float:
        return max(self._settings.missing_grace_s, 2 * self.median_step_s)

    # ---- the lesson (rules 18 and 25)
    def judge(self, backoff: FailureBackoff, now: float) -> bool:
        """Evaluates the ended generation, once. Returns True if it failed before its first step."""
        current = self.current
        if current is None or self._judged:
            return False
        self._judged = True
        if current.formation is not None and current.formation.probe_ports:
            return False  # it was not meant to train
        lost = [m for m, why in self.gone.items() if why != LEFT]
        if self._agreed and any(self.gone[m] != SPARED for m in lost):
            backoff.lost_member(self._reached)
        if self._reached > current.start or len(self.gone) == len(current.members):
            return False
        if not lost and any(r.unsaved and r.leaves == current.identity for r in self.requests):
            return False  # it had no step to train, and only its save failed
        unresponsive = [m for m in current.newcomers if self.gone.get(m) == UNRESPONSIVE]
        blamed = unresponsive if lost else list(current.newcomers)
        if blamed:
            backoff.blame([current.requests[m].node_id for m in blamed], now)
        elif not lost and not any(r.starved and r.leaves == current.identity for r in self.requests):
            # Otherwise it had no time to form, which does not indicate a failing network.
            backoff.failed_to_start()
        return True

    # ---- searches
    def copy(self) -> MembershipState:
        """An independent copy."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.waiting, twin.gone, twin._deadlines = dict(self.waiting), dict(self.gone), dict(self._deadlines)
        twin._excused = dict(self._excused)
        return twin

    def snapshot(self, backoff: FailureBackoff) -> tuple[Hashable, dict[str, Hashable]]:
        """Returns what later answers depend on: facts about no particular member, then each member
        by name.
        """
        current = self.current
        names = {*self.waiting, *(current.members if current else ())}
        identity = current.identity if current else None
        everyone = (identity, self.ended_at, self._judged, self._reached, self._agreed, self._late_s)
        return everyone, {name: self._facts_of(name, backoff) for name in names}

    def _facts_of(self, name: str, backoff: FailureBackoff) -> Hashable:
        current, arrival = self.current, self.waiting.get(name)
        inside = self.is_inside(name)
        request = arrival.request if arrival else current.requests.get(name) if current and inside else None
        waits = None
        if arrival and request:
            held = tuple((h.key, h.shard, h.source) for h in request.holdings)
            waits = arrival.since, request.key, request.leaves, request.prepared, held
        delay = backoff.not_before(request.node_id) if request else None
        new = bool(current and name in current.newcomers)
        excused_s = self._excused.get(name)
        return inside, new, self.gone.get(name), self._deadlines.get(name), excused_s, waits, delay
