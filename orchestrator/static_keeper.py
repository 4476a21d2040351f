"""The coordinator's work for a static group: journal, commits, sign of life, in threads of rank 0's process.

It drives the same commit machine as the coordinator does, without Ray; who trains is fixed, so it decides
nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from orchestrator import starting
from orchestrator.attempt import Attempt, note_beginning
from orchestrator.config import JobConfig
from orchestrator.elastic.roster import Roster
from orchestrator.errors import FencedError, OrchestratorError
from orchestrator.faults import hook
from orchestrator.monitor import sentences
from orchestrator.monitor.journal import GROUP_FORMED, JournalWriter
from orchestrator.plan.claims import GenerationStart
from orchestrator.records import Cursor, RunStatus, StateKey, StepRecord, Vote, encode
from orchestrator.resume.commit import CommitMachine
from orchestrator.resume.committer import PointCommitter, note_committed
from orchestrator.resume.events import (
    Acknowledge,
    Action,
    Event,
    Fence,
    Forming,
    GenerationFormed,
    GiveUp,
    ReadyToForm,
    Tick,
    VoteCast,
)
from orchestrator.resume.points import Damage, Point
from orchestrator.resume.store import RunStore

if TYPE_CHECKING:
    from orchestrator.train.static import Start

GENERATION = 1  # the only one of the attempt
FLUSH_EVERY_S = 0.5
HEARTBEAT_EVERY_S = 2.0
VOTE_LIMIT_S = 600.0  # how long a save waits for the votes that are missing


class StaticKeeper:
    """`train.static.Keeper` of one claimed attempt.

    One thread writes: it takes votes from a queue, drives the commit machine, and keeps the journal durable
    meanwhile. Another shows that the attempt lives, and waits for nothing else. If a newer attempt appears or
    the journal cannot be written, every vote is answered with that error, and the next call of `records`
    raises it.
    """

    def __init__(
        self,
        store: RunStore,
        attempt: Attempt,
        job: JobConfig,
        say: Callable[[str], None],
        fault_plan: str = "",
    ) -> None:
        """`say` tells the user what is no error of the run, but must not be silent."""
        self._store, self._attempt, self._job, self._say = store, attempt, job, say
        self._fault = hook(fault_plan)
        point, number = attempt.point, attempt.number
        self._journal = JournalWriter(store.storage, number, job.run.name)
        self._machine = CommitMachine(
            attempt=number,
            keep_latest=job.resume.keep_latest,
            vote_limit_s=VOTE_LIMIT_S,
            points=attempt.inherited,
            pinned=point.name if point else None,
        )
        rng = starting.rng_document(job)
        self._committer = PointCommitter(
            store, self._journal, number, job.flat(), rng, time.monotonic, self._fault
        )
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: end when all is done
        self._answers: dict[tuple[StateKey, int], Future[bool]] = {}
        self._lock = threading.Lock()  # over the answers and the failure
        self._failure: Exception | None = None
        self._acknowledged = -1
        self._world_size = 0
        self._last_step: StepRecord | None = None
        self._newest: Point | None = point
        self._over = threading.Event()
        self._writer = threading.Thread(target=self._write, name="keeper", daemon=True)
        self._pulse = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._pulse.start()

    # ---------------------------------------------------------------------- calls of the group
    def begin(self, world_size: int) -> Start:
        """Journals the attempt and its only generation, durably, and starts to keep them."""
        from orchestrator.train.static import Start

        attempt, self._world_size = self._attempt, world_size
        cursor = attempt.point.cursor if attempt.point else Cursor()
        note_beginning(self._journal, attempt, self._job.flat())
        self._advance(Forming())
        self._journal.generation(
            GenerationStart(
                attempt=attempt.number,
                generation=GENERATION,
                parent=attempt.parent,
                step=attempt.step_label,
                consumed_samples=cursor.consumed_samples,
                consumed_tokens=cursor.consumed_tokens,
                target_tokens=cursor.target_tokens,
                world_size=world_size,
                global_batch_size=self._job.train.global_batch_size,
                seq_len=self._job.pack.seq_len,
            )
        )
        members = [str(rank) for rank in range(world_size)]
        change = Roster(world_size).formed(
            attempt.number, GENERATION, members, attempt.step_label, 0, time.monotonic()
        )
        self._journal.event(GROUP_FORMED, **encode(change))
        self._journal.flush()
        self._fault("generation_journalled", attempt.step_label, -1)
        self._advance(GenerationFormed(generation=GENERATION, parent=attempt.parent))
        self._acknowledged = attempt.step_label
        self._writer.start()
        self._say(sentences.group_change(change))
        return Start(
            launch=attempt.launch,
            attempt=attempt.number,
            generation=GENERATION,
            parent=attempt.parent,
            point=attempt.point.name if attempt.point else None,
            cursor=cursor,
            step=attempt.step_label,
        )

    def records(self, records: Sequence[StepRecord]) -> None:
        """Notes them; they are durable soon after. Raises what ended the keeping, if it has ended."""
        if self._failure is not None:
            raise self._failure
        for record in records:
            self._journal.step(record)
            self._last_step = record

    def acknowledged_step(self) -> int:
        """The label up to which all records are durable."""
        return self._acknowledged

    def vote(self, vote: Vote) -> Future[bool]:
        """Hands it to the commit machine; True: the point is committed, False: the save was given up."""
        answer: Future[bool] = Future()
        with self._lock:
            if self._failure is None:
                self._answers[vote.key, vote.rank] = answer
            else:
                answer.set_exception(self._failure)
        self._events.put(VoteCast(vote=vote, now_s=time.monotonic()))
        return answer

    def finished(self, key: StateKey, reason: str) -> None:
        """Waits until all that was begun is written (older points deleted, too), and ends the attempt."""
        self._events.put(None)
        self._writer.join()
        if self._failure is not None:
            raise self._failure
        self._end(reason, f"{reason} at step {key.step}")

    # ---------------------------------------------------------------------- calls of who runs the group
    def failed(self, error: BaseException) -> None:
        """The group ended with `error`; says so in the run, unless another launch has taken that over."""
        if isinstance(error, FencedError) or self._machine.fenced:
            self._over.set()
            return
        self._events.put(None)
        if self._writer.is_alive():
            self._writer.join()
        # where storage is what failed, `error` says so, and the end stays unsaid
        with suppress(OrchestratorError):
            self._end("failed", f"{type(error).__name__}: {error}")

    def status(self) -> RunStatus:
        """What is known now, for the progress line."""
        newest = self._newest
        return RunStatus(
            version=0,
            attempt=self._attempt.number,
            generation=GENERATION,
            world_size=self._world_size,
            last_step=self._last_step,
            newest_point=newest.name if newest else None,
            committed=newest.cursor if newest else Cursor(),
            waiting_since=None,
            ended=None,
            reason="",
            left_out=(),
            members=(),
            failures=(),
        )

    # ---------------------------------------------------------------------- inside
    def _end(self, outcome: str, reason: str) -> None:
        self._over.set()
        self._journal.event("end", outcome=outcome, reason=reason)
        self._journal.close()
        self._store.write_end(self._attempt.number, outcome, reason)

    def _beat(self) -> None:
        # a hint for other starts, which watch the journal grow too
        heartbeat = self._store.heartbeat(self._attempt.number)
        heartbeat.beat()
        while not self._over.wait(HEARTBEAT_EVERY_S):
            heartbeat.beat()

    def _write(self) -> None:
        """The writing thread: votes as they come, journal and time in between."""
        due = 0.0
        try:
            while not self._machine.fenced:
                now = time.monotonic()
                if now >= due:
                    due = now + FLUSH_EVERY_S
                    self._flush()
                    self._advance(Tick(now_s=now))
                try:
                    event = self._events.get(timeout=max(0.0, due - now))
                except queue.Empty:
                    continue
                if event is None:
                    return
                self._advance(event)
        except Exception as error:  # noqa: BLE001  whatever it is, the votes must be answered
            self._fail(error)

    def _flush(self) -> None:
        durable = self._journal.flush()
        if durable is not None:
            self._acknowledged = durable.step

    def _advance(self, event: Event) -> None:
        """Tells the commit machine what happened and does what it asks for."""
        todo = deque([event])
        while todo:
            self._machine, actions = self._machine.on(todo.popleft())
            for action in actions:
                answer = self._perform(action)
                if answer is not None:
                    todo.append(answer)

    def _perform(self, action: Action) -> Event | None:
        match action:
            case Acknowledge() | GiveUp():
                self._answer(action)
                return None
            case Fence():
                self._fail(
                    FencedError(
                        f"attempt {self._attempt.number + 1} of this run exists: another launch has taken "
                        "it over, so this one ends"
                    )
                )
                return None
            case ReadyToForm():
                return None  # nothing is under way before the only generation
            case _:
                answer = self._committer.perform(action)
                damages = self._committer.take_damages()
                self._note_damages(damages)
                for damage in damages:
                    self._say(f"warning: {damage}")
                return answer

    def _note_damages(self, damages: Sequence[Damage]) -> None:
        for damage in damages:
            self._journal.event("damaged point", point=damage.point, file=damage.file, reason=damage.reason)

    def _answer(self, action: Acknowledge | GiveUp) -> None:
        point = self._committer.last_point
        if isinstance(action, GiveUp):
            self._journal.event("save given up", point=action.key.point_name, reason=action.reason)
            self._say(f"warning: the save of {action.key.point_name} was given up: {action.reason}")
        elif point is not None and point.key == action.key:
            self._newest = point
            note_committed(self._journal, point)
        for rank in action.ranks:
            with self._lock:
                answer = self._answers.pop((action.key, rank), None)
            if answer is not None:
                answer.set_result(isinstance(action, Acknowledge))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = error
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.set_exception(error)
