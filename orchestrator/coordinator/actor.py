"""The coordinator actor: what members and the supervisor may ask of it, and what they are answered.

It decides nothing itself: the launch machine says who trains and when the run ends, the commit machine which
points exist, and `LaunchDriver` carries that out. It knows neither model nor data, and is not on the step
path.
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

from orchestrator.cluster.ray_state import ray_says
from orchestrator.coordinator import launch_driver
from orchestrator.coordinator.attempt_journal import note_beginning
from orchestrator.coordinator.checked_machine import checked
from orchestrator.coordinator.continue_launch import continue_launch
from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.coordinator.launch_driver import LaunchDriver
from orchestrator.coordinator.measuring import measured
from orchestrator.errors import FencedError, UnsavedError
from orchestrator.faults import hook
from orchestrator.history import sentences
from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import JournalWriter
from orchestrator.history.request_files import STOP
from orchestrator.parts.node_storage import run_storage
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
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.resume.commit_events import PartFailed, PartGrows
from orchestrator.resume.store import RunStore

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_notes import FeedNotes

# an open call is answered at least this often: a dead caller does not leave it open, and a caller knows a
# coordinator that is frozen from one that waits
ANSWER_S = 10.0
TRIED_PORTS = 64  # members that wait for each other try each other's ports in groups of at most this size
_END_AGAIN_S = 0.5  # how soon a member that failed is answered whether its process may end


class Coordinator:
    """One attempt's coordinator; lives in a `coordinator.process.CoordinatorProcess`. Every call carries the
    launch id; one of another launch is refused.

    A restarted one claims the next attempt of its launch, adopts nothing half-collected, and has the members
    meet again at their next step boundary (membership rules 8 and 10). Where the launch had ended before, it
    writes nothing, and only answers.
    """

    def __init__(
        self,
        start: CoordinatorStart,
        why_dead: Callable[[MemberInfo], str | None] | None = None,
        feeder_notes: Callable[[int], Awaitable[FeedNotes | None]] | None = None,
        store: RunStore | None = None,
        claimed: set[int] | None = None,
    ) -> None:
        """Takes up the attempt, or claims the next one when this process is a restarted one (then the attempt
        has a journal already). `why_dead` says how the process of a member ended that is surely gone; by
        default Ray does. `feeder_notes` asks the launch's feeder; see `FeederNotes`. `store`: that of
        `start.storage`. `claimed`: see `mine` of `continue_launch`.

        Waits for storage. Raises `StorageError`, after which another one may be made, and `FencedError`.
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
            start, attempt, store, journal, metrics, fault, why_dead or ray_says, feeder_notes
        )
        self._launch, self._commits, self._storage = driver.machine, driver.commits, store.storage
        self._damages: tuple[Damage, ...] = ()
        self._loading: dict[str, tuple[int, int]] = {}  # until the next step
        self._doing: dict[str, Doing] = {}  # of members, since the newest step
        self._journalled: dict[str, JoinRequest] = {}  # the newest join of each member, without its records

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, and that is written down as far as it can be."""
        return self._driver.end_is_written

    # ------------------------------------------------------------ calls of members
    async def join(self, request: JoinRequest) -> GenerationView | Refusal | RunOver | StillWaiting:
        """Waits until the member is in a generation; `RunOver` when the run has ended, `Refusal` when it has
        no place here, `StillWaiting` after a while: it asks again.
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
        """What keeps the machine of a worker that is about to join from taking part; None: nothing.
        `StillWaiting` while storage fails here.
        """
        self._check(launch)
        return await checked(self._storage, proof)

    async def watch(
        self, launch: str, attempt: int, generation: int, known: ControlRequests | None
    ) -> ControlRequests:
        """Rank 0's open call: answered when the control requests for this generation differ from `known`, and
        at least every few seconds.
        """
        self._check(launch)
        deadline = time.monotonic() + ANSWER_S
        while True:
            wanted = self._launch.control_requests(attempt, generation, self._driver.acknowledged)
            if wanted != known or time.monotonic() > deadline:
                return wanted
            await self._driver.news.wait(deadline - time.monotonic())

    async def ended(self, launch: str, attempt: int, generation: int) -> StillWaiting | None:
        """The open call of every other rank: answered once the generation is over, and then at once.
        `StillWaiting` after a while: it asks again.
        """
        self._check(launch)
        if self._launch.control_requests(attempt, generation, -1).ended:
            return None
        return None if await self._driver.ends.wait((attempt, generation), ANSWER_S) else StillWaiting()

    async def report(
        self, launch: str, member: str, attempt: int, generation: int, records: tuple[StepRecord, ...]
    ) -> None:
        """Step records of a running generation, in batches by one member. Equal copies of what came before
        change nothing.
        """
        self._check(launch)
        self._driver.take_records(records)
        self._loading.clear()
        self._doing.clear()
        if attempt == self._attempt.number and records:
            self._launch.rendezvous.applied(generation, records[-1].step, time.monotonic())
        await self._driver.notify()

    async def phase(self, launch: str, member: str, limit_s: float) -> None:
        """`member` has begun or left a phase: from now on the others may have to wait `limit_s` for it."""
        self._check(launch)
        self._launch.busy(member, time.monotonic() + limit_s)

    async def loading(self, launch: str, member: str, done_bytes: int, num_bytes: int) -> None:
        """`member` has read so many bytes of what it loads of a point; said for as long as it loads."""
        self._check(launch)
        self._loading[member] = done_bytes, num_bytes
        await self._driver.notify()

    async def doing(
        self, launch: str, member: str, what: Doing
    ) -> tuple[tuple[str, int], ...] | StillWaiting | None:
        """What a member does that has finished no step for long, in its own words. Where all members of a
        small group wait for each other, the addresses at which it is to try them, by rank.
        """
        self._check(launch)
        self._doing[member] = what
        members = self._launch.members
        kinds = {self._doing[m].kind if m in self._doing else "" for m in members}
        return self._launch.rendezvous.addresses if kinds == {PEERS} and len(members) <= TRIED_PORTS else None

    async def finished(self, launch: str, member: str, key: StateKey, reason: str) -> StillWaiting | None:
        """A member's part of the run is over (`done` or `stopped`); it may go when that is durable, and asks
        again until then.
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
        damages: tuple[Damage, ...] = (),
        place: MemberInfo | None = None,
    ) -> bool | StillWaiting:
        """What ended a member; see `LaunchMachine.failed`. Answers when its process may end: True if another
        one is to take its place, False if the run is over. `StillWaiting` after a while: it asks again.
        `damages`: what it found wrong with the point that it was to load. The status has them: the driver
        claims anew and continues an older point.
        """
        self._check(launch)
        self._damages = tuple(dict.fromkeys((*self._damages, *damages)))
        if kind != UnsavedError.__name__:  # it left on purpose, and the reason of the run's end says why
            self._driver.roster.gone(member, sentences.failure(kind, text))
        await self._driver.carry_out(self._launch.failed(member, kind, text, fatal, place, time.monotonic()))
        self._driver.look_soon()
        if not self._launch.may_end(member, time.monotonic()):
            await self._driver.news.wait(_END_AGAIN_S)
        if not self._launch.may_end(member, time.monotonic()):
            return StillWaiting()
        return self._launch.ended is None

    # ------------------------------------------------------------ calls of members about a save
    async def vote(self, launch: str, vote: Vote) -> bool | StillWaiting:
        """One rank's part of a save is written; answers True once the point is committed, False if the save
        was given up, `StillWaiting` after a while: it asks again.
        """
        self._check(launch)
        if vote.key.attempt != self._attempt.number or self._attempt.earlier.ended is not None:
            self._lost_save(vote.key)
            return False  # no half-collected save is adopted from an older coordinator
        self._driver.take_records(vote.records)
        self._launch.voted(vote.key)
        return await self._commits.vote(vote, ANSWER_S)

    async def save_failed(self, launch: str, key: StateKey, rank: int, world_size: int, reason: str) -> None:
        """A rank could not write its part of the save of `key`; it trains on."""
        self._check(launch)
        self._lost_save(key)
        self._launch.voted(key)
        self._commits.notify_soon(
            PartFailed(key=key, rank=rank, world_size=world_size, reason=reason, now_s=time.monotonic())
        )

    async def is_given_up(self, launch: str, key: StateKey, rank: int, world_size: int, moved: bool) -> bool:
        """Whether a save that a member began as `rank` of `world_size` ranks can never be committed: then it
        need not write its part to the end. `moved`: it has written more of it since it asked last.
        """
        self._check(launch)
        if key.attempt == self._attempt.number:
            self._commits.notify_soon(
                PartGrows(key=key, rank=rank, world_size=world_size, moved=moved, now_s=time.monotonic())
            )
        return key.attempt != self._attempt.number or self._commits.is_hopeless(key, world_size)

    async def digest(self, launch: str, key: StateKey, weights_digest: str) -> None:
        """What the weights of a state are; of an older attempt's it is left out."""
        self._check(launch)
        if key.attempt == self._attempt.number:
            self._journal.event(
                EventKind.STATE_DIGEST,
                generation=key.generation,
                step=key.step,
                weights_digest=weights_digest,
            )

    # ------------------------------------------------------------ calls of the supervisor
    async def status(self, seen: tuple[int, int], wait_s: float) -> RunStatus:
        """The run's status, as soon as it is newer than `seen` (attempt and version of the last answer), at
        latest after `wait_s` seconds.
        """
        self._driver.ensure_running()
        version = seen[1] if seen[0] == self._attempt.number else -1
        deadline = time.monotonic() + wait_s
        driver, news, launch = self._driver, self._driver.news, self._launch
        while news.version <= version and time.monotonic() < deadline:
            await news.wait(deadline - time.monotonic())
        view, newest, unheard = driver.view, self._commits.newest, news.since(version)
        # whoever hears of the end may end this process
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
        """Save what is trained by now, and train on; `by` is who wants it."""
        self._driver.ensure_running()
        await self._driver.carry_out(self._launch.request_save(by))
        self._driver.look_soon()

    async def expect(self, num_workers: int) -> None:
        """How many workers the supervisor has started or is starting."""
        self._driver.ensure_running()
        self._launch.rendezvous.expect(num_workers)
        self._driver.look_soon()

    async def draining(self, node: str, host: str, grace_s: float) -> None:
        """A node is about to be taken away, in `grace_s` seconds (inf: when it is idle)."""
        self._driver.ensure_running()
        await self._driver.carry_out(self._launch.draining(node, host, grace_s, time.monotonic()))
        self._driver.look_soon()

    async def stop(self, by: str, grace_s: float = math.inf) -> None:
        """Save and stop at the next step boundary; `by` is who wants it, and kills the launch in `grace_s`
        seconds (inf: nobody said so).
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
        """The process of a member that is missed could not run for so long, because its machine is busy."""
        self._driver.ensure_running()
        self._launch.starved(member, seconds)

    async def group_failed(self, node: str, reason: str) -> None:
        """The group of a node ended without having been asked to."""
        self._driver.ensure_running()
        await self._driver.carry_out(self._launch.group_failed(node, reason))

    async def note(self, kind: EventKind, fields: dict[str, Any]) -> None:
        """An event of the supervisor for the journal, whose only writer is here."""
        self._driver.ensure_running()
        self._journal.event(kind, **fields)
        if kind == EventKind.GROUP_STOPPED:
            self._driver.roster.node_gone(fields["node"])

    async def end(self, outcome: str, reason: str) -> None:
        """The supervisor ends the run (`failed`, `stopped`): no member is waited for."""
        self._driver.ensure_running()
        await self._driver.carry_out(self._launch.end(outcome, reason))

    async def warned(self, text: str) -> None:
        """What its process had to say before it could begin; goes out with the next status."""
        await self._driver.warned(text)

    # ------------------------------------------------------------ inside
    def _lost_save(self, key: StateKey) -> None:
        """Of a save that was sent to a coordinator that is gone, nothing comes."""
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


def _text(key: StateKey | None) -> str:
    return key.point_name if key else ""
