"""The coordinator actor: answers the calls of members and of the supervisor.

The launch machine decides which members train and when the run ends. The commit machine decides which points
exist. `LaunchDriver` carries these decisions out. The coordinator is not on the step path. `checked` decides
whether the machine of a joining worker can take part.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.commit.commit_driver import in_daemon_thread
from orchestrator.checkpoint.commit.commit_events import PartFailed, PartGrows
from orchestrator.checkpoint.node_local.node_storage import run_storage
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.ray_state import ray_says
from orchestrator.coordinator import launch_driver
from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.coordinator.attempt.launch_attempts import continue_launch
from orchestrator.coordinator.attempt.metric_sinks import measured
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.coordinator.launch_driver import LaunchDriver
from orchestrator.coordinator.machine.launch_history import LossTrail
from orchestrator.errors import FencedError, StorageError, UnsavedError
from orchestrator.faults import hook
from orchestrator.history import sentences
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import STOP
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import (
    ControlRequests,
    GenerationView,
    JoinRequest,
    MachineProof,
    Refusal,
    RunOver,
    StillWaiting,
    Unfit,
)
from orchestrator.records.points import Damage, Vote
from orchestrator.records.run_status import PEERS, Doing, MemberInfo, RunStatus
from orchestrator.records.steps import EvalRecord, StateKey, StepRecord
from orchestrator.storage.files import Storage

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_reports import FeedNotes

# An open call is answered at least this often. A dead caller thus does not leave it open, and a caller can
# distinguish a frozen coordinator from a waiting one.
ANSWER_S = 10.0
TRIED_PORTS = 64  # the largest group in which members that wait for each other try each other's ports
_END_AGAIN_S = 0.5  # interval in which a failed member is answered whether its process may end


class Coordinator:
    """One attempt's coordinator, which lives in a `coordinator.process.CoordinatorProcess`.

    Every call carries the launch id. A call of another launch is refused.

    A restarted coordinator claims the next attempt of its launch, does not adopt half-collected saves, and
    makes the members meet again at their next step boundary (membership rules 8 and 10). If the launch had
    already ended, it writes nothing and only answers.
    """

    def __init__(
        self,
        start: CoordinatorStart,
        why_dead: Callable[[MemberInfo], str | None] | None = None,
        feeder_notes: Callable[[int], Awaitable[FeedNotes | None]] | None = None,
        store: RunStore | None = None,
        claimed: set[int] | None = None,
    ) -> None:
        """Takes up the attempt. A restarted process, whose attempt already has a journal, claims the next one
        instead.

        `why_dead` returns how the process of a member ended that is surely gone; by default Ray is asked.
        `feeder_notes` calls the launch's feeder; see `FeederNotes`. `store`: that of `start.storage`.
        `claimed`: see `mine` of `continue_launch`.

        Waits for storage. Raises `StorageError`, after which another coordinator may be created, and
        `FencedError`.
        """
        fault = hook(start.fault_plan)
        store = store or RunStore(run_storage(start.storage, start.nodes))
        attempt = self._attempt = continue_launch(store, start.attempt, socket.gethostname(), fault, claimed)
        metrics = measured(start.flat_config, start.storage, start.run, attempt)
        journal = self._journal = JournalWriter(
            store.storage, attempt.number, start.run, run_id=attempt.run_id, listener=metrics
        )
        if attempt.earlier.ended is None:
            note_beginning(journal, attempt, start.flat_config)
            journal.flush()
        driver = self._driver = LaunchDriver(
            *(start, attempt, store, journal, metrics, fault, why_dead or ray_says, feeder_notes),
            _losses(start, store),
        )
        self._launch, self._commits, self._storage = driver.machine, driver.commits, store.storage
        self._damages: tuple[Damage, ...] = ()
        self._loading: dict[str, tuple[int, int]] = {}  # until the next step
        self._doing: dict[str, Doing] = {}  # of members, since the newest step
        self._computed_with = ("", "")
        self._kernels: bytes | None = None
        self._journalled: dict[str, JoinRequest] = {}  # the newest join of each member, without its records

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, and the end is written as far as possible."""
        return self._driver.end_is_written

    # ------------------------------------------------------------ calls of members
    async def join(self, request: JoinRequest) -> GenerationView | Refusal | RunOver | StillWaiting:
        """Waits until the member is in a generation.

        Returns `RunOver` if the run has ended, `Refusal` if the member has no place here, and `StillWaiting`
        after a while; the member then asks again.
        """
        self._driver.ensure_running()
        if request.launch != self._attempt.launch:
            return Refusal(reason=self._other_launch(request.launch))
        answer = self._driver.joins.open(request.member)
        self._driver.take_records(request.records)
        self._driver.roster.came(request, time.monotonic())
        self._note_join(replace(request, records=()))
        await self._driver.carry_out(self._launch.join(request, time.monotonic()))
        self._driver.look_soon()
        await asyncio.wait([answer], timeout=ANSWER_S)
        return answer.result() if answer.done() else StillWaiting()

    async def check_machine(self, launch: str, proof: MachineProof) -> Unfit | StillWaiting | None:
        """Returns why the machine of a joining worker cannot take part; None if it can.

        Returns `StillWaiting` while storage fails here.
        """
        self._check(launch)
        return await checked(self._storage, proof)

    async def watch(
        self, launch: str, attempt: int, generation: int, known: ControlRequests | None
    ) -> ControlRequests:
        """Rank 0's open call: returns when the control requests for this generation differ from `known`.

        Returns at least every few seconds.
        """
        self._check(launch)
        deadline = time.monotonic() + ANSWER_S
        while True:
            wanted = self._launch.control_requests(attempt, generation, self._driver.acknowledged)
            if wanted != known or time.monotonic() > deadline:
                return wanted
            await self._driver.news.wait(deadline - time.monotonic())

    async def ended(self, launch: str, attempt: int, generation: int) -> StillWaiting | None:
        """The open call of every other rank: returns None as soon as the generation is over.

        Returns `StillWaiting` after a while; the rank then asks again.
        """
        self._check(launch)
        if self._launch.control_requests(attempt, generation, -1).ended:
            return None
        return None if await self._driver.ends.wait((attempt, generation), ANSWER_S) else StillWaiting()

    async def report(
        self, launch: str, member: str, attempt: int, generation: int, records: tuple[StepRecord, ...]
    ) -> None:
        """Takes step records of a running generation, in batches from one member. Equal copies change
        nothing.
        """
        self._check(launch)
        self._driver.take_records(records)
        self._loading.clear()
        self._doing.clear()
        if attempt == self._attempt.number and records:
            self._launch.rendezvous.applied(generation, records[-1].step, time.monotonic())
        await self._driver.notify()

    async def phase(self, launch: str, member: str, limit_s: float) -> None:
        """`member` has begun or left a phase. From now on the others may have to wait `limit_s` for it."""
        self._check(launch)
        self._launch.busy(member, time.monotonic() + limit_s)

    async def loading(self, launch: str, member: str, done_bytes: int, num_bytes: int) -> None:
        """`member` has read `done_bytes` of the `num_bytes` that it loads of a point. Called repeatedly while
        it loads.
        """
        self._check(launch)
        self._loading[member] = done_bytes, num_bytes
        await self._driver.notify()

    async def doing(
        self, launch: str, member: str, what: Doing
    ) -> tuple[tuple[str, int], ...] | StillWaiting | None:
        """`member` reports what it does while it has finished no step for long.

        If all members of a small group wait for each other, returns the addresses at which it is to try them,
        by rank.
        """
        self._check(launch)
        self._doing[member] = what
        members = self._launch.members
        kinds = {self._doing[m].kind if m in self._doing else "" for m in members}
        return self._launch.rendezvous.addresses if kinds == {PEERS} and len(members) <= TRIED_PORTS else None

    async def finished(self, launch: str, member: str, key: StateKey, reason: str) -> StillWaiting | None:
        """A member's part of the run is over (`done` or `stopped`).

        It may end once that is durable. `StillWaiting`: it asks again.
        """
        self._check(launch)
        await self._driver.carry_out(self._launch.finished(member, key, reason, time.monotonic()))
        was_over = self._attempt.earlier.ended is not None
        if was_over or await self._driver.flush(ANSWER_S) or self._launch.ended is not None:
            return None
        await asyncio.sleep(launch_driver.FLUSH_EVERY_S)
        return StillWaiting()

    async def failed(
        self,
        launch: str,
        member: str,
        kind: str,
        text: str,
        fatal: bool,
        code: str | None = None,
        damages: tuple[Damage, ...] = (),
        place: MemberInfo | None = None,
    ) -> bool | StillWaiting:
        """A member reports the error that ended it; see `LaunchMachine.failed`. Returns when its process may
        end.

        True: another process is to take its place. False: the run is over. `StillWaiting` after a while; it
        then asks again. `damages`: what it found wrong with the point that it was to load. They are part of
        the status: the driver claims anew and continues an older point.
        """
        self._check(launch)
        self._damages = tuple(dict.fromkeys((*self._damages, *damages)))
        if kind != UnsavedError.__name__:  # it left on purpose, and the reason of the run's end explains it
            self._driver.roster.gone(member, sentences.failure(kind, text))
        now = time.monotonic()
        await self._driver.carry_out(self._launch.failed(member, kind, text, fatal, place, now, code))
        self._driver.look_soon()
        if not self._launch.may_end(member, time.monotonic()):
            await self._driver.news.wait(_END_AGAIN_S)
        if not self._launch.may_end(member, time.monotonic()):
            return StillWaiting()
        return self._launch.ended is None

    # ------------------------------------------------------------ calls of members about a save
    async def vote(self, launch: str, vote: Vote) -> bool | StillWaiting:
        """One rank's part of a save is written.

        Returns True once the point is committed, False if the save was given up, and `StillWaiting` after a
        while; the rank then asks again.
        """
        self._check(launch)
        if vote.key.attempt != self._attempt.number or self._attempt.earlier.ended is not None:
            self._lost_save(vote.key)
            return False  # half-collected saves of an older coordinator are not adopted
        self._driver.take_records(vote.records)
        self._launch.voted(vote.key)
        return await self._commits.vote(vote, ANSWER_S)

    async def save_failed(self, launch: str, key: StateKey, rank: int, world_size: int, reason: str) -> None:
        """A rank could not write its part of the save of `key`. It continues to train."""
        self._check(launch)
        self._lost_save(key)
        self._launch.voted(key)
        self._commits.notify_soon(
            PartFailed(key=key, rank=rank, world_size=world_size, reason=reason, now_s=time.monotonic())
        )

    async def is_given_up(self, launch: str, key: StateKey, rank: int, world_size: int, moved: bool) -> bool:
        """Whether a save that a member began as `rank` of `world_size` ranks can never be committed.

        The member then need not finish writing its part. `moved`: it has written more of it since its last
        call.
        """
        self._check(launch)
        if key.attempt == self._attempt.number:
            self._commits.notify_soon(
                PartGrows(key=key, rank=rank, world_size=world_size, moved=moved, now_s=time.monotonic())
            )
        return key.attempt != self._attempt.number or self._commits.is_hopeless(key, world_size)

    # ------------------------------------------------------------ reports of members
    async def digest(self, launch: str, key: StateKey, weights_digest: str) -> None:
        """Takes the digest of the weights of a state. Those of older attempts are ignored."""
        self._check(launch)
        if key.attempt == self._attempt.number:
            self._journal.event(
                EventKind.STATE_DIGEST,
                generation=key.generation,
                step=key.step,
                weights_digest=weights_digest,
            )

    async def evaluated(self, launch: str, record: EvalRecord, is_last: bool) -> StillWaiting | bool:
        """Takes the evaluation of one part; `is_last`: of the last one.

        Returns True once it is durable, False for one of an older attempt, which is not taken, and
        `StillWaiting` while storage fails; the rank then asks again.
        """
        self._check(launch)
        if record.attempt != self._attempt.number:
            return False
        return True if await self._driver.take_evaluation(record, is_last) else StillWaiting()

    async def computed_with(self, launch: str, blocks: str, attention: str) -> bool:
        """Takes how the model is computed (the event `kernels`). Returns whether its kernels are wanted."""
        self._check(launch)
        if self._launch.ended is None and (blocks, attention) != self._computed_with:
            self._computed_with = blocks, attention
            self._journal.event(EventKind.KERNELS, blocks=blocks, attention=attention)
        return self._kernels is None

    async def offer_kernels(self, launch: str, kernels: bytes) -> None:
        """Takes compiled kernels, for workers that come later. They are kept in memory alone."""
        self._check(launch)
        self._kernels = kernels

    async def offered_kernels(self, launch: str) -> bytes | None:
        """Returns the compiled kernels of another worker of this launch, if one has offered them."""
        self._check(launch)
        return self._kernels

    async def callback_failed(self, launch: str, text: str, stops: bool) -> None:
        """Takes an error of a callback. `stops`: the run is to save and stop because of it."""
        self._check(launch)
        if self._launch.ended is not None:
            return
        self._journal.event(EventKind.CALLBACK_FAILED, text=text)
        await self._driver.warned(f"callback failed: {text}")
        if stops:
            await self.stop("a callback that failed (train.on_callback_error=stop)")

    # ------------------------------------------------------------ calls of the supervisor
    async def status(self, seen: tuple[int, int], wait_s: float) -> RunStatus:
        """Returns the run's status as soon as it is newer than `seen`, at the latest after `wait_s` seconds.

        `seen` has the attempt and version of the last answer.
        """
        self._driver.ensure_running()
        version = seen[1] if seen[0] == self._attempt.number else -1
        deadline = time.monotonic() + wait_s
        driver, news, launch = self._driver, self._driver.news, self._launch
        while news.version <= version and time.monotonic() < deadline:
            await news.wait(deadline - time.monotonic())
        view, newest, unheard = driver.view, self._commits.newest, news.since(version)
        # after it learns of the end, the driver may end this process
        ended, reason = launch.ended if launch.ended and driver.end_is_written else (None, "")
        below = launch.rendezvous.below_minimum_since
        return RunStatus(
            version=news.version,
            attempt=self._attempt.number,
            generation=launch.rendezvous.generation,
            world_size=view.world_size if view else 0,
            last_step=launch.last_step,
            newest_point=newest.name if newest else None,
            committed=newest.cursor if newest else Cursor(),
            waiting_since=None if below is None else time.monotonic() - below,
            ended=ended,
            reason=reason,
            code=launch.code if ended else None,
            left_out=unheard.left_out,
            members=tuple(launch.infos[m] for m in (view.members if view else ()) if m in launch.infos),
            failures=tuple((failure.step, failure.reason) for failure in launch.failures),
            warnings=unheard.warnings,
            stopping=launch.stopping,
            changes=unheard.changes,
            lost=driver.roster.losses,
            notices=unheard.notices,
            pid=os.getpid(),
            damages=self._damages,
            loading=(sum(n for n, _ in self._loading.values()), sum(n for _, n in self._loading.values())),
            doing=tuple(self._doing.items()),
            missing=tuple(launch.infos[m] for m in launch.rendezvous.missing if m in launch.infos),
            resting=launch.rendezvous.resting(time.monotonic()),
        )

    async def save(self, by: str) -> None:
        """Requests a save of what is trained by now; training continues. `by` is the origin of the
        request.
        """
        self._driver.ensure_running()
        await self._driver.carry_out(self._launch.request_save(by))
        self._driver.look_soon()

    async def expect(self, num_workers: int) -> None:
        """Sets how many workers the supervisor has started or is starting."""
        self._driver.ensure_running()
        self._launch.rendezvous.expect(num_workers)
        self._driver.look_soon()

    async def draining(self, node: str, host: str, grace_s: float) -> None:
        """A node is about to be removed, in `grace_s` seconds (inf: when it is idle)."""
        self._driver.ensure_running()
        await self._driver.carry_out(self._launch.draining(node, host, grace_s, time.monotonic()))
        self._driver.look_soon()

    async def stop(self, by: str, grace_s: float = math.inf) -> None:
        """Requests a save and stop at the next step boundary.

        `by` is the origin of the request, which kills the launch in `grace_s` seconds (inf: unknown).
        """
        self._driver.ensure_running()
        if self._launch.stopping:
            return
        self._journal.event(EventKind.CONTROL_REQUEST, what=STOP, by=by, request=0)
        self._launch.request_stop(by)
        await self._driver.carry_out(self._launch.stop_within(by, grace_s))
        self._driver.look_soon()
        await self._driver.notify()

    async def starved(self, member: str, seconds: float) -> None:
        """The process of a missing member could not run for `seconds`, because its machine is busy."""
        self._driver.ensure_running()
        self._launch.starved(member, seconds)

    async def group_failed(self, node: str, reason: str) -> None:
        """The group of a node ended unexpectedly."""
        self._driver.ensure_running()
        await self._driver.carry_out(self._launch.group_failed(node, reason))

    async def note(self, kind: EventKind, fields: dict[str, Any]) -> None:
        """Journals an event of the supervisor. Only this process writes the journal."""
        self._driver.ensure_running()
        self._journal.event(kind, **fields)
        if kind == EventKind.GROUP_STOPPED:
            self._driver.roster.node_gone(fields["node"])

    async def end(self, outcome: str, reason: str, code: str | None = None) -> None:
        """The supervisor ends the run (`failed`, `stopped`). No member is waited for.

        `code`: of the error with which it failed.
        """
        self._driver.ensure_running()
        await self._driver.carry_out(self._launch.end(outcome, reason, code=code))

    async def died(self, member: str, why: str) -> None:
        """The connection of `member` has ended, so its process is gone. `why` is the reason for people.

        Nothing changes if its part is over: it has finished or failed, or the run has ended.
        """
        self._driver.ensure_running()
        has_joined = member in self._launch.infos
        if self._launch.ended is None and not (has_joined and self._launch.rendezvous.is_gone(member)):
            await self._driver.died(member, why)

    async def settle(self, limit_s: float) -> bool:
        """Waits until older points are verified and deleted; False if that takes longer than `limit_s`."""
        return await self._commits.settle(limit_s)

    async def warned(self, text: str) -> None:
        """A warning of its process from before it could begin; it is part of the next status."""
        await self._driver.warned(text)

    # ------------------------------------------------------------ inside
    def _lost_save(self, key: StateKey) -> None:
        """A save that was sent to a coordinator that is gone is lost."""
        if key.attempt < self._attempt.number and self._attempt.earlier.ended is None:
            self._commits.lost(key)

    def _check(self, launch: str) -> None:
        self._driver.ensure_running()
        if launch != self._attempt.launch:
            raise FencedError(self._other_launch(launch))

    def _other_launch(self, launch: str) -> str:
        current = self._attempt.launch
        return f"this is a call of launch {launch}, the run is now launch {current}; the caller exits"

    def _note_join(self, request: JoinRequest) -> None:
        if self._journalled.get(request.member) == request:
            return  # it asks again
        self._journalled[request.member] = request
        self._journal.event(
            EventKind.JOIN,
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


def _losses(start: CoordinatorStart, store: RunStore) -> LossTrail | None:
    """Reads the losses of the steps so far, if a policy needs them. Raises `StorageError`."""
    if start.loss_window is None:
        return None
    first, seen = start.attempt.number, survey(store)
    return LossTrail(
        start.loss_window, first, seen.lineage.records, seen.journal.generations, seen.journal.records
    )


def _text(key: StateKey | None) -> str:
    return key.point_name if key else ""


# ---------------------------------------------------------------------------- the machine of a joining worker
CLOCK_LIMIT_S = 900.0  # the clock error that the servers of buckets tolerate
_PROBES, _PROBE_AGAIN_S = 3, 0.5  # a network file system may show a new file late


async def checked(storage: Storage, proof: MachineProof) -> Unfit | StillWaiting | None:
    """Checks that a joining worker has the coordinator's storage and clock; returns what is wrong, or None.

    A folder of the same path on the worker's own disk does not reach the coordinator. The worker's saves
    would be given up one after the other, while its disk fills. A clock that is wrong by hours produces wrong
    times in the journal and in metrics, and buckets refuse its requests. `StillWaiting`: the storage cannot
    be read here now.
    """
    off_s = proof.unix_s - time.time()
    if abs(off_s) > CLOCK_LIMIT_S:
        ahead = "ahead of" if off_s > 0 else "behind"
        return Unfit(
            code="machine.clock",
            text=f"this machine's clock is {abs(off_s):,.0f} s {ahead} the coordinator's "
            f"({_clock_text(proof.unix_s)} instead of {_clock_text(time.time())}, allowed: "
            f"{CLOCK_LIMIT_S:.0f} s)",
        )
    found: bytes | None = None
    for number in range(_PROBES):
        if number:
            await asyncio.sleep(_PROBE_AGAIN_S)
        try:
            found = await in_daemon_thread(lambda: storage.read(proof.probe))
        except FileNotFoundError:
            continue
        except StorageError:
            await asyncio.sleep(_PROBE_AGAIN_S)
            return StillWaiting()
        break
    if found == proof.token.encode():
        return None
    return Unfit(
        code="machine.storage",
        text=f"{storage.root} on this machine is another folder than on the coordinator's: what is written "
        "there does not arrive in the run; mount the run's storage on this machine",
    )


def _clock_text(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))
