"""The supervisor: collects facts, asks the policy, and carries out its decisions until the run has ended.

It runs in the driver. The coordinator reports the end of the run. `MissedMembers` grants missing members the
time for which a busy machine did not let them run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from orchestrator.cluster.machine import ProcessLook, Silence, look_at_process, starved_s
from orchestrator.cluster.node_groups import GroupSpec, NodeGroup, remove_orphaned_placement_groups
from orchestrator.cluster.ray_state import why_not_created
from orchestrator.elastic.supervision.background_call import BackgroundCall
from orchestrator.elastic.supervision.policy import (
    Decision,
    EndLaunch,
    ExpectWorkers,
    GroupFacts,
    LaunchLimits,
    LeaveNode,
    NodeFacts,
    NodeSnapshot,
    StallWatch,
    StartGroup,
    StopGroup,
    SupervisionFacts,
    decide,
)
from orchestrator.errors import CoordinatorSilentError, ElasticError, UnsavedError
from orchestrator.history import sentences
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.run_status import Doing, GroupMember, Held, MemberInfo, RunStatus, Stall

STATUS_WAIT_S = 0.25
NODES_EVERY_S = 0.5
NODES_SILENT_S = 10.0  # a GCS without an answer for this long is reported; its last answer stays valid
FIRST_NODES_S = 60.0  # how long the first answer is waited for; without it nothing can be started
COORDINATOR_LIMIT_S = 60.0
FROZEN_S = 10.0  # a live coordinator answers within a second; twice this time without an answer ends it
HUNG_S = 60.0  # one that could have answered for this long is ended although it uses CPU time
SILENCE_LOOK_S = 0.5  # how often an unresponsive coordinator is inspected
TO_END_S = 5.0  # the part of a launch's remaining time that it needs to record its end
END_S = 5.0  # how long groups may take to end after the run
INTERRUPTED_S = 0.5  # how long their resources may take to be freed if the run has not ended
POLL_S = 0.05
DEADLINE_CHANGED_S = 1.0  # two reports of one deadline differ by less
LOOK_S = 2.0  # how long a node's agent may take to inspect its workers


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedLaunch:
    """What the supervisor needs to start node groups: the worker's function, its task, and a worker's
    resources.

    `tokenizer_node` is the node that the tokenizers are to run on (None: any).
    """

    name: str
    train_function: Callable[[dict[str, Any]], None]
    worker_config: dict[str, Any]
    resources_per_worker: dict[str, float]
    ray_storage: str
    limits: LaunchLimits
    tokenizer_node: str | None = None


class Supervisor:
    """Drives one launch.

    `nodes` returns the live nodes as facts. `show` is called with each new status, `stalled` with the
    inspection of workers after no step was finished for long, and `say` with other messages for the user.

    Calls to the cluster's GCS run in threads. While the GCS does not answer, the nodes of its last answer are
    used, training continues, and signals are handled.
    """

    def __init__(
        self,
        launch: SupervisedLaunch,
        coordinator: Any,
        nodes: Callable[[], tuple[NodeFacts, ...]],
        show: Callable[[RunStatus], None],
        stalled: Callable[[Stall], None] = lambda stall: None,
        say: Callable[[str], None] = lambda text: None,
        own_node: str = "",
    ) -> None:
        """`own_node`: the node that this process runs on."""
        self._own_node = own_node
        self._say, self._silent_s = say, 0.0  # the GCS's silence when it was reported
        self._asked_nodes, self._asked_cleaning = BackgroundCall(nodes), BackgroundCall(
            remove_orphaned_placement_groups
        )
        self._stalled, self._stall_watch = stalled, StallWatch()
        self._look: _Look | None = None
        self._launch, self._coordinator, self._show = launch, coordinator, show
        self._groups: dict[str, NodeGroup] = {}
        self._leaving: dict[str, tuple[int, float]] = {}  # node -> (the attempt that was notified, deadline)
        self._expected = (-1, -1)  # attempt, and the number of workers that its coordinator was notified of
        self._nodes, self._looked_at = NodeSnapshot(), 0.0  # when the newest query was sent
        self._number = 0
        self._to_clean = False
        self._stop_by, self._stop_s, self._save_by = "", math.inf, ""
        self._end_at = math.inf  # when the launch ends without the save that it stops with
        self.has_trained = False  # whether a group of workers has been formed
        self._missed = MissedMembers(excuse=self._excuse)
        self._coordinator_pid = 0
        self._killed = ""  # why a coordinator was killed, until another one has answered that can journal it

    def ask_stop(self, by: str = "a signal", grace_s: float = math.inf) -> None:
        """Requests a save and stop. May be called from a signal handler.

        `by` is the origin of the request, which ends this process in `grace_s` seconds (inf: unknown).
        """
        self._stop_by, self._stop_s = by, grace_s
        self._end_at = time.monotonic() + max(grace_s / 2, grace_s - TO_END_S)

    def ask_save(self, by: str) -> None:
        """Requests a save after the current step, without a stop. May be called from a signal handler.

        `by` is the origin of the request.
        """
        self._save_by = by

    def run(self) -> RunStatus:
        """Runs until the run has ended; returns its last status.

        Raises `ElasticError` if the coordinator stays away, or if the cluster never reports its nodes.
        """
        status, seen = None, (-1, -1)
        self._first_nodes()
        try:
            self._act(None)
            while status is None or status.ended is None:
                status = self._status(seen)
                if (status.attempt, status.version) != seen:
                    self._show(status)
                seen = (status.attempt, status.version)
                self.has_trained = self.has_trained or status.world_size > 0
                self._watch_steps(status)
                self._missed.watch(status.missing, self._groups)
                if self._stop_by and not status.stopping:
                    # again, for a restarted coordinator
                    self._coordinator.stop.remote(self._stop_by, self._stop_s)
                if status.ended is None and time.monotonic() > self._end_at:
                    self._end_at = math.inf
                    reason = sentences.not_saved(self._stop_by, self._stop_s)
                    self._coordinator.end.remote("failed", reason, UnsavedError.code)
                if self._save_by:
                    self._coordinator.save.remote(self._save_by)
                    self._save_by = ""
                self._look_at_nodes()
                if time.monotonic() - self._looked_at > NODES_EVERY_S:
                    self._ask_nodes()
                if status.ended is None:
                    self._act(status)
            return replace(status, stopping=status.stopping or bool(self._stop_by))
        finally:
            # an interrupt waits for nothing
            self._release(END_S if status is not None and status.ended is not None else 0.0)

    # ------------------------------------------------------------ inside
    def _release(self, patience_s: float) -> None:
        """Ends the groups and frees their resources.

        Groups that end within `patience_s` end by themselves.
        """
        deadline = time.monotonic() + patience_s
        running = list(self._groups.values())
        while running and time.monotonic() < deadline:
            running = [group for group in running if group.ended() is None]
            time.sleep(POLL_S)
        for group in running:
            group.stop()
        # resources that are not freed in time end with the driver's job
        deadline, removed = time.monotonic() + (END_S if patience_s else INTERRUPTED_S), 0
        while removed < len(running) and time.monotonic() < deadline:
            self._asked_cleaning.ask()
            removed += self._asked_cleaning.answer(max(0.0, deadline - time.monotonic())) or 0
            time.sleep(POLL_S)
        self._groups.clear()

    def _ask_nodes(self) -> None:
        now = time.monotonic()
        if self._asked_nodes.ask():
            self._looked_at = now

    def _first_nodes(self) -> None:
        self._ask_nodes()
        nodes = self._asked_nodes.answer(FIRST_NODES_S)
        if nodes is None:
            raise ElasticError(
                f"the cluster's GCS did not report its nodes for {FIRST_NODES_S:.0f} s, so no worker can be "
                "started; check its head node, then start the same command again",
                code="cluster.gcs_silent",
            )
        self._nodes = self._nodes.looked(nodes, self._looked_at, time.monotonic())

    def _look_at_nodes(self) -> None:
        """Processes the GCS's answer, if there is one. Never waits."""
        silent_s, nodes = self._asked_nodes.unanswered_s, self._asked_nodes.answer()
        if nodes is not None:
            if self._silent_s:
                self._say(f"the cluster's GCS answers again, after {self._silent_s:.0f} s")
            self._silent_s = 0.0
            self._nodes = self._nodes.looked(nodes, self._looked_at, time.monotonic())
        elif silent_s > NODES_SILENT_S:
            if not self._silent_s:
                self._say(
                    f"warning: the cluster's GCS has not answered for {silent_s:.0f} s; the run continues, "
                    "but nodes that come or go are not seen and no worker is replaced until it does; look at "
                    "the cluster's head node"
                )
            self._silent_s = silent_s

    def _status(self, seen: tuple[int, int]) -> RunStatus:
        """Asks until the coordinator answers.

        A coordinator that stands still is killed, so that Ray restarts it. A slow one is waited for. One that
        could not begin ends the launch at once.
        """
        silence, asked_at_s, is_slow = self._silence(), 0.0, False
        answer = self._coordinator.status.remote(seen, STATUS_WAIT_S)
        while True:
            try:
                status: RunStatus = ray.get(answer, timeout=min(SILENCE_LOOK_S, FROZEN_S))
            except GetTimeoutError as error:
                last: Exception = error
            except RayActorError as error:
                if reason := why_not_created(error):
                    raise ElasticError(
                        f"the coordinator could not begin: {reason}", code="launch.coordinator_not_started"
                    ) from error
                last = error
                self._coordinator_pid = 0  # the next one has another pid
                time.sleep(0.1)
                answer = self._coordinator.status.remote(seen, STATUS_WAIT_S)
            else:
                self._coordinator_pid = status.pid
                if self._killed:
                    self._note(EventKind.UNRESPONSIVE, reason=self._killed)
                    self._killed = ""
                return status
            counted_s = silence.look(time.monotonic(), self._look_at_coordinator())
            if not is_slow and silence.lasts_s > 2 * FROZEN_S and silence.is_at_work:
                is_slow = True
                self._say(sentences.coordinator_is_slow(self._coordinator_pid, silence.lasts_s))
            # one call is not enough: an answer may have been lost
            if self._coordinator_pid and silence.stands_still(2 * FROZEN_S, HUNG_S):
                self._killed = sentences.coordinator_is_frozen(self._coordinator_pid, silence.lasts_s)
                self._say(self._killed)
                self._coordinator_pid = 0
                ray.kill(self._coordinator, no_restart=False)
                silence, asked_at_s = self._silence(), 0.0
                answer = self._coordinator.status.remote(seen, STATUS_WAIT_S)
            elif counted_s > self._silence_limit_s():
                raise CoordinatorSilentError(
                    f"the coordinator did not answer for {silence.lasts_s:.0f} s ({last}); "
                    "start the same command again: it continues from the newest resume point"
                ) from last
            elif counted_s > asked_at_s + FROZEN_S:
                asked_at_s = counted_s
                answer = self._coordinator.status.remote(seen, STATUS_WAIT_S)

    def _silence(self) -> Silence:
        return Silence(time.monotonic(), SILENCE_LOOK_S)

    def _look_at_coordinator(self) -> ProcessLook | None:
        """Inspects the coordinator, which runs on the machine of this process."""
        return look_at_process(self._coordinator_pid, time.monotonic())

    def _silence_limit_s(self) -> float:
        """Returns how long a coordinator may stay away.

        While live workers hold the state, it is as long as a run waits for workers.
        """
        holds = self.has_trained and any(group.ended() is None for group in self._groups.values())
        return max(COORDINATOR_LIMIT_S, self._launch.limits.wait_s) if holds else COORDINATOR_LIMIT_S

    def _excuse(self, member: str, seconds: float) -> None:
        self._coordinator.starved.remote(member, seconds)

    def _watch_steps(self, status: RunStatus) -> None:
        """Has the agents inspect their workers if no step was finished for long, and passes on the results.

        Never waits.
        """
        now = time.monotonic()
        self._stall_watch.saw(status, now)
        quiet_s = self._stall_watch.due(now)
        if quiet_s is not None:
            pids: dict[str, list[int]] = {}
            for info in status.members:
                pids.setdefault(info.node_id, []).append(info.pid)
            answers = {n: self._groups[n].look_at(pids[n]) for n in pids if n in self._groups}
            self._look = _Look(
                began=now,
                quiet_s=quiet_s,
                members=status.members,
                answers=answers,
                stopping=status.stopping,
            )
        look = self._look
        if look is None:
            return
        asked = list(look.answers.values())
        ready = ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else []
        if len(ready) == len(asked) or now - look.began > LOOK_S:
            self._look = None
            states = {ref: _answer(ref) for ref in ready}
            self._stalled(look.stall(states, self._stall_watch.median_s, dict(status.doing)))

    def _act(self, status: RunStatus | None) -> None:
        self._reap()
        if status is not None:
            for info in status.left_out:
                if info.node_id in self._groups:
                    self._groups[info.node_id].kill_member(info.pid)
        for decision in decide(self._facts(status), self._launch.limits):
            self._carry_out(decision, status.attempt if status else -1)

    def _reap(self) -> None:
        """Handles groups that ended: removes them, reports the reason as a failure, and frees their placement
        groups.
        """
        for node_id, group in list(self._groups.items()):
            reason = group.ended()
            if reason is None:
                continue
            del self._groups[node_id]
            self._nodes = self._nodes.group_ended(node_id, time.monotonic())
            self._to_clean = True
            self._note(EventKind.GROUP_ENDED, node=node_id, reason=reason)
            if reason:
                self._coordinator.group_failed.remote(node_id, reason)
        if self._to_clean:
            self._asked_cleaning.answer()
            self._to_clean = not self._asked_cleaning.ask()

    def _facts(self, status: RunStatus | None) -> SupervisionFacts:
        return SupervisionFacts(
            nodes=self._nodes.nodes,
            unknown=self._nodes.unknown.union(status.resting if status else ()),
            groups=tuple(
                GroupFacts(node_id=node_id, num_workers=group.spec.num_workers)
                for node_id, group in self._groups.items()
            ),
            below_minimum_s=status.waiting_since if status else None,
            has_begun=self._number > 0,
            tokenizer_node=self._launch.tokenizer_node,
        )

    def _carry_out(self, decision: Decision, attempt: int) -> None:
        match decision:
            case StartGroup():
                self._number += 1
                spec = GroupSpec(
                    name=f"{self._launch.name}-{self._number}",
                    node_id=decision.node_id,
                    num_workers=decision.num_workers,
                    resources_per_worker=self._launch.resources_per_worker,
                    ray_storage=self._launch.ray_storage,
                )
                self._groups[decision.node_id] = NodeGroup(
                    spec, self._launch.train_function, self._launch.worker_config
                )
                self._note(EventKind.GROUP_STARTED, node=decision.node_id, num_workers=decision.num_workers)
            case StopGroup():
                self._groups.pop(decision.node_id).stop()
                self._note(EventKind.GROUP_STOPPED, node=decision.node_id, reason=decision.reason)
            case LeaveNode():
                self._leave(decision, attempt)
            case ExpectWorkers():
                if self._expected != (attempt, decision.num_workers):
                    self._expected = (attempt, decision.num_workers)
                    self._coordinator.expect.remote(decision.num_workers)
            case EndLaunch():
                self._coordinator.end.remote("failed", decision.reason, decision.code)

    def _leave(self, decision: LeaveNode, attempt: int) -> None:
        """Notifies each attempt's coordinator once, and again if the node goes earlier than reported.

        Later deadlines are not reported, because the last answer ages while the GCS is silent. If the
        driver's own node is to go, the whole launch saves and stops.
        """
        until, known = time.monotonic() + decision.grace_s, self._leaving.get(decision.node_id)
        if attempt < 0 or (
            known is not None and known[0] == attempt and until >= known[1] - DEADLINE_CHANGED_S
        ):
            return
        self._leaving[decision.node_id] = (attempt, until)
        self._coordinator.draining.remote(decision.node_id, decision.host, decision.grace_s)
        if decision.node_id == self._own_node and not self._stop_by:
            self.ask_stop(f"a drain notice for the driver's node {decision.host}", decision.grace_s)

    def _note(self, kind: EventKind, **fields: Any) -> None:
        self._coordinator.note.remote(kind, fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """A pending inspection of workers by their agents. `answers`: node -> reference."""

    began: float
    quiet_s: float
    members: tuple[MemberInfo, ...]
    answers: dict[str, Any]
    stopping: bool

    def stall(
        self, states: dict[Any, dict[int, str] | None], median_s: float, doing: dict[str, Doing]
    ) -> Stall:
        """Builds the report. `states` are the answers that have arrived; `doing` is what the members
        reported.
        """
        held = []
        for rank, info in enumerate(self.members):
            seen = states.get(self.answers.get(info.node_id))
            named = GroupMember(rank=rank, host=info.host, pid=info.pid)
            state = None if seen is None else seen[info.pid]
            held.append(Held(worker=named, state=state, doing=doing.get(info.member)))
        return Stall(quiet_s=self.quiet_s, median_s=median_s, held=tuple(held), stopping=self.stopping)


def _answer(reference: Any) -> dict[int, str] | None:
    try:
        return ray.get(reference)  # type: ignore[no-any-return]
    except RayError:
        return None


# --------------------------------------------------------------------------------------------- missed members
LOOK_EVERY_S = 1.0
ANSWER_S = 2.0  # an agent without an answer for this long is itself starved, or its node is unreachable
AGENT_LIMIT_S = 20.0  # the longest time for which that excuses its members


class StartedGroup(Protocol):
    """The methods of a node group that are used here."""

    def cpu_time_of(self, pids: Sequence[int]) -> Any:
        """Returns a reference to its agent's answer, by pid."""


@dataclass(kw_only=True, slots=True)
class _Asked:
    """A pending call to an agent. `excused_s`: the time granted because it did not answer."""

    members: tuple[MemberInfo, ...]
    answer: Any
    since: float
    excused_s: float = 0.0


@dataclass(kw_only=True)
class MissedMembers:
    """Watches missing members. `excuse` is called with a member and the seconds for which it could
    not run.
    """

    excuse: Callable[[str, float], None]
    clock: Callable[[], float] = time.monotonic
    _asked: dict[str, _Asked] = field(default_factory=dict)  # by node
    _looks: dict[str, ProcessLook] = field(default_factory=dict)  # by member
    _next: float = 0.0

    def watch(self, missing: Sequence[MemberInfo], groups: Mapping[str, StartedGroup]) -> None:
        """Polls the agents. To be called often; never waits."""
        now = self.clock()
        for node, asked in list(self._asked.items()):
            self._hear(node, asked, now)
        names = {info.member for info in missing}
        self._looks = {member: look for member, look in self._looks.items() if member in names}
        if not missing or now < self._next:
            return
        self._next = now + LOOK_EVERY_S
        for node in {info.node_id for info in missing} & set(groups) - set(self._asked):
            members = tuple(info for info in missing if info.node_id == node)
            answer = groups[node].cpu_time_of([info.pid for info in members])
            self._asked[node] = _Asked(members=members, answer=answer, since=now)

    def _hear(self, node: str, asked: _Asked, now: float) -> None:
        if not ray.wait([asked.answer], timeout=0)[0]:
            silent_s = now - asked.since
            granted_s = min(silent_s, AGENT_LIMIT_S) if silent_s > ANSWER_S else 0.0
            if granted_s > asked.excused_s:
                for info in asked.members:
                    self.excuse(info.member, granted_s - asked.excused_s)
                asked.excused_s = granted_s
            return
        del self._asked[node]
        try:
            looks: dict[int, ProcessLook | None] = ray.get(asked.answer)
        except RayError:
            return  # the agent has ended, and its workers with it
        for info in asked.members:
            look = looks.get(info.pid)
            if look is None:
                continue
            before = self._looks.get(info.member)
            self._looks[info.member] = look
            seconds = 0.0 if before is None else starved_s(before, look) - asked.excused_s
            if seconds > 0:
                self.excuse(info.member, seconds)
