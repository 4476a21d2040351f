"""Every disk that a power cut could leave while the real code writes, commits and deletes points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from orchestrator.checkpoint.files.part_file import FOLDER
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import point_path
from orchestrator.planning.state.state_layout import Layout, layout_of
from orchestrator.records.points import FileEntry
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, no_sleep, write_point
from tests.checkpoint.saves import commit_parts
from tests.storage.crashfs import ModelDisk

BLOCK = 700


@dataclass
class Promises:
    """What others were told after a number of disk calls: this point, or a newer one, stays whole."""

    told: list[tuple[int, str]]

    def newest(self, num_calls: int) -> str | None:
        return max((name for calls, name in self.told if calls < num_calls), default=None)


def save_three_keep_one(store: RunStore, disk: ModelDisk) -> Promises:
    """Three saves in a row; each is acknowledged, then the one before it is deleted."""
    promises = Promises([])
    names: list[str] = []
    for step in (10, 20, 30):
        names.append(write_point(store, key(step)).name)
        promises.told.append((len(disk.history), names[-1]))
        if len(names) > 1:
            store.delete_point(names.pop(0))
    return promises


def explore(
    make_store: Callable[[ModelDisk], RunStore], save: Callable[[RunStore, ModelDisk], Promises]
) -> tuple[int, set[str]]:
    """The number of disks looked at, and what was wrong with any of them."""
    disk = ModelDisk(block=BLOCK)
    promises = save(make_store(disk), disk)
    wrong, count = set(), 0
    checked: dict[frozenset[tuple[str, bytes | None]], tuple[list[str], list[str]]] = {}
    for num_calls, _, files in disk.crashes():
        count += 1
        if frozenset(files.items()) not in checked:
            store = RunStore(Storage("/run", ModelDisk.of(files), no_sleep))
            names = store.point_names()
            checked[frozenset(files.items())] = names, [n for n in names if not store.verify_point(n)]
        names, whole = checked[frozenset(files.items())]
        if names != whole:
            wrong.add("a torn point is committed")
        promised = promises.newest(num_calls)
        if promised is not None and max(whole, default="") < promised:
            wrong.add("an acknowledged point is lost")
    return count, wrong


def real_store(disk: ModelDisk) -> RunStore:
    return RunStore(Storage("/run", disk, no_sleep))


def test_no_power_cut_loses_an_acknowledged_point_or_leaves_a_torn_one_committed() -> None:
    count, wrong = explore(real_store, save_three_keep_one)
    assert wrong == set()
    assert count > 500, "the exploration must be one"


@pytest.mark.parametrize("layout", [layout_of(3, None), layout_of(4, 2)], ids=["fsdp2", "hsdp"])
def test_no_power_cut_does_so_to_sharded_points_of_many_tensors(layout: Layout) -> None:
    def save(store: RunStore, disk: ModelDisk) -> Promises:
        promises = Promises([])
        for step in (10, 20):
            name = commit_parts(store, key(step), layout)
            promises.told.append((len(disk.history), name))
        store.delete_point(key(10).point_name)
        return promises

    count, wrong = explore(real_store, save)
    assert wrong == set()
    assert count > 500, "the exploration must be one"


class CommitFirst(Storage):
    """Planted mistake: COMMIT is written before the documents it lists."""

    def __init__(self, disk: ModelDisk) -> None:
        super().__init__("/run", disk, no_sleep)
        self.later: list[tuple[str, bytes]] = []

    def write(self, path: str, data: bytes | memoryview) -> FileEntry:
        if not path.endswith(".json"):
            return super().write(path, data)
        self.later.append((path, bytes(data)))
        scratch = Storage("/run", ModelDisk(), no_sleep)
        return scratch.write(path, data)

    def create(self, path: str, data: bytes) -> bool:
        created = super().create(path, data)
        for document, content in self.later:
            super().write(document, content)
        self.later.clear()
        return created


class NoFolderSync(Storage):
    """Planted mistake: names are never made durable."""

    def sync(self, folder: str) -> None:
        return


class NoFileSync(ModelDisk):
    """Planted mistake: contents are never made durable."""

    def fsync(self, handle: int) -> None:
        self._mark("no fsync")


class PartsFirst(RunStore):
    """Planted mistake: a point's files are deleted before its COMMIT."""

    def delete_point(self, name: str) -> None:
        self.storage.delete_folder(point_path(name, FOLDER))
        super().delete_point(name)


def overwrite_in_place(store: RunStore, disk: ModelDisk) -> Promises:
    """Planted mistake: there is one place for the point, emptied for the next."""
    promises = Promises([])
    for _ in range(2):
        if store.point_names():
            store.delete_point(key(10).point_name)
        name = write_point(store, key(10)).name
        promises.told.append((len(disk.history), name))
    return promises


def test_the_exploration_catches_a_writer_that_commits_first() -> None:
    assert (
        "a torn point is committed"
        in explore(lambda disk: RunStore(CommitFirst(disk)), save_three_keep_one)[1]
    )


def test_the_exploration_catches_a_writer_that_overwrites() -> None:
    assert "an acknowledged point is lost" in explore(real_store, overwrite_in_place)[1]


def test_the_exploration_catches_a_writer_that_syncs_no_folder() -> None:
    assert explore(lambda disk: RunStore(NoFolderSync("/run", disk, no_sleep)), save_three_keep_one)[1]


def test_the_exploration_catches_a_writer_that_deletes_parts_first() -> None:
    assert (
        "a torn point is committed"
        in explore(lambda disk: PartsFirst(Storage("/run", disk, no_sleep)), save_three_keep_one)[1]
    )


def test_the_exploration_catches_a_disk_that_syncs_no_file() -> None:
    disk = NoFileSync(block=BLOCK)
    name = write_point(real_store(disk), key(10)).name
    disk.history = disk.history[-1:]  # after the acknowledgement
    left = (real_store(ModelDisk.of(files)) for _, _, files in disk.crashes())
    assert any(store.point_names() != [name] or store.verify_point(name) for store in left)
