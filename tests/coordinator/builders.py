"""Coordinators in this process, what starts them, and disks that fail."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.actor import Coordinator
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.coordinator.process import CoordinatorProcess
from orchestrator.elastic.formation import GroupSize
from orchestrator.history.claims.claim_files import START
from orchestrator.history.claims.segments import GrowingSegments
from orchestrator.planning.schedule import Budgets
from orchestrator.records.membership import JoinRequest
from orchestrator.records.run_status import RunStatus
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import CONFIG, no_sleep

LIMIT_S = 60.0
LAUNCH = "aaaa"


def coordinator(
    store: RunStore, min_workers: int = 1, max_workers: int = 1, limit_s: float = 60.0, notes: Any = None
) -> Coordinator:
    """Of a launch with one worker, if not said otherwise; no member is ever known to be dead."""
    return Coordinator(what_it_needs(store, min_workers, max_workers, limit_s), lambda info: None, notes)


def what_it_needs(
    store: RunStore, min_workers: int = 1, max_workers: int = 1, limit_s: float = 60.0
) -> CoordinatorStart:
    attempt = Attempt(
        number=1,
        launch=LAUNCH,
        why=START,
        point=None,
        inherited=(),
        step_label=0,
        budgets=Budgets(),
        encoders=(),
    )
    return CoordinatorStart(
        attempt=attempt,
        storage=store.storage.root,
        size=GroupSize(min_workers=min_workers, max_workers=max_workers, expected=max_workers),
        max_failures=3,
        keep_latest=3,
        run="tiny",
        global_batch_size=8,
        seq_len=32,
        flat_config=CONFIG,
        rng={"rule": "none"},
        storage_limit_s=limit_s,
    )


JOIN = JoinRequest(
    member="m",
    launch=LAUNCH,
    actor_id="",
    node_id="n",
    host="127.0.0.1",
    port=1,
    key=None,
    leaves=None,
    prepared=None,
    cursor=None,
)


class FailingDisk(OsDisk):
    """Fails every write and sync of a file while `broken`, and hangs them while `hanging` is not set."""

    def __init__(self) -> None:
        self.broken = False
        self.hanging = threading.Event()
        self.hanging.set()

    def write(self, handle: int, data: memoryview) -> int:
        self._fail()
        return super().write(handle, data)

    def fsync(self, handle: int) -> None:
        self._fail()
        super().fsync(handle)

    def _fail(self) -> None:
        self.hanging.wait(LIMIT_S)
        if self.broken:
            raise OSError(errno.ENOSPC, "No space left on device")


def on_failing_disk(store: RunStore) -> tuple[RunStore, FailingDisk]:
    disk = FailingDisk()
    return RunStore(Storage(store.storage.root, disk, no_sleep)), disk


async def flushed(actor: Coordinator) -> None:
    """What was given to the thread that waits for storage, the journal's regular flush too, is done."""
    await actor._commits.on_disk(lambda: None)


async def ended(actor: Coordinator | CoordinatorProcess) -> RunStatus:
    """The status that says how the run ended, which is written down then: it may have ended by itself."""
    news = await actor.status((-1, -1), 0.0)
    while news.ended is None:
        news = await actor.status((news.attempt, news.version), 0.5)
    return news


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work(), LIMIT_S)

    asyncio.run(limited())


async def status(actor: Coordinator) -> RunStatus:
    return await actor.status((-1, -1), 0.0)


def with_disk(actor: Coordinator, store: RunStore) -> Coordinator:
    """Its journal goes to another disk from now on."""
    log = actor._journal._log
    assert isinstance(log, GrowingSegments)
    log._storage = store.storage
    actor._journal.close()
    return actor
