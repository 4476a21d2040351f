"""Nodes that come to a launch with `resume.node_folder` when it already trains. Nodes are folders here
(`tests.checkpoint.files.node_disks`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.checkpoint.node_local.node_folder import ASK_AGAIN_S
from orchestrator.checkpoint.node_local.remote_nodes import NodeServer
from orchestrator.elastic.supervision.policy import NodeFacts
from orchestrator.launch.on_ray.node_disks import NodeDisks
from tests.checkpoint.files.node_disks import Disks, Way

LIMIT_S = 60.0


def facts(*names: str) -> tuple[NodeFacts, ...]:
    """So many live nodes with 4 CPUs each."""
    return tuple(
        NodeFacts(
            node_id=name,
            host=f"host-{name}",
            is_head=name == "a",
            cpus=4.0,
            gpus=0.0,
            free_cpus=4.0,
            free_gpus=0.0,
        )
        for name in names
    )


def with_room(disks: NodeDisks, names: str) -> set[str]:
    return {node.node_id for node in disks.with_room(facts(*names)) if node.free_cpus}


def until(happened: Callable[[], bool]) -> None:
    """Nodes answer in threads."""
    never, deadline = threading.Event(), time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline
        never.wait(0.01)


def test_a_node_that_comes_without_the_folder_gets_no_workers_and_is_named_and_the_others_train_on(
    tmp_path: Path,
) -> None:
    nodes, said, now = Disks(tmp_path, ("a", "b", "c")), list[str](), [0.0]
    nodes.servers["c"] = NodeServer("$A_VARIABLE_THAT_NOBODY_SET/points", "address of c")
    disks = NodeDisks(nodes.disk("a"), Way(nodes, "a"), said.append, lambda: now[0])
    nodes.names = ("a",)
    disks.require_room(0)
    nodes.names = ("a", "b", "c")
    assert "c" not in with_room(disks, "abc"), "not before it has answered"
    until(lambda: with_room(disks, "abc") == {"a", "b"} and bool(said))
    assert len(said) == 1
    assert "node host-c gets no workers" in said[0]
    assert "set the variable on every node" in said[0]
    assert {node.node_id for node in disks.with_room(facts("a", "b", "c"))} == {*"abc"}, "it may still drain"

    nodes.servers["c"] = NodeServer(nodes.disk("c"), "address of c")
    now[0] += ASK_AGAIN_S
    until(lambda: with_room(disks, "abc") == {*"abc"})
    assert len(said) == 1


def test_a_node_that_does_not_answer_gets_workers_when_it_does(tmp_path: Path) -> None:
    nodes, said = Disks(tmp_path, ("a", "b")), list[str]()
    disks = NodeDisks(nodes.disk("a"), Way(nodes, "a"), said.append)
    nodes.names = ("a",)
    disks.require_room(0)
    nodes.names, nodes.down = ("a", "b"), {"b"}
    until(lambda: nodes.calls.count(("b", "home")) > 3 or bool(with_room(disks, "ab") - {"a"}))
    assert with_room(disks, "ab") == {"a"}
    nodes.down = set()
    until(lambda: with_room(disks, "ab") == {*"ab"})
    assert not said


def test_without_a_node_folder_nobody_is_asked(tmp_path: Path) -> None:
    nodes = Disks(tmp_path, ("a", "b"))
    assert with_room(NodeDisks(None, Way(nodes, "a")), "ab") == {*"ab"}
    assert not nodes.calls
