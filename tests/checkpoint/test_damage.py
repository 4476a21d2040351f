"""Every damage to a file of the newest point is found and named, and the next older point is used."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from orchestrator.checkpoint.points.points import COMMIT, DOCUMENTS, files_digest
from orchestrator.checkpoint.points.run_file import RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import OtherFormatError, ResumePointError, StorageError
from orchestrator.history.claims.claim_files import START, UNREADABLE, AttemptEnd, UnreadableFile
from orchestrator.history.claims.claims import Claim, ClaimParent
from orchestrator.json_form import SealError, decode, seal, unseal
from orchestrator.records.points import FileEntry
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, no_sleep, write_point
from tests.planning.identities import IDENTITY
from tests.raising import check_error, raises
from tests.storage.crashfs import ModelDisk

PARTS = [f"state/0000{rank}-of-00002.safetensors" for rank in range(2)]
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
    if (file, damage) == ("parts.json", of_another_step):
        pytest.skip("parts.json is the same for all steps")
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
    assert list(store.read_manifest(point.name).tensors) == [("model", "w"), ("optimizer", "w")]


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
    with raises(ResumePointError, "point.none_healthy", " 2 ", *names, PARTS[0]):
        RunStore(Storage(str(run))).healthy_newest(names)


def test_a_run_without_points_has_no_newest(tmp_path) -> None:
    assert RunStore(Storage(str(tmp_path))).healthy_newest([]) == (None, ())


class Unreadable(ModelDisk):
    """A disk that answers every read with an input/output error."""

    def read(self, handle: int, into: memoryview) -> int:
        raise OSError(5, "Input/output error")


def test_unreadable_storage_is_an_error_and_never_a_reason_to_fall_back() -> None:
    disk = ModelDisk()
    store = RunStore(Storage("/run", disk, no_sleep))
    for step in (10, 20):
        write_point(store, key(step))
    broken = RunStore(Storage("/run", Unreadable.of(disk.files()), no_sleep))
    with raises(StorageError, "storage.failed", "EIO"):
        broken.healthy_newest(broken.point_names())


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (self.mark, 0o755)


ADVERSARIAL = [
    *FILES,
    ".metadata",
    "state/.metadata",
    "data.pkl",
    "state/pytorch_model.bin",
    "state/state.pt",
    "COMMIT.tmp-00",
]


@pytest.mark.parametrize("file", ADVERSARIAL)
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
        for read in (store.read_point, store.read_manifest):
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
        with raises(ResumePointError, "run.damaged_run_file", "JSON"):
            store.read_run()
    store.claims()
    store.read_parent(1)
    store.read_end(1)
    assert not mark.exists()


def changed(content: Any) -> Iterator[tuple[str, Any]]:
    """The document with every field, at every depth, made null, of another type, missing, and with one more
    beside it.
    """
    for name in content if isinstance(content, dict) else range(len(content)):
        for value in (None, "x", -1, 1.5, True, [], {}, [None], {"x": None}):
            if value != content[name] or type(value) is not type(content[name]):
                yield f"{name}={value!r}", replaced(content, name, value)
        yield f"{name} missing", without(content, name)
        if isinstance(content[name], dict | list):
            for what, inner in changed(content[name]):
                yield f"{name}.{what}", replaced(content, name, inner)
    if isinstance(content, dict):
        yield "one more", {**content, "x": 1}


def replaced(content: Any, name: Any, value: Any) -> Any:
    after = copy.deepcopy(content)
    after[name] = value
    return after


def without(content: Any, name: Any) -> Any:
    after = copy.deepcopy(content)
    del after[name]
    return after


def test_a_commit_with_any_field_wrong_is_damage_of_that_file(two_points, tmp_path) -> None:
    run, name = tmp_path / "run", key(20).point_name
    shutil.copytree(two_points, run)
    store, commit = RunStore(Storage(str(run))), run / "points" / name / COMMIT
    whole = unseal(commit.read_bytes())
    # these are not compared with anything: any value of their type is as good
    free = ("optimizer_steps", "save_blocked_s", "save_s", "parent", "run_id")
    count = 0
    for what, content in [*changed(whole), ("a list", [whole]), ("nothing", None), ("a text", "x")]:
        commit.write_bytes(seal(content))
        count += 1
        try:
            damages = store.verify_point(name)
        except OtherFormatError:
            assert what.startswith("format="), what
            continue
        if damages:
            assert {damage.file for damage in damages} <= {COMMIT, "parts.json"}, what
            assert damages[0].file == COMMIT or what.startswith("weights_digest="), what
        else:
            assert what.startswith(free), what
            assert isinstance(content, dict)
            kinds = {field: type(whole[field]) for field in free if field != "parent"}
            taken = {field: content.get(field, "") for field in kinds}
            assert all(
                type(v) is kinds[f] or (kinds[f] is float and type(v) is int) for f, v in taken.items()
            )
            assert content.get("parent") is None or what.startswith("parent")
    assert count > 300


def test_a_file_list_that_is_no_list_is_damage(two_points, tmp_path) -> None:
    run, name = tmp_path / "run", key(20).point_name
    shutil.copytree(two_points, run)
    commit = run / "points" / name / COMMIT
    commit.write_bytes(seal({**unseal(commit.read_bytes()), "files": None}))
    (damage,) = RunStore(Storage(str(run))).verify_point(name)
    assert damage.file == COMMIT
    assert "COMMIT.files: expected a list, found None" in damage.reason


@pytest.mark.parametrize("file", ["cursor.json", "parts.json", "config.json"])
@pytest.mark.parametrize("content", [b"null", b"[]", b"{", b'{"tensors": null, "sources": null}'])
def test_a_document_that_a_writer_made_wrong_is_damage_of_that_file(tmp_path, file, content) -> None:
    store = RunStore(Storage(str(tmp_path)))
    name = write_point(store, key(10)).name
    folder = tmp_path / "points" / name
    (folder / file).write_bytes(content)
    commit = unseal((folder / COMMIT).read_bytes())
    for entry in commit["files"]:
        if entry["path"] == file:
            entry |= {"bytes": len(content), "digest": blake3(content).hexdigest()}
    files = tuple(decode(FileEntry, entry) for entry in commit["files"])
    (folder / COMMIT).write_bytes(seal({**commit, "files_digest": files_digest(files)}))
    if content.startswith(b'{"') and file == "config.json":
        assert store.verify_point(name) == [], "any object is a configuration"
        return
    assert [damage.file for damage in store.verify_point(name)] == [file]


@pytest.mark.parametrize("file", ["run.json", "0001.json", "0001.parent.json", "0001.end.json"])
def test_a_runs_own_document_with_any_field_wrong_is_what_it_is_for_a_torn_one(tmp_path, file) -> None:
    store = RunStore(Storage(str(tmp_path)))
    store.create_run("tiny", IDENTITY)
    store.claim(1, "aaaa", START, "host")
    store.write_parent(
        ClaimParent(attempt=1, parent=key(10, attempt=0), inherited=(key(10, attempt=0).point_name,))
    )
    store.write_end(1, "done", "all steps trained")
    path = tmp_path / (file if file == "run.json" else f"attempts/{file}")
    whole = unseal(path.read_bytes())
    seen: set[type] = set()
    for _, content in [*changed(whole), ("a list", [whole]), ("nothing", None)]:
        path.write_bytes(seal(content))
        if file == "run.json":
            try:
                seen.add(type(store.read_run()))
            except OtherFormatError:
                assert content["format"] != whole["format"]
            except ResumePointError as error:
                check_error(error, "run.damaged_run_file", "run.json")
                seen.add(ResumePointError)
        elif file == "0001.json":
            seen.add(type(store.read_claim(1).why != UNREADABLE and store.read_claim(1)))
        else:
            seen.add(type(store.read_parent(1) if "parent" in file else store.read_end(1)))
    expected: dict[str, set[type]] = {
        "run.json": {RunFile, ResumePointError},
        "0001.json": {Claim, bool},
        "0001.parent.json": {ClaimParent, UnreadableFile},
        "0001.end.json": {AttemptEnd, type(None)},
    }
    assert seen == expected[file], "either it reads as a whole document, or as none"
