"""The rendezvous: decides which members train next, and from which state (docs/membership.md).

It is a pure, deterministic state machine. The coordinator reports events with their time in seconds (one
monotonic clock), and carries out what `tick` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from orchestrator.elastic.drain import GroupPlacement, NodeDrain
from orchestrator.elastic.failure import FailureBackoff
from orchestrator.elastic.formation import (
    NOTHING,
    Action,
    Form,
    Formation,
    Generation,
    GroupSize,
    Ignored,
    JoinAnswer,
    NewestPoint,
    PendingRequests,
    PreviousGeneration,
    RendezvousSettings,
    StopRun,
    Waiting,
)
from orchestrator.elastic.membership_state import DEAD, LEFT, SPARED, MembershipState
from orchestrator.elastic.next_formation import (
    Continuation,
    ParentStateSelection,
    choose,
    continued,
    held_by_all,
    holds_any,
    newest_left,
    next_formation,
    refusal,
    too_few,
    view_of,
    view_of_first,
    worth_interrupting,
)
from orchestrator.errors import FencedError, UnsavedError
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import ControlRequests, GenerationView, JoinRequest, Source
from orchestrator.records.steps import StateKey


class Rendezvous:
    """Forms the generations of one attempt.

    `size` bounds the group. `previous` is what a restarted coordinator knows of the generation that is still
    training; its members are asked to meet at a step boundary (`control_requests`). `rebase(parent, cursor)`
    returns the step label with which this launch continues a point of an older launch, that is one whose
    attempt is below `first_attempt` (the launch's first; default: this one). All times are seconds.
    """

    def __init__(
        self,
        *,
        attempt: int,
        launch: str,
        size: GroupSize,
        settings: RendezvousSettings | None = None,
        previous: PreviousGeneration | None = None,
        first_attempt: int | None = None,
        rebase: Callable[[StateKey, Cursor | None], int] | None = None,
    ) -> None:
        assert previous is None or previous.attempt < attempt, (
            f"{previous} is not older than attempt {attempt}"
        )
        self.attempt, self.launch = attempt, launch
        self.min_workers = size.min_workers
        self._min, self._max, self._expected = size.min_workers, size.max_workers, size.expected
        self.num_refused = 0  # expected members that cannot work; they are tried again later
        self._settings = settings or RendezvousSettings()
        self._states = ParentStateSelection(
            attempt, attempt if first_attempt is None else first_attempt, rebase
        )
        self._is_first = previous is None  # no member has trained in this launch before
        self._backoff = FailureBackoff(self._settings)
        self._group = MembershipState(self._settings, previous)
        if previous is not None and not previous.members:
            self._group.end(float("-inf"))  # all of them are known to be dead
        self._pending: tuple[Formation, dict[str, JoinRequest]] | None = None
        self._viewed: tuple[Generation, GenerationView] | None = None  # view of the first member
        self._older_ended: set[tuple[int, int]] = set()
        if previous is not None and previous.ended:
            self._older_ended.add((previous.attempt, previous.generation))
        self._short_since: float | None = None
        self._saved_below = False  # the state of the survivors below the minimum was saved, or is being saved
        self._reform = False
        self._asked = PendingRequests()
        self._drain = NodeDrain()
        self._stopped: str | None = None

    # ---- what happens
    def join(self, request: JoinRequest, now: float) -> JoinAnswer | None:
        """A member asks for the next generation. None: it waits until a `Form` names it (`view_for`).

        A repeated join replaces the member's earlier one. A join by a member of the current generation ends
        that one for all (`control_requests`). A join that names an older generation than the one its member
        is in is `Ignored` (rule 20). If it comes from the very port that was answered, the answer is repeated
        instead. Raises `FencedError` if the member knows a newer attempt than this one.
        """
        formed = self._states.formed
        refused = refusal(request, attempt=self.attempt, launch=self.launch, formed=formed)
        if refused is not None:
            return refused
        leaves = request.leaves or (0, 0)
        if leaves < newest_left(request.member, self.attempt, self._group):
            return self._repeated(request)
        if leaves[0] < self.attempt:
            self._older_ended.add(leaves)
        # It may not know an older attempt's last generation, which has nevertheless lost it.
        if self._group.is_inside(request.member):
            self._end(now)
        self._group.observe(request.key, self._backoff)
        self._group.arrive(self._states.trusted(request), now)
        return None

    def dead(self, member: str, now: float, *, spare: bool = False) -> None:
        """The process of `member`, or its node, is gone. If it comes nevertheless, it joins as any other.

        A newcomer that the run can spare is no sign that the step kills workers (rule 25).
        """
        self._group.forget(member, SPARED if spare else DEAD)
        if self._group.is_inside(member):
            self._end(now)

    def left(self, member: str, key: StateKey | None, now: float) -> None:
        """`member` left on purpose, holding `key`, after its last vote was answered. It is not waited for.

        Its generation ends. The other members leave at the same step, or join within the grace of any
        generation that ended.
        """
        self._group.observe(key, self._backoff)
        self._group.forget(member, LEFT)
        if self._group.is_inside(member):
            self._end(now)

    def applied(self, generation: int, step: int, now: float) -> None:  # noqa: ARG002  every event has its time
        """Handles a report that `step` was applied in `generation` of this attempt.

        Reports of other generations are ignored.
        """
        self._group.observe(StateKey(attempt=self.attempt, generation=generation, step=step), self._backoff)

    def extend_deadline(self, member: str, until: float) -> None:
        """`member` is in a phase with its own limit (rule 23). It does not count as unresponsive before
        `until`.
        """
        self._group.extend_deadline(member, until)

    def excuse(self, member: str, seconds: float) -> None:
        """`member`, which is missing, could not run for `seconds`, because its machine is busy (rule 17)."""
        self._group.excuse(member, seconds)

    def judge_was_late(self, seconds: float) -> None:
        """The coordinator's process could not run for `seconds`, and may have missed calls (rule 17)."""
        self._group.judge_was_late(seconds)

    @property
    def missing(self) -> tuple[str, ...]:
        """Members of the ended generation whose join is waited for."""
        return () if self._group.is_running else tuple(self._group.missing)

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """The addresses of the members of the running generation, by rank; empty if unknown."""
        current = self._group.current
        if current is None or not self._group.is_running or current.formation is None:
            return ()
        return tuple((current.requests[m].host, current.requests[m].port) for m in current.members)

    def blame(self, node: str, now: float, *, first_is_free: bool = False) -> float:
        """Delays newcomers from `node`, because one could not work. Returns the delay in seconds.

        The delay doubles each time. With `first_is_free` the first one is replaced at once.
        """
        self._backoff.blame([node], now, first_is_free=first_is_free)
        return self._backoff.not_before(node) - now

    def resting(self, now: float) -> tuple[str, ...]:
        """Returns the nodes whose newcomers have to wait."""
        return self._backoff.resting(now)

    @property
    def expected(self) -> int:
        """The number of members that there should be."""
        return max(1, min(self._expected, self._max) - self.num_refused)

    def expect(self, num_workers: int) -> None:
        """Sets how many members the supervisor has started, or is starting."""
        self._expected = num_workers

    def median_step(self, seconds: float) -> None:
        """Sets the median duration of a step. A member has at least two of these to join."""
        self._group.median_step_s = seconds

    def set_newest_point(self, key: StateKey | None, cursor: Cursor | None, name: str | None) -> None:
        """Sets the newest committed point on the lineage (None: there is none)."""
        self._states.point = (
            None if key is None else NewestPoint(key=key, cursor=cursor, name=name or key.point_name)
        )

    def request_stop(self) -> None:
        """Requests a save and stop at the next step boundary. Repeated to every generation until its members
        left.
        """
        self._asked = replace(self._asked, stop=True)

    def request_save(self, request: str) -> None:
        """Requests a save at the next step boundary.

        It comes after a re-form that is requested and does not need it. It is repeated until
        `save_answered(request)`, and not started again after that.
        """
        self._asked = self._asked.on_save(request)

    def save_answered(self, request: str) -> None:
        """The save requested as `request` has begun (its first vote arrived)."""
        self._asked = self._asked.on_save_answered(request)

    def drain(self, nodes: Iterable[str]) -> None:
        """These nodes are about to go. No member is admitted from them any more."""
        self._drain = replace(self._drain, nodes=frozenset(nodes))

    def leave(self, save: bool, in_time: bool = True) -> None:
        """Makes the members on draining nodes leave at the next step boundary, without loss.

        While the others and the newest point do not hold the whole newest state, the rendezvous waits for the
        point of that state, if a save of it is undecided. Otherwise all continue together, save and meet
        again. `save`: a save is known to be needed, so that the current step is saved at once. If the need
        shows only when they meet, the next step is saved. `in_time`: a save will be committed before the
        nodes go. If not, the save before a planned re-form would only prevent other saves.
        """
        self._drain = self._drain.on_leave(save, in_time)

    def stay(self) -> None:
        """Lets the members on draining nodes continue with the others."""
        self._drain = self._drain.on_stay()

    def distrust(self, key: StateKey, now: float) -> None:
        """The members of the generation of `key` hold different states.

        The next generation continues the newest committed point, whatever members hold (rule 27).
        """
        self._states.distrusted = (key.attempt, key.generation)
        for request in self._group.requests:
            self._group.arrive(self._states.trusted(request), now)
        if self._group.current is not None and self._group.current.identity <= self._states.distrusted:
            self._end(now)

    def save_decided(self, key: StateKey) -> None:
        """The save of `key` was committed or given up."""
        self._drain = self._drain.on_save_decided(key)

    # ---- what to do
    def tick(self, now: float) -> list[Action]:
        """Returns what the coordinator must do now; empty while a generation runs or is being formed.

        To be called after every event and at least every 0.1 s.
        """
        if self._stopped is not None or self._pending is not None:
            return []
        if self._group.is_running:
            if not self._group.is_unresponsive_as_a_whole(now):
                self._reform = self._wants_reform(now)
                return []
            # members that still train, in a long step, learn of the end and have their time to join
            self._end(now)
        actions: list[Action] = [*self._group.leave_out_unresponsive(now)]
        expected = self.expected
        decision = self._nobody_to_stop() or self._group.too_early(expected, now) or self._close(now)
        if self._short_since is None and self._group.num_live < self._min:
            self._short_since = now
        if isinstance(decision, Waiting) and not self._group.num_live and self.has_trained:
            decision = replace(decision, needed=self._min)
        if isinstance(decision, StopRun):
            self._stopped = decision.reason
        return [*actions, decision]

    def formed(self, generation: int, now: float) -> None:
        """The formation is durable in the journal, so its members may be answered.

        If one of them died or joined again meanwhile, the generation never begins: `view_for` returns None,
        all members keep waiting, and the next tick forms another one.
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
        """Returns the running generation as `member` sees it; None if it is not in it, or none runs."""
        current = self._group.current
        if current is None or not self._group.is_running or member not in current.ranks:
            return None
        if self._viewed is None or self._viewed[0] is not current:
            if (first := view_of_first(current, self.launch)) is None:
                return None
            self._viewed = current, first
        return view_of(member, current, self._viewed[1])

    def control_requests(self, attempt: int, generation: int, acknowledged_step: int) -> ControlRequests:
        """Returns what is requested of a generation: the answer to its long call.

        The running generation gets its control requests. An ended or replaced one of this attempt gets
        `ended`. One of an older attempt of this launch is still training. It is asked only for `reform`, so
        that all meet at a step boundary with equal states (rule 10). Once one of its members has joined or
        died, or a generation of this attempt was formed, it is `ended`, because it cannot continue. Raises
        `FencedError` for a newer attempt.
        """
        if attempt > self.attempt:
            raise FencedError(
                f"a member asks for attempt {attempt}, this one is attempt {self.attempt}; it ends"
            )
        found, current = replace(NOTHING, ended=True), self._group.current
        if attempt < self.attempt:
            ended = self._has_ended(attempt, generation)
            found = replace(NOTHING, ended=ended, reform=not ended)
        elif current is not None and self._group.is_running and current.identity == (attempt, generation):
            # leavers are looked up only during a drain, because every member asks all the time
            drain = self._drain
            found = self._asked.of_running(
                save_only=current.formation is not None and current.formation.save_only,
                reform=self._reform,
                leaving_saves=drain.with_save and drain.has_leavers(current, self._group),
                in_time=drain.in_time or not drain.has_leavers(current, self._group),
                over=self._stopped is not None,
            )
        return replace(found, acknowledged_step=acknowledged_step)

    def _has_ended(self, attempt: int, generation: int) -> bool:
        """Whether a generation of an older attempt can no longer continue."""
        known = (attempt, generation) in self._older_ended
        return known or bool(self._states.formed) or self._stopped is not None

    @property
    def generation(self) -> int:
        """The number of the newest generation that was formed in this attempt, 0 before the first."""
        return max(self._states.formed, default=0)

    @property
    def has_trained(self) -> bool:
        """Whether a generation of this launch was formed before, in this attempt or an older one."""
        return bool(self.generation) or not self._is_first

    @property
    def num_live(self) -> int:
        """The number of waiting members, and of those of the current generation that may still join."""
        return self._group.num_live

    def waits(self, member: str) -> bool:
        """Whether it waits for the next generation."""
        return member in self._group.waiting

    def can_spare(self, *members: str) -> bool:
        """Whether the run has enough members without these, none of which has trained yet."""
        proven = any(self._group.is_proven(member) for member in members)
        return not proven and self._group.num_without(members) >= self._min

    @property
    def below_minimum_since(self) -> float | None:
        """When the members became fewer than the minimum (seconds); None while there are enough."""
        return self._short_since

    @property
    def drained(self) -> tuple[str, ...]:
        """The members that wait on a node that is about to go."""
        return tuple(r.member for r in self._group.requests if r.node_id in self._drain.nodes)

    @property
    def placed(self) -> GroupPlacement:
        """Where the members are; see `NodeDrain.placed`."""
        return self._drain.placed(self._group)

    @property
    def may_go(self) -> tuple[str, ...]:
        """The waiting members on draining nodes that are not needed; see `NodeDrain.may_go`."""
        if self._pending is not None:
            return ()
        return self._drain.may_go(self._group.requests, self._states, self._group.is_running)

    def is_gone(self, member: str) -> bool:
        """Whether it is neither waiting nor a live member of the current generation.

        The missing vote of such a member will never arrive (rule 15).
        """
        known = self._group.is_inside(member) and member not in self._group.gone
        return not known and member not in self._group.waiting

    # ---- events, inside
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
        """Whether interrupting the running generation is worthwhile, to admit or release members."""
        current = self._group.current
        assert current is not None, "asked for a running generation"
        if current.formation is None or current.formation.save_only:
            return True
        if self._drain.leave and self._drain.has_leavers(current, self._group):
            return True
        return worth_interrupting(
            current,
            self._group,
            self._drain.elsewhere(self._group.requests),
            self._backoff,
            max_workers=self._max,
            debounce_s=self._settings.join_debounce_s,
            now=now,
        )

    # ---- forming
    def _nobody_to_stop(self) -> StopRun | None:
        held = held_by_all(self._group.requests)
        holders = any(h.source is not Source.PREPARED for h in held)
        if not self._asked.stop or holders or self._group.missing:
            return None
        if not self.has_trained:
            return StopRun(outcome="stopped", reason="stopped before the first step, nothing is to be saved")
        return StopRun(
            reason="a stop was asked for, and no member is left that holds a state to save",
            code=UnsavedError.code,
        )

    def _close(self, now: float) -> Form | Waiting | StopRun:
        """Forms the next generation, now that all members that will come have arrived.

        Returns another decision if they are too few or the run must stop.
        """
        if self._group.judge(self._backoff, now):
            self._saved_below = False
        verdict = self._backoff.verdict()
        if verdict is not None:
            return verdict
        awaited = self._awaited_save()
        if awaited is not None:
            since = now if self._group.ended_at is None else self._group.ended_at
            return Waiting(reason=f"the point {awaited.point_name} is waited for", since=since)
        chosen = self._chosen(now)
        what = self._newest(chosen)
        save_only = len(chosen) < self._min
        if save_only:
            unsaved = what.source is not None and self._states.is_unsaved(what.parent)
            if self._asked.stop and not unsaved and chosen and what.parent is not None:
                step = self._states.label(what.parent, what.point)
                return StopRun(outcome="stopped", reason=f"stopped at step {step}")
            tried = self._saved_below and not self._asked.stop and self._asked.save is None
            if not unsaved or tried:
                return self._below_minimum(len(chosen), now)
        return self._form(chosen, what, save_only)

    def _awaited_save(self) -> StateKey | None:
        """Returns the save that is awaited because no member may leave without it."""
        requests = self._group.requests
        if not self._drain.needs_save(requests, self._states):
            return None
        self._drain = self._drain.on_leave(True, self._drain.in_time)
        return self._drain.awaited_save(requests, self._states)

    def _chosen(self, now: float) -> Sequence[JoinRequest]:
        """Chooses the members. A member that the others do not reach waits like a blamed newcomer."""
        requests = [r for r in self._group.requests if not self._asked.stop or holds_any(r)]
        candidates = self._drain.candidates(requests, self._states)
        choice = choose(candidates, self._group, self._states, self._backoff, max_workers=self._max, now=now)
        self._backoff.blame([r.node_id for r in choice.unreached], now)
        for request in choice.unreached:
            self._group.forgive(request.member)
        return choice.members

    def _newest(self, requests: Sequence[JoinRequest]) -> Continuation:
        """Returns what a generation of these members continues."""
        return continued(requests, self._states, self._group.current)

    def _form(self, chosen: Sequence[JoinRequest], what: Continuation, save_only: bool) -> Form:
        formation = next_formation(
            chosen,
            what,
            self._states,
            self._group.current,
            attempt=self.attempt,
            generation=self.generation + 1,
            probe_ports=self._backoff.probe_ports,
            save_only=save_only,
        )
        if formation.probe_ports:
            self._backoff.probed()
        self._states.formed[formation.generation] = formation
        self._pending = (formation, {r.member: r for r in chosen})
        return Form(formation=formation)

    def _below_minimum(self, num_chosen: int, now: float) -> Waiting:
        self._short_since = now if self._short_since is None else self._short_since
        reason = too_few(num_chosen, self._group.requests, self._backoff, min_workers=self._min, now=now)
        return Waiting(reason=reason, since=self._short_since, needed=self._min, there=num_chosen)

    # ---- searches
    def copy(self) -> Rendezvous:
        """An independent copy, for a search over all interleavings."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._states, twin._older_ended = self._states.copy(), set(self._older_ended)
        twin._backoff, twin._group = self._backoff.copy(), self._group.copy()
        return twin

    def snapshot(self) -> tuple[Hashable, dict[str, Hashable]]:
        """Returns everything that later decisions depend on.

        The formations so far, which the caller has seen, are not included. The first part concerns no
        particular member, the second each member by name. Two machines with equal snapshots decide alike, up
        to the order among equals. A search therefore visits only one of them.
        """
        group, members = self._group.snapshot(self._backoff)
        everyone: Hashable = (
            self.attempt,
            self.generation,
            group,
            self._states.point and self._states.point.key,
            self._states.distrusted,
            (
                self._asked.stop,
                self._asked.save,
                self._stopped,
                self._saved_below,
                self._short_since,
                self._reform,
            ),
            self._drain.snapshot(),
            frozenset(self._older_ended),
            self._backoff.snapshot(),
        )
        return everyone, members
