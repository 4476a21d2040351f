"""The disks of a cluster's nodes in a launch (`resume.node_folder`): the driver's access to them, and
checks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from orchestrator.checkpoint.node_local.node_folder import ASK_AGAIN_S, FolderChecks
from orchestrator.checkpoint.node_local.node_storage import NodeStorage
from orchestrator.checkpoint.node_local.remote_nodes import (
    FutureAnswer,
    Home,
    NodeServer,
    ReachedNodes,
    Servers,
)
from orchestrator.elastic.supervision.background_call import BackgroundCall
from orchestrator.elastic.supervision.policy import NodeFacts
from orchestrator.errors import OrchestratorError, ResourceError, StorageError, UnreachableNodeError, text_of
from orchestrator.launch.capacity.resource_estimate import gib

ANSWER_S = 30.0  # the actor may have to be started first
_LOOK_S = 0.5
_THREADS = 16  # concurrent calls of one actor


class RayServers(Servers):
    """Calls a `NodeServer` actor on each node. Pickles.

    An actor is found by its name. The first caller makes it (the driver, as nodes come, so that it lives as
    long as the launch). It ends with the process that made it, and the next call makes it again.
    """

    def __init__(self, launch: str, folder: str | None) -> None:
        """`launch` is unique to the launch. `folder` as configured."""
        self._launch, self._folder = launch, folder
        self._actors: dict[str, Any] = {}

    def __reduce__(self) -> tuple[type[RayServers], tuple[str, str | None]]:
        return RayServers, (self._launch, self._folder)

    @override
    def own(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    @override
    def all(self) -> Sequence[str]:
        rows: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return sorted(str(row["NodeID"]) for row in rows if row["Alive"])

    @override
    def call(self, node: str, method: str, *arguments: Any) -> RayAnswer:
        try:
            actor = self._actors.get(node) or self._made(node)
            return RayAnswer(getattr(actor, method).remote(*arguments), lambda: self._forget(node))
        except (RayError, ValueError) as error:
            self._forget(node)
            return RayAnswer(None, lambda: None, text=f"node {node} takes no call: {error}")

    def _made(self, node: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actor = _server_class().options(
            name=f"node-files-{self._launch}-{node}",
            get_if_exists=True,
            scheduling_strategy=there,
            max_concurrency=_THREADS,
        )
        self._actors[node] = made = actor.remote(self._folder, _address(node))
        return made

    def _forget(self, node: str) -> None:
        self._actors.pop(node, None)


class RayAnswer(FutureAnswer):
    """The answer of an actor."""

    def __init__(self, reference: Any, lost: Callable[[], None], text: str = "") -> None:
        """`lost` is called if the actor does not answer. `text`: why there was no call."""
        self._reference, self._lost, self._text = reference, lost, text

    @override
    def get(self, check: Callable[[], None] | None = None) -> Any:
        if self._reference is None:
            raise UnreachableNodeError(self._text)
        try:
            while check is not None and not ray.wait([self._reference], timeout=_LOOK_S)[0]:
                check()
            return ray.get(self._reference, timeout=ANSWER_S)
        except RayTaskError as error:
            if isinstance(error.cause, OrchestratorError | FileNotFoundError):
                raise error.cause from None
            raise
        except (RayError, GetTimeoutError) as error:
            self._lost()
            raise UnreachableNodeError(f"{type(error).__name__}: {error}") from error


@cache
def _server_class() -> Any:
    """One class for all nodes: Ray waits for its GCS for each new class."""
    return ray.remote(num_cpus=0)(NodeServer)


def _address(node: str) -> str:
    rows: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return next((str(row["NodeManagerAddress"]) for row in rows if row["NodeID"] == node), "")


class NodeDisks:
    """The node disks of one launch, once its driver is connected to Ray."""

    def __init__(
        self,
        folder: str | None,
        servers: Servers | None = None,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder` is `resume.node_folder`. `servers`: by default actors on Ray's nodes.

        `say` receives messages about later nodes that cannot keep points.
        """
        self._folder, self._say, self._clock = folder, say, clock
        self._servers = servers or RayServers(secrets.token_hex(4), folder)
        self.nodes = ReachedNodes(self._servers, folder)
        self._checks = FolderChecks()
        self._asked: dict[str, BackgroundCall[Home]] = {}

    def reached_by(self, storage: NodeStorage) -> None:
        """From now on `storage` finds the parts of points there, including those written by older
        launches.
        """
        storage.reach(self.nodes)

    def require_room(self, needed_bytes: int) -> None:
        """Makes the folder on every node.

        Raises `ResourceError` if one cannot, or if all together have less than `needed_bytes` free.
        """
        if self._folder is None:
            return
        by_node = self.nodes.require_folders()
        self._checks = FolderChecks(by_node)
        homes = {home.place.id: home for home in by_node.values()}
        free = sum(home.free_bytes for home in homes.values())
        if free < needed_bytes:
            listed = ", ".join(f"{home.place}: {gib(home.free_bytes)}" for home in homes.values())
            raise ResourceError(
                f"{gib(needed_bytes)} of disk are needed for resume points in "
                f"resume.node_folder={self._folder}, {gib(free)} are free ({listed}); free some, lower "
                "resume.keep_latest, or take another folder",
                code="storage.no_room",
            )

    def with_room(self, nodes: Sequence[NodeFacts]) -> tuple[NodeFacts, ...]:
        """`nodes` with the room for workers that their disks allow. Does not wait; call it again.

        A node whose folder is unusable, which is reported, or that has not answered yet has no room. Each
        gets its server, which lives as long as this process.
        """
        if self._folder is None:
            return tuple(nodes)
        hosts = {node.node_id: node.host for node in nodes}
        for node in self._checks.to_ask(hosts, self._clock()):
            self._asked[node] = BackgroundCall(partial(self.nodes.home, node))
            self._asked[node].ask()
        for node in [*self._asked]:
            self._look_for_answer(node, hosts.get(node, ""))
        held_back = self._checks.held_back(hosts)
        return tuple(_without_room(node) if node.node_id in held_back else node for node in nodes)

    def _look_for_answer(self, node: str, host: str) -> None:
        try:
            if self._asked[node].answer() is None:
                return
            self._checks.is_right(node)
        except UnreachableNodeError:
            self._checks.is_silent(node)
        except (ResourceError, StorageError, OSError, RayError) as error:
            if self._checks.is_wrong(node, text_of(error), self._clock()):
                self._say(
                    f"warning: node {host} gets no workers: {text_of(error)}; it is tried again every "
                    f"{ASK_AGAIN_S:.0f} s"
                )
        del self._asked[node]


def _without_room(node: NodeFacts) -> NodeFacts:
    return replace(node, cpus=0.0, gpus=0.0, free_cpus=0.0, free_gpus=0.0)
