"""The list of runs: made from the tails of journals, and one run that cannot be read hides no other."""

from __future__ import annotations

import errno
import gc
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from benchmarks.made_run import write_run
from orchestrator.inspect.dashboard import runs as opened_runs
from orchestrator.inspect.dashboard.app import _api, make_app
from orchestrator.inspect.dashboard.runs import ROW_BYTES, Runs
from orchestrator.inspect.run import Run
from orchestrator.launch.capacity.capacity import KnownMachines, memory_plan
from orchestrator.planning.state.memory import Machine
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from tests.inspect.dashboard.serving import HOST, TOKEN, Served, client


class Watched(OsDisk):
    """A disk that counts the bytes read of journals, and does not give what lies below some paths."""

    def __init__(self, refused: str = "nothing", error: int = errno.EACCES) -> None:
        super().__init__()
        self.refused, self.error, self.read_bytes = refused, error, 0
        self._journals: set[int] = set()

    def _guard(self, path: str) -> None:
        if self.refused in path:
            raise OSError(self.error, "not given", path)

    def list(self, path: str) -> list[str]:
        self._guard(path)
        return super().list(path)

    def open(self, path: str) -> int:
        self._guard(path)
        handle = super().open(path)
        self._journals.discard(handle)
        if "/journal/" in path:
            self._journals.add(handle)
        return handle

    def read(self, handle: int, into: memoryview) -> int:
        num = super().read(handle, into)
        self.read_bytes += num if handle in self._journals else 0
        return num


def listing(storage: Path, disk: OsDisk) -> TestClient:
    app = make_app(Storage(str(storage), disk), TOKEN)
    return TestClient(app, base_url=HOST, headers={"Authorization": f"Bearer {TOKEN}"})


def rows_of(asking: TestClient) -> dict[str, Any]:
    answer = asking.get("/api/runs")
    assert answer.status_code == 200, answer.text
    return {row["name"]: row for row in answer.json()["runs"]}


def test_a_list_reads_the_tails_of_journals_and_once(tmp_path: Path) -> None:
    made = write_run(tmp_path / "long", steps=20_000, points=20, attempts=3)
    size = sum(path.stat().st_size for path in (tmp_path / "long" / "journal").rglob("*.jsonl"))
    assert size > 4 * ROW_BYTES
    disk = Watched()
    asking = listing(tmp_path, disk)
    row = rows_of(asking)["long"]
    whole = client(tmp_path).get("/api/runs/long").json()
    for name in ("uri", "state", "attempt", "created", "missing", "missing_text"):
        assert row[name] == whole[name], name
    assert row["progress"]["step"] == whole["progress"]["step"]
    assert row["progress"]["tokens"] == whole["progress"]["tokens"]
    assert row["progress"]["max_step"] == whole["progress"]["max_step"]
    assert row["progress"]["max_step"] == Run(tmp_path / "long").status(0).total_steps
    assert row["point"]["name"] == whole["point"]["name"]
    assert (row["risk"]["steps"], row["risk"]["tokens"]) == (whole["risk"]["steps"], whole["risk"]["tokens"])
    before = disk.read_bytes
    assert rows_of(asking)["long"]["progress"] == row["progress"]
    assert disk.read_bytes == before, "nothing has changed"
    made.store.write_end(max(made.store.claim_numbers()), "done", "at its end", made.run.id)
    again = Watched()
    assert rows_of(listing(tmp_path, again))["long"]["state"] == "done"
    assert 0 < again.read_bytes <= 2 * ROW_BYTES, "its tail, once more if something seems to be missing"


def damaged_line(run: Path) -> None:
    segment = sorted((run / "journal").rglob("*.jsonl"))[-1]
    segment.chmod(0o644)
    lines = segment.read_bytes().split(b"\n")
    lines[len(lines) // 2] = b'{"kind":"step","step":'
    segment.write_bytes(b"\n".join(lines))


def no_run_file(run: Path) -> None:
    (run / "run.json").chmod(0o644)
    (run / "run.json").write_text('{"seal": 7}')


def foreign_line(run: Path) -> None:
    segment = sorted((run / "journal").rglob("*.jsonl"))[-1]
    segment.chmod(0o644)
    lines = segment.read_bytes().split(b"\n")
    lines[-3] = b'{"kind":"step","seq":"x","time":5,"format":1}'
    segment.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize(
    ("damage", "state"), [(damaged_line, "open"), (no_run_file, "unreadable"), (foreign_line, "open")]
)
def test_a_run_that_is_not_as_it_was_written_has_its_own_row(
    run: Served, tmp_path: Path, damage: Callable[[Path], None], state: str
) -> None:
    for name in ("good", "bad"):
        shutil.copytree(run.storage / "made", tmp_path / name)
    damage(tmp_path / "bad")
    rows = {row["uri"].rpartition("/")[2]: row for row in client(tmp_path).get("/api/runs").json()["runs"]}
    assert rows["bad"]["state"] == state
    assert rows["bad"]["reason"] or "journal/" in rows["bad"]["missing_text"]
    assert rows["good"]["state"] in {"open", "gone"}
    assert not rows["good"]["missing_text"]


@pytest.mark.quick("5-/bad/run.json", "116-/bad/points", "5-/bad/attempts")
@pytest.mark.parametrize(
    "refused", ["/bad/journal", "/bad/attempts", "/bad/points", "/bad/run.json", "/bad/quarantine"]
)
@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_run_that_storage_does_not_give_has_its_own_row(
    run: Served, tmp_path: Path, refused: str, error: int
) -> None:
    for name in ("good", "bad"):
        shutil.copytree(run.storage / "made", tmp_path / name)
    found = listing(tmp_path, Watched(refused, error)).get("/api/runs")
    assert found.status_code == 200, found.text
    rows = {row["uri"].rpartition("/")[2]: row for row in found.json()["runs"]}
    assert rows["bad"]["state"] == "unreadable"
    assert "not given" in rows["bad"]["reason"]
    assert rows["good"]["state"] in {"open", "gone"}


def test_the_journals_of_few_runs_are_kept(
    run: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_runs, "MOST_KEPT", 2)
    for name in ("a", "b", "c", "d"):
        shutil.copytree(run.storage / "made", tmp_path / name)
    runs, views = Runs(Storage(str(tmp_path))), {}
    for name in ("a", "b", "c", "d"):
        with runs.open(name).reading() as seen:
            views[name] = weakref.ref(seen)
    del seen
    gc.collect()
    assert [name for name, kept in views.items() if kept() is not None] == ["c", "d"]
    with runs.open("a").reading() as again:
        assert again.last_id


def test_a_stop_waits_for_no_lock_and_for_no_thread_of_others(run: Served, tmp_path: Path) -> None:
    shutil.copytree(run.storage / "made", tmp_path / "made")
    runs = Runs(Storage(str(tmp_path)))
    app = _api(runs, lambda: 0.0, threading.Event(), 1.0)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with runs.open("made").reading():
            held.set()
            over.wait(60)

    answers = list[int]()
    with TestClient(app, base_url=HOST) as asking:
        threads = [threading.Thread(target=hold)]
        threads[0].start()
        assert held.wait(60)
        # more than the server has threads for requests
        threads += [threading.Thread(target=asking.get, args=("/api/runs/made",)) for _ in range(60)]
        for thread in threads[1:]:
            thread.start()

        def stop() -> None:
            answers.append(asking.post("/api/runs/made/actions/stop/plan", json={}).status_code)
            body = {"token": "0.none"}
            answers.append(asking.post("/api/runs/made/actions/stop", json=body).status_code)

        stopping = threading.Thread(target=stop)
        stopping.start()
        stopping.join(60)
        is_held_up = stopping.is_alive()
        over.set()
        for thread in [*threads, stopping]:
            thread.join()
    assert not is_held_up
    assert answers == [200, 409]


@pytest.mark.parametrize("workers", [10**6, 10**12, [2, 10**15], [10**14, 10**15]])
def test_a_plan_for_an_absurd_number_of_workers_has_an_end(workers: int | list[int], run: Served) -> None:
    cluster = run.made.config.cluster.model_copy(update={"num_workers": workers})
    job = run.made.config.model_copy(update={"cluster": cluster})
    machines = (Machine(host="a", memory_bytes=1 << 38, gpu_bytes=()),)
    notes, problems = memory_plan(job, KnownMachines(machines=machines, source="a test"))
    assert notes
    assert problems or not isinstance(workers, int)
