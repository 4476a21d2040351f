"""The durable file operations, when names are taken, disks fail, or a file system can do less."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from orchestrator.errors import ConfigError, StorageError
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import READ_BYTES, Storage
from orchestrator.storage.local_store import TEMPORARY, LocalStore
from orchestrator.storage.store import Pieces, Store
from orchestrator.storage.tries import TRIES
from tests.checkpoint.samples import no_sleep
from tests.raising import raises
from tests.storage.failing import FailingDisk


def test_what_is_written_is_read_back_with_its_digest(tmp_path) -> None:
    storage = Storage(str(tmp_path / "new" / "run"))
    entry = storage.write("a/b/c", memoryview(b"hello"))
    storage.sync("a/b")
    assert (entry.path, entry.bytes, entry.digest) == ("a/b/c", 5, blake3(b"hello").hexdigest())
    assert storage.read("a/b/c") == b"hello"
    assert storage.entry("a/b/c") == entry
    assert storage.size("a/b/c") == 5
    assert storage.exists("a/b/c")
    assert storage.list("a") == ["b"]


def test_a_name_is_never_written_twice(tmp_path) -> None:
    storage = Storage(str(tmp_path))
    storage.write("a", b"first")
    with raises(StorageError, "storage.name_taken", "EEXIST"):
        storage.write("a", b"second")
    with raises(StorageError, "storage.name_taken", "EEXIST"):
        storage.append("a")
    assert not storage.create("a", b"third")
    assert storage.read("a") == b"first"
    assert storage.list("") == ["a"], "no temporary file is left"


def test_of_many_that_create_a_name_exactly_one_wins(tmp_path) -> None:
    barrier, won = threading.Barrier(8), []

    def race(number: int) -> None:
        storage = Storage(str(tmp_path))
        barrier.wait()
        if storage.create("claim", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert Storage(str(tmp_path)).read("claim") == b"%d" % won[0]


def test_without_hard_links_a_name_is_still_created_once(tmp_path) -> None:
    storage = Storage(str(tmp_path), FailingDisk("link", errno.EPERM))
    assert storage.create("claim", b"one")
    assert not storage.create("claim", b"two")
    assert storage.read("claim") == b"one"
    assert storage.list("") == ["claim"]


def test_a_link_that_was_made_but_reported_as_taken_counts_as_made(tmp_path) -> None:
    class Repeated(OsDisk):
        def link(self, old: str, new: str) -> None:
            super().link(old, new)
            super().link(old, new)  # as a network file system that sends its request twice

    assert Storage(str(tmp_path), Repeated()).create("claim", b"one")


@pytest.mark.parametrize("call", ["create", "write", "fsync", "make_folder", "fsync_folder"])
def test_a_failure_that_passes_is_tried_again(tmp_path, call) -> None:
    disk = FailingDisk(call, errno.EIO, times=TRIES - 1)
    waits: list[float] = []
    storage = Storage(str(tmp_path), disk, waits.append)
    storage.write("a/b", b"x")
    storage.sync("a")
    assert storage.read("a/b") == b"x"
    assert disk.seen >= TRIES
    assert sum(waits) < 3


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EIO, "storage.failed"),
        (errno.ENOSPC, "storage.full"),
        (errno.ESTALE, "storage.changed_while_read"),
        (errno.ETIMEDOUT, "storage.timeout"),
        (errno.ENOTCONN, "storage.unreachable"),
    ],
)
@pytest.mark.parametrize("call", ["create", "write", "fsync"])
def test_a_failure_that_stays_is_an_error_and_leaves_no_file(tmp_path, call, number, code) -> None:
    disk = FailingDisk(call, number)
    storage = Storage(str(tmp_path), disk, no_sleep)
    with raises(StorageError, code, errno.errorcode[number]):
        storage.write("a", b"x")
    assert disk.seen == TRIES
    assert storage.list("") == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_failure_about_rights_is_not_tried_again(tmp_path, number) -> None:
    disk = FailingDisk("create", number)
    with raises(StorageError, "storage.denied", errno.errorcode[number]):
        Storage(str(tmp_path), disk, no_sleep).write("a", b"x")
    assert disk.seen == 1


def test_surely_absent_is_another_thing_than_unreadable(tmp_path) -> None:
    storage = Storage(str(tmp_path))
    storage.write("file", b"x")
    for absent in ("nothing", "no/folder", "file/below"):
        assert not storage.exists(absent)
        for look in (storage.read, storage.size, storage.entry):
            with pytest.raises(FileNotFoundError):
                look(absent)
    assert storage.list("nothing") == []
    for call, look in (
        ("open", storage.read),
        ("read", storage.read),
        ("size", storage.exists),
        ("list", storage.list),
    ):
        broken = Storage(str(tmp_path), FailingDisk(call, errno.EIO), no_sleep)
        with raises(StorageError, "storage.failed", "EIO"):
            getattr(broken, look.__name__)("file" if call != "list" else "")


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "", "a/\0b"])
def test_no_path_leads_out_of_the_run(tmp_path, path) -> None:
    storage = Storage(str(tmp_path / "run"))
    for use in (storage.read, storage.delete, storage.delete_folder, storage.exists, storage.append):
        with raises(StorageError, "storage.outside_path", repr(path), storage.root):
            use(path)


def test_deleting_a_folder_removes_links_but_not_what_they_point_to(tmp_path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"x")
    storage = Storage(str(tmp_path / "run"))
    storage.write("folder/inner/file", b"x")
    (tmp_path / "run" / "folder" / "link").symlink_to(tmp_path / "outside")
    storage.delete_folder("folder")
    storage.delete_folder("folder")
    storage.delete("folder/file")
    assert storage.list("") == []
    assert (tmp_path / "outside" / "file").exists()


def test_an_appended_file_grows_and_a_failed_sync_ends_it(tmp_path) -> None:
    storage = Storage(str(tmp_path))
    with_failure = Storage(str(tmp_path), FailingDisk("fsync", errno.EIO), no_sleep)
    handle = storage.append("log")
    handle.write(b"one\n")
    handle.sync()
    handle.write(b"two\n")
    handle.close()
    handle.close()
    assert (storage.read("log"), handle.num_bytes) == (b"one\ntwo\n", 8)
    broken = with_failure.append("other")
    broken.write(b"x")
    with raises(StorageError, "storage.failed", "EIO"):
        broken.sync()
    for use in (broken.sync, lambda: broken.write(b"y")):
        with raises(StorageError, "storage.closed_file", f"{tmp_path}/other"):
            use()


def test_a_close_that_fails_is_an_error_of_the_storage(tmp_path) -> None:
    handle = Storage(str(tmp_path), FailingDisk("close", errno.EIO, times=1), no_sleep).append("log")
    handle.write(b"one\n")
    with raises(StorageError, "storage.failed", "close ", "EIO"):
        handle.close()
    handle.close()


def test_a_close_that_fails_without_hard_links_is_an_error_of_the_storage(tmp_path) -> None:
    class ClosesBadly(FailingDisk):
        """No hard links, and what is written under its own name is not closed well."""

        def create(self, path: str) -> int:
            handle = super().create(path)
            self.own = handle if TEMPORARY not in path else -1
            return handle

        def close(self, handle: int) -> None:
            super().close(handle)
            if handle == self.own:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    with raises(StorageError, "storage.failed", "EIO"):
        Storage(str(tmp_path), ClosesBadly("link", errno.EPERM), no_sleep).create("claim", b"one")


def test_only_local_paths_are_supported_and_they_are_made_absolute(tmp_path, monkeypatch) -> None:
    for uri in ("s3://bucket/run", "gs://bucket/run"):
        with raises(ConfigError, "config.storage_uri", uri):
            Storage(uri)
    with raises(ConfigError, "config.empty_path"):
        Storage("")
    monkeypatch.chdir(tmp_path)
    storage = pickle.loads(pickle.dumps(Storage("runs/a")))
    monkeypatch.chdir("/")
    storage.write("x", b"1")
    assert (tmp_path / "runs" / "a" / "x").read_bytes() == b"1"


def test_a_root_that_cannot_be_made_is_an_error_with_its_path(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with raises(StorageError, "storage.unusable_path", f"{tmp_path}/file/run"):
        Storage(str(tmp_path / "file" / "run")).write("a", b"x")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_of_another_folder_is_taken_whole_and_stays_when_that_folder_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def link(self: OsDisk, old: str, new: str) -> None:
        raise OSError(errno.EXDEV, "another file system")

    other = Storage(str(tmp_path / "other"))
    written = other.write("a/b", b"content" * 1000)
    here = other.beside(str(tmp_path / "here"))
    if not has_links:
        monkeypatch.setattr(OsDisk, "link", link)
    assert here.take(other, "a/b", "c/d") is has_links
    with raises(StorageError, "storage.name_taken", f"{tmp_path}/here/c/d"):
        here.take(other, "a/b", "c/d")
    with pytest.raises(FileNotFoundError):
        here.take(other, "a/none", "c/none")
    other.delete_folder("a")
    assert here.entry("c/d") == replace(written, path="c/d")


class WritesLate(LocalStore):
    """It asks for all pieces before it writes one, as an upload may, and can link nothing."""

    def put(self, path: str, pieces: Pieces, size: int, *, exclusive: bool = False) -> bool:
        held = list(pieces())
        return super().put(path, lambda: held, size, exclusive=exclusive)

    def copy(self, source: Store, theirs: str, path: str) -> bool:
        return False


def test_what_is_taken_piece_by_piece_is_whole_though_the_pieces_are_written_late(tmp_path: Path) -> None:
    other = Storage(str(tmp_path / "other"))
    written = other.write("a", b"".join(bytes([number]) * READ_BYTES for number in range(3)))
    here = Storage.on(WritesLate(str(tmp_path / "here")))
    assert not here.take(other, "a", "b")
    assert here.entry("b") == replace(written, path="b")
