"""The coordinator actor: it joins the rendezvous (who trains), the commits (which points exist) and the
journal (what happened).

All decisions are those of the pure machines it drives; it holds their inputs together, keeps time, and is the
only writer of the journal. It knows neither model nor data, and is not on the step path.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.attempt import Attempt, continue_launch, note_beginning
from orchestrator.cluster import cause_of_death
from orchestrator.commits import Commits
from orchestrator.elastic.formation import (
    Form,
    Formation,
    Ignored,
    LeaveOut,
    Refused,
    RendezvousSettings,
    StopRun,
    Waiting,
)
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.elastic.roster import Roster
from orchestrator.errors import FencedError, StorageError
from orchestrator.faults import hook
from orchestrator.monitor import sentences
from orchestrator.monitor.journal import GROUP_FORMED, JournalWriter
from orchestrator.plan.claims import GenerationStart
from orchestrator.records import (
    PHASE_LIMITS_S,
    Cursor,
    GenerationView,
    GroupChange,
    JoinRequest,
    MemberInfo,
    Refusal,
    RunOver,
    RunStatus,
    StateKey,
    StepRecord,
    Vote,
    Wishes,
    encode,
)
from orchestrator.resume.commit import CommitMachine
from orchestrator.resume.committer import PointCommitter
from orchestrator.resume.events import Forming, GenerationFormed, Tick, VoterGone
from orchestrator.resume.points import Point
from orchestrator.resume.store import RunStore
from orchestrator.storage import Storage

TICK_S = 0.05
FLUSH_EVERY_S = 1.0
HEARTBEAT_EVERY_S = 2.0
VOTE_LIMIT_S = 600.0  # how long a save waits for the votes that are missing
LIVENESS_EVERY_S = 0.05
WATCH_ANSWER_S = (
    10.0  # a watching call is answered at least this often, so that a dead caller does not leave it open
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorStart:
    """What the driver hands to coordinator: the attempt it claimed, and what the run needs from then on."""

    attempt: Attempt
    storage: str
    min_workers: int
    max_workers: int
    expected: int
    keep_latest: int
    run: str
    global_batch_size: int
    seq_len: int
    flat_config: dict[str, Any]
    rng: dict[str, Any]
    fault_plan: str = ""


class Coordinator:
    """An async Ray actor (0 CPU, restartable, no retries). Every call carries the launch id; one of another
    launch is refused.

    A restarted one claims the next attempt of its launch, adopts nothing half-collected, and has the members
    meet again at their next step boundary (MEMBERSHIP.md rules 8 and 10).
    """

    def __init__(self, start: CoordinatorStart) -> None:
        """Takes up the attempt, or claims the next one when this process is a restarted one (then the attempt
        has a journal already).
        """
        self._start, self._fault = start, hook(start.fault_plan)
        self._store = RunStore(Storage(start.storage))
        self._attempt = continue_launch(self._store, start.attempt, socket.gethostname(), self._fault)
        number = self._attempt.number
        self._journal = JournalWriter(self._store.storage, number, start.run)
        note_beginning(self._journal, self._attempt, start.flat_config)
        self._journal.flush()
        self._heartbeat = self._store.heartbeat(number)
        self._rendezvous = Rendezvous(
            attempt=number,
            launch=self._attempt.launch,
            min_workers=start.min_workers,
            max_workers=start.max_workers,
            expected=start.expected,
            settings=RendezvousSettings(),
            previous=self._attempt.previous,
            first_attempt=start.attempt.number,
            rebase=lambda parent, cursor: self._attempt.step_label,  # noqa: ARG005
        )
        point = self._attempt.point
        if point is not None:
            self._rendezvous.set_newest_point(point.key, point.cursor, point.name)
        machine = CommitMachine(
            attempt=number,
            keep_latest=start.keep_latest,
            vote_limit_s=VOTE_LIMIT_S,
            points=self._attempt.inherited,
            pinned=point.name if point else None,
        )
        committer = PointCommitter(
            self._store, self._journal, number, start.flat_config, start.rng, time.monotonic, self._fault
        )
        self._commits = Commits(machine, committer, self._journal, point, self)
        # The sign of life must not wait behind a long commit: another start would think that this attempt is
        # dead.
        self._pulse = ThreadPoolExecutor(max_workers=1, thread_name_prefix="heartbeat")
        self._beating: Future[bool] | None = None
        self._joins: dict[str, asyncio.Future[Any]] = {}
        self._infos = {info.member: info for info in self._attempt.members}
        self._roster, self._changes = Roster(start.max_workers, self._attempt.members), list[GroupChange]()
        self._left_out: list[MemberInfo] = []
        self._failures: list[tuple[int, str]] = []
        # what the driver has not shown yet; what the first attempt's start found, it has seen itself
        restarted = number != start.attempt.number
        self._warnings = [str(file) for file in self._attempt.unreadable if restarted]
        self._failed_generations: set[int] = set()
        self._steps: list[float] = []
        self._last_step: StepRecord | None = None
        self._acknowledged = -1
        self._save_wish = ""
        self._view: GenerationView | None = None
        self._finished: dict[str, tuple[str, str]] = {}
        self._ended: tuple[str, str] | None = self._attempt.ended
        self._version = 0
        self._changed = asyncio.Condition()
        self._loop_task: asyncio.Task[None] | None = None
        self._wake: asyncio.Event | None = None

    # ------------------------------------------------------------ calls of members
    async def join(self, request: JoinRequest) -> GenerationView | Refusal | RunOver:
        """Waits until the member is in a generation; `RunOver` when the run has ended, `Refusal` when it has
        no place here.
        """
        self._ensure_running()
        if self._ended is not None:
            return RunOver(reason=self._ended[1])
        self._infos[request.member] = MemberInfo(
            member=request.member,
            actor_id=request.actor_id,
            node_id=request.node_id,
            pid=request.pid,
            host=request.host,
        )
        self._roster.came(request, time.monotonic())
        self._take_records(request.records)
        self._journal.event(
            "join",
            member=request.member,
            actor=request.actor_id,
            node=request.node_id,
            pid=request.pid,
            host=request.host,
            key=_text(request.key),
            leaves=request.leaves,
            unreached=request.unreached,
            reason=request.reason,
        )
        try:
            answer = self._rendezvous.join(request, time.monotonic())
        except FencedError as error:
            await self.fenced(str(error))
            return Refusal(reason=str(error))
        if isinstance(answer, Refused):
            return Refusal(reason=answer.reason)
        if isinstance(answer, GenerationView):
            return answer
        if isinstance(answer, Ignored) and request.member not in self._joins:
            return Refusal(reason=answer.reason)
        old = self._joins.pop(request.member, None)
        if old is not None and not old.done():
            old.cancel()
        future = self._joins[request.member] = asyncio.get_running_loop().create_future()
        self._poke()
        await self._tell()
        found: GenerationView | Refusal | RunOver = await future
        return found

    async def watch(self, launch: str, attempt: int, generation: int, known: Wishes | None) -> Wishes:
        """Rank 0's open call: answered when the wishes for this generation differ from `known`, and at least
        every few seconds.
        """
        self._ensure_running()
        self._check(launch)
        deadline = time.monotonic() + WATCH_ANSWER_S
        while True:
            wishes = self._rendezvous.wishes(attempt, generation, self._acknowledged)
            if self._ended is not None:
                wishes = Wishes(
                    ended=True, save=False, stop=False, reform=False, acknowledged_step=self._acknowledged
                )
            if wishes != known or time.monotonic() > deadline:
                return wishes
            await self._wait_for_change(deadline - time.monotonic())

    async def report(
        self, launch: str, member: str, attempt: int, generation: int, records: tuple[StepRecord, ...]
    ) -> None:
        """Step records of a running generation, in batches by one member. Equal copies of what came before
        change nothing.
        """
        self._ensure_running()
        self._check(launch)
        self._take_records(records)
        if attempt == self._attempt.number and records:
            self._rendezvous.applied(generation, records[-1].step, time.monotonic())
        await self._tell()

    async def phase(self, launch: str, member: str, phase: str) -> None:
        """`member` has been in `phase` for a while, or has left it: how long may the others wait for it?"""
        self._ensure_running()
        self._check(launch)
        self._rendezvous.excuse(member, time.monotonic() + PHASE_LIMITS_S[phase])

    async def vote(self, launch: str, vote: Vote) -> bool:
        """One rank's part of a save is written; answers True once the point is committed, False if the save
        was given up.
        """
        self._ensure_running()
        self._check(launch)
        if vote.key.attempt != self._attempt.number:
            return False  # no half-collected save is adopted from an older coordinator
        self._take_records(vote.records)
        self._rendezvous.save_answered(self._save_wish)
        return await self._commits.vote(vote)

    async def finished(self, launch: str, member: str, key: StateKey, reason: str) -> None:
        """A member's part of the run is over (`done` or `stopped`); when all of its generation said so, the
        run has ended.
        """
        self._ensure_running()
        self._check(launch)
        self._finished[member] = (reason, f"{reason} at step {key.step}")
        self._rendezvous.left(member, key, "finished" if reason == "done" else "stopped", time.monotonic())
        await self._end_if_finished()

    async def failed(self, launch: str, member: str, kind: str, text: str, fatal: bool) -> None:
        """What ended a member. `fatal`: an error of ours, which another try would only repeat, ends run."""
        self._ensure_running()
        self._check(launch)
        self._journal.event("member failed", member=member, error=kind, text=text)
        self._roster.gone(member, sentences.failure(kind, text))
        if not fatal:
            self._count_failure(f"{kind}: {text}")
        if fatal:
            await self._end("failed", f"{kind}: {text}")
        await self._tell()

    # ------------------------------------------------------------ calls of the supervisor
    async def status(self, seen_version: int, wait_s: float) -> RunStatus:
        """The run's status, as soon as it is newer than `seen_version`, at latest after `wait_s` seconds."""
        self._ensure_running()
        deadline = time.monotonic() + wait_s
        while self._version <= seen_version and time.monotonic() < deadline:
            await self._wait_for_change(deadline - time.monotonic())
        view, below = self._view, self._rendezvous.below_minimum_since
        newest = self._commits.newest
        left_out, self._left_out = tuple(self._left_out), []
        warnings, self._warnings = tuple(self._warnings), []
        changes, self._changes = tuple(self._changes), []
        return RunStatus(
            version=self._version,
            attempt=self._attempt.number,
            generation=self._rendezvous.generation,
            world_size=view.world_size if view else 0,
            last_step=self._last_step,
            newest_point=newest.name if newest else None,
            committed=newest.cursor if newest else Cursor(),
            waiting_since=None if below is None else time.monotonic() - below,
            ended=self._ended[0] if self._ended else None,
            reason=self._ended[1] if self._ended else "",
            left_out=left_out,
            members=tuple(self._infos[m] for m in (view.members if view else ()) if m in self._infos),
            failures=tuple(self._failures),
            warnings=warnings,
            changes=changes,
            lost=self._roster.losses,
        )

    async def expect(self, num_workers: int) -> None:
        """How many workers the supervisor has started or is starting."""
        self._ensure_running()
        self._rendezvous.expect(num_workers)
        self._poke()

    async def wish(self, what: str) -> None:
        """`stop`: save and stop at the next step boundary; `save`: save."""
        self._ensure_running()
        self._journal.event("wish", what=what)
        if what == "stop":
            self._rendezvous.wish_stop()
        else:
            self._save_wish = f"save-{time.monotonic()}"
            self._rendezvous.wish_save(self._save_wish)
        self._poke()
        await self._tell()

    async def note(self, kind: str, fields: dict[str, Any]) -> None:
        """An event of the supervisor for the journal, whose only writer is here."""
        self._ensure_running()
        self._journal.event(kind, **fields)

    async def feed_notes(self, notes: Any) -> None:
        """What the feeder noticed (`data.feeder.FeedNotes`): bad documents that were skipped, documents that
        the encoders differ about, cursors.
        """
        self._ensure_running()
        for text in notes.bad_documents:
            self._journal.event("bad document", text=text)
        for text in notes.encoder_differences:
            self._journal.event("encoders differ", text=text)
        for cursor in notes.cursors:
            self._journal.event("cursor", cursor=encode(cursor))

    async def end(self, outcome: str, reason: str) -> None:
        """The supervisor ends the run (`failed`, `stopped`): no member is waited for."""
        self._ensure_running()
        await self._end(outcome, reason)

    # ------------------------------------------------------------ inside
    def _check(self, launch: str) -> None:
        if launch != self._attempt.launch:
            raise FencedError(
                f"this is a call of launch {launch}, the run is now launch {self._attempt.launch}; the "
                "caller exits"
            )

    def _ensure_running(self) -> None:
        """The first call starts the loop: a restarted actor has no caller that would."""
        if self._loop_task is None:
            self._wake = asyncio.Event()
            self._loop_task = asyncio.get_running_loop().create_task(self._loop())

    def _poke(self) -> None:
        if self._wake is not None:
            self._wake.set()

    async def _tell(self) -> None:
        self._version += 1
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_change(self, seconds: float) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout=max(0.01, seconds))
            except TimeoutError:
                return

    def _take_records(self, records: tuple[StepRecord, ...]) -> None:
        for record in records:
            self._journal.step(record)
            if self._last_step is None or record.key > self._last_step.key:
                self._last_step = record
                self._steps = [*self._steps[-30:], record.step_s]
        if self._steps:
            self._rendezvous.median_step(statistics.median(self._steps))

    async def _loop(self) -> None:
        """Time and storage: ticks the rendezvous, keeps the journal durable, shows that it lives, looks for a
        newer claim.
        """
        due = dict.fromkeys(("flush", "heartbeat", "live"), 0.0)
        try:
            while True:
                now = time.monotonic()
                if now >= due["live"]:
                    await self._look_for_the_dead(now)
                    took = time.monotonic() - now
                    due["live"] = now + max(LIVENESS_EVERY_S, 5 * took)  # about 1 ms a member
                if self._ended is None:
                    await self._act(now)
                if now >= due["flush"]:
                    due["flush"] = now + FLUSH_EVERY_S
                    await self._flush()
                    await self._commits.tell(Tick(now_s=now))
                if now >= due["heartbeat"]:
                    due["heartbeat"] = now + HEARTBEAT_EVERY_S
                    if self._beating is None or self._beating.done():  # while storage hangs none queue up
                        self._beating = self._pulse.submit(self._heartbeat.beat)
                await self._sleep_until_woken()
        except Exception as error:  # noqa: BLE001  whatever it is, the run must end with its reason instead of hanging
            await self._end("failed", f"the coordinator failed: {type(error).__name__}: {error}")

    async def _sleep_until_woken(self) -> None:
        assert self._wake is not None, "the loop runs"
        try:
            await asyncio.wait_for(self._wake.wait(), timeout=TICK_S)
        except TimeoutError:
            return
        finally:
            self._wake.clear()

    async def _look_for_the_dead(self, now: float) -> None:
        """Asks the GCS for the members that are forming a group, wait, or are waited for: a dead one is left
        out at once (liveness is a hint for speed only). In training a peer's death shows in the collectives.
        """
        if self._trains and not (self._joins or self._commits.under_way or self._finished):
            return
        from ray._private.state import state  # the public state API needs the dashboard process

        for member, info in list(self._infos.items()):
            if not info.actor_id or (self._rendezvous.is_gone(member) and member not in self._joins):
                continue
            row = state.actor_table(info.actor_id)
            if not row or row["State"] == "DEAD":
                why = cause_of_death(row)
                self._journal.event("member dead", member=member, reason=why)
                self._roster.gone(member, why)
                self._count_failure(f"member {member} died")
                self._rendezvous.dead(member, now)
                self._infos.pop(member)
                future = self._joins.pop(member, None)
                if future is not None and not future.done():
                    future.cancel()
                await self._gone(member)
                await self._end_if_finished()
                await self._tell()  # a generation that is still forming is over

    @property
    def _trains(self) -> bool:
        """The newest generation is known to have done a step."""
        view, last = self._view, self._last_step
        return (
            view is not None
            and last is not None
            and (last.attempt, last.generation) == (view.attempt, view.generation)
        )

    def _count_failure(self, reason: str) -> None:
        """One failure per generation, however many members it cost: a lost node is one. Before the first
        generation each one counts.
        """
        generation = self._rendezvous.generation
        if generation == 0 or generation not in self._failed_generations:
            self._failed_generations.add(generation)
            self._failures.append((self._last_step.step if self._last_step else 0, reason))

    async def _end_if_finished(self) -> None:
        """The run ends when every member of generation is finished, or dead after another one finished."""
        if self._view is None or not self._finished or self._joins:
            return
        if all(m in self._finished or self._rendezvous.is_gone(m) for m in self._view.members):
            await self._end(*next(iter(self._finished.values())))

    async def _gone(self, member: str) -> None:
        """A member of the newest generation will cast no vote any more."""
        view = self._view
        if view is not None and member in view.members and view.attempt == self._attempt.number:
            await self._commits.tell(VoterGone(generation=view.generation, rank=view.members.index(member)))

    async def _act(self, now: float) -> None:
        async with self._commits.lock:
            for action in self._rendezvous.tick(now):
                if isinstance(action, Form):
                    await self._form(action.formation)
                elif isinstance(action, LeaveOut):
                    self._journal.event("left out", member=action.member, reason=action.reason)
                    self._roster.gone(action.member, sentences.SILENT)
                    if action.member in self._infos:
                        self._left_out.append(self._infos[action.member])
                    await self._tell()
                elif isinstance(action, StopRun):
                    await self._end(action.outcome, action.reason)
                else:
                    assert isinstance(action, Waiting), f"unknown action {action}"

    async def _form(self, formation: Formation) -> None:
        """Journals the generation durably, then answers its members (rule 2); saves that are not on its path
        are given up.
        """
        cursor = formation.cursor or Cursor()
        start = GenerationStart(
            attempt=formation.attempt,
            generation=formation.generation,
            parent=formation.parent,
            step=formation.step,
            consumed_samples=cursor.consumed_samples,
            consumed_tokens=cursor.consumed_tokens,
            target_tokens=cursor.target_tokens,
            world_size=len(formation.members),
            global_batch_size=self._start.global_batch_size,
            seq_len=self._start.seq_len,
            members=formation.members,
        )
        await self._commits.advance(Forming())
        self._journal.generation(start)
        await self._commits.on_disk(self._journal.flush)
        self._fault("generation_journalled", formation.step, -1)
        await self._commits.advance(
            GenerationFormed(generation=formation.generation, parent=formation.parent)
        )
        self._rendezvous.formed(formation.generation, time.monotonic())
        self._acknowledged = formation.step
        for member in formation.members:
            view = self._rendezvous.view_for(member)
            if view is None:
                return  # somebody died or came anew meanwhile: the next tick forms another generation
            self._view = view
            future = self._joins.pop(member, None)
            if future is not None and not future.done():
                future.set_result(view)
        self._note_change(formation)
        await self._tell()

    def _note_change(self, formation: Formation) -> None:
        """For people: how this generation differs from the one before it."""
        before = self._last_step.step if self._last_step else 0
        change = self._roster.formed(
            formation.attempt,
            formation.generation,
            formation.members,
            formation.step,
            before,
            time.monotonic(),
        )
        self._changes.append(change)
        self._journal.event(GROUP_FORMED, **encode(change))

    async def _flush(self) -> None:
        durable = await self._commits.on_disk(self._journal.flush)
        view = self._view
        if (
            durable is None
            or view is None
            or (durable.attempt, durable.generation) != (view.attempt, view.generation)
        ):
            return
        if durable.step > self._acknowledged:
            self._acknowledged = durable.step
            await self._tell()

    async def _end(self, outcome: str, reason: str) -> None:
        if self._ended is not None:
            return
        self._ended = (outcome, reason)
        self._journal.event("end", outcome=outcome, reason=reason)
        # where storage is what failed, the reason says so, and the end stays unsaid
        with suppress(StorageError):
            await self._commits.on_disk(self._journal.flush)
            await self._commits.on_disk(partial(self._store.write_end, self._attempt.number, outcome, reason))
        for future in (*self._joins.values(),):
            if not future.done():
                future.set_result(RunOver(reason=reason))
        self._joins.clear()
        await self._tell()

    # ------------------------------------------------------------ what the commits tell
    async def committed(self, point: Point) -> None:
        """See `CommitListener`: members may be told to load it."""
        self._rendezvous.set_newest_point(point.key, point.cursor, point.name)
        await self._tell()

    async def warned(self, text: str) -> None:
        """See `CommitListener`: goes out with the next status."""
        self._warnings.append(text)
        await self._tell()

    async def fenced(self, reason: str) -> None:
        """A newer attempt exists: acknowledge nothing, write nothing, end the members and the launch."""
        self._ended = ("failed", reason)
        for future in (*self._joins.values(),):
            if not future.done():
                future.set_result(Refusal(reason=reason))
        self._commits.refuse_all()
        await self._tell()


def _text(key: StateKey | None) -> str:
    return key.point_name if key else ""
