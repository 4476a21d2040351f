"""`trainer.membership.Membership` over calls to a coordinator that may be away for a while: each call is
repeated with fresh arguments until it is answered.

It knows no Ray: how a call travels is the business of `Calls`.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from orchestrator.cluster.starvation import ProcessLook, Silence, look_at_process, starved_s
from orchestrator.errors import ElasticError, FencedError, OrchestratorError, StorageError, report_of
from orchestrator.launch.generation_end import GenerationEnd
from orchestrator.launch.phase_reports import QUIET_S, PhaseReports, doing
from orchestrator.launch.trying_ports import unreached, unreached_ranks
from orchestrator.records.membership import (
    ControlRequests,
    GenerationView,
    JoinRequest,
    MemberState,
    Refusal,
    RunOver,
    StillWaiting,
)
from orchestrator.records.points import DamagedPointError, Vote
from orchestrator.records.run_status import CODE, PEERS, MemberInfo
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.trainer.membership import connect_store, open_store
from orchestrator.trainer.phases import BETWEEN, ENDING, LOAD, PHASE_LIMITS_S, SAVE_WAIT, STEP

# A coordinator of our launch that cannot be reached: after this long members stop (membership rule 11).
COORDINATOR_LIMIT_S = 60.0
ORPHANED_LIMIT_S = 3.0  # the same once this member's Ray is gone: no coordinator is started anew
ANSWER_LIMIT_S = 30.0  # a coordinator that lives answers every call within 10 s
_LOG_STACK_S = 30.0  # a loop that is in one place for so long has its stack in the worker's log
_RETRY_S = 0.1
_OWN_EVERY_S = 5.0  # how often a member looks how much CPU time it gets
_OWN_LOOK_S = 1.0  # how often a member that gets no answer looks whether it could run itself
_log = logging.getLogger(__name__)
_REPORT_EVERY_S = 0.5
_LOADING_EVERY_S = 5.0
_GIVEN_UP_EVERY_S = 5.0  # how often a member that saves asks whether that is still wanted, at most
_QUESTIONS_PER_S = 200.0  # of all members together: a coordinator answers more than 1,000 calls a second
_QUIET = ControlRequests(ended=False, save=False, stop=False, reform=False, acknowledged_step=-1)
_OVER = replace(_QUIET, ended=True)
# what rank 0 asks for by itself when the coordinator stays away
_ALONE = ControlRequests(ended=False, save=True, stop=True, reform=False, acknowledged_step=-1)


def ask_every_s(world_size: int) -> float:
    """How often each of so many members asks about its save, so that all together ask 200 times a second at
    most: every 5 s up to 1,000 members, every 50 s at 10,000.
    """
    return max(_GIVEN_UP_EVERY_S, world_size / _QUESTIONS_PER_S)


def _look_at_this() -> ProcessLook | None:
    return look_at_process(os.getpid(), time.monotonic())


def _is_starved(before: ProcessLook | None, now: ProcessLook | None) -> bool:
    """Whether a process could not run for most of the time between two looks."""
    if before is None or now is None:
        return False
    return starved_s(before, now) > (now.at_s - before.at_s) / 2


class UnansweredError(Exception):
    """A call was not answered: the coordinator is away, or frozen. Whether it had an effect is unknown."""


class Calls(Protocol):
    """The way to the coordinator."""

    def call(self, method: str, arguments: Sequence[Any], limit_s: float) -> Any:
        """One call and its answer. Raises `UnansweredError` if none came within `limit_s`, and what the call
        itself raised.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where this member lives: its actor and node in Ray ("" outside it), and the address others reach."""

    actor_id: str
    node_id: str
    host: str


@dataclass(kw_only=True, slots=True)
class _Undecided:
    """A save of this member: its rank in it, by how many it is made, and how far its part had come when that
    was said last.
    """

    key: StateKey
    rank: int
    world_size: int
    progress: Callable[[], int]
    said: int


class RemoteMembership:
    """One member. Its threads end with the process; what ends one of them unforeseen is raised by the next
    call of the loop.
    """

    def __init__(
        self,
        calls: Calls,
        launch: str,
        place: Place,
        coordinator_limit_s: float = COORDINATOR_LIMIT_S,
        keep_vote: Callable[[Vote], None] | None = None,
        is_orphaned: Callable[[], bool] = lambda: False,
        look: Callable[[], ProcessLook | None] = _look_at_this,
    ) -> None:
        """Opens this member's TCPStore on a port of the system's choice, before it joins anything.
        `keep_vote` writes a vote that no coordinator hears into storage. `is_orphaned`: whether the Ray that
        started this process is gone. `look`: how much CPU time this process got (None: not known).
        """
        self._is_orphaned, self._look = is_orphaned, look
        self._keep_vote = keep_vote
        self.member = os.urandom(6).hex()
        self._calls, self._launch, self._place = calls, launch, place
        self._limit_s = coordinator_limit_s
        self.store = open_store(place.host)
        self._control_requests: dict[tuple[int, int], ControlRequests] = {}
        self._reports: queue.SimpleQueue[tuple[GenerationView, Sequence[StepRecord]]] = queue.SimpleQueue()
        self._digests: queue.SimpleQueue[tuple[StateKey, str]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._phase = (STEP, time.monotonic())
        self._step_limit_s = PHASE_LIMITS_S[SAVE_WAIT]
        self._end = GenerationEnd()
        self._stepped_at = time.monotonic()  # when the newest step was finished
        self._loading: tuple[int, int] | None = None  # what the coordinator is to hear
        self._world_size = 0  # of the generation that this member is in
        self._logged: tuple[str, float] | None = None  # the phase in which the loop's stack was logged
        self._tried: tuple[float, tuple[int, ...]] = (0.0, ())  # the wait in which ports were tried; in vain
        self._undecided: _Undecided | None = None
        self._given_up: StateKey | None = None  # the newest that is known to be
        self._broken: BaseException | None = None
        self._loop = threading.get_ident()  # the thread that trains
        self._entered = self._own = self._look()  # when the last generation was entered, and newly
        self._in_thread("report", self._report_loop)

    def connect_store(self, view: GenerationView) -> Any:
        """The store of the generation's rank 0, under a prefix of its own."""
        return connect_store(self.store, view)

    def join(self, state: MemberState) -> GenerationView | None:
        """Blocks until this member is in a new generation; None: the run is over. Raises `FencedError` when
        it is refused.
        """
        self._check()
        self._end.leave()
        self._world_size = 0
        request = self._join_request(state)
        answer = self._ask("join", request)
        while isinstance(answer, GenerationView) and answer.probe:
            request = replace(
                request,
                leaves=(answer.attempt, answer.generation),
                reason="tried the others' ports",
                unreached=unreached(answer),
            )
            answer = self._ask("join", request)
        if isinstance(answer, Refusal):
            raise FencedError(answer.reason)
        if isinstance(answer, RunOver):
            return None
        assert isinstance(answer, GenerationView), f"join was answered with {answer}"
        self._entered = self._look()
        self._end.enter((answer.attempt, answer.generation))
        self._world_size = answer.world_size
        watch = self._watch if answer.rank == 0 else self._await_end
        self._in_thread("watch", lambda: watch(answer))
        return answer

    def control_requests(self, view: GenerationView) -> ControlRequests:
        """The latest control requests that the watching thread has heard of; never blocks."""
        self._check()
        return self._control_requests.get((view.attempt, view.generation), _QUIET)

    def when_ended(self, view: GenerationView, act: Callable[[], None]) -> None:
        """The watching thread acts, or the caller's if that one has heard already."""
        self._end.when_heard((view.attempt, view.generation), act)

    def step_limit(self, seconds: float) -> None:
        """The reporting thread tells it, should the generation end within a step."""
        self._step_limit_s = seconds

    def phase(self, name: str) -> None:
        """The reporting thread notifies the coordinator, should it last."""
        self._phase = (STEP if name == BETWEEN else name, time.monotonic())
        if name == BETWEEN:
            self._stepped_at = self._phase[1]

    def loading(self, done_bytes: int, num_bytes: int) -> None:
        """The reporting thread notifies the coordinator every `_LOADING_EVERY_S`."""
        self._loading = done_bytes, num_bytes

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        """Hands the records to the reporting thread; never blocks."""
        self._reports.put((view, tuple(records)))

    def digest(self, view: GenerationView, key: StateKey, weights_digest: str) -> None:
        """Hands it to the reporting thread, which sends it after the step's record; never blocks."""
        del view
        self._digests.put((key, weights_digest))

    def vote(self, vote: Vote) -> Future[bool]:
        """Sends the vote from a thread of its own; the future answers whether the point was committed. Where
        no coordinator hears it, the vote is written into storage (rule 11).
        """
        self._undecided = None
        return self._ask_aside("vote", self._launch, vote)

    def save_failed(self, view: GenerationView, key: StateKey, error: OrchestratorError) -> Future[bool]:
        """Reports to the coordinator, from a thread of its own, that this rank has no part of the save."""
        self._undecided = None
        return self._ask_aside("save_failed", self._launch, key, view.rank, view.world_size, str(error))

    def is_given_up(self, view: GenerationView, key: StateKey, progress: Callable[[], int]) -> bool:
        """What the reporting thread has heard, which asks from time to time until the vote or the report is
        given, and says then whether more of the part is written.
        """
        undecided = self._undecided
        if undecided is None or undecided.key != key:
            self._undecided = _Undecided(
                key=key, rank=view.rank, world_size=view.world_size, progress=progress, said=progress()
            )
        return key == self._given_up

    def finished(self, key: StateKey, reason: str) -> None:
        """Reports to the coordinator that this member's part of the run is over, and before it what waits."""
        self._send_reports()
        self._ask("finished", self._launch, self.member, key, reason)

    def failed(self, error: BaseException) -> bool:
        """Reports to the coordinator what ended this member, so that the reason reaches the user whatever Ray
        does with the exception; before it the steps that were not reported yet. Returns when this process may
        end: True if another one is to take its place, False if the run is over.
        """
        self._send_reports()
        place = MemberInfo(
            member=self.member,
            actor_id=self._place.actor_id,
            node_id=self._place.node_id,
            pid=os.getpid(),
            host=self._place.host,
        )
        damages = error.damages if isinstance(error, DamagedPointError) else ()
        return bool(self._ask("failed", self._launch, self.member, *report_of(error), damages, place))

    # ---- inside
    def _join_request(self, state: MemberState) -> JoinRequest:
        return JoinRequest(
            member=self.member,
            launch=self._launch,
            actor_id=self._place.actor_id,
            node_id=self._place.node_id,
            host=self._place.host,
            port=self.store.port,
            key=state.key,
            leaves=state.leaves,
            prepared=state.prepared,
            cursor=state.cursor,
            records=state.records,
            reason=state.reason[-2000:],
            pid=os.getpid(),
            saving=state.saving,
            holdings=state.holdings,
            unsaved=state.unsaved,
            starved=_is_starved(self._entered, self._look()),
            idle_s=time.monotonic() - self._stepped_at if state.leaves is not None else 0.0,
        )

    def _check(self) -> None:
        if self._broken is not None:
            raise ElasticError(
                f"a thread of member {self.member} ended: {type(self._broken).__name__}: {self._broken}; "
                "start the same command again: it continues from the newest resume point"
            ) from self._broken

    def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  the loop raises it
                self._broken = error

        threading.Thread(target=run, daemon=True, name=name).start()

    def _ask_aside(self, method: str, *arguments: Any) -> Future[bool]:
        """`_ask` in a thread; what it answers, as a truth."""
        answer: Future[bool] = Future()

        def send() -> None:
            try:
                answer.set_result(bool(self._ask(method, *arguments)))
            except ElasticError as error:
                answer.set_exception(self._unheard(error, arguments[-1]))
            except BaseException as error:  # noqa: BLE001  the future carries it to the loop
                answer.set_exception(error)

        threading.Thread(target=send, daemon=True, name=method).start()
        return answer

    def _unheard(self, error: ElasticError, what: Any) -> ElasticError:
        """What ends a member whose vote, if it was one, no coordinator has heard."""
        if not isinstance(what, Vote) or self._keep_vote is None:
            return error
        try:
            self._keep_vote(what)
        except StorageError as failed:
            return ElasticError(f"{error}. The vote for {what.key.point_name} is not kept either: {failed}")
        return ElasticError(
            f"{error}. The vote for {what.key.point_name} is written: the next start commits that point, if "
            "the votes of all ranks are there"
        )

    def _ask(self, method: str, *arguments: Any) -> Any:
        """One call, repeated while the coordinator is away or has nothing to say yet; `ElasticError` after
        `coordinator_limit_s` without an answer, in which this process could run, and after
        `ORPHANED_LIMIT_S` where its Ray is gone.
        """
        call_s = min(ANSWER_LIMIT_S, self._limit_s)
        silence, looked = Silence(time.monotonic(), call_s + _OWN_LOOK_S, self._own), time.monotonic()
        while True:
            try:
                answer = self._calls.call(method, arguments, call_s)
            except UnansweredError as error:
                now = time.monotonic()
                if now - looked > min(_OWN_LOOK_S, self._limit_s):
                    silence.look(now, self._look())
                    looked = now
                limit_s = min(self._limit_s, ORPHANED_LIMIT_S) if self._is_orphaned() else self._limit_s
                if silence.counted_s > limit_s:
                    raise ElasticError(
                        f"no coordinator of launch {self._launch} answered for {limit_s:.0f} s "
                        f"({error}); start the same command again: it continues from the newest resume point"
                    ) from error
                time.sleep(_RETRY_S)
                continue
            if not isinstance(answer, StillWaiting):
                return answer
            silence, looked = Silence(time.monotonic(), call_s + _OWN_LOOK_S, self._own), time.monotonic()

    def _watch(self, view: GenerationView) -> None:
        """Rank 0's open call: it returns when the control requests for this generation change, and is asked
        again until the generation is over.
        """
        known: ControlRequests | None = None
        while known is None or not known.ended:
            try:
                known = self._ask("watch", self._launch, view.attempt, view.generation, known)
            except FencedError:
                known = _OVER
            except OrchestratorError:
                self._control_requests[view.attempt, view.generation] = _ALONE
                return
            self._control_requests[view.attempt, view.generation] = known
        self._end.hear((view.attempt, view.generation))

    def _await_end(self, view: GenerationView) -> None:
        """The open call of every other rank: it returns when the generation is over."""
        generation = (view.attempt, view.generation)
        while self._end.is_inside(generation):
            try:
                self._ask("ended", self._launch, *generation)
            except FencedError:
                pass  # over for this member: what it waits in is called off, and its next join says this
            except OrchestratorError:
                time.sleep(_RETRY_S)  # the coordinator may come back; meanwhile rank 0 has all save and stop
                continue
            self._control_requests[generation] = _OVER
            self._end.hear(generation)
            return

    def _doing(self) -> tuple[str, float]:
        """The phase, and since when. Who is in a step of a generation that is over says so."""
        phase, since = self._phase
        heard_at = self._end.heard_at
        return (ENDING, heard_at) if phase == STEP and heard_at is not None else (phase, since)

    def _report_loop(self) -> None:
        """Reports to the coordinator what nobody waits for: step records in batches, long phases. While it
        stays away the records stay with the members, who bring them to the next join.
        """
        reports = PhaseReports(told_at=time.monotonic())
        asked_at = said_at = loading_at = looked_at = reports.told_at
        while True:
            time.sleep(_REPORT_EVERY_S)
            phase, since = self._doing()
            now = time.monotonic()
            limit_s = reports.due_s(phase, since, self._step_limit_s, now)
            if now - looked_at > _OWN_EVERY_S:
                looked_at, self._own = now, self._look()
            try:
                self._send_reports()
                if limit_s is not None:
                    self._ask("phase", self._launch, self.member, limit_s)
                    reports = PhaseReports(told=phase, told_at=now)
                if phase == LOAD and now - max(loading_at, since) > _LOADING_EVERY_S and self._loading:
                    loading_at = now
                    self._ask("loading", self._launch, self.member, *self._loading)
                if self._world_size and now - max(since, said_at) > QUIET_S:
                    said_at = now + self._world_size / _QUESTIONS_PER_S
                    with suppress(Exception):  # it is for people: nothing of it may end a member
                        self._say_doing(phase, now - since)
                asked = self._undecided
                if asked is not None and now - asked_at > ask_every_s(asked.world_size):
                    asked_at = now
                    self._ask_about_save()
            except OrchestratorError:
                continue  # it may come back, and then hears what is new; the loop's own calls have a limit

    def _say_doing(self, phase: str, since_s: float) -> None:
        """Reports what the loop does, which has finished no step for long."""
        frame = sys._current_frames().get(self._loop)
        what = doing(phase, traceback.extract_stack(frame) if frame is not None else (), since_s)
        if what.kind == CODE and since_s > _LOG_STACK_S and self._logged != self._phase:
            self._logged = self._phase
            _log.warning("in %s for %.0f s:\n%s", phase, since_s, "".join(traceback.format_stack(frame)))
        since = self._phase[1]
        if what.kind == PEERS and self._tried[0] == since:
            what = replace(what, unreached=self._tried[1])
        addresses = self._ask("doing", self._launch, self.member, what)
        if addresses and self._tried[0] != since:  # once for each wait
            self._tried = since, unreached_ranks(addresses)

    def _ask_about_save(self) -> None:
        if (asked := self._undecided) is None:
            return
        progress = asked.progress()
        moved, asked.said = progress != asked.said, progress
        if self._ask("is_given_up", self._launch, asked.key, asked.rank, asked.world_size, moved):
            self._given_up = asked.key

    def _send_reports(self) -> None:
        """One batch at a time: when this returns, what was to be reported before it is."""
        view, batch = None, list[StepRecord]()
        with self._sending:
            with suppress(queue.Empty):
                while True:
                    view, records = self._reports.get_nowait()
                    batch.extend(records)
            if view is not None:
                self._ask("report", self._launch, self.member, view.attempt, view.generation, tuple(batch))
            with suppress(queue.Empty):
                while True:
                    self._ask("digest", self._launch, *self._digests.get_nowait())
