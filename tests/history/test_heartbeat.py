"""The sign of life returns when the storage does."""

from __future__ import annotations

import errno

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.claims.claim_files import START
from orchestrator.history.claims.liveness import Busy
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep
from tests.storage.crashfs import ModelDisk
from tests.storage.failing import FailingDisk


def names(store: RunStore) -> list[str]:
    return [name for name in store.storage.list("attempts") if "heartbeat" in name]


@pytest.mark.parametrize(
    ("call", "number"), [("write", errno.ENOSPC), ("write", errno.EIO), ("create", errno.EIO)]
)
def test_a_heartbeat_goes_on_in_a_new_file_after_storage_has_failed(tmp_path, call: str, number: int) -> None:
    disk = FailingDisk(call, number, times=0)
    store = RunStore(Storage(str(tmp_path / "run"), disk, no_sleep))
    watcher = RunStore(Storage(str(tmp_path / "run")))
    store.claim(1, "aaaa", START, "host")
    heartbeat = store.heartbeat(1)
    if call == "write":
        assert heartbeat.beat()
    disk.seen, disk.times = 0, 10**9
    assert [heartbeat.beat() for _ in range(50)] == [False] * 50
    assert len(names(store)) <= 1, "a storage that stays full gathers no files"
    disk.times = 0
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds
        heartbeat.beat()

    assert watcher.watch_busy(10, lambda: now[0], wait) == Busy(number=1)
    assert now[0] < 1.0
    assert len(names(store)) == 1
    assert store.claim_numbers() == [1]


def test_a_beat_is_on_disk_when_it_returns() -> None:
    disk = ModelDisk()
    heartbeat = RunStore(Storage("/run", disk)).heartbeat(1)
    for beats in range(1, 4):
        assert heartbeat.beat()
        written = disk.live["/run/attempts/0001.heartbeat"]
        assert written is not None
        assert written.safe == b"." * beats
    assert disk.durable["/run/attempts/0001.heartbeat"] is written
