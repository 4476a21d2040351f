"""Two machines on one NFS server: what one of them writes, grows or deletes, the other sees, whatever its
cache says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.checkpoint.commit.store_actions import VOTES_COMPLETE, note_committed
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.resume_point_choice import choose_point
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.errors import StorageError
from orchestrator.history.claims.claim_files import START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import STOP, RequestFiles
from orchestrator.inspect.status.snapshot import GONE, OPEN, STARTING
from orchestrator.inspect.status.status_reader import SnapshotReader, as_proven
from orchestrator.inspect.status.view import view_of
from orchestrator.launch.doctor.storage_check import attributes_age_s, mount_of
from orchestrator.storage.disk import Disk, OsDisk
from orchestrator.storage.files import Storage
from tests.checkpoint.driver import Coordinator
from tests.checkpoint.samples import key, no_sleep
from tests.storage.crashfs import ModelDisk
from tests.storage.nfs_client import NfsClient, NoctoClient, trusts_the_miss, trusts_the_stat

PATH, DATA = "a/b/file", b"content"


def two_machines() -> tuple[Storage, Storage]:
    """Both have made their caches by a look at the file, which is not there; nor are its folders."""
    server = ModelDisk()
    here, there = (Storage("/run", NfsClient(server), no_sleep) for _ in range(2))
    for storage in (here, there):
        assert not storage.exists(PATH)
        storage.write(f"of {'here' if storage is here else 'there'}", b"")  # the root is there
        assert not storage.exists(PATH)
    return here, there


def read_into(storage: Storage) -> bytes:
    into = bytearray(len(DATA))
    assert storage.read_into(PATH, 0, memoryview(into)) == len(DATA)
    return bytes(into)


def taken(storage: Storage) -> bytes:
    other = storage.beside("/other")
    other.take(storage, PATH, "file")
    return other.read("file")


def synced(storage: Storage) -> bytes:
    storage.sync("a/b")
    return DATA


def deleted(delete: Callable[[Storage], None]) -> Callable[[Storage], bytes]:
    """Whether the file is gone for the server, too: then `DATA`."""

    def look(storage: Storage) -> bytes:
        delete(storage)
        client = storage._store.disk  # type: ignore[attr-defined]
        return b"" if f"/run/{PATH}" in client.server.files() else DATA

    return look


LOOKS: dict[str, Callable[[Storage], bytes]] = {
    "exists": lambda storage: DATA if storage.exists(PATH) else b"",
    "size": lambda storage: DATA[: storage.size(PATH)],
    "tag": lambda storage: DATA if storage.tag(PATH) is not None else b"",
    "read": lambda storage: storage.read(PATH),
    "read_part": lambda storage: bytes(storage.read_part(PATH, 0, 100)),
    "read_into": read_into,
    "entry": lambda storage: DATA[: storage.entry(PATH).bytes],
    "list": lambda storage: DATA if storage.list("a/b") == ["file"] else b"",
    "take": taken,
    "delete": deleted(lambda storage: storage.delete(PATH)),
    "delete_all": deleted(lambda storage: storage.delete_all([PATH])),
    "delete_folder": deleted(lambda storage: storage.delete_folder("a")),
    "write beside": lambda storage: DATA[: storage.write("a/b/other", DATA).bytes],
    "sync": synced,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_file_of_another_machine_is_seen_however_its_absence_was_cached(look: str) -> None:
    here, there = two_machines()
    there.create(PATH, DATA)
    assert LOOKS[look](here) == DATA


@pytest.mark.parametrize("look", sorted({*LOOKS} - {"write beside"}))
def test_a_store_that_trusts_the_miss_is_caught_by_each_of_them(
    monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    trusts_the_miss(monkeypatch)
    here, there = two_machines()
    there.create(PATH, DATA)
    try:
        found = LOOKS[look](here)
    except (FileNotFoundError, StorageError):
        return
    assert found != DATA


def test_the_size_of_a_growing_file_is_that_of_the_server() -> None:
    assert _sizes() == [1, 2, 3]


def test_a_store_that_asks_for_a_size_without_opening_the_file_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trusts_the_stat(monkeypatch)
    assert _sizes() == [1, 1, 1]


def _sizes() -> list[int]:
    here, there = two_machines()
    file, sizes = there.append("grows"), []
    for _ in range(3):
        file.write(b".")
        file.sync()
        sizes.append(here.size("grows"))
    return sizes


def test_a_file_that_another_machine_deleted_is_absent() -> None:
    here, there = two_machines()
    there.create(PATH, DATA)
    assert here.exists(PATH)
    there.delete(PATH)
    assert not here.exists(PATH)
    there.create(PATH, DATA[:3])
    assert here.size(PATH) == 3


def test_a_file_that_grows_notices_what_other_machines_did_to_it() -> None:
    here, there = two_machines()
    file = there.append("log")
    file.write(b"one\n")
    file.sync()
    assert file.why_lost() == ""
    here.delete("log")
    assert "is gone" in file.why_lost()
    here.create("log", b"one\n")
    assert "is another file" in file.why_lost()


def test_a_link_that_was_made_but_reported_as_taken_counts_although_the_number_of_links_is_cached() -> None:
    class Repeats(NfsClient):
        """Its request to link was carried out, the answer was lost, and the repeat finds the name taken."""

        def link(self, old: str, new: str) -> None:
            assert self.num_links(old) == 1
            known = self.cache
            super().link(old, new)
            self.cache = known
            raise FileExistsError(17, "exists", new)

    assert Storage("/run", Repeats(ModelDisk()), no_sleep).create("claim", DATA)


# ------------------------------------------------------------ what depends on it
def test_a_point_that_another_machine_acknowledged_is_continued_that_a_page_here_saw_unfinished() -> None:
    server = ModelDisk()
    here, there = (RunStore(Storage("/run", NfsClient(server), no_sleep)) for _ in range(2))
    there.claim(1, "launch", START, "host")
    there.write_parent(ClaimParent(attempt=1, parent=None, inherited=(), budgets=None, encoders=()))
    seen: list[list[str]] = []

    def look(place: str, step: int, rank: int | None) -> None:
        if place == VOTES_COMPLETE:  # the parts are there, COMMIT is not
            seen.append(here.point_names())

    coordinator = Coordinator(there, fault=look)
    for step in (10, 20):
        coordinator.save(key(step))
        note_committed(coordinator.journal, coordinator.committer.last_point)
    coordinator.journal.flush()
    there.write_end(1, "stopped", "asked to")
    newest = key(20).point_name
    assert seen[-1] == [key(10).point_name]
    assert newest in {name.point_name for name, _, committed in coordinator.answers if committed}
    found = survey(here)
    assert (found.points[-1], found.lost) == (newest, ())
    point, damages = choose_point(here, found, "latest")
    assert (point.name, list(damages)) == (newest, [])


def test_a_request_an_end_and_a_parent_of_another_machine_are_seen_at_the_next_look() -> None:
    server = ModelDisk()
    here, there = (Storage("/run", NfsClient(server), no_sleep) for _ in range(2))
    launch, stop = RequestFiles(here, "launch", "id"), RequestFiles(there, "launch", "id")
    ours, theirs = RunStore(here), RunStore(there)
    assert (launch.read(1), ours.read_end(1), ours.read_parent(1), ours.read_run()) == (None,) * 4
    assert not ours.next_claim_exists(0)
    stop.ask(STOP)
    theirs.claim(1, "launch", START, "host")
    theirs.write_parent(ClaimParent(attempt=1, parent=None))
    theirs.write_end(1, "done", "all steps trained")
    assert launch.read(1).what == STOP
    assert ours.next_claim_exists(0)
    assert ours.read_parent(1) == ClaimParent(attempt=1, parent=None)
    assert ours.read_end(1).outcome == "done"


@pytest.mark.parametrize(("client", "kept_s"), [(NfsClient, 0.0), (NoctoClient, 60.0)])
@pytest.mark.parametrize("lives", [True, False])
def test_status_calls_no_run_dead_whose_files_this_machine_does_not_ask_for(
    client: type[NfsClient], kept_s: float, lives: bool
) -> None:
    server = ModelDisk()
    here = RunStore(Storage("/run", client(server), no_sleep))
    there = RunStore(Storage("/run", NfsClient(server), no_sleep))
    there.claim(1, "launch", START, "host")
    there.write_parent(ClaimParent(attempt=1, parent=None))
    written = datetime(2026, 11, 21, 22, 0, tzinfo=UTC)
    journal = JournalWriter(there.storage, 1, now=lambda: written)
    journal.event(EventKind.FAILURE, step=0, reason="none")
    journal.flush()
    heartbeat, passed = there.heartbeat(1), 0.0
    heartbeat.beat()
    here.signs_of_life(1)  # this machine has looked before

    def wait(seconds: float) -> None:
        nonlocal passed
        passed += seconds
        if lives:
            heartbeat.beat()

    watched = here.watch_busy(10.0, lambda: passed, wait)
    snapshot = SnapshotReader(store=here).read(watched, 10.0, 10.0)
    view = view_of("run", as_proven(snapshot, kept_s), written + timedelta(minutes=5))
    if client is NfsClient:
        assert (view.alive, view.state) == ((True, STARTING) if lives else (False, GONE))
        assert ("5 min" in view.verdict) == (not lives), "since the last line, as on the page"
    else:
        assert (view.alive, view.state) == (None, OPEN)
        assert "unknown" in view.verdict
        assert "5 min" in view.verdict


@pytest.mark.parametrize(
    ("kind", "options", "expected_s"),
    [
        ("nfs4", "rw,hard", 0.0),
        ("nfs4", "rw,nocto", 60.0),
        ("nfs", "rw,nocto,acregmax=30", 30.0),
        ("nfs4", "rw,nocto,noac", 0.0),
        ("cifs", "rw,actimeo=15", 15.0),
        ("fuse.sshfs", "rw", 20.0),
        ("ext4", "rw", 0.0),
    ],
)
def test_how_long_a_mount_keeps_sizes_of_files(kind: str, options: str, expected_s: float) -> None:
    line = f"36 35 98:0 / /mnt rw,noatime shared:1 - {kind} server:/export {options}\n"
    assert attributes_age_s(mount_of(line, "/mnt/run")) == expected_s


# By file, why it may ask a disk by name itself: nothing of a run is decided by the answer.
BYPASSES = {
    "history/journal/code_record.py": "the source files of a user's functions, found as Python finds modules",
    "history/metrics/published_folder.py": "logs in a folder of this machine, which this process writes",
    "checkpoint/export/export.py": "the folder of an export; os.rename onto one that is taken fails",
    "checkpoint/points/model_folders.py": "the folder of a user's weights",
    "checkpoint/files/part_writer.py": "memory that processes of one machine share",
    "inspect/submitted.py": "what a process of this machine wrote; whether a listed folder exists",
    "inspect/dashboard/runs.py": "which run.json it is, after the storage said that there is one",
    "inspect/dashboard/actions.py": "whether a name is taken; the fork itself creates it exclusively",
    "inspect/dashboard/app.py": "the page's own files; whether the folder exists, after it was listed",
}
BY_NAME = re.compile(
    r"os\.(stat|lstat|listdir|scandir|access|path\.(exists|lexists|isfile|isdir|getsize|getmtime))\("
    r"|\.(exists|is_file|is_dir|stat|lstat|iterdir|glob|rglob|read_text|read_bytes)\(\)"
)


def test_what_reads_runs_asks_the_storage_and_no_disk() -> None:
    package = Path(orchestrator.__file__).parent
    found = {
        str(path.relative_to(package))
        for room in ("history", "checkpoint", "coordinator", "elastic", "inspect", "torchrun")
        for path in (package / room).rglob("*.py")
        if BY_NAME.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(BYPASSES), "use the run's Storage, which asks an NFS server anew"


# ------------------------------------------------------------ what it costs
class Counted:
    """A disk whose calls are counted, by name."""

    def __init__(self, disk: Disk) -> None:
        self._disk, self.calls = disk, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return getattr(self._disk, name)(*arguments)

        return call


def test_what_is_there_costs_no_list_and_a_miss_costs_one(tmp_path: Path) -> None:
    disk = Counted(OsDisk())
    storage = Storage(str(tmp_path), disk)  # type: ignore[arg-type]
    storage.create("attempts/0001.json", DATA)
    for path, expected in (
        ("attempts/0001.json", ["open", "size", "close"]),
        ("attempts/0002.json", ["open", "list", "open"]),
    ):
        disk.calls.clear()
        storage.exists(path)
        assert disk.calls == expected


def test_a_miss_reads_no_more_than_the_begin_of_a_large_folder(tmp_path: Path) -> None:
    class Large(OsDisk):
        def list(self, path: str) -> Iterable[str]:
            yield "the first"
            raise AssertionError("the whole folder is read")

    assert not Storage(str(tmp_path), Large()).exists("nothing")


def test_a_miss_leaves_no_folder_open(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.write("file", DATA)
    assert not storage.exists("nothing")
    opened = {os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()}
    assert str(tmp_path.resolve()) not in opened


def test_a_folder_that_may_not_be_listed_still_has_an_answer() -> None:
    class Closed(ModelDisk):
        def list(self, path: str) -> list[str]:
            raise PermissionError(13, "Permission denied", path)

    storage = Storage("/run", Closed(), no_sleep)
    assert not storage.exists("nothing")
