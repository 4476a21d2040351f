"""Who trains next, and from which state: the rendezvous as a pure, deterministic state machine (MEMBERSHIP.md rules 1 to 25).

It knows no Ray, no torch, no clock and no storage: the coordinator tells it what happened, with the time in seconds (one monotonic
clock), and carries out what `tick` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from orchestrator.elastic.blame import Blame
from orchestrator.elastic.formation import (
    Action,
    Arrival,
    Form,
    Formation,
    Generation,
    Ignored,
    JoinAnswer,
    LeaveOut,
    NewestPoint,
    PreviousGeneration,
    Refused,
    RendezvousSettings,
    StopRun,
    Waiting,
)
from orchestrator.errors import FencedError
from orchestrator.records import Cursor, GenerationView, JoinRequest, StateKey, Wishes

# why a member of the current generation is not waited for
DEAD, SILENT, LEFT = "dead", "silent", "left"


class Rendezvous:
    """Forms the generations of one attempt.

    `min_workers` to `max_workers` members train; a group without survivors (a start, or after all died) waits for `expected`.
    `previous` is what a restarted coordinator knows of the generation that trains on; its members are asked to meet at a step
    boundary (`wishes`). `rebase(parent, cursor)` gives the step label with which this launch continues a point of an older launch,
    that is one whose attempt is below `first_attempt` (the launch's first; default: this one). All times are seconds.
    """

    def __init__(
        self,
        *,
        attempt: int,
        launch: str,
        min_workers: int,
        max_workers: int,
        expected: int,
        settings: RendezvousSettings | None = None,
        previous: PreviousGeneration | None = None,
        first_attempt: int | None = None,
        rebase: Callable[[StateKey, Cursor | None], int] | None = None,
    ) -> None:
        assert 1 <= min_workers <= max_workers, f"1 <= min {min_workers} <= max {max_workers}"
        self.attempt, self.launch = attempt, launch
        self._min, self._max, self._expected = min_workers, max_workers, expected
        self._settings = settings or RendezvousSettings()
        self._first_attempt = attempt if first_attempt is None else first_attempt
        self._rebase = rebase
        self._blame = Blame(self._settings)
        self._point: NewestPoint | None = None
        self._median_step_s = 0.0

        self._waiting: dict[str, Arrival] = {}
        self._excused: dict[str, float] = {}  # member: not silent before
        self._formed: dict[int, Formation] = {}  # every generation of this attempt
        self._pending: tuple[Formation, dict[str, JoinRequest]] | None = None
        # the newest generation whose members were answered (or the older attempt's), and what became of it
        self._current: Generation | None = None
        self._ended_at: float | None = None
        self._judged = False
        self._gone: dict[str, str] = {}  # members of `_current` that are not waited for
        self._reached = -1  # the newest step known to be applied in it
        self._agreed = False  # some member is known to have agreed on its state

        self._older_ended: set[tuple[int, int]] = set()
        self._short_since: float | None = None
        self._saved_below = False
        self._reform = False
        self._stop = False
        self._save: str | None = None
        self._saves_done: set[str] = set()
        self._stopped: str | None = None
        if previous is not None:
            assert previous.attempt < attempt, f"previous attempt {previous.attempt} is not older than {attempt}"
            self._current = Generation(
                attempt=previous.attempt, number=previous.generation, members=previous.members, formation=None
            )
            self._judged = True

    # --------------------------------------------------------------------------------------------------------- what happens
    def join(self, request: JoinRequest, now: float) -> JoinAnswer | None:
        """A member asks for the next generation. None: it waits, until a `Form` names it and `view_for` answers.

        A repeated join replaces the member's earlier one. One that names the current generation ends it for all (`wishes`). One that
        names an older generation than the one its member is in is `Ignored` (rule 20), unless it is the very call that was answered
        (same port): then the answer is given again. Raises `FencedError` if the member knows a newer attempt than this one.
        """
        if request.launch != self.launch:
            return Refused(
                reason=f"member {request.member} belongs to launch {request.launch}, this run is now launch {self.launch}; it exits"
            )
        self._check_fence(request)
        current, leaves = self._current, request.leaves or (0, 0)
        if leaves[0] == self.attempt and leaves[1] not in self._formed:
            return Refused(
                reason=f"member {request.member} leaves generation {leaves[1]} of attempt {leaves[0]}, which was never formed"
            )
        waiting = self._waiting.get(request.member)
        newest = (waiting.request.leaves or (0, 0)) if waiting else (0, 0)
        inside = current is not None and request.member in current.members
        if current is not None and inside and current.attempt == self.attempt:
            newest = max(newest, current.identity)
        if leaves < newest:
            return self._repeated(request)
        if leaves[0] < self.attempt:
            self._older_ended.add(leaves)
        # a member may not have heard of the older attempt's last generation: whatever it leaves, that one has lost it
        if inside:
            self._end(now)
        self._observe_key(request.key)
        self._gone.pop(request.member, None)
        if waiting is None or waiting.request != request:
            self._waiting[request.member] = Arrival(request=request, since=waiting.since if waiting else now)
        return None

    def dead(self, member: str, now: float) -> None:
        """The process of `member` is gone for sure, or its node is. One that comes nevertheless joins as any other."""
        self._forget(member, DEAD)
        if self._current is not None and member in self._current.members:
            self._end(now)

    def left(self, member: str, key: StateKey | None, reason: str, now: float) -> None:
        """`member` went on purpose (`finished`, `stopped`), holding `key`, after its last vote was answered; nobody waits for it.

        For these two reasons the generation goes on, because all of its members leave at the same step; for any other it ends.
        """
        self._observe_key(key)
        self._forget(member, LEFT)
        going = reason in ("finished", "stopped")
        if not going and self._current is not None and member in self._current.members:
            self._end(now)

    def applied(self, generation: int, step: int, now: float) -> None:  # noqa: ARG002 - every event has its time
        """A progress report: `step` was applied in `generation` of this attempt. Reports of other generations are ignored."""
        self._observe_key(StateKey(attempt=self.attempt, generation=generation, step=step))

    def excuse(self, member: str, until: float) -> None:
        """`member` announced a phase with a limit of its own (rule 23): it does not count as silent before `until`."""
        self._excused[member] = until

    def expect(self, num_workers: int) -> None:
        """How many members the supervisor has started, or is starting."""
        self._expected = num_workers

    def median_step(self, seconds: float) -> None:
        """The median step's duration; a member has at least two of these to come."""
        self._median_step_s = seconds

    def set_newest_point(self, key: StateKey | None, cursor: Cursor | None, name: str | None) -> None:
        """The newest committed point on the lineage (None: there is none)."""
        self._point = None if key is None else NewestPoint(key=key, cursor=cursor, name=name or key.point_name)

    def wish_stop(self) -> None:
        """Save and stop at the next step boundary; repeated to every generation until the members left."""
        self._stop = True

    def wish_save(self, wish: str) -> None:
        """Save at the next step boundary; repeated until `save_answered(wish)`. A wish that was answered is not taken up again."""
        if wish not in self._saves_done:
            self._save = wish

    def save_answered(self, wish: str) -> None:
        """The save asked for as `wish` has begun or was done (its first vote came)."""
        self._saves_done.add(wish)
        if self._save == wish:
            self._save = None

    # --------------------------------------------------------------------------------------------------------- what to do
    def tick(self, now: float) -> list[Action]:
        """What the coordinator must do now; call it after every event and at least every 0.1 s. Empty while a generation runs."""
        if self._stopped is not None or self._pending is not None:
            return []
        if self._running() and not self._older_is_silent(now):
            self._reform = self._wants_reform(now)
            return []
        actions = self._close(now)
        if self._short_since is None and self._num_live() < self._min:
            self._short_since = now
        if isinstance(actions[-1], StopRun):
            self._stopped = actions[-1].reason
        return actions

    def formed(self, generation: int, now: float) -> None:
        """The formation was journalled durably. Its members may be answered now, unless one died or joined anew meanwhile: then the
        generation never begins (`view_for` is None), all keep waiting, and the next tick forms another one."""
        assert self._pending and self._pending[0].generation == generation, f"generation {generation} is not being formed"
        formation, requests = self._pending
        self._pending = None
        if any(member not in self._waiting or self._waiting[member].request is not request for member, request in requests.items()):
            return
        for member in formation.members:
            del self._waiting[member]
            self._excused.pop(member, None)
        self._current = Generation(
            attempt=self.attempt, number=generation, members=formation.members, formation=formation, requests=requests
        )
        self._ended_at, self._judged, self._gone = None, False, {}
        self._reached, self._agreed, self._reform = formation.step, False, formation.save_only
        self._saved_below = formation.save_only
        if not formation.save_only:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now

    def view_for(self, member: str) -> GenerationView | None:
        """The running generation as `member` sees it; None if it is not in it, or none runs."""
        current = self._current
        if current is None or current.formation is None or self._ended_at is not None or member not in current.members:
            return None
        formation, first = current.formation, current.requests[current.members[0]]
        return GenerationView(
            attempt=self.attempt,
            generation=current.number,
            rank=current.members.index(member),
            world_size=len(current.members),
            members=current.members,
            host=first.host,
            port=first.port,
            parent=formation.parent,
            source_rank=None if formation.source is None else 0,
            point=formation.point,
            cursor=formation.cursor,
            step=formation.step,
            launch=self.launch,
        )

    def wishes(self, attempt: int, generation: int, acknowledged_step: int) -> Wishes:
        """What is wanted of a generation; the coordinator answers its long calls with it. Raises `FencedError` for a newer attempt.

        The running one: its wishes. An ended or replaced one of this attempt: `ended`. One of an older attempt of this launch trains
        on and gets only `reform`, so that all meet at a step boundary with equal states (rule 10); once one of its members has come,
        died, or a generation of this attempt was formed, it is `ended`, because it cannot go on.
        """
        if attempt > self.attempt:
            raise FencedError(f"a member asks for attempt {attempt}, this coordinator is attempt {self.attempt}; it ends")
        current = self._current
        identity = (attempt, generation)
        if attempt < self.attempt and not self._formed and identity not in self._older_ended:
            return Wishes(ended=False, save=False, stop=False, reform=True, acknowledged_step=acknowledged_step)
        if current is None or identity != current.identity or self._ended_at is not None or self._stopped is not None:
            return Wishes(ended=True, save=False, stop=False, reform=False, acknowledged_step=acknowledged_step)
        assert current.formation is not None, "a running generation of this attempt has a formation"
        save = self._save is not None or current.formation.save_only
        return Wishes(
            ended=False, save=save, stop=self._stop, reform=self._reform and not self._stop, acknowledged_step=acknowledged_step
        )

    def on_path(self, key: StateKey, parent: StateKey | None) -> bool:
        """Does the history that ends in `parent` contain the state `key` of this attempt? A save for which it does not is given up
        before the generation continuing `parent` is journalled (rule 15)."""
        at = parent
        while at is not None:
            if (at.attempt, at.generation) == (key.attempt, key.generation):
                return key.step <= at.step
            at = self._formed[at.generation].parent if at.attempt == self.attempt else None
        return False

    @property
    def generation(self) -> int:
        """The number of the newest generation that was formed in this attempt, 0 before the first."""
        return max(self._formed, default=0)

    @property
    def below_minimum_since(self) -> float | None:
        """Since when fewer than the minimum are there to train (seconds), None while enough are."""
        return self._short_since

    def is_gone(self, member: str) -> bool:
        """Not waiting and not a live member of the current generation: its missing vote will never come (rule 15)."""
        current = self._current
        known = current is not None and member in current.members and member not in self._gone
        return not known and member not in self._waiting

    # --------------------------------------------------------------------------------------------------------- events, inside
    def _check_fence(self, request: JoinRequest) -> None:
        newest = max(request.leaves[0] if request.leaves else 0, request.key.attempt if request.key else 0)
        if newest > self.attempt:
            raise FencedError(
                f"member {request.member} knows attempt {newest}, this coordinator is attempt {self.attempt}; it ends"
            )

    def _repeated(self, request: JoinRequest) -> JoinAnswer:
        current = self._current
        answered = current.requests.get(request.member) if current else None
        view = self.view_for(request.member)
        if view is not None and answered is not None and (answered.host, answered.port) == (request.host, request.port):
            return view
        return Ignored(reason=f"member {request.member} leaves {request.leaves}, but it is already past that generation")

    def _observe_key(self, key: StateKey | None) -> None:
        current = self._current
        if key is None or current is None or (key.attempt, key.generation) != current.identity:
            return
        self._agreed = True
        if key.step > self._reached:
            self._reached = key.step
            nodes = [current.requests[m].node_id for m in current.newcomers]
            self._blame.progressed(key.step, nodes)

    def _forget(self, member: str, why: str) -> None:
        self._waiting.pop(member, None)
        self._excused.pop(member, None)
        if self._current is not None and member in self._current.members:
            self._gone.setdefault(member, why)

    def _end(self, now: float) -> None:
        if self._ended_at is None:
            assert self._current is not None, "only a current generation ends"
            self._ended_at = now
            if self._current.attempt < self.attempt:
                self._older_ended.add(self._current.identity)

    def _num_live(self) -> int:
        live = {m for m in self._current.members if m not in self._gone} if self._current else set()
        return len(live | set(self._waiting))

    def _running(self) -> bool:
        return self._current is not None and self._ended_at is None

    def _wants_reform(self, now: float) -> bool:
        """Somebody may come in: is it worth interrupting the running generation?"""
        current = self._current
        assert current is not None, "asked for a running generation"
        if current.formation is None or current.formation.save_only:
            return True
        joiners = [a.since for a in self._waiting.values() if self._blame.not_before(a.request.node_id) <= now]
        if not joiners or len(current.members) - len(self._gone) >= self._max:
            return False
        debounce = self._settings.join_debounce_s
        return now - max(joiners) >= debounce or now - min(joiners) >= 5 * debounce

    def _older_is_silent(self, now: float) -> bool:
        """Newcomers wait, and nobody of the older attempt's generation came within the start grace: it is over."""
        if self._current is None or self._current.formation is not None or not self._waiting:
            return False
        first = min(a.since for a in self._waiting.values())
        if now - first < self._settings.start_grace_s:
            return False
        self._end(first)
        return True

    # --------------------------------------------------------------------------------------------------------- closing
    def _close(self, now: float) -> list[Action]:
        """Closes the rendezvous if it can be closed; the last action says what came of it."""
        actions: list[Action] = []
        current = self._current
        if current is not None:
            missing = [m for m in current.members if m not in self._waiting and m not in self._gone]
            for member in missing:
                if now >= self._silent_from(member):
                    self._gone[member] = SILENT
                    actions.append(LeaveOut(member=member, reason=self._silence(member, now)))
            still = [m for m in missing if m not in self._gone]
            if still:
                reason = f"generation {current.number} ended; {', '.join(still)} still to come"
                return [*actions, Waiting(reason=reason, since=self._ended_at or now)]
        wait = self._too_early(now)
        if wait is not None:
            return [*actions, wait]
        self._judge(now)
        verdict = self._blame.verdict()
        if verdict is not None:
            return [*actions, StopRun(reason=verdict)]
        return [*actions, self._form(now)]

    def _grace_s(self) -> float:
        return max(self._settings.missing_grace_s, 2 * self._median_step_s)

    def _silent_from(self, member: str) -> float:
        assert self._ended_at is not None, "members are missed after the end of a generation"
        return max(self._ended_at + self._grace_s(), self._excused.get(member, float("-inf")))

    def _silence(self, member: str, now: float) -> str:
        assert self._current is not None and self._ended_at is not None, "members are missed after the end of a generation"
        return (
            f"member {member} did not come for {now - self._ended_at:.1f} s after generation {self._current.number} ended "
            f"(allowed {self._silent_from(member) - self._ended_at:.1f} s); it is left out and killed"
        )

    def _too_early(self, now: float) -> Waiting | None:
        """Without a survivor of the current generation the group starts together: it waits for the expected number, for a while."""
        current = self._current
        if not self._waiting:
            since = self._short_since if self._short_since is not None else now
            return Waiting(reason="no member is there", since=since)
        if current is not None and any(m in self._waiting for m in current.members):
            return None
        first = min(a.since for a in self._waiting.values())
        survivors = [a.since for a in self._waiting.values() if a.request.leaves is not None]
        until = min(survivors) + self._grace_s() if survivors else first + self._settings.start_grace_s
        expected = min(self._expected, self._max)
        if len(self._waiting) < expected and now < until:
            return Waiting(reason=f"{len(self._waiting)} of {expected} expected members have come", since=first)
        return None

    def _judge(self, now: float) -> None:
        """Draws the lesson from the generation that ended, once."""
        current = self._current
        if current is None or self._judged:
            return
        self._judged = True
        lost = [m for m, why in self._gone.items() if why != LEFT]
        if lost and self._agreed:
            self._blame.lost_member(self._reached)
        if self._reached > current.start or len(self._gone) == len(current.members):
            return
        self._saved_below = False
        silent = [m for m in current.newcomers if self._gone.get(m) == SILENT]
        blamed = silent if lost else list(current.newcomers)
        if blamed:
            self._blame.blame([current.requests[m].node_id for m in blamed], now)
        elif not lost:
            self._blame.came_to_nothing()

    # --------------------------------------------------------------------------------------------------------- forming
    def _form(self, now: float) -> Form | Waiting | StopRun:
        if self._stop and not any(a.request.key is not None for a in self._waiting.values()):
            return StopRun(reason="a stop was asked for and no member is left that holds a state to save")
        chosen = self._chosen(now)
        parent, source, point = self._newest(chosen)
        save_only = False
        if len(chosen) < self._min:
            if self._saved_below or source is None or parent is None or not self._is_unsaved(parent):
                return self._below_minimum(chosen, now)
            save_only = True
        number = self.generation + 1
        previous = self._current.members if self._current is not None else ()
        names = {r.member for r in chosen}
        formation = Formation(
            attempt=self.attempt,
            generation=number,
            members=self._by_rank(names, source),
            parent=parent,
            source=source,
            point=point.name if point else None,
            cursor=next(r.cursor for r in chosen if r.member == source) if source else point.cursor if point else None,
            step=self._label(parent, point),
            newcomers=tuple(sorted(names - set(previous))) if names & set(previous) else (),
            probe_ports=self._blame.probe_ports,
            save_only=save_only,
        )
        self._formed[number] = formation
        self._pending = (formation, {r.member: r for r in chosen})
        return Form(formation=formation)

    def _chosen(self, now: float) -> list[JoinRequest]:
        """Who is in: nobody who has to wait, at most the maximum; the newest state first, then the current members, then by arrival."""
        requests = [a.request for a in self._waiting.values() if not self._stop or a.request.key is not None]
        allowed = [r for r in requests if self._blame.not_before(r.node_id) <= now]
        best = max((r for r in requests if r.key is not None), key=_key_of, default=None)
        if best is not None and all(r.key is None or self._origin(r.key) != self._origin(_key_of(best)) for r in allowed):
            allowed.append(best)  # who alone holds the newest state is never left behind
        known = self._current.members if self._current is not None else ()
        allowed.sort(key=lambda r: (r is not best, r.member not in known, self._waiting[r.member].since, r.member))
        return allowed[: self._max]

    def _newest(self, requests: Iterable[JoinRequest]) -> tuple[StateKey | None, str | None, NewestPoint | None]:
        """The newest state by (attempt, generation, step) over members and the committed point (rule 1), and who holds it."""
        held = [r for r in requests if r.key is not None]
        best = max((_key_of(r) for r in held), default=None)
        point = self._point
        if point is not None and (best is None or point.key > best):
            return point.key, None, point
        if best is None:
            return None, None, None
        return best, self._by_rank({r.member for r in held if r.key == best}, None)[0], None

    def _by_rank(self, members: Iterable[str], source: str | None) -> tuple[str, ...]:
        """The source first, the others by their rank in the current generation, then by name."""
        known = self._current.members if self._current is not None else ()
        ranks = {m: i for i, m in enumerate(known)}
        return tuple(sorted(members, key=lambda m: (m != source, ranks.get(m, len(ranks)), m)))

    def _label(self, parent: StateKey | None, point: NewestPoint | None) -> int:
        if parent is None:
            return 0
        if point is not None and self._rebase is not None and parent.attempt < self._first_attempt:
            return self._rebase(parent, point.cursor)
        return parent.step

    def _origin(self, key: StateKey) -> StateKey | None:
        """The oldest key of the same content: agreeing on a state in a new generation renames it without changing it."""
        at: StateKey | None = key
        while at is not None and at.attempt == self.attempt and self._formed[at.generation].step == at.step:
            at = self._formed[at.generation].parent
        return at

    def _is_unsaved(self, parent: StateKey) -> bool:
        origin = self._origin(parent)
        return origin is not None and (self._point is None or self._origin(self._point.key) != origin)

    def _below_minimum(self, chosen: list[JoinRequest], now: float) -> Waiting:
        self._short_since = since = self._short_since if self._short_since is not None else now
        reason = f"{len(chosen)} of at least {self._min} members are there"
        later = sorted(
            f"{a.request.member} until {self._blame.not_before(a.request.node_id):.1f}"
            for a in self._waiting.values()
            if self._blame.not_before(a.request.node_id) > now
        )
        if later:
            reason += f"; blamed for a generation that came to nothing, and waiting: {', '.join(later)}"
        return Waiting(reason=reason, since=since)

    # --------------------------------------------------------------------------------------------------------- searches
    def copy(self) -> Rendezvous:
        """An independent copy, for a search over all interleavings."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        for name in ("_waiting", "_excused", "_formed", "_gone"):
            setattr(twin, name, dict(getattr(self, name)))
        twin._older_ended, twin._saves_done = set(self._older_ended), set(self._saves_done)
        twin._blame = self._blame.copy()
        return twin

    def snapshot(self) -> tuple[Hashable, dict[str, Hashable]]:
        """All that later decisions depend on: what concerns nobody in particular, and what concerns each member by name.

        Two machines with equal snapshots decide alike (up to the names that break ties), so a search visits only one of them.
        """
        current = self._current
        names = set(self._waiting) | set(current.members if current else ())
        everyone: Hashable = (
            self.attempt,
            self.generation,
            (current.identity if current else None, self._ended_at, self._judged, self._reached, self._agreed),
            self._point and self._point.key,
            (self._stop, self._save, self._stopped, self._saved_below, self._short_since, self._reform),
            frozenset(self._older_ended),
            self._blame.snapshot(),
        )
        return everyone, {name: self._told_of(name) for name in names}

    def _told_of(self, name: str) -> Hashable:
        current, arrival = self._current, self._waiting.get(name)
        inside = current is not None and name in current.members
        request = arrival.request if arrival else current.requests.get(name) if current and inside else None
        waits = (arrival.since, request.key, request.leaves, request.prepared) if arrival and request else None
        delay = self._blame.not_before(request.node_id) if request else None
        return inside, self._excused.get(name), bool(current and name in current.newcomers), self._gone.get(name), waits, delay


def _key_of(request: JoinRequest) -> StateKey:
    assert request.key is not None, "asked of members that hold a state"
    return request.key
