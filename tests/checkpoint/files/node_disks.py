"""Nodes of a test: a folder each, a server each, and a way to them that takes no cluster. A process on one of
them reaches the others' files only through their servers, as on real machines: once parts are written, the
disks are mounted elsewhere, so that the paths in COMMIT lead nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.files.part_file import write_part
from orchestrator.checkpoint.node_local.node_folder import PartsOnNode
from orchestrator.checkpoint.node_local.node_storage import NodeStorage, run_storage
from orchestrator.checkpoint.node_local.remote_nodes import NodeServer, ReachedNodes
from orchestrator.checkpoint.points.run_file import folder_on_nodes
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import UnreachableNodeError
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from tests.checkpoint.files.samples import part_of, saved
from tests.checkpoint.samples import CONFIG, cursor, key
from tests.planning.identities import IDENTITY


@dataclass
class Disks:
    """Some nodes and the storage that all of them see. `down`: they do not answer."""

    folder: Path
    names: Sequence[str]
    down: set[str] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)  # (node, what was asked of it)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self._mounted = 0
        self.servers = {name: NodeServer(self.disk(name), f"address of {name}") for name in self.names}

    def disk(self, name: str) -> str:
        """Where a node's folder lies now."""
        return str(self.folder / f"{name}-{self._mounted}")

    def mount_elsewhere(self) -> None:
        """All disks get other paths."""
        before = {name: self.disk(name) for name in self.names}
        self._mounted += 1
        for name, was in before.items():
            if os.path.exists(was):
                os.rename(was, self.disk(name))
            self.servers[name] = NodeServer(self.disk(name), f"address of {name}")

    def nodes(self, name: str) -> ReachedNodes:
        """As a process on this node reaches them."""
        self.now_s += 1000.0  # nothing holds that others have found out
        return ReachedNodes(Way(self, name), self.disk(name), lambda: self.now_s)

    def storage(self, name: str) -> NodeStorage:
        """The run's, as that process sees it."""
        return run_storage(str(self.folder / "run"), self.nodes(name))

    def store(self, name: str) -> RunStore:
        """See `storage`."""
        return RunStore(self.storage(name))

    def commit(self, at: StateKey, where: Sequence[str], run_id: str) -> str:
        """A point whose ranks run on these nodes; its name."""
        layout, votes = Layout(num_shards=len(where), num_replicas=1), []
        for node in where:
            self.servers[node].workers_came()
        for rank, node in enumerate(where):
            storage = self.storage(node)
            on_node = PartsOnNode(
                self.disk(node),
                folder_on_nodes(storage),
                f"address of {node}",
                self.nodes(node),
                self.said.append,
            )
            part = part_of(layout, rank, seed=at.step, point=at.point_name)
            entry = write_part(on_node.storage, at.point_name, part)
            votes.append(
                Vote(
                    key=at,
                    rank=rank,
                    world_size=len(where),
                    cursor=cursor(at),
                    optimizer_steps=at.step,
                    files=(entry,),
                    tensors=tuple(saved().values()) if rank == 0 else (),
                    save_blocked_s=0.0,
                    records=(),
                    layout=(len(where), 1),
                    sums=part.sums,
                    nodes=on_node.placed(at.point_name, entry, lambda: None),
                )
            )
        return self.store(where[0]).commit_point(votes, CONFIG, {"rule": "none"}, None, run_id=run_id).name


@dataclass
class Way:
    """See `Servers`: the one of a process on `name`."""

    disks: Disks
    name: str

    def own(self) -> str:
        return self.name

    def all(self) -> Sequence[str]:
        return [name for name in self.disks.names if name not in self.disks.down]

    def call(self, node: str, method: str, *arguments: Any) -> Given:
        self.disks.calls.append((node, method))
        return Given(self.disks, node, lambda: getattr(self.disks.servers[node], method)(*arguments))


@dataclass
class Given:
    """See `Answer`."""

    disks: Disks
    node: str
    act: Callable[[], Any]

    def get(self, check: Callable[[], None] | None = None) -> Any:
        if self.node in self.disks.down:
            raise UnreachableNodeError(f"{self.node} is down")
        return self.act()


RANKS = ("a", "a", "b", "c")  # on which node each runs


def committed_point(disks: Disks, step: int = 4, ranks: tuple[str, ...] = RANKS) -> str:
    """The name of a point that the ranks made; no path in its COMMIT leads anywhere any more."""
    store = disks.store(ranks[0])
    run = store.read_run() or store.create_run("tiny", IDENTITY)
    name = disks.commit(key(step), ranks, run.id)
    disks.mount_elsewhere()
    return name
