"""What runs in each Ray Train worker: the training loop, joined to the coordinator and the feeder by remote
calls.

It holds no decision about membership, data or points: it repeats calls until they are answered and hands the
answers to the loop.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from orchestrator.config import JobConfig
from orchestrator.errors import ElasticError, FencedError, OrchestratorError
from orchestrator.loading import loading
from orchestrator.plan.schedule import Budgets
from orchestrator.records import (
    BETWEEN,
    STEP,
    Cursor,
    GenerationView,
    JoinRequest,
    Refusal,
    RunOver,
    StateKey,
    StepRecord,
    Vote,
    Wishes,
)

# A coordinator of our launch that cannot be reached: after this long members stop (MEMBERSHIP.md rule 11).
COORDINATOR_LIMIT_S = 60.0
_RETRY_S = 0.1
_REPORT_EVERY_S = 0.5
_PROBE_S = 3.0  # how long a port is tried
_LONG_PHASE_S = 1.0  # a shorter one is nobody's business


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTask:
    """All that a worker needs to take part in a launch; it crosses the process border by pickle, written and
    read by this package.
    """

    launch: str
    coordinator: Any  # actor handles
    feeder: Any
    config: JobConfig
    budgets: Budgets
    config_digest: str
    storage: str
    fault_plan: str = ""  # JSON of faults.FaultPlan, "" outside tests


class CoordinatorMembership:
    """`train.membership.Membership` over remote calls: repeats each call with fresh arguments until the
    coordinator answers.

    Ray's own retries are off, because a repeated `join` would carry an old step and a dead address.
    """

    def __init__(self, task: WorkerTask) -> None:
        """Opens this member's TCPStore on a port of the system's choice, before it joins anything."""
        from orchestrator.train.membership import open_store

        self.member = os.urandom(6).hex()
        self._task = task
        self._host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self.store = open_store(self._host)
        context = ray.get_runtime_context()
        self._actor_id, self._node_id = context.get_actor_id() or "", context.get_node_id()
        self._wishes: dict[tuple[int, int], Wishes] = {}
        self._reports: queue.SimpleQueue[tuple[GenerationView, Sequence[StepRecord]]] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None
        self._phase = (STEP, time.monotonic())
        self._stepped_at = time.monotonic()  # when the newest step was finished
        threading.Thread(target=self._report_loop, daemon=True, name="report").start()

    def connect_store(self, view: GenerationView) -> Any:
        """The store of the generation's rank 0, under a prefix of its own."""
        from orchestrator.train.membership import connect_store

        return connect_store(self.store, view)

    def join(
        self,
        key: StateKey | None,
        cursor: Cursor | None,
        leaves: tuple[int, int] | None,
        prepared: StateKey | None,
        records: Sequence[StepRecord],
        reason: str,
    ) -> GenerationView | None:
        """Blocks until this member is in a new generation; None: the run is over. Raises `FencedError` when
        it is refused.
        """
        request = JoinRequest(
            member=self.member,
            launch=self._task.launch,
            actor_id=self._actor_id,
            node_id=self._node_id,
            host=self._host,
            port=self.store.port,
            key=key,
            leaves=leaves,
            prepared=prepared,
            cursor=cursor,
            records=tuple(records),
            reason=reason[-2000:],
            pid=os.getpid(),
            idle_s=time.monotonic() - self._stepped_at if leaves is not None else 0.0,
        )
        answer = self._ask("join", request)
        while isinstance(answer, GenerationView) and answer.probe:
            request = replace(
                request,
                leaves=(answer.attempt, answer.generation),
                reason="tried the others' ports",
                unreached=try_ports(answer),
            )
            answer = self._ask("join", request)
        if isinstance(answer, Refusal):
            raise FencedError(answer.reason)
        if answer is None or isinstance(answer, RunOver):
            return None
        if answer.rank == 0:
            self._watcher = threading.Thread(target=self._watch, args=(answer,), daemon=True, name="watch")
            self._watcher.start()
        return answer  # type: ignore[no-any-return]

    def wishes(self, view: GenerationView) -> Wishes:
        """The latest wishes that the watching thread has heard of; never blocks."""
        quiet = Wishes(ended=False, save=False, stop=False, reform=False, acknowledged_step=-1)
        return self._wishes.get((view.attempt, view.generation), quiet)

    def phase(self, name: str) -> None:
        """The reporting thread tells the coordinator, should it last."""
        self._phase = (STEP if name == BETWEEN else name, time.monotonic())
        if name == BETWEEN:
            self._stepped_at = self._phase[1]

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        """Hands the records to the reporting thread; never blocks."""
        self._reports.put((view, tuple(records)))

    def vote(self, vote: Vote) -> Future[bool]:
        """Sends the vote from a thread of its own; the future answers whether the point was committed."""
        answer: Future[bool] = Future()

        def send() -> None:
            try:
                answer.set_result(bool(self._ask("vote", self._task.launch, vote)))
            except BaseException as error:  # noqa: BLE001  the future carries it to the loop
                answer.set_exception(error)

        threading.Thread(target=send, daemon=True, name="vote").start()
        return answer

    def finished(self, key: StateKey, reason: str) -> None:
        """Tells the coordinator that this member's part of the run is over."""
        self._ask("finished", self._task.launch, self.member, key, reason)

    def failed(self, error: BaseException) -> None:
        """Tells the coordinator what ended this member, so that the reason reaches the user whatever Ray does
        with the exception.
        """
        fatal = isinstance(error, OrchestratorError)
        text = str(error) if fatal else "".join(traceback.format_exception(error))[-4000:]
        self._ask("failed", self._task.launch, self.member, type(error).__name__, text, fatal)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """One call, repeated while the coordinator is away; `ElasticError` after `COORDINATOR_LIMIT_S`
        without it.
        """
        away_since: float | None = None
        while True:
            try:
                return ray.get(getattr(self._task.coordinator, method).remote(*arguments))
            except (ActorUnavailableError, ActorDiedError, RayActorError) as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > COORDINATOR_LIMIT_S:
                    raise ElasticError(
                        f"no coordinator of launch {self._task.launch} answered for "
                        f"{COORDINATOR_LIMIT_S:.0f} s ({error}); "
                        "start the same command again: it continues from the newest resume point"
                    ) from error
                time.sleep(_RETRY_S)

    def _watch(self, view: GenerationView) -> None:
        """Rank 0's open call: it returns when the wishes for this generation change, and is asked again until
        the generation is over.
        """
        known: Wishes | None = None
        while known is None or not known.ended:
            try:
                known = self._ask("watch", self._task.launch, view.attempt, view.generation, known)
            except OrchestratorError:
                known = Wishes(ended=False, save=True, stop=True, reform=False, acknowledged_step=-1)
            self._wishes[view.attempt, view.generation] = known
            if known.stop and not known.ended and known.acknowledged_step < 0:
                return

    def _report_loop(self) -> None:
        """Tells the coordinator, in a thread, what nobody waits for: step records in batches, long phases."""
        told = STEP
        try:
            while True:
                time.sleep(_REPORT_EVERY_S)
                view, batch = None, list[StepRecord]()
                while not self._reports.empty():
                    view, records = self._reports.get()
                    batch.extend(records)
                if view is not None:
                    where = (self._task.launch, self.member, view.attempt, view.generation)
                    self._ask("report", *where, tuple(batch))
                phase, since = self._phase
                if phase != told and (phase == STEP or time.monotonic() - since > _LONG_PHASE_S):
                    self._ask("phase", self._task.launch, self.member, phase)
                    told = phase
        except OrchestratorError:
            return  # the records stay with the members, who bring them to the next join


def try_ports(view: GenerationView) -> tuple[str, ...]:
    """The members whose stores this one cannot reach, all tried at once, within `_PROBE_S`."""

    def reaches(address: tuple[str, int]) -> bool:
        try:
            socket.create_connection(address, timeout=_PROBE_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = pool.map(reaches, view.probe)
        return tuple(member for member, answer in zip(view.members, answers, strict=True) if not answer)


def train_function(config: dict[str, Any]) -> None:
    """The Ray Train function of every worker. An error of ours ends the run by word to the coordinator; any
    other is raised too, so that Ray replaces the process.
    """
    task: WorkerTask = config["task"]
    # Few threads and no telemetry in a process of which a machine runs many.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with loading():
        from orchestrator.data.ray_feed import RayFeed
        from orchestrator.faults import hook
        from orchestrator.storage import Storage
        from orchestrator.train.job import TrainJob
        from orchestrator.train.loop import train

    job = TrainJob(
        model=task.config.model,
        train=task.config.train,
        resume=task.config.resume,
        seq_len=task.config.pack.seq_len,
        budgets=task.budgets,
        config_digest=task.config_digest,
        device="cuda" if task.config.cluster.use_gpu else "cpu",
    )
    membership = CoordinatorMembership(task)
    try:
        train(
            job,
            membership,
            RayFeed(task.feeder, task.launch),
            Storage(task.storage),
            faults=hook(task.fault_plan),
        )
    except OrchestratorError as error:
        membership.failed(error)
    except BaseException as error:
        membership.failed(error)
        raise
