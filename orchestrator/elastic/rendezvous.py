"""Who trains next, and from which state: the rendezvous as a pure, deterministic state machine
(docs/membership.md).

It knows no Ray, no torch, no clock and no storage: the coordinator reports what happened, with the time in
seconds (one monotonic clock), and carries out what `tick` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from orchestrator.elastic.draining import Placed
from orchestrator.elastic.failure_backoff import FailureBackoff
from orchestrator.elastic.formation import (
    Action,
    Form,
    Formation,
    Generation,
    Ignored,
    JoinAnswer,
    NewestPoint,
    PreviousGeneration,
    Refused,
    RendezvousSettings,
    StopRun,
    Waiting,
)
from orchestrator.elastic.holdings import (
    CompleteState,
    complete,
    held_by,
    held_by_all,
    memory_point_to_keep,
    newest_complete,
)
from orchestrator.elastic.membership_state import DEAD, LEFT, MembershipState
from orchestrator.elastic.parent_state import ParentStateSelection
from orchestrator.elastic.reach import largest_reaching
from orchestrator.errors import FencedError
from orchestrator.records import (
    ControlRequests,
    Cursor,
    GenerationView,
    JoinRequest,
    ShardSource,
    Source,
    StateKey,
)


class Rendezvous:
    """Forms the generations of one attempt.

    `min_workers` to `max_workers` members train; a group without survivors (a start, or after all died) waits
    for `expected`. `previous` is what a restarted coordinator knows of the generation that trains on; its
    members are asked to meet at a step boundary (`control_requests`). `rebase(parent, cursor)` gives the step
    label with which this launch continues a point of an older launch, that is one whose attempt is below
    `first_attempt` (the launch's first; default: this one). All times are seconds.
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
        assert previous is None or previous.attempt < attempt, (
            f"{previous} is not older than attempt {attempt}"
        )
        self.attempt, self.launch = attempt, launch
        self.min_workers = min_workers
        self._min, self._max, self._expected = min_workers, max_workers, expected
        self._settings = settings or RendezvousSettings()
        self._states = ParentStateSelection(
            attempt, attempt if first_attempt is None else first_attempt, rebase
        )
        self._is_first = previous is None  # nobody has trained in this launch before
        self._backoff = FailureBackoff(self._settings)
        self._group = MembershipState(self._settings, previous)
        if previous is not None and not previous.members:
            self._group.end(float("-inf"))  # all of them are known to be dead
        self._pending: tuple[Formation, dict[str, JoinRequest]] | None = None
        self._viewed: tuple[Generation, GenerationView] | None = None  # by its first member
        self._older_ended: set[tuple[int, int]] = set()
        if previous is not None and previous.ended:
            self._older_ended.add((previous.attempt, previous.generation))
        self._short_since: float | None = None
        self._saved_below = False  # what the survivors below the minimum hold was saved, or is being saved
        self._reform = False
        self._stop = False
        self._save: str | None = None
        self._saves_done: set[str] = set()
        self._draining: frozenset[str] = frozenset()  # nodes that nobody is taken in from
        self._leave = self._leave_with_save = False  # nor kept on, and whether a save comes first
        self._decided: StateKey | None = None  # the newest save that was committed or given up
        self._stopped: str | None = None

    # ---- what happens
    def join(self, request: JoinRequest, now: float) -> JoinAnswer | None:
        """A member asks for the next generation. None: it waits until a `Form` names it (`view_for`).

        A repeated join replaces the member's earlier one. A join by a member of the current generation ends
        that one for all (`control_requests`). One that names an older generation than the one its member is
        in is `Ignored` (rule 20), unless it comes from the very port that was answered: then the answer is
        given again. Raises `FencedError` if the member knows a newer attempt than this one.
        """
        refused = self._refusal(request)
        if refused is not None:
            return refused
        leaves = request.leaves or (0, 0)
        if leaves < self._newest_left(request.member):
            return self._repeated(request)
        if leaves[0] < self.attempt:
            self._older_ended.add(leaves)
        # it may never have heard of an older attempt's last generation, which has lost it nevertheless
        if self._group.is_inside(request.member):
            self._end(now)
        self._group.observe(request.key, self._backoff)
        self._group.arrive(request, now)
        return None

    def dead(self, member: str, now: float) -> None:
        """The process of `member` is gone, or its node is. One that comes nevertheless joins as any other."""
        self._group.forget(member, DEAD)
        if self._group.is_inside(member):
            self._end(now)

    def left(self, member: str, key: StateKey | None, now: float) -> None:
        """`member` went on purpose, holding `key`, after its last vote was answered; nobody waits for it.

        Its generation ends: the other members leave at the same step, or come to join within the grace of
        any generation that ended.
        """
        self._group.observe(key, self._backoff)
        self._group.forget(member, LEFT)
        if self._group.is_inside(member):
            self._end(now)

    def applied(self, generation: int, step: int, now: float) -> None:  # noqa: ARG002  every event has its time
        """A report: `step` was applied in `generation` of this attempt. Those of other generations are
        ignored.
        """
        self._group.observe(StateKey(attempt=self.attempt, generation=generation, step=step), self._backoff)

    def extend_deadline(self, member: str, until: float) -> None:
        """`member` is in a phase with a limit of its own (rule 23): it does not count as unresponsive
        before `until`.
        """
        self._group.extend_deadline(member, until)

    def expect(self, num_workers: int) -> None:
        """How many members the supervisor has started, or is starting."""
        self._expected = num_workers

    def median_step(self, seconds: float) -> None:
        """The median step's duration; a member has at least two of these to come."""
        self._group.median_step_s = seconds

    def set_newest_point(self, key: StateKey | None, cursor: Cursor | None, name: str | None) -> None:
        """The newest committed point on the lineage (None: there is none)."""
        self._states.point = (
            None if key is None else NewestPoint(key=key, cursor=cursor, name=name or key.point_name)
        )

    def request_stop(self) -> None:
        """Save and stop at the next step boundary; repeated to every generation until its members left."""
        self._stop = True

    def request_save(self, request: str) -> None:
        """Save at the next step boundary, after a re-form that is wanted and does not need it; repeated until
        `save_answered(request)`, and not taken up again after it.
        """
        if request not in self._saves_done:
            self._save = request

    def save_answered(self, request: str) -> None:
        """The save asked for as `request` has begun (its first vote came)."""
        self._saves_done.add(request)
        if self._save == request:
            self._save = None

    def drain(self, nodes: Iterable[str]) -> None:
        """These nodes are about to go: nobody is taken in from them any more."""
        self._draining = frozenset(nodes)

    def leave(self, save: bool) -> None:
        """The members on draining nodes are to leave at the next step boundary, and nothing may be lost by
        it: while the others and the newest point do not hold the whole of the newest state, the point of that
        is waited for, where a save of it is undecided; else all go on together, and save and meet again.
        `save`: that is known to be so, so that the step at hand is saved at once; where it shows only when
        they meet, the next one is.
        """
        self._leave, self._leave_with_save = True, self._leave_with_save or save

    def stay(self) -> None:
        """Whoever is on a draining node goes on with the others."""
        self._leave = self._leave_with_save = False

    def save_decided(self, key: StateKey) -> None:
        """The save of `key` was committed or given up."""
        self._decided = max(self._decided or key, key)

    # ---- what to do
    def tick(self, now: float) -> list[Action]:
        """What the coordinator must do now; empty while a generation runs or is being formed.

        Call it after every event and at least every 0.1 s.
        """
        if self._stopped is not None or self._pending is not None:
            return []
        if self._group.is_running:
            if not self._group.is_unresponsive_as_a_whole(now):
                self._reform = self._wants_reform(now)
                return []
            self._end(now)  # who trains on, in a long step, hears of it and has its time to come
        actions: list[Action] = [*self._group.leave_out_unresponsive(now)]
        expected = min(self._expected, self._max)
        decision = self._nobody_to_stop() or self._group.too_early(expected, now) or self._close(now)
        if self._short_since is None and self._group.num_live < self._min:
            self._short_since = now
        if isinstance(decision, Waiting) and not self._group.num_live and self._has_trained:
            decision = replace(decision, needed=self._min)
        if isinstance(decision, StopRun):
            self._stopped = decision.reason
        return [*actions, decision]

    def formed(self, generation: int, now: float) -> None:
        """The formation is durable in the journal, so its members may be answered.

        If one of them died or joined anew meanwhile, the generation never begins: `view_for` is None, all
        keep waiting, and the next tick forms another one.
        """
        assert self._pending is not None, f"generation {generation} is not forming"
        formation, requests = self._pending
        assert formation.generation == generation, f"{formation.generation} is forming, not {generation}"
        self._pending = None
        waiting = self._group.waiting
        if any(m not in waiting or waiting[m].request is not request for m, request in requests.items()):
            return
        self._group.begin(
            Generation(
                attempt=self.attempt,
                number=generation,
                members=formation.members,
                formation=formation,
                requests=requests,
            )
        )
        self._reform = self._saved_below = formation.save_only
        if not formation.save_only:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now

    def view_for(self, member: str) -> GenerationView | None:
        """The running generation as `member` sees it; None if it is not in it, or none runs."""
        current = self._group.current
        if current is None or not self._group.is_running or member not in current.ranks:
            return None
        if self._viewed is None or self._viewed[0] is not current:
            if (first := self._view_of_first(current)) is None:
                return None
            self._viewed = current, first
        own_host = current.requests[member].host
        return replace(self._viewed[1], rank=current.ranks[member], own_host=own_host)

    def _view_of_first(self, current: Generation) -> GenerationView | None:
        """The running generation as its first member sees it: of 10,000 members all but two fields are alike,
        and take as long to make as there are members.
        """
        if current.formation is None:
            return None
        formation, first = current.formation, current.requests[current.members[0]]
        return GenerationView(
            attempt=self.attempt,
            generation=current.number,
            rank=0,
            world_size=len(current.members),
            members=current.members,
            host=first.host,
            port=first.port,
            parent=formation.parent,
            source_rank=None if formation.source is None else 0,
            sources=formation.sources,
            keep=formation.keep,
            nodes=_numbered([current.requests[m].node_id for m in current.members]),
            own_host=first.host,
            point=formation.point,
            cursor=formation.cursor,
            step=formation.step,
            launch=self.launch,
            probe=tuple((r.host, r.port) for r in (current.requests[m] for m in current.members))
            if formation.probe_ports
            else (),
        )

    def control_requests(self, attempt: int, generation: int, acknowledged_step: int) -> ControlRequests:
        """What is wanted of a generation: the answer to its long call. Raises `FencedError` for a newer
        attempt.

        The running one: its control requests. An ended or replaced one of this attempt: `ended`. One of an
        older attempt of this launch trains on and is asked only for `reform`, so that all meet at a step
        boundary with equal states (rule 10); once one of its members has come or died, or a generation of
        this attempt was formed, it is `ended`, because it cannot go on.
        """
        if attempt > self.attempt:
            raise FencedError(
                f"a member asks for attempt {attempt}, this one is attempt {self.attempt}; it ends"
            )
        save = stop = reform = ended = False
        current = self._group.current
        if attempt < self.attempt:
            ended = (
                bool(self._states.formed)
                or (attempt, generation) in self._older_ended
                or self._stopped is not None
            )
            reform = not ended
        elif current is None or (attempt, generation) != current.identity or not self._group.is_running:
            ended = True
        else:
            ended = self._stopped is not None
            save_only = current.formation is not None and current.formation.save_only
            stop = self._stop
            reform = self._reform and not stop
            # a re-form waits for the save that is asked for with it: one that it does not need comes after it
            needed = save_only or (reform and self._leave_with_save and self._has_leavers(current))
            save = needed or (self._save is not None and not reform)
        return ControlRequests(
            ended=ended, save=save, stop=stop, reform=reform, acknowledged_step=acknowledged_step
        )

    @property
    def generation(self) -> int:
        """The number of the newest generation that was formed in this attempt, 0 before the first."""
        return max(self._states.formed, default=0)

    @property
    def _has_trained(self) -> bool:
        """Whether a generation of this launch was formed before, in this attempt or an older one."""
        return bool(self.generation) or not self._is_first

    @property
    def below_minimum_since(self) -> float | None:
        """Since when fewer than the minimum are there to train (seconds), None while enough are."""
        return self._short_since

    @property
    def drained(self) -> tuple[str, ...]:
        """Who waits on a node that is about to go."""
        waiting = self._group.waiting.items()
        return tuple(member for member, a in waiting if a.request.node_id in self._draining)

    @property
    def placed(self) -> Placed:
        """Where the members of the running generation are, and those that wait with a state; newcomers
        elsewhere count, too.
        """
        current, gone = self._group.current, self._group.gone
        inside = current.requests if current is not None else {}
        there = {m: r for m, r in inside.items() if current and m in current.members and m not in gone}
        there |= {m: a.request for m, a in self._group.waiting.items()}
        leaving = [r for r in there.values() if r.node_id in self._draining]
        return Placed(
            leaving=tuple(r.node_id for r in leaving if r.member in inside or _holds_any(r)),
            num_elsewhere=len(there) - len(leaving),
        )

    @property
    def may_go(self) -> tuple[str, ...]:
        """Who waits, is on a draining node, and is needed by nobody: without a state; or, when the node is to
        be left, with none that is newer than what the others have (those who have not come yet, or with whom
        it would be complete, may need its part), and no vote that is not answered (rule 15).
        """
        if self._pending is not None:
            return ()
        requests = [a.request for a in self._group.waiting.values()]
        going = [r for r in requests if r.node_id in self._draining]
        if not going:
            return ()
        theirs = self._states.newest(r for r in requests if r.node_id not in self._draining)[0]
        return tuple(
            r.member
            for r in going
            if not _holds_any(r)
            or (
                self._leave
                and (self._group.is_running or not self._is_newer(r, theirs))
                and not self._is_undecided(r.saving)
            )
        )

    def _is_newer(self, request: JoinRequest, state: StateKey | None) -> bool:
        """Whether a member has a part of a state that is newer than this one."""
        newest = max((held.key for held in held_by(request)), default=None)
        if newest is None or state is None:
            return newest is not None
        return newest > state and self._states.origin(newest) != self._states.origin(state)

    def is_gone(self, member: str) -> bool:
        """Neither waiting nor a live member of the current generation: its missing vote will never come (rule
        15).
        """
        known = self._group.is_inside(member) and member not in self._group.gone
        return not known and member not in self._group.waiting

    # ---- events, inside
    def _refusal(self, request: JoinRequest) -> Refused | None:
        who, named = f"member {request.member}", {request.leaves or (0, 0), *_generations_of(request)}
        if request.launch != self.launch:
            return Refused(
                reason=f"{who} is of launch {request.launch}, the run is now {self.launch}; it exits"
            )
        newest = max(attempt for attempt, _ in named)
        if newest > self.attempt:
            raise FencedError(
                f"{who} knows attempt {newest}, this coordinator is attempt {self.attempt}; it ends"
            )
        if any(attempt == self.attempt and number not in self._states.formed for attempt, number in named):
            formed = f"attempt {self.attempt} has formed {self.generation} generations"
            return Refused(
                reason=f"{who} leaves generation {request.leaves} with {request.key}, but {formed}; it exits"
            )
        return None

    def _newest_left(self, member: str) -> tuple[int, int]:
        """The newest generation that `member` is known to have been in; it cannot leave an older one any
        more.
        """
        waiting, current = self._group.waiting.get(member), self._group.current
        newest = (waiting.request.leaves or (0, 0)) if waiting else (0, 0)
        if current is not None and current.attempt == self.attempt and member in current.ranks:
            newest = max(newest, current.identity)
        return newest

    def _repeated(self, request: JoinRequest) -> JoinAnswer:
        current, view = self._group.current, self.view_for(request.member)
        if view is not None and current is not None:
            answered = current.requests[request.member]
            if (answered.host, answered.port) == (request.host, request.port):
                return view
        return Ignored(
            reason=f"member {request.member} leaves {request.leaves}, but it is past that generation"
        )

    def _end(self, now: float) -> None:
        self._group.end(now)
        current = self._group.current
        if current is not None and current.attempt < self.attempt:
            self._older_ended.add(current.identity)

    def _wants_reform(self, now: float) -> bool:
        """Somebody may come in: is it worth interrupting the running generation?"""
        current = self._group.current
        assert current is not None, "asked for a running generation"
        if current.formation is None or current.formation.save_only:
            return True
        if self._leave and self._has_leavers(current):
            return True
        arrivals = [a for a in self._group.waiting.values() if a.request.node_id not in self._draining]
        joiners = [a.since for a in arrivals if self._backoff.not_before(a.request.node_id) <= now]
        if not joiners or len(current.members) - len(self._group.gone) >= self._max:
            return False
        debounce = self._settings.join_debounce_s
        return now - max(joiners) >= debounce or now - min(joiners) >= 5 * debounce

    # ---- forming
    def _nobody_to_stop(self) -> StopRun | None:
        held = held_by_all(a.request for a in self._group.waiting.values())
        holders = any(h.source is not Source.PREPARED for h in held)
        if not self._stop or holders or self._group.missing:
            return None
        if not self._has_trained:
            return StopRun(outcome="stopped", reason="stopped before the first step, nothing is to be saved")
        return StopRun(reason="a stop was asked for, and no member is left that holds a state to save")

    def _close(self, now: float) -> Form | Waiting | StopRun:
        """All that will come are there: forms the next generation, unless they are too few or the run must
        stop.
        """
        if self._group.judge(self._backoff, now):
            self._saved_below = False
        verdict = self._backoff.verdict()
        if verdict is not None:
            return StopRun(reason=verdict)
        awaited = self._awaited_save()
        if awaited is not None:
            since = now if self._group.ended_at is None else self._group.ended_at
            return Waiting(reason=f"the point {awaited.point_name} is waited for", since=since)
        chosen = self._chosen(now)
        parent, source, point = self._newest(chosen)
        save_only = len(chosen) < self._min
        if save_only and not (source is not None and self._states.is_unsaved(parent)):
            if self._stop and chosen and parent is not None:
                step = self._states.label(parent, point)
                return StopRun(outcome="stopped", reason=f"stopped at step {step}")
            return self._below_minimum(chosen, now)
        if save_only and self._saved_below and not self._stop:
            return self._below_minimum(chosen, now)
        held = held_by_all(chosen)
        state = complete([h for h in held if h.key == parent]) if source else None
        known = set(self._group.current.members) if self._group.current is not None else set()
        names = {r.member for r in chosen}
        members = self._by_rank(names, source)
        formation = Formation(
            attempt=self.attempt,
            generation=self.generation + 1,
            members=members,
            parent=parent,
            source=source,
            point=point.name if point else None,
            cursor=state.cursor if state else point.cursor if point else None,
            step=self._states.label(parent, point),
            newcomers=tuple(sorted(names - known)) if names & known else (),
            probe_ports=self._backoff.probe_ports,
            save_only=save_only,
            sources=_by_ranks(state, members) if state else (),
            keep=memory_point_to_keep(held, self._states.floor),
        )
        if formation.probe_ports:
            self._backoff.probed()
        self._states.formed[formation.generation] = formation
        self._pending = (formation, {r.member: r for r in chosen})
        return Form(formation=formation)

    def _chosen(self, now: float) -> list[JoinRequest]:
        """Who is in: nobody who has to wait, and at most the maximum.

        Members that together hold the newest state come first, then the members of the current generation,
        then the others as they came.
        """
        waiting, requests = self._group.waiting, self._eligible()
        allowed = [
            r
            for r in requests
            if self._group.is_trusted(r.member) or self._backoff.not_before(r.node_id) <= now
        ]
        newest = newest_complete(held_by_all(requests), None)
        state = newest_complete(held_by_all(allowed), None) if len(allowed) < len(requests) else newest
        if newest and (not state or self._states.origin(state.key) != self._states.origin(newest.key)):
            state = newest  # who alone holds a shard of the newest state is never left out
        names = dict.fromkeys(r.member for r in allowed)
        cover = frozenset(state.cover([*names], [r.member for r in requests])) if state else frozenset()
        allowed += [r for r in requests if r.member in cover and r.member not in names]
        inside = self._group.is_inside
        allowed.sort(
            key=lambda r: (r.member not in cover, not inside(r.member), waiting[r.member].since, r.member)
        )
        return self._reaching(allowed, state, now)[: self._max]

    def _eligible(self) -> list[JoinRequest]:
        """Who may be in the next generation. From a draining node only whoever holds a state, and when it is
        to be left only while the others do not have all of the newest one.
        """
        waiting = [a.request for a in self._group.waiting.values()]
        requests = [r for r in waiting if not self._stop or _holds_any(r)]
        elsewhere = [r for r in requests if r.node_id not in self._draining]
        if self._leave and self._have_newest(elsewhere, requests):
            return elsewhere
        return [r for r in requests if r.node_id not in self._draining or _holds_any(r)]

    def _have_newest(self, some: Sequence[JoinRequest], requests: Sequence[JoinRequest]) -> bool:
        """Whether these, with the newest point, have all of the newest state that all have together."""
        newest, theirs = (self._states.newest(each)[0] for each in (requests, some))
        return self._states.origin(theirs) == self._states.origin(newest)

    def _awaited_save(self) -> StateKey | None:
        """The save that is waited for, because without it nobody may leave."""
        requests = [a.request for a in self._group.waiting.values()]
        elsewhere = [r for r in requests if r.node_id not in self._draining]
        if not self._leave or len(elsewhere) == len(requests) or self._have_newest(elsewhere, requests):
            return None
        self._leave_with_save = True
        newest = self._states.newest(requests)[0]
        asked = [r.saving for r in requests if r.saving is not None and r.saving == newest]
        return asked[0] if asked and self._is_undecided(asked[0]) else None

    def _is_undecided(self, key: StateKey | None) -> bool:
        return key is not None and (self._decided is None or self._decided < key)

    def _has_leavers(self, current: Generation) -> bool:
        return any(
            current.requests[m].node_id in self._draining
            for m in current.members
            if m not in self._group.gone and m in current.requests
        )

    def _reaching(
        self, requests: list[JoinRequest], state: CompleteState | None, now: float
    ) -> list[JoinRequest]:
        """Those who reach each other, as far as they have tried (rule 18), and together hold `state` if that
        can be; the others wait like a blamed newcomer.
        """
        failed = [(r.member, other) for r in requests for other in r.unreached]
        if not failed:
            return requests
        names = [r.member for r in requests]
        needed = state.needed if state else [names]
        kept = largest_reaching(names, failed, needed) or largest_reaching(names, failed, [names])
        left = [r for r in requests if r.member not in kept]
        self._backoff.blame([r.node_id for r in left], now)
        for request in left:
            self._group.forgive(request.member)
        return [r for r in requests if r.member in kept]

    def _newest(
        self, requests: Iterable[JoinRequest]
    ) -> tuple[StateKey | None, str | None, NewestPoint | None]:
        """The newest state (rule 1): its key, and the member or the point that has it. Of the members that
        have a part of it one that trains it, if there is any.
        """
        requests = list(requests)
        parent, point = self._states.newest(requests)
        if parent is None or point is not None:
            return parent, None, point
        holders = {r.member for r in requests if r.key == parent} or {
            h.member for h in held_by_all(requests) if h.key == parent
        }
        return parent, self._by_rank(holders, None)[0], None

    def _by_rank(self, members: Iterable[str], source: str | None) -> tuple[str, ...]:
        """The source first, the others by their rank in the current generation, then by name."""
        ranks = self._group.current.ranks if self._group.current is not None else {}
        return tuple(sorted(members, key=lambda m: (m != source, ranks.get(m, len(ranks)), m)))

    def _below_minimum(self, chosen: list[JoinRequest], now: float) -> Waiting:
        self._short_since = now if self._short_since is None else self._short_since
        reason = f"{len(chosen)} of at least {self._min} members are there"
        later = {
            a.request.member: self._backoff.not_before(a.request.node_id)
            for a in self._group.waiting.values()
        }
        waits = [
            f"{member} for {until - now:.0f} s" for member, until in sorted(later.items()) if until > now
        ]
        if waits:
            reason += f"; waiting after a generation that failed before its first step: {', '.join(waits)}"
        return Waiting(reason=reason, since=self._short_since, needed=self._min, there=len(chosen))

    # ---- searches
    def copy(self) -> Rendezvous:
        """An independent copy, for a search over all interleavings."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._states, twin._older_ended = self._states.copy(), set(self._older_ended)
        twin._saves_done, twin._backoff, twin._group = (
            set(self._saves_done),
            self._backoff.copy(),
            self._group.copy(),
        )
        return twin

    def snapshot(self) -> tuple[Hashable, dict[str, Hashable]]:
        """All that later decisions depend on, but the formations so far, which the caller has seen.

        First what concerns nobody in particular, then what concerns each member by name. Two machines with
        equal snapshots decide alike, up to who is first among equals, so a search visits only one of them.
        """
        group, members = self._group.snapshot(self._backoff)
        everyone: Hashable = (
            self.attempt,
            self.generation,
            group,
            self._states.point and self._states.point.key,
            (self._stop, self._save, self._stopped, self._saved_below, self._short_since, self._reform),
            (self._draining, self._leave, self._leave_with_save, self._draining and self._decided),
            frozenset(self._older_ended),
            self._backoff.snapshot(),
        )
        return everyone, members


def _generations_of(request: JoinRequest) -> set[tuple[int, int]]:
    """The generations whose states a member has."""
    keys = [request.key, *(h.key for h in request.holdings)]
    return {(key.attempt, key.generation) for key in keys if key is not None}


def _holds_any(request: JoinRequest) -> bool:
    return request.key is not None or bool(request.holdings)


def _by_ranks(state: CompleteState, members: Sequence[str]) -> tuple[tuple[ShardSource, ...], ...]:
    """Who can give each shard, by rank instead of by name."""
    rank = {member: number for number, member in enumerate(members)}
    return tuple(
        tuple(
            sorted(
                (ShardSource(rank=rank[h.member], source=h.source) for h in of_one),
                key=lambda s: (s.source, s.rank),
            )
        )
        for of_one in state.holders
    )


def _numbered(nodes: Iterable[str]) -> tuple[int, ...]:
    """A number for each name, as they come."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(node, len(numbers)) for node in nodes)
