"""Points whose parts lie on the disks of nodes: read through any node, kept through the loss of one, named
when two are lost, deleted everywhere. Nodes are folders here (`tests.checkpoint.files.node_disks`).
"""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.checkpoint.files.part_file import write_part
from orchestrator.checkpoint.files.part_writer import PartCancelled, PartWriter
from orchestrator.checkpoint.node_local.node_folder import (
    NODE,
    NodeStore,
    PartsOnNode,
    expanded,
    make_node,
    read_node,
)
from orchestrator.checkpoint.node_local.node_storage import NodeStorage, run_storage
from orchestrator.checkpoint.node_local.remote_nodes import NodeServer
from orchestrator.checkpoint.points.points import COMMIT, Point
from orchestrator.checkpoint.points.store import PointStatus, RunStore, remove_leftovers
from orchestrator.errors import ResourceError, ResumePointError, StorageError, UnreachableNodeError
from orchestrator.inspect.status.integrity import Verifying
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.points import FileEntry, NodePlace
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import LocalStore
from tests.checkpoint.files.node_disks import RANKS, Disks, committed_point
from tests.checkpoint.files.samples import POINT, STATE, bytes_of, job_of, part_of
from tests.checkpoint.samples import key
from tests.checkpoint.saves import commit_parts, read_state
from tests.planning.identities import IDENTITY
from tests.raising import raises


def state_at(step: int) -> dict[tuple[str, str], bytes]:
    return {(each.group, each.name): bytes_of(each, step) for each in STATE}


def files_on(disks: Disks, node: str) -> list[str]:
    """The parts on a node's disk."""
    return sorted(path.name for path in Path(disks.disk(node)).glob("*/points/*/state/*"))


def test_any_node_reads_a_point_whose_parts_lie_on_others(disks: Disks) -> None:
    name = committed_point(disks)
    assert not Path(disks.folder, "run", "points", name, "state").exists()
    assert sum(len(files_on(disks, node)) for node in "abc") == 2 * len(RANKS), "each part and its copy"
    for node in "abc":
        assert read_state(disks.store(node), name) == state_at(4)
        assert disks.store(node).verify_point(name) == []
        assert disks.store(node).verify_point(name, fast=True) == []


def test_a_process_reads_its_own_nodes_parts_without_asking_anybody(disks: Disks) -> None:
    name = committed_point(disks, ranks=("a", "a"))
    disks.calls.clear()
    assert read_state(disks.store("a"), name) == state_at(4)
    assert disks.calls == []


def test_a_lost_node_costs_no_point_for_its_neighbour_has_copies(disks: Disks) -> None:
    name = committed_point(disks)
    for lost in "abc":
        disks.down = {lost}
        for node in {*"abc"} - {lost}:
            assert read_state(disks.store(node), name) == state_at(4)
            assert disks.store(node).verify_point(name) == []


def test_where_a_node_and_its_copies_are_gone_the_message_names_both_and_nothing_is_damaged(
    disks: Disks,
) -> None:
    older, name = committed_point(disks, step=4), committed_point(disks, step=8)
    disks.down = {"b", "c"}
    store = disks.store("a")
    # of the three nodes each keeps one other's copies: one rank has both of its places on these two
    with raises(UnreachableNodeError, "storage.unreachable_node", name) as seen:
        store.verify_point(name)
    assert re.search("address of [bc]", str(seen.value))
    with raises(UnreachableNodeError, "storage.unreachable_node", name) as seen:
        store.healthy_newest([older, name])
    assert "resume.from=" not in str(seen.value), "no older point can be reached either"
    assert store.verify_point(name, fast=True) == [], "a look without a cluster leaves out what it cannot see"
    assert not store.is_quarantined(name)
    disks.down = set()
    assert disks.store("a").verify_point(name) == []


def test_an_older_point_is_never_taken_silently_and_is_named(disks: Disks) -> None:
    store = disks.store("a")
    store.create_run("tiny", IDENTITY)
    older = committed_point(disks, step=4, ranks=("a",))
    name = committed_point(disks, step=8, ranks=("b", "c"))
    disks.down = {"b", "c"}
    with raises(UnreachableNodeError, "storage.unreachable_node", f"resume.from={older}"):
        disks.store("a").healthy_newest([older, name])
    store = disks.store("a")
    newest, _ = store.healthy_newest([older, name], fast=True)
    assert newest is not None
    assert newest.name == name, "a look by sizes leaves out what it does not see"
    with raises(UnreachableNodeError, "storage.unreachable_node", f"resume.from={older}"):
        store.require_reached(newest, [older])
    disks.down = {"c"}
    disks.store("a").require_reached(newest, [older])


def test_wrong_bytes_in_one_place_are_read_from_the_other_and_in_both_they_are_damage(disks: Disks) -> None:
    name = committed_point(disks)
    paths = sorted(disks.folder.glob(f"?-*/*/points/{name}/state/00002-*"))
    assert len(paths) == 2
    for number, path in enumerate(paths):
        for node in "abc":
            if number == 0:
                assert disks.store(node).verify_point(name) == []
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        if number == 0:
            for node in "abc":
                assert disks.store(node).verify_point(name) == []
                assert read_state(disks.store(node), name) == state_at(4)
    for node in "abc":
        (damage,) = disks.store(node).verify_point(name)
        assert damage.file.startswith("state/00002-")
        with raises(ResumePointError, "point.damaged", "00002"):
            read_state(disks.store(node), name)


def test_a_file_that_one_place_has_lost_is_gone_only_if_the_other_is_reached_and_lacks_it_too(
    disks: Disks,
) -> None:
    name = committed_point(disks)
    first, second = sorted(disks.folder.glob(f"?-*/*/points/{name}/state/00002-*"))
    first.unlink()
    holder = second.relative_to(disks.folder).parts[0].partition("-")[0]
    reader = next(node for node in "abc" if node != holder)
    assert read_state(disks.store(reader), name) == state_at(4)
    disks.down = {holder}
    with raises(UnreachableNodeError, "storage.unreachable_node", f"address of {holder}"):
        disks.store(reader).verify_point(name)
    disks.down = set()
    second.unlink()
    (damage,) = disks.store(reader).verify_point(name)
    assert damage.reason == "is missing"


def test_a_disk_that_is_not_mounted_has_lost_nothing(disks: Disks) -> None:
    name = committed_point(disks, ranks=("a",))
    disk = Path(disks.disk("a"))
    disk.rename(disk.with_name("away"))
    disk.mkdir()  # the place where it was mounted
    with raises(UnreachableNodeError, "storage.unreachable_node", "file 0 "):
        disks.store("a").verify_point(name)


class GoesMeanwhile:
    """See `Nodes`: a disk that is taken out after it was found, and before it is read."""

    advice = "put it in again"

    def __init__(self, empty: Path) -> None:
        self._answers: list[NodeStore | None] = [LocalStore(str(empty)), None]

    def store(self, place: NodePlace) -> NodeStore | None:
        return self._answers.pop(0) if self._answers else None

    def everywhere(self, run: str) -> list[NodeStore]:
        return []


def test_a_disk_that_goes_while_it_is_read_has_lost_nothing(disks: Disks) -> None:
    name = committed_point(disks, ranks=("a",))
    storage = run_storage(str(disks.folder / "run"), GoesMeanwhile(disks.folder / "empty"))
    with raises(UnreachableNodeError, "storage.unreachable_node", "file 0 "):
        storage.size(f"points/{name}/state/00000-of-00001.safetensors")


def test_deleting_a_point_empties_every_node_that_is_reached_and_a_start_the_others_later(
    disks: Disks,
) -> None:
    name = committed_point(disks)
    disks.down = {"c"}
    disks.store("a").delete_point(name)
    assert files_on(disks, "a") == files_on(disks, "b") == []
    assert files_on(disks, "c")
    disks.down = set()
    store = disks.store("a")
    assert store.left_on_nodes() == [name]
    deleted = PointStatus(kept=frozenset(), deleted=frozenset({name}))
    assert [left.point for left in remove_leftovers(store, 2, deleted)] == [name]
    assert files_on(disks, "c") == []


def test_a_start_leaves_parts_of_committed_points_where_they_are(disks: Disks) -> None:
    name = committed_point(disks)
    before = [files_on(disks, node) for node in "abc"]
    store = disks.store("a")
    assert remove_leftovers(store, 9, PointStatus(kept=frozenset(), deleted=frozenset())) == ()
    assert [files_on(disks, node) for node in "abc"] == before
    assert store.verify_point(name) == []


def test_parts_of_a_save_that_was_given_up_are_discarded_on_every_node(disks: Disks) -> None:
    store = disks.store("a")
    store.create_run("tiny", IDENTITY)
    name = committed_point(disks, step=4)
    (disks.folder / "run" / "points" / name / COMMIT).unlink()
    disks.store("b").discard(name)
    assert [files_on(disks, node) for node in "abc"] == [[], [], []]


def test_a_run_goes_on_with_another_node_folder_and_with_none(disks: Disks) -> None:
    name = committed_point(disks)
    where = {node: disks.disk(node) for node in disks.names}
    there = disks.commit(key(8), RANKS, disks.store("a").read_run().id)  # type: ignore[union-attr]
    # this one's COMMIT names where its disks are: a process without the key finds it
    assert where["a"] in {each.node.folder.rpartition("/")[0] for each in disks.storage("a").nodes_of(there)}
    plain = RunStore(run_storage(str(disks.folder / "run")))
    assert plain.verify_point(there) == []
    assert read_state(plain, there) == state_at(8)
    with pytest.raises(UnreachableNodeError):
        plain.verify_point(name)
    plain.delete_point(there)
    assert not list(disks.folder.glob(f"?-*/*/points/{there}"))
    (row,) = Verifying(store=plain).rows([name])
    assert (row["healthy"], row["damaged"]) == (None, [])
    assert "needs nodes" in row["away"]


def test_points_in_the_runs_storage_and_points_on_nodes_are_one_run(disks: Disks) -> None:
    name = committed_point(disks)
    store, plain = disks.store("a"), RunStore(Storage(str(disks.folder / "run")))
    run = store.read_run()
    assert run is not None
    shared = commit_parts(plain, key(12), Layout(num_shards=2, num_replicas=1), run.id)
    commit = (disks.folder / "run" / "points" / shared / COMMIT).read_bytes()
    assert b"nodes" not in commit, "as older versions read it"
    assert disks.storage("a").nodes_of(shared) == ()
    assert [read_state(store, each) for each in (name, shared)] == [state_at(4), state_at(12)]


def test_a_fork_takes_the_parts_from_their_nodes_into_its_own_storage(disks: Disks) -> None:
    name = committed_point(disks)
    store = disks.store("a")
    fork = RunStore(store.storage.beside(str(disks.folder / "fork")))
    run = fork.create_run("fork", IDENTITY)
    at = StateKey(attempt=0, generation=1, step=4)
    # COMMIT of a point without run_id belongs to no run that has one
    taken: Point = fork.take_point(store, store.read_point(name), at, run.id)
    assert taken.commit.nodes == ()
    alone = RunStore(Storage(str(disks.folder / "fork")))
    assert read_state(alone, taken.name) == state_at(4)
    assert alone.verify_point(taken.name) == []


def test_a_copy_that_fails_costs_the_copy_and_is_said(disks: Disks) -> None:
    store = disks.store("a")
    run = store.create_run("tiny", IDENTITY)
    part = part_of(Layout(num_shards=1, num_replicas=1), 0, seed=4, point=key(4).point_name)
    # what another process left lies where the copy would
    for node in "bc":
        Storage(f"{disks.disk(node)}/tiny-{run.id}").write(f"points/{key(4).point_name}/{part.path}", b"else")
        disks.servers[node].workers_came()
    name = disks.commit(key(4), ("a",), run.id)
    assert len(disks.said) == 1
    assert "has no copy on another node" in disks.said[0]
    assert [each.copies for each in disks.storage("a").nodes_of(name)] == [()]
    assert disks.store("a").verify_point(name) == []


def test_a_copy_that_nobody_needs_any_more_ends_and_leaves_no_file(tmp_path: Path) -> None:
    source, server = Storage(str(tmp_path / "own" / "run")), NodeServer(str(tmp_path / "other"), "")
    entry = write_part(source, POINT, part_of(Layout(num_shards=1, num_replicas=1), 0))
    server.stop_keeping("token")
    with pytest.raises(PartCancelled):
        server.keep(source._store, "run", f"points/{POINT}/{entry.path}", entry, "token")
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file() and path.name != NODE]


def test_a_copy_whose_bytes_changed_on_the_way_is_no_copy(tmp_path: Path) -> None:
    source, server = Storage(str(tmp_path / "own" / "run")), NodeServer(str(tmp_path / "other"), "")
    entry = write_part(source, POINT, part_of(Layout(num_shards=1, num_replicas=1), 0))
    path = f"points/{POINT}/{entry.path}"
    file = tmp_path / "own" / "run" / path
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with raises(StorageError, "storage.copy_differs", path):
        server.keep(source._store, "run", path, entry, "token")
    assert not [path for path in (tmp_path / "other").rglob("*.safetensors")]


def test_a_node_is_known_by_its_folder_which_says_it_for_ever(tmp_path: Path) -> None:
    made = make_node(str(tmp_path / "disk"), "10.0.0.7")
    assert made == make_node(str(tmp_path / "disk"), "another address") == read_node(str(tmp_path / "disk"))
    assert make_node(str(tmp_path / "other"), "10.0.0.7").id != made.id
    (tmp_path / "disk" / NODE).write_text("{}")
    assert read_node(str(tmp_path / "disk")) is None
    with raises(StorageError, "storage.node_identity", f"{tmp_path}/disk/{NODE}"):
        make_node(str(tmp_path / "disk"), "")


def test_a_folder_is_what_its_node_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/local/7")
    assert expanded("$SCRATCH/points/") == "/local/7/points"
    assert expanded("~") == os.path.expanduser("~")
    monkeypatch.delenv("SCRATCH")
    with raises(ResourceError, "config.node_folder_not_absolute", "$SCRATCH/points"):
        expanded("$SCRATCH/points")


def test_folders_that_cannot_be_made_are_named_before_anything_starts(disks: Disks) -> None:
    assert set(disks.nodes("a").require_folders()) == {"a", "b", "c"}
    disks.mount_elsewhere()
    Path(disks.disk("b")).rename(disks.folder / "b-away")
    Path(disks.disk("b")).write_text("a file")
    with raises(ResourceError, "storage.node_folder_unusable", "node b: ") as seen:
        disks.nodes("a").require_folders()
    assert "node a" not in str(seen.value)


def test_a_storage_with_nodes_pickles(disks: Disks) -> None:
    name = committed_point(disks, ranks=("a",))
    storage = NodeStorage(disks.storage("a")._store, run_storage(str(disks.folder)).reached)
    again = pickle.loads(pickle.dumps(storage))
    assert again.nodes_of(name) == disks.storage("a").nodes_of(name)


class EndlessCopies:
    """See `Copies`: another node that never has it."""

    def __init__(self) -> None:
        self.begun, self._never = threading.Event(), threading.Event()

    def keep(
        self, own: NodePlace, path: str, entry: FileEntry, check: Callable[[], None]
    ) -> NodePlace | None:
        self.begun.set()
        while True:
            check()
            self._never.wait(0.01)


def test_a_save_that_is_called_off_while_it_is_copied_does_not_wait_for_the_copy(tmp_path: Path) -> None:
    copies, disk = EndlessCopies(), str(tmp_path / "disk")
    on_node = PartsOnNode(disk, "run", "10.0.0.7", copies, lambda text: None)
    writer = PartWriter(on_node.storage, lambda text: None, process_from_bytes=1 << 40, placed=on_node.placed)
    answer = writer.write(job_of(tmp_path / "buffer"))
    assert copies.begun.wait(60.0)
    assert not answer.done(), "a part has its copy before the rank votes"
    writer.cancel()
    written = answer.result(60.0)
    node = read_node(disk)
    assert node is not None
    assert [(place.id, place.folder) for place in written.nodes] == [(node.id, f"{disk}/run")]
    assert (tmp_path / "disk" / "run" / "points" / POINT / written.entry.path).exists()
    writer.close()
