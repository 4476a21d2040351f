"""`checkpoint.node_local.reached_nodes.Servers` on Ray: a `NodeServer` actor on each node.

An actor is found by its name. The first caller makes it (the driver, as nodes come, so that it lives as long
as the launch). It ends with its maker; the next call makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.checkpoint.node_local.node_server import NodeServer
from orchestrator.errors import OrchestratorError, UnreachableNodeError

ANSWER_S = 30.0  # the actor may have to be started first
_LOOK_S = 0.5
_THREADS = 16  # concurrent calls of one actor


class RayServers:
    """See `Servers`. Pickles."""

    def __init__(self, launch: str, folder: str | None) -> None:
        """`launch` is unique to the launch. `folder` as configured."""
        self._launch, self._folder = launch, folder
        self._actors: dict[str, Any] = {}

    def __reduce__(self) -> tuple[type[RayServers], tuple[str, str | None]]:
        return RayServers, (self._launch, self._folder)

    def own(self) -> str:
        """See `Servers`."""
        return str(ray.get_runtime_context().get_node_id())

    def all(self) -> Sequence[str]:
        """See `Servers`."""
        rows: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return sorted(str(row["NodeID"]) for row in rows if row["Alive"])

    def call(self, node: str, method: str, *arguments: Any) -> RayAnswer:
        """See `Servers`."""
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


class RayAnswer:
    """See `Answer`."""

    def __init__(self, reference: Any, lost: Callable[[], None], text: str = "") -> None:
        """`lost` is called if the actor does not answer. `text`: why there was no call."""
        self._reference, self._lost, self._text = reference, lost, text

    def get(self, check: Callable[[], None] | None = None) -> Any:
        """See `Answer`."""
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
