"""Folders beside a run in which something is trained for a while and then removed, and what a kill left of
them.

    .replay-<run>-<machine>-<pid>-<start>-<random>/<run>/    the process that made it stands in its name

So whoever comes later on the same machine can tell whether that process is gone; of another machine's folders
nobody can, and they are only named.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from orchestrator.cluster.machine import machine_id, this_process
from orchestrator.history.busy import Busy
from orchestrator.history.journal_reader import journal_process
from orchestrator.history.processes import AllEnded, has_ended
from orchestrator.resume.store import RunStore

PREFIX = ".replay-"
_NAME = re.compile(r"\.replay-.+-(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d*)-[^-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftScratch:
    """A folder beside a run whose maker is `dead`, or of which nobody can tell that here."""

    path: str
    dead: bool

    def __str__(self) -> str:
        if self.dead:
            return f"{self.path} is left of a replay that was killed; `points --prune` and `replay` remove it"
        return (
            f"{self.path} belongs to a replay of another machine (or of this one before it was booted anew), "
            f"so nobody can tell here whether that is still at work; once it has ended, remove it: "
            f"rm -r {shlex.quote(self.path)}"
        )


@contextmanager
def scratch(store: RunStore, say: Callable[[str], None]) -> Iterator[str]:
    """A run's folder to be, on the run's own file system; afterwards it is gone. After a SIGKILL it stays,
    until `remove_left`.
    """
    from orchestrator.launch.start import check_writable

    storage, name = os.path.split(store.storage.root)
    check_writable(Path(storage))
    _, pid, start = this_process()
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{name}-{_machine()}-{pid}-{start}-", dir=storage)
    try:
        yield os.path.join(folder, name)
    finally:
        _remove(folder, say, f"removed {folder}")


def left(store: RunStore) -> list[LeftScratch]:
    """What lies beside the run of replays that are over, or may be; not those that this machine still runs.
    It looks at names only, and raises nothing: a folder that cannot be listed has none.
    """
    storage = os.path.dirname(store.storage.root)
    try:
        names = sorted(name for name in os.listdir(storage) if name.startswith(PREFIX))
    except OSError:
        return []
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        is_here = match is not None and match["machine"] == _machine()
        dead = is_here and match is not None and has_ended(machine_id(), int(match["pid"]), match["start"])
        if dead or not is_here:
            found.append(LeftScratch(path=os.path.join(storage, name), dead=dead))
    return found


def remove_left(store: RunStore, say: Callable[[str], None]) -> None:
    """Removes what killed replays of this machine left beside the run, once nobody is at work on it, and
    names what it cannot judge. Watches a launch that did not say its end for at most 10 s, as a start does.
    """
    for each in left(store):
        if not each.dead:
            say(f"note: {each}")
        elif _is_in_use(store, each.path, say):
            say(f"note: {each.path} is left of a replay that was killed, and its launch still runs: kept")
        else:
            _remove(each.path, say, f"removed {each.path}, left of a replay that was killed")


def _is_in_use(store: RunStore, folder: str, say: Callable[[str], None]) -> bool:
    """Whether the launch of a driver that was killed may still write there."""
    from orchestrator.launch.busy_watch import BUSY_WATCH_S

    for name in os.listdir(folder):
        inner = RunStore(store.storage.beside(os.path.join(folder, name)))
        ended = AllEnded(inner, partial(journal_process, inner.storage))
        newest = inner.newest_claim()
        if newest is not None and inner.read_end(newest.number) is None and not ended(newest):
            say(f"{folder}: checking for {BUSY_WATCH_S:.0f} s whether its launch still runs")
        found = inner.watch_busy(BUSY_WATCH_S, time.monotonic, time.sleep, ended)
        if isinstance(found, Busy):
            return True
    return False


def _remove(folder: str, say: Callable[[str], None], told: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    there = os.path.exists(folder)
    say(f"warning: {folder} could not be removed; remove it: rm -r {shlex.quote(folder)}" if there else told)


def _machine() -> str:
    return blake3(machine_id().encode()).hexdigest()[:12]
