"""Whether another launch works on the run: a start watches for its sign of life, and waits for what a killed
driver left.

What is a sign of life decides `history.busy`.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from orchestrator.cluster.machine import machine_id
from orchestrator.cluster.starvation import ProcessLook, Silence, look_at_process
from orchestrator.errors import BusyError
from orchestrator.history.busy import Free
from orchestrator.history.claim_files import WATCH_S
from orchestrator.history.journal_reader import journal_process
from orchestrator.history.processes import AllEnded, driver_was_killed
from orchestrator.resume.store import RunStore

BUSY_WATCH_S = 10.0
ORPHANS_S = 90.0
LOOK_S = 1.0  # a look at storage that takes longer than this shows nothing of the attempt meanwhile


@contextmanager
def watching(store: RunStore, say: Callable[[str], None]) -> Iterator[Callable[[], int]]:
    """`refuse_busy` in a thread, while the block looks at everything else; what is given waits for its
    result. Leaving the block ends the watch: an error and Ctrl-C wait for nobody.
    """
    over = threading.Event()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="busy") as watcher:
        found = watcher.submit(refuse_busy, store, say, over)
        try:
            yield found.result
        finally:
            over.set()


def refuse_busy(store: RunStore, say: Callable[[str], None], over: threading.Event | None = None) -> int:
    """Watches for another launch that works on the run, at most 10 s; `BusyError` if there is one. Returns
    the newest attempt's number (0: none): nobody is at work on it, so that `claimed` may take the next.

    What a killed driver of this machine left is no launch: its processes end by themselves, within
    `ORPHANS_S`, and are waited for; once they are known to have ended nothing is watched. What it waits for
    it says, once. `over` ends the watch from another thread: `CancelledError`, which nobody sees.
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
    """A clock for the watch: it stands while this process, or on this machine the one that keeps the newest
    attempt's journal, could not run. What is late on a busy host is not dead.
    """
    newest = store.newest_claim()
    process = None if newest is None else journal_process(store.storage, newest.number)
    pid = process.pid if process is not None and process.machine == machine_id() else 0

    def look() -> ProcessLook | None:
        return look_at_process(pid, time.monotonic())

    silence = Silence(time.monotonic(), WATCH_S + LOOK_S, look())
    return lambda: silence.look(time.monotonic(), look())
