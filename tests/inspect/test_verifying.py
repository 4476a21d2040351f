"""Verification in parallel: the same rows, told as it goes on, and gone on with where it was interrupted."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cli.commands import main
from orchestrator.errors import StorageError
from orchestrator.history.numbered_files import AUDIT, VERIFY, Finding
from orchestrator.inspect.status.integrity import Verifying, done_before
from orchestrator.planning.state.state_layout import layout_of
from orchestrator.records.points import Damage
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key
from tests.checkpoint.saves import commit_parts

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "format2" / "example"
LIMIT_S = 60.0


@pytest.fixture
def example(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLE, tmp_path / "example")
    return tmp_path / "example"


class Heard:
    """A progress that counts; it interrupts after so many points."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.points: list[tuple[str, bool]] = []
        self.wanted, self.bytes, self._after = 0, 0, interrupt_after
        self._lock = threading.Lock()

    def begin(self, num_points: int, num_bytes: int) -> None:
        self.wanted = num_bytes

    def read(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes += num_bytes

    def done(self, point: str, healthy: bool) -> None:
        self.points.append((point, healthy))
        if len(self.points) == self._after:
            raise KeyboardInterrupt


def store_of(folder: Path) -> RunStore:
    return RunStore(Storage(str(folder)))


def damage(folder: Path, point: str) -> None:
    file = next((folder / "points" / point / "state").iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def found(points: dict[str, bool], every: bool) -> Finding:
    rows = [{"point": name, "healthy": healthy} for name, healthy in points.items()]
    result = {"checked": "digests", "all": every, "points": rows}
    return Finding(number=1, what=VERIFY, attempt=1, seconds=0.0, result=result)


def test_threads_find_what_one_after_the_other_finds_and_all_bytes_are_told(example: Path) -> None:
    store = store_of(example)
    names = store.point_names()
    damage(example, names[1])
    (example / "points" / names[2] / "rng.json").unlink()
    one_by_one = [store.verify_point(name) for name in names]
    heard = Heard()
    rows = Verifying(store=store, progress=heard).rows(names)
    assert [[Damage(point=row["name"], **each) for each in row["damaged"]] for row in rows] == one_by_one
    assert [row["healthy"] for row in rows] == [True, False, False, True]
    assert heard.points == [(row["name"], row["healthy"]) for row in rows]
    assert heard.bytes == heard.wanted


def test_a_damaged_point_is_marked_until_a_verification_finds_it_whole(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = orchestrator.open(example), store_of(example)
    *_, newest = store.point_names()
    file = next((example / "points" / newest / "state").iterdir())
    whole = file.read_bytes()
    damage(example, newest)
    assert [row["quarantined"] for row in run.verify()] == [False, False, False, True]
    status = run.status(0)
    assert (status.newest_point, status.quarantined) == (store.point_names()[-2], (newest,))
    file.write_bytes(whole)
    with pytest.raises(SystemExit) as ended:
        main(["points", str(example)])
    assert ended.value.code == 1, "a list goes by the mark"
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["points", str(example), "--verify"])
    assert ended.value.code == 0
    assert f"{newest}  healthy " in capsys.readouterr().out
    assert not any(row["quarantined"] for row in run.list_points()), "whoever reads it whole lifts the mark"
    damage(example, newest)
    assert [row["healthy"] for row in run.list_points()] == [None] * 4
    rows = run.list_points(verify=True)
    assert [row["quarantined"] for row in rows] == [False, False, False, True]
    assert [row["healthy"] for row in rows] == [True, True, True, False]
    file.write_bytes(whole)
    assert [row["quarantined"] for row in run.verify(newest)] == [False]


def test_a_verification_reads_on_where_it_may_not_write(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(example)
    damage(example, store.point_names()[0])

    def refuses(path: str, data: bytes) -> bool:
        raise StorageError(f"{path}: read-only file system")

    monkeypatch.setattr(store.storage, "create", refuses)
    rows = Verifying(store=store).rows(store.point_names())
    assert [row["healthy"] for row in rows] == [False, True, True, True]
    assert not any(row["quarantined"] for row in rows)


def test_files_of_a_point_are_read_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, together = store_of(tmp_path), threading.Barrier(2, timeout=LIMIT_S)
    name = commit_parts(store, key(10), layout_of(2, None))
    read_part = store.storage.read_part

    def waits(path: str, start: int, num_bytes: int) -> bytearray:
        if path.endswith(".safetensors") and start == 0:
            together.wait()  # until another thread reads the header of the other one
        return read_part(path, start, num_bytes)

    monkeypatch.setattr(store.storage, "read_part", waits)
    assert Verifying(store=store, num_threads=2).rows([name])[0]["healthy"]


def test_what_an_interrupted_verification_found_whole_is_not_read_again_if_that_is_asked_for(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = orchestrator.open(example)
    names = [row["name"] for row in run.list_points()]
    with pytest.raises(KeyboardInterrupt):
        run.verify(progress=Heard(interrupt_after=2))
    heard = Heard()
    assert all(row["healthy"] for row in run.verify(resume=True, progress=heard))
    assert [name for name, _ in heard.points] == names
    sizes = {row["name"]: row["bytes"] for row in run.list_points()}
    assert heard.bytes == sum(sizes[name] for name in names[2:])
    # the command leaves that it came to its end: the next --resume reads all, as every verify without it does
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(example), "--resume"])
    assert ended.value.code == 0
    assert f"4/4 {names[3]}: healthy" in capsys.readouterr().err
    run.verify(resume=True, progress=(heard := Heard()))
    assert heard.bytes == sum(sizes.values())


def test_only_what_was_whole_since_the_last_complete_verification_counts() -> None:
    assert done_before([]) == frozenset()
    assert done_before([found({"a": True, "b": False}, False)]) == {"a"}
    assert done_before([found({"a": True}, False), found({"a": False}, False)]) == frozenset()
    assert done_before([found({"a": True}, False), found({"a": True, "b": True}, True)]) == frozenset()
    points = [{"point": "a", "healthy": True}]
    older = Finding(number=1, what=VERIFY, attempt=1, seconds=0.0, result={"points": points})
    assert done_before([older, found({"b": True}, False)]) == {"b"}
    audit = Finding(number=2, what=AUDIT, attempt=1, seconds=0.0, result={"exactly_once": True})
    assert done_before([found({"a": True}, False), audit]) == {"a"}


def test_long_verifications_note_what_they_have_found_meanwhile(example: Path) -> None:
    store, notes, now = store_of(example), list[dict[str, Any]](), iter(range(0, 1000, 31))
    names = store.point_names()
    Verifying(store=store, note=notes.append, clock=lambda: float(next(now))).rows(names)
    assert [[each["point"] for each in note["points"]] for note in notes] == [[n] for n in names[:-1]]
    assert not any(note["all"] for note in notes)
