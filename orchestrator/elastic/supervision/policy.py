"""The supervisor's policy: computes decisions from facts about nodes, groups and failures.

It also checks whether a job fits before anything is started. Pure functions: times are seconds in the facts,
and earlier decisions are not remembered. `NodeSnapshot` combines the newest list of nodes with what is known
otherwise. `StallWatch` decides when the workers' processes are inspected.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field, replace

from orchestrator.records.run_status import RunStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLimits:
    """The user's requirements.

    They are the number of workers (to start with, to continue with, at most), what each takes, the
    tokenizers, and the limits after which the run gives up. `tokenizer_cpus`: what each tokenizer takes: 1,
    or 0 if the workers leave too few.
    """

    start_workers: int
    min_workers: int
    max_workers: int
    cpus_per_worker: float
    gpus_per_worker: float
    num_tokenizers: int
    wait_s: float
    tokenizer_cpus: float = 1.0

    @property
    def feed_cpus(self) -> float:
        """What all tokenizers take together."""
        return self.num_tokenizers * self.tokenizer_cpus


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """A live node, with all its logical resources and the free ones. Bytes are 0 if unknown.

    `grace_s`: the node is about to be removed in this many seconds (inf: when it is idle); None: it stays.
    """

    node_id: str
    host: str
    is_head: bool
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    object_store_bytes: int = 0
    grace_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFacts:
    """A node group that has not ended."""

    node_id: str
    num_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionFacts:
    """The inputs of a decision.

    `below_minimum_s`: how long there have been too few workers to train; None: there are enough.
    `has_begun`: a group was started before, and the tokenizers have been given CPUs since.
    `tokenizer_node`: the node that the tokenizers are to run on (None: any).
    `unknown`: nodes of which nothing is known since their last group ended, and those whose workers could not
    work a short while ago.
    """

    nodes: tuple[NodeFacts, ...]
    groups: tuple[GroupFacts, ...]
    below_minimum_s: float | None
    has_begun: bool = False
    tokenizer_node: str | None = None
    unknown: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class StartGroup:
    """Start a group of `num_workers` on this node."""

    node_id: str
    num_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StopGroup:
    """End this node's group: its node is gone."""

    node_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveNode:
    """This node is about to be removed: its workers are to leave it within `grace_s` seconds (inf: no limit).

    The decision is repeated as long as the node exists.
    """

    node_id: str
    host: str
    grace_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectWorkers:
    """This many workers have been started or are starting. A first generation waits for them."""

    num_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EndLaunch:
    """End the run with this reason, and the code of the error that it is."""

    reason: str
    code: str


Decision = StartGroup | StopGroup | LeaveNode | ExpectWorkers | EndLaunch


def decide(facts: SupervisionFacts, limits: LaunchLimits) -> tuple[Decision, ...]:
    """Returns what to do now; empty if nothing is to be changed.

    A group is started wherever there is room and workers are missing. The workers of a lost node thus come
    back on any node, up to the maximum. No group is started while the workers that there is room for are too
    few to train, for two reasons: a group never grows, and the resources of a group that has just ended
    become free one by one. No group is started on a node of which nothing is known since its last group
    ended, because that may have ended with the node. A node that is about to be removed gets no group. Its
    workers count as lost already, and others are started for them. The run is stopped when there were too few
    workers for longer than `wait_s`. The launch machine decides how many failures are too many.
    """
    reason = _give_up(facts, limits)
    if reason:
        return (EndLaunch(reason=reason, code="cluster.too_few_workers"),)
    live = {node.node_id for node in facts.nodes}
    lost = tuple(
        StopGroup(node_id=g.node_id, reason="its node is gone") for g in facts.groups if g.node_id not in live
    )
    leave = tuple(
        LeaveNode(node_id=node.node_id, host=node.host, grace_s=node.grace_s)
        for node in facts.nodes
        if node.grace_s is not None
    )
    stay = tuple(node for node in facts.nodes if node.grace_s is None)
    staying = {node.node_id for node in stay}
    kept = tuple(g for g in facts.groups if g.node_id in staying)
    missing = limits.max_workers - sum(g.num_workers for g in kept)
    held = sum(node.cpus - node.free_cpus for node in facts.nodes) if facts.has_begun else 0.0
    held -= limits.cpus_per_worker * sum(g.num_workers for g in facts.groups if g.node_id in live)
    started = placement(stay, kept, limits, missing, held, facts.tokenizer_node, facts.unknown)
    expected = sum(g.num_workers for g in kept) + sum(g.num_workers for g in started)
    if expected < limits.min_workers:
        started, expected = (), sum(g.num_workers for g in kept)
    return (*lost, *leave, *started, *((ExpectWorkers(num_workers=expected),) if expected else ()))


def tokenizer_node(nodes: tuple[NodeFacts, ...], limits: LaunchLimits) -> str | None:
    """Chooses the node on which the tokenizers run; None if no node has room for all of them.

    Of the nodes with enough room it is the one with the fewest free CPUs, so that larger ones are left to
    workers. Among equals the head is preferred. With None, the tokenizers run wherever there is room.
    """
    fitting = [node for node in nodes if node.free_cpus >= limits.feed_cpus]
    return min(fitting, key=lambda n: (n.free_cpus, not n.is_head, n.node_id)).node_id if fitting else None


def placement(
    nodes: tuple[NodeFacts, ...],
    groups: tuple[GroupFacts, ...],
    limits: LaunchLimits,
    missing: int,
    held_cpus: float = 0.0,
    tokenizers_on: str | None = None,
    unknown: frozenset[str] = frozenset(),
) -> tuple[StartGroup, ...]:
    """Places `missing` workers on nodes without a group, the roomiest first, each filled before the next.

    Nodes in `unknown` are skipped. The tokenizers may not have their CPUs yet, so these are kept free, minus
    `held_cpus`, which are in use but not by workers and thus by tokenizers. They are kept free on the node
    `tokenizers_on`; while no group exists also elsewhere, from the least roomy nodes on. The first groups do
    not prove that the tokenizers have their CPUs: Ray assigns these seconds later.
    """
    rooms = {node.node_id: node.free_cpus for node in nodes}
    by_room = sorted(nodes, key=lambda n: (-_workers(n, rooms[n.node_id], limits), not n.is_head, n.node_id))
    owed = max(0.0, limits.feed_cpus - max(0.0, held_cpus))
    chosen = tokenizers_on if tokenizers_on in rooms or groups else tokenizer_node(nodes, limits)
    for node in sorted(reversed(by_room), key=lambda n: n.node_id != chosen):
        if groups and node.node_id != chosen:
            continue
        taken = min(owed, float(int(rooms[node.node_id])))
        rooms[node.node_id] -= taken
        owed -= taken
    busy = {g.node_id for g in groups} | unknown
    decisions = []
    for node in by_room:
        size = min(missing, _workers(node, rooms[node.node_id], limits))
        if node.node_id in busy or size <= 0:
            continue
        decisions.append(StartGroup(node_id=node.node_id, num_workers=size))
        missing -= size
    return tuple(decisions)


def preflight(
    nodes: tuple[NodeFacts, ...],
    limits: LaunchLimits,
    *,
    disk_free_bytes: int | None,
    disk_needed_bytes: int,
    object_store_needed_bytes: int,
) -> list[str]:
    """Returns why the job cannot run on this cluster now, with what is needed and available; empty if it can.

    The need is workers and tokenizers, which also read the data. The workers that the run starts with must
    fit at once. If one CPU per tokenizer is too much, the caller tries again with `without_tokenizer_cpus`.
    """
    problems = []
    cpus = sum(node.free_cpus for node in nodes)
    needed = limits.start_workers * limits.cpus_per_worker + limits.feed_cpus
    if cpus < needed:
        tokenizers = f" + {limits.num_tokenizers} tokenizers × 1" if limits.feed_cpus else ""
        problems.append(
            f"{needed:g} logical CPUs are needed ({limits.start_workers} workers × "
            f"{limits.cpus_per_worker:g}{tokenizers}), {cpus:g} of {sum(n.cpus for n in nodes):g} are free "
            "in the cluster; lower cluster.num_workers, or add nodes"
        )
    elif (
        sum(_workers(node, node.free_cpus, limits) for node in nodes) < limits.start_workers
        and not limits.gpus_per_worker
    ):
        problems.append(
            f"{limits.start_workers} workers of {limits.cpus_per_worker:g} CPUs are needed, but the free "
            "CPUs of the nodes "
            f"({', '.join(f'{n.host}: {n.free_cpus:g}' for n in nodes)}) hold fewer; lower "
            "cluster.cpus_per_worker, or add nodes"
        )
    gpus, needed_gpus = sum(node.free_gpus for node in nodes), limits.start_workers * limits.gpus_per_worker
    if gpus < needed_gpus:
        problems.append(
            f"{needed_gpus:g} GPUs are needed (cluster.use_gpu, {limits.start_workers} workers), {gpus:g} "
            "are free in the cluster; "
            "lower cluster.num_workers, set cluster.use_gpu=false, or add nodes"
        )
    problems += disk_problems(disk_free_bytes, disk_needed_bytes)
    store = max((node.object_store_bytes for node in nodes), default=0)
    if 0 < store < object_store_needed_bytes:
        problems.append(
            f"{_mib(object_store_needed_bytes)} of Ray's object store are needed for tokens in flight, the "
            f"largest node has {_mib(store)}; "
            "start Ray with a larger object store (--object-store-memory), or lower data.num_tokenizers"
        )
    return problems


def without_tokenizer_cpus(limits: LaunchLimits) -> LaunchLimits:
    """Returns the same limits with tokenizers that take no CPU of their own.

    They run beside the workers, at the lowest priority. A job then fits wherever its workers do, as on a
    local Ray, which is given all that is needed.
    """
    return replace(limits, tokenizer_cpus=0.0)


def disk_problems(free_bytes: int | None, needed_bytes: int) -> list[str]:
    """Returns why the resume points do not fit on the disk, with what is needed and available.

    Empty if they fit, or if the free space is unknown.
    """
    if free_bytes is None or free_bytes >= needed_bytes:
        return []
    return [
        f"{_mib(needed_bytes)} of disk are needed for resume points at run.storage, {_mib(free_bytes)} are "
        "free; free some, lower resume.keep_latest, or take another run.storage"
    ]


def _workers(node: NodeFacts, free_cpus: float, limits: LaunchLimits) -> int:
    """Returns how many workers the node can hold, tolerant to the rounding of Ray's fractional CPUs."""
    by_cpu = int((free_cpus + 1e-6) // limits.cpus_per_worker)
    return (
        by_cpu
        if not limits.gpus_per_worker
        else min(by_cpu, int((node.free_gpus + 1e-6) // limits.gpus_per_worker))
    )


def _give_up(facts: SupervisionFacts, limits: LaunchLimits) -> str:
    below = facts.below_minimum_s
    if below is not None and below > limits.wait_s:
        return (
            f"fewer than {limits.min_workers} workers (cluster.num_workers) were there for {below:.0f} s, "
            f"cluster.wait_s={limits.wait_s:g}: nodes are missing, or worker processes died while they "
            "started, which Ray's lines before this one name. Add nodes, or correct what ended them, and "
            "start the same command again: it continues from the newest resume point, if there is one"
        )
    return ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


# ----------------------------------------------------------------------------------- the newest list of nodes
@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSnapshot:
    """The `nodes` as returned by a query that began at `began`.

    A node that was about to be removed keeps this status, whatever later queries return. Drains are never
    cancelled, and Ray forgets a drain (2.60) a moment before it declares the node dead. `going` has the time
    at which each goes. A node whose group ended after the query began is in `unknown`: everything that the
    query returned about it, including its existence, is older than that end.
    """

    nodes: tuple[NodeFacts, ...] = ()
    began: float = 0.0
    going: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)  # node -> when its newest group ended

    @property
    def unknown(self) -> frozenset[str]:
        """The nodes on which nothing may be started before the next query."""
        return frozenset(node for node, at in self.ended.items() if at >= self.began)

    def looked(self, nodes: tuple[NodeFacts, ...], began: float, now: float) -> NodeSnapshot:
        """Updates from the answer to a query that began at `began`."""
        there = {node.node_id for node in nodes}
        going = {node_id: at for node_id, at in self.going.items() if node_id in there}
        going |= {node.node_id: now + node.grace_s for node in nodes if node.grace_s is not None}
        return NodeSnapshot(
            nodes=tuple(
                replace(node, grace_s=max(0.0, going[node.node_id] - now))
                if node.grace_s is None and node.node_id in going
                else node
                for node in nodes
            ),
            began=began,
            going=going,
            ended={node: at for node, at in self.ended.items() if at >= began},
        )

    def group_ended(self, node_id: str, now: float) -> NodeSnapshot:
        """Records that a node's group has ended."""
        return replace(self, ended={**self.ended, node_id: now})


# ----------------------------------------------------------------------------------------------------- stalls
# an inspection is due after max(5 s, 3 × median step), then each time that has doubled
LEAST_S, MEDIANS = 5.0, 3.0


class StallWatch:
    """Watches each status, and decides when an inspection is due."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=30)
        self._at: tuple[int, int, int] | None = None
        self._since = 0.0
        self._looks = 0

    @property
    def median_s(self) -> float:
        """The median duration of a step."""
        return statistics.median(self._steps) if self._steps else 0.0

    def saw(self, status: RunStatus, now: float) -> None:
        """Handles a status. Only a group that has done a step is watched, because a first step may take any
        time.
        """
        step, at = status.last_step, None
        if step is not None and (step.attempt, step.generation) == (status.attempt, status.generation):
            at = (step.attempt, step.generation, step.step)
        if status.waiting_since is not None or status.ended is not None:
            at = None
        if at != self._at:
            self._at, self._since, self._looks = at, now, 0
            if at is not None and step is not None:
                self._steps.append(step.step_s)

    def due(self, now: float) -> float | None:
        """Returns how long no step was finished, if an inspection is due now. The next is due after twice
        that time.
        """
        quiet = now - self._since
        if self._at is None or quiet < max(LEAST_S, MEDIANS * self.median_s) * 2**self._looks:
            return None
        self._looks += 1
        return quiet
