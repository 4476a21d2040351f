"""Watches whether another launch is active on the run, and waits for the processes of a killed driver.

`history.claims.liveness` decides from the observations.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.machine import machine_id
from orchestrator.cluster.starvation import ProcessLook, Silence, look_at_process
from orchestrator.errors import BusyError
from orchestrator.history.claims.claim_files import WATCH_S
from orchestrator.history.claims.liveness import Free
from orchestrator.history.claims.processes import AllEnded, driver_was_killed
from orchestrator.history.journal.journal_reader import journal_process

BUSY_WATCH_S = 10.0
ORPHANS_S = 90.0
LOOK_S = 1.0  # an observation of storage that takes longer shows nothing about the attempt


@contextmanager
def watching(store: RunStore, say: Callable[[str], None]) -> Iterator[Callable[[], int]]:
    """Runs `refuse_busy` in a thread while the block prepares the start. The yielded function waits for its
    result.

    Leaving the block ends the watch, so that an error and Ctrl-C need not wait.
    """
    over = threading.Event()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="busy") as watcher:
        found = watcher.submit(refuse_busy, store, say, over)
        try:
            yield found.result
        finally:
            over.set()


def refuse_busy(store: RunStore, say: Callable[[str], None], over: threading.Event | None = None) -> int:
    """Watches for at most 10 s whether another launch is active on the run; raises `BusyError` if so.

    Returns the newest attempt's number (0: none). No launch is active on it, so `claimed` may take the next
    number. Processes that a killed driver of this machine left do not count: they end by themselves, within
    `ORPHANS_S`, and are waited for. Once they are known to have ended, nothing is watched. A wait is reported
    once. `over` ends the watch from another thread, with `CancelledError`, which is not shown.
    """
    pause, told = over or threading.Event(), False

    def wait(seconds: float) -> None:
        if pause.wait(seconds):
            raise CancelledError

    newest, ended = store.newest_claim(), AllEnded(store, partial(journal_process, store.storage))
    if newest is not None and store.read_end(newest.number) is None and not ended(newest):
        say(
            f"attempt {newest.number} has no end record: checking for {BUSY_WATCH_S:.0f} s whether it still "
            "runs"
        )
    deadline = time.monotonic() + ORPHANS_S
    while True:
        found = store.watch_busy(BUSY_WATCH_S, _silence_of(store), wait, ended)
        if isinstance(found, Free):
            return found.number
        claim = store.read_claim(found.number)
        if driver_was_killed(store, claim) and time.monotonic() < deadline:
            if not told:
                say(
                    f"attempt {claim.number} still runs, but its driver was killed: waiting for its "
                    f"processes to end, at most {ORPHANS_S:.0f} s"
                )
            told = True
            continue
        raise BusyError(
            f"run {store.storage.root} is busy: attempt {claim.number} of launch {claim.launch} on host "
            f"{claim.host} is alive; wait until it has ended, stop it (`orchestrator stop "
            f"{shlex.quote(store.storage.root)}`, Ctrl-C there, or `ray job stop`), or take another run.name"
        )


def _silence_of(store: RunStore) -> Callable[[], float]:
    """A clock for the watch that stops while a process could not run.

    The processes are this one, and on this machine the one that writes the newest attempt's journal. A
    process that is late on a busy host is not dead.
    """
    newest = store.newest_claim()
    process = None if newest is None else journal_process(store.storage, newest.number)
    pid = process.pid if process is not None and process.machine == machine_id() else 0

    def look() -> ProcessLook | None:
        return look_at_process(pid, time.monotonic())

    silence = Silence(time.monotonic(), WATCH_S + LOOK_S, look())
    return lambda: silence.look(time.monotonic(), look())
