"""The loop's `Membership`, over calls to a coordinator that may be unavailable for a while.

Each call is repeated with fresh arguments until it is answered. `Calls` transports the calls.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from orchestrator.checkpoint.points.run_file import read_run
from orchestrator.checkpoint.points.sealed_votes import keep_vote
from orchestrator.cluster.machine import ProcessLook, Silence, look_at_process, starved_s
from orchestrator.errors import (
    CoordinatorSilentError,
    ElasticError,
    FencedError,
    OrchestratorError,
    StorageError,
    report_of,
)
from orchestrator.launch.member.coordinator_calls import (
    QUIET_S,
    Calls,
    GenerationEnd,
    PhaseReports,
    UnansweredError,
    doing,
    unreached,
    unreached_ranks,
)
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
from orchestrator.records.steps import EvalRecord, StateKey, StepRecord
from orchestrator.storage.files import Storage
from orchestrator.trainer.interfaces.loop_interface import (
    BETWEEN,
    ENDING,
    EVAL,
    LOAD,
    PHASE_LIMITS_S,
    SAVE_WAIT,
    STEP,
    connect_store,
    open_store,
)

# Members stop after this long without contact to a coordinator of our launch (membership rule 11).
COORDINATOR_LIMIT_S = 60.0
ORPHANED_LIMIT_S = 3.0  # the same once this member is orphaned: no coordinator is restarted
ANSWER_LIMIT_S = 30.0  # a live coordinator answers every call within 10 s
_LOG_STACK_S = 30.0  # after this long in one place, the loop's stack is written to the worker's log
_RETRY_S = 0.1
_OWN_EVERY_S = 5.0  # how often a member checks how much CPU time it gets
_OWN_LOOK_S = 1.0  # how often a member without an answer checks whether it could run itself
_log = logging.getLogger(__name__)
_REPORT_EVERY_S = 0.5
_LOADING_EVERY_S = 5.0
_GIVEN_UP_EVERY_S = 5.0  # how often a member that saves asks whether that is still wanted, at most
_QUESTIONS_PER_S = 200.0  # of all members together: a coordinator answers more than 1,000 calls a second
_QUIET = ControlRequests(ended=False, save=False, stop=False, reform=False, acknowledged_step=-1)
_OVER = replace(_QUIET, ended=True)
# the requests that rank 0 makes by itself if the coordinator stays unavailable
_ALONE = ControlRequests(ended=False, save=True, stop=True, reform=False, acknowledged_step=-1)


def ask_every_s(world_size: int) -> float:
    """The interval at which each member asks about its save.

    All together ask at most 200 times a second: every 5 s up to 1,000 members, every 50 s at 10,000.
    """
    return max(_GIVEN_UP_EVERY_S, world_size / _QUESTIONS_PER_S)


def _look_at_this() -> ProcessLook | None:
    return look_at_process(os.getpid(), time.monotonic())


def _is_starved(before: ProcessLook | None, now: ProcessLook | None) -> bool:
    """Whether a process could not run for most of the time between two observations."""
    if before is None or now is None:
        return False
    return starved_s(before, now) > (now.at_s - before.at_s) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberAddress:
    """Where this member runs: its actor and node in Ray ("" outside it), and its address for the others."""

    actor_id: str
    node_id: str
    host: str


@dataclass(kw_only=True, slots=True)
class _Undecided:
    """A member's save: its rank in it, the number of ranks, and the progress of its part at the last
    report.
    """

    key: StateKey
    rank: int
    world_size: int
    progress: Callable[[], int]
    said: int


def frame_of(thread: int) -> FrameType | None:
    """The frame that a thread of this process is in, by its id; None if it has ended.

    No garbage is collected meanwhile. CPython before 3.11.9 holds a lock while it makes the frames; what a
    collection runs then may give way to a thread that begins and waits for that lock, and the process stands
    still for ever (github.com/python/cpython/issues/106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()


def keep_in_storage(storage: Storage, vote: Vote) -> None:
    """Writes a vote that reached no coordinator into the run's storage. Raises `StorageError`."""
    run = read_run(storage)
    keep_vote(storage, vote, run.id if run is not None else "")


class RemoteMembership:
    """One member. Its threads end with the process. An unexpected error that ends one of them is raised by
    the loop's next call.
    """

    def __init__(
        self,
        calls: Calls,
        launch: str,
        place: MemberAddress,
        coordinator_limit_s: float = COORDINATOR_LIMIT_S,
        keep_vote: Callable[[Vote], None] | None = None,
        is_orphaned: Callable[[], bool] = lambda: False,
        look: Callable[[], ProcessLook | None] = _look_at_this,
        member: str | None = None,
    ) -> None:
        """Opens this member's TCPStore on a free port, before it joins anything.

        `keep_vote` writes a vote that reaches no coordinator into storage. `is_orphaned`: whether no
        coordinator can come back, because the Ray or the process that started it is gone. `look`: how much
        CPU time this process got (None: not known). `member`: its name (None: a random one).
        """
        self._is_orphaned, self._look = is_orphaned, look
        self._keep_vote = keep_vote
        self.member = member or os.urandom(6).hex()
        self._calls, self._launch, self._place = calls, launch, place
        self._limit_s = coordinator_limit_s
        self.store = open_store(place.host)
        self._control_requests: dict[tuple[int, int], ControlRequests] = {}
        self._reports: queue.SimpleQueue[tuple[GenerationView, Sequence[StepRecord]]] = queue.SimpleQueue()
        self._digests: queue.SimpleQueue[tuple[StateKey, str]] = queue.SimpleQueue()
        self._evals_taken = True
        self._evals: deque[tuple[EvalRecord, bool]] = deque()  # until the coordinator has them
        self._callback_errors: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._phase = (STEP, time.monotonic())
        self._step_limit_s = PHASE_LIMITS_S[SAVE_WAIT]
        self._end = GenerationEnd()
        self._stepped_at = time.monotonic()  # when the newest step was finished
        self._loading: tuple[int, int] | None = None  # to be sent to the coordinator
        self._world_size = 0  # of the generation that this member is in
        self._logged: tuple[str, float] | None = None  # the phase in which the loop's stack was logged
        self._tried: tuple[float, tuple[int, ...]] = (0.0, ())  # the wait in which ports were tried; in vain
        self._undecided: _Undecided | None = None
        self._given_up: StateKey | None = None  # the newest that is known to be given up
        self._broken: BaseException | None = None
        self._loop = threading.get_ident()  # the thread that trains
        self._entered = self._own = self._look()  # when the last generation was entered, and now
        self._in_thread("report", self._report_loop)

    def connect_store(self, view: GenerationView) -> Any:
        """The store of the generation's rank 0, with a separate prefix."""
        return connect_store(self.store, view)

    def join(self, state: MemberState) -> GenerationView | None:
        """Blocks until this member is in a new generation; None: the run is over. Raises `FencedError` if
        refused.
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
        """The latest control requests that the watching thread has received. Never blocks."""
        self._check()
        return self._control_requests.get((view.attempt, view.generation), _QUIET)

    def when_ended(self, view: GenerationView, act: Callable[[], None]) -> None:
        """Calls `act` in the watching thread, or in the caller's if the end is already known."""
        self._end.when_heard((view.attempt, view.generation), act)

    def step_limit(self, seconds: float) -> None:
        """The reporting thread reports it if the generation ends within a step."""
        self._step_limit_s = seconds

    def phase(self, name: str) -> None:
        """The reporting thread reports it if the phase lasts."""
        if name != EVAL or self._phase[0] != EVAL:  # the batches of an evaluation are one phase
            self._phase = (STEP if name == BETWEEN else name, time.monotonic())
        if name == BETWEEN:
            self._stepped_at = self._phase[1]

    def loading(self, done_bytes: int, num_bytes: int) -> None:
        """The reporting thread reports it every `_LOADING_EVERY_S`."""
        self._loading = done_bytes, num_bytes

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        """Passes the records to the reporting thread. Never blocks."""
        self._reports.put((view, tuple(records)))

    def digest(self, view: GenerationView, key: StateKey, weights_digest: str) -> None:
        """Passes the digest to the reporting thread, which sends it after the step's record. Never blocks."""
        del view
        self._digests.put((key, weights_digest))

    def computed_with(self, blocks: str, attention: str, kernels: Callable[[], bytes | None]) -> None:
        """Reports it, and sends the kernels if they are wanted, in a thread of its own."""

        def send() -> None:
            with suppress(ElasticError):  # the calls of the loop report that no coordinator answers
                wanted = self._ask("computed_with", self._launch, blocks, attention)
                if wanted and (copies := kernels()) is not None:
                    self._ask("offer_kernels", self._launch, copies)

        threading.Thread(target=send, daemon=True, name="kernels").start()

    def evaluated(self, view: GenerationView, record: EvalRecord, is_last: bool) -> None:
        """Passes the record to the reporting thread, which sends it after those of the steps."""
        del view
        self._evals.append((record, is_last))

    def callback_failed(self, text: str, stops: bool) -> None:
        """Passes the error to the reporting thread. Never blocks."""
        self._callback_errors.put((text, stops))

    def send_reports(self) -> bool:
        """Sends one batch at a time. When this returns, everything pending before the call is sent.

        Returns whether all evaluations since the last call of the loop were taken.
        """
        self._send_reports()
        taken, self._evals_taken = self._evals_taken, True
        return taken

    def vote(self, vote: Vote) -> Future[bool]:
        """Sends the vote from its own thread. The future has the result: whether the point was committed.

        If no coordinator receives it, the vote is written into storage (rule 11).
        """
        self._undecided = None
        return self._ask_aside("vote", self._launch, vote)

    def save_failed(self, view: GenerationView, key: StateKey, error: OrchestratorError) -> Future[bool]:
        """Reports to the coordinator, from its own thread, that this rank has no part of the save."""
        self._undecided = None
        return self._ask_aside("save_failed", self._launch, key, view.rank, view.world_size, str(error))

    def is_given_up(self, view: GenerationView, key: StateKey, progress: Callable[[], int]) -> bool:
        """Whether the save is given up, as far as the reporting thread knows.

        That thread asks from time to time until the vote or the report is made, and reports whether more of
        the part was written.
        """
        undecided = self._undecided
        if undecided is None or undecided.key != key:
            self._undecided = _Undecided(
                key=key, rank=view.rank, world_size=view.world_size, progress=progress, said=progress()
            )
        return key == self._given_up

    def finished(self, key: StateKey, reason: str) -> None:
        """Reports to the coordinator that this member's part of the run is over, after all pending
        reports.
        """
        self._send_reports()
        self._ask("finished", self._launch, self.member, key, reason)

    def failed(self, error: BaseException) -> bool:
        """Reports to the coordinator the error that ended this member, after the steps not reported yet.

        The reason then reaches the user whatever Ray does with the exception. Returns when this process may
        end: True if another one takes its place, False if the run is over.
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
        broken = self._broken
        if broken is not None:
            raise ElasticError(
                f"a thread of member {self.member} ended: {type(broken).__name__}: {broken}; "
                "start the same command again: it continues from the newest resume point",
                code=broken.code if isinstance(broken, OrchestratorError) else "internal.thread_ended",
            ) from broken

    def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  the loop raises it
                self._broken = error

        threading.Thread(target=run, daemon=True, name=name).start()

    def _ask_aside(self, method: str, *arguments: Any) -> Future[bool]:
        """`_ask` in a thread, with its answer as a boolean."""
        answer: Future[bool] = Future()

        def send() -> None:
            try:
                answer.set_result(bool(self._ask(method, *arguments)))
            except ElasticError as error:
                answer.set_exception(self._unheard(error, arguments[-1]))
            except BaseException as error:  # noqa: BLE001  raised in the loop by the future
                answer.set_exception(error)

        threading.Thread(target=send, daemon=True, name=method).start()
        return answer

    def _unheard(self, error: ElasticError, what: Any) -> ElasticError:
        """The error that ends a member whose call, perhaps a vote, reached no coordinator."""
        if not isinstance(what, Vote) or self._keep_vote is None:
            return error
        try:
            self._keep_vote(what)
        except StorageError as failed:
            return ElasticError(
                f"{error}. The vote for {what.key.point_name} is not kept either: {failed}", code=error.code
            )
        return ElasticError(
            f"{error}. The vote for {what.key.point_name} is written: the next start commits that point, if "
            "the votes of all ranks are there",
            code=error.code,
        )

    def _ask(self, method: str, *arguments: Any) -> Any:
        """One call, repeated while the coordinator is unavailable or has no answer yet.

        Raises `ElasticError` after `coordinator_limit_s` without an answer, counting only time in which this
        process could run, and after `ORPHANED_LIMIT_S` if it is orphaned.
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
                        f"({error}); start the same command again: it continues from the newest resume point",
                        code=CoordinatorSilentError.code,
                    ) from error
                time.sleep(_RETRY_S)
                continue
            if not isinstance(answer, StillWaiting):
                return answer
            silence, looked = Silence(time.monotonic(), call_s + _OWN_LOOK_S, self._own), time.monotonic()

    def _watch(self, view: GenerationView) -> None:
        """Rank 0's long poll: returns when the control requests for this generation change, until the
        generation is over.
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
        """The long poll of every other rank: returns when the generation is over."""
        generation = (view.attempt, view.generation)
        while self._end.is_inside(generation):
            try:
                self._ask("ended", self._launch, *generation)
            except FencedError:
                pass  # over for this member: its waits are cancelled, and its next join reports this
            except OrchestratorError:
                time.sleep(_RETRY_S)  # the coordinator may come back; meanwhile rank 0 has all save and stop
                continue
            self._control_requests[generation] = _OVER
            self._end.hear(generation)
            return

    def _doing(self) -> tuple[str, float]:
        """The phase, and since when. Reports a member in a step of a generation that is over."""
        phase, since = self._phase
        heard_at = self._end.heard_at
        return (ENDING, heard_at) if phase == STEP and heard_at is not None else (phase, since)

    def _report_loop(self) -> None:
        """Sends reports that no caller waits for: batches of step records, and long phases.

        While the coordinator is unavailable, the records stay with the members, who bring them to the next
        join.
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
                    with suppress(Exception):  # only informative: an error here must not end a member
                        self._say_doing(phase, now - since)
                asked = self._undecided
                if asked is not None and now - asked_at > ask_every_s(asked.world_size):
                    asked_at = now
                    self._ask_about_save()
            except OrchestratorError:
                continue  # it may come back, and then receives new facts; the loop's own calls have a limit

    def _say_doing(self, phase: str, since_s: float) -> None:
        """Reports the activity of a loop that has finished no step for long."""
        frame = frame_of(self._loop)
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
            while self._evals:
                self._evals_taken &= bool(self._ask("evaluated", self._launch, *self._evals[0]))
                self._evals.popleft()
            with suppress(queue.Empty):
                while True:
                    self._ask("callback_failed", self._launch, *self._callback_errors.get_nowait())
