"""Every damage to a file of the newest point is found and named, and the next older point is used."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.errors import ResumePointError, StorageError
from orchestrator.resume.points import COMMIT, DOCUMENTS
from orchestrator.resume.sealed import SealError, seal, unseal
from orchestrator.resume.store import RunStore
from orchestrator.storage import Storage
from tests.resume.crashfs import ModelDisk
from tests.resume.samples import key, no_sleep, write_point

PARTS = [f"{group}/0000{rank}-of-00002.safetensors" for group in ("model", "optimizer") for rank in range(2)]
FILES = [COMMIT, *DOCUMENTS, *PARTS]


def truncate(share: float) -> Callable[[Path, Path], None]:
    def damage(file: Path, other: Path) -> None:
        os.truncate(file, min(int(file.stat().st_size * share), file.stat().st_size - 1))

    return damage


def flip(share: float, bit: int) -> Callable[[Path, Path], None]:
    def damage(file: Path, other: Path) -> None:
        data = bytearray(file.read_bytes())
        data[min(int(len(data) * share), len(data) - 1)] ^= 1 << bit
        file.write_bytes(data)

    return damage


def delete(file: Path, other: Path) -> None:
    file.unlink()


def grow(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def zeros(file: Path, other: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def of_another_step(file: Path, other: Path) -> None:
    assert file.read_bytes() != other.read_bytes(), "else nothing is damaged"
    shutil.copyfile(other, file)


def folder_instead(file: Path, other: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = {
    "empty": truncate(0.0),
    "cut in half": truncate(0.5),
    "cut by a byte": truncate(1.0),
    "deleted": delete,
    "a byte more": grow,
    "zeros": zeros,
    "of another step": of_another_step,
    "a folder": folder_instead,
    **{f"bit {bit} at {share}": flip(share, bit) for share in (0.0, 0.3, 0.6, 1.0) for bit in (0, 5)},
}


@pytest.fixture(scope="module")
def two_points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the points of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("run")
    store = RunStore(Storage(str(folder)))
    for step in (10, 20):
        write_point(store, key(step))
    return folder


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_the_older_point_is_used(two_points, tmp_path, file, damage) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_points, run)
    store = RunStore(Storage(str(run)))
    older, newer = key(10).point_name, key(20).point_name
    damage(run / "points" / newer / file, run / "points" / older / file)

    if file == COMMIT and not (run / "points" / newer / COMMIT).is_file():
        assert store.point_names() == [older], "without COMMIT there is no point"
    else:
        assert store.point_names() == [older, newer]
    found, skipped = store.healthy_newest([older, newer])
    assert found is not None
    assert found.name == older
    assert {(d.point, d.file) for d in skipped} == {(newer, file)}
    assert store.verify_point(older) == []


def test_a_whole_point_is_healthy_and_reads_back_as_written(two_points) -> None:
    store = RunStore(Storage(str(two_points)))
    point, skipped = store.healthy_newest(store.point_names())
    assert point is not None
    assert skipped == ()
    assert point == store.read_point(point.name)
    assert point.key == key(20)
    assert point.cursor.consumed_samples == 160
    assert point.config["train.lr"] == 1 / 20
    assert (point.commit.world_size, point.commit.save_blocked_s, point.commit.save_s) == (2, 0.2, 1.5)
    assert [t.name for t in store.read_parts(point.name)] == ["w0", "w1", "w0", "w1"]


def test_no_single_flipped_bit_of_commit_goes_unnoticed(two_points) -> None:
    data = (two_points / "points" / key(20).point_name / COMMIT).read_bytes()
    for position in range(len(data) * 8):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(SealError):
            unseal(bytes(changed))


def test_a_commit_that_lists_a_file_outside_its_folder_is_damaged(two_points, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_points, run)
    commit = run / "points" / key(20).point_name / COMMIT
    content = unseal(commit.read_bytes())
    content["files"][0]["path"] = "../../../etc/passwd"
    commit.write_bytes(seal(content))
    damages = RunStore(Storage(str(run))).verify_point(key(20).point_name)
    assert [d.file for d in damages] == [COMMIT]


def test_if_no_point_is_healthy_the_start_is_refused_with_every_reason(two_points, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_points, run)
    names = [key(10).point_name, key(20).point_name]
    for name in names:
        delete(run / "points" / name / PARTS[0], run)
    with pytest.raises(ResumePointError, match="none of the 2") as caught:
        RunStore(Storage(str(run))).healthy_newest(names)
    assert all(name in str(caught.value) for name in names)


def test_a_run_without_points_has_no_newest(tmp_path) -> None:
    assert RunStore(Storage(str(tmp_path))).healthy_newest([]) == (None, ())


class Unreadable(ModelDisk):
    """A disk that answers every read with an input/output error."""

    def read(self, handle: int, num_bytes: int) -> bytes:
        raise OSError(5, "Input/output error")


def test_unreadable_storage_is_an_error_and_never_a_reason_to_fall_back() -> None:
    disk = ModelDisk()
    store = RunStore(Storage("/run", disk, no_sleep))
    for step in (10, 20):
        write_point(store, key(step))
    broken = RunStore(Storage("/run", Unreadable.of(disk.files()), no_sleep))
    with pytest.raises(StorageError, match="Input/output error"):
        broken.healthy_newest(broken.point_names())


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (self.mark, 0o755)


HOSTILE = [
    *FILES,
    ".metadata",
    "model/.metadata",
    "data.pkl",
    "model/pytorch_model.bin",
    "optimizer/state.pt",
    "COMMIT.tmp-00",
]


@pytest.mark.parametrize("file", HOSTILE)
def test_a_pickle_under_any_name_is_never_run(two_points, tmp_path, file) -> None:
    run, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(two_points, run)
    newer = key(20).point_name
    for protocol in (0, 4):
        (run / "points" / newer / file).write_bytes(pickle.dumps(Bomb(str(mark)), protocol=protocol))
        store = RunStore(Storage(str(run)))
        damaged = bool(store.verify_point(newer))
        assert damaged == (file in FILES), "what COMMIT does not list is no part of the point"
        found, _ = store.healthy_newest(store.point_names())
        assert found is not None
        assert found.name == (key(10) if damaged else key(20)).point_name
        for read in (store.read_point, store.read_parts):
            try:
                read(newer)
            except ResumePointError:
                continue
    assert not mark.exists()
    pickle.loads((run / "points" / newer / file).read_bytes())
    assert mark.exists(), "the pickle must be a live one, else the test shows nothing"


@pytest.mark.parametrize(
    "file", ["run.json", "attempts/0001.json", "attempts/0001.parent.json", "attempts/0001.end.json"]
)
def test_a_pickle_in_place_of_a_runs_own_file_is_never_run(tmp_path, file) -> None:
    mark = tmp_path / "mark"
    store = RunStore(Storage(str(tmp_path / "run")))
    (tmp_path / "run" / "attempts").mkdir(parents=True)
    (tmp_path / "run" / file).write_bytes(pickle.dumps(Bomb(str(mark))))
    if file == "run.json":
        with pytest.raises(ResumePointError, match="is not JSON"):
            store.read_run()
    store.claims()
    store.read_parent(1)
    store.read_end(1)
    assert not mark.exists()
