"""Temporary folders beside a run for training that is removed afterwards, and cleanup after a kill.

    .replay-<run>-<machine>-<pid>-<start>-<random>/<run>/    the name contains the process that made it

A later process on the same machine can determine whether that process has ended. For folders of another
machine that is not possible; they are only reported.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.machine import has_ended, machine_id, this_process
from orchestrator.errors import StorageError
from orchestrator.history.claims.claim_files import AllEnded
from orchestrator.history.claims.liveness import Busy
from orchestrator.history.journal.journal_reader import journal_process
from orchestrator.storage.files import Storage
from orchestrator.storage.open import is_bucket, join, split

PREFIX = ".replay-"
_NAME = re.compile(r"\.replay-.+-(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d*)-[^-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftScratch:
    """A folder beside a run whose maker is `dead`, or not known here."""

    path: str
    dead: bool

    def __str__(self) -> str:
        if self.dead:
            return f"{self.path} is left of a replay that was killed; `points --prune` and `replay` remove it"
        return (
            f"{self.path} belongs to a replay of another machine (or of this one before it was booted anew), "
            f"so nobody can tell here whether that is still at work; once it has ended, {_by_hand(self.path)}"
        )


@contextmanager
def scratch(store: RunStore, say: Callable[[str], None]) -> Iterator[str]:
    """A folder for a run, on the run's own file system, or in its bucket. It is deleted afterwards.

    After a SIGKILL it stays, until `remove_left`.
    """
    from orchestrator.launch.start.run_preparation import check_writable

    beside, name = split(store.storage.root)
    storage = store.storage.beside(beside)
    check_writable(storage)
    _, pid, start = this_process()
    own = f"{PREFIX}{name}-{_machine()}-{pid}-{start}-{secrets.token_hex(4)}"
    if storage.folder is not None:
        (storage.folder / own).mkdir(mode=0o700)
    try:
        yield join(beside, own, name)
    finally:
        _remove(storage, own, say, f"removed {join(beside, own)}")


def left(store: RunStore) -> list[LeftScratch]:
    """The folders beside the run of replays that are over, or may be, without those that this machine still
    runs.

    It checks only names, and raises nothing: a folder that cannot be listed has none.
    """
    beside = split(store.storage.root)[0]
    try:
        names = [name for name in store.storage.beside(beside).list("") if name.startswith(PREFIX)]
    except StorageError:
        return []
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        is_here = match is not None and match["machine"] == _machine()
        dead = is_here and match is not None and has_ended(machine_id(), int(match["pid"]), match["start"])
        if dead or not is_here:
            found.append(LeftScratch(path=join(beside, name), dead=dead))
    return found


def remove_left(store: RunStore, say: Callable[[str], None]) -> None:
    """Deletes the folders of killed replays of this machine beside the run, and reports those that it cannot
    judge.

    Waits until no launch is active in them. Watches a launch without an end record for at most 10 s, as a
    start does.
    """
    for each in left(store):
        if not each.dead:
            say(f"note: {each}")
        elif _is_in_use(store, each.path, say):
            say(f"note: {each.path}, left by a killed replay, is kept because its launch still runs")
        else:
            beside, name = split(each.path)
            told = f"removed {each.path}, left of a replay that was killed"
            _remove(store.storage.beside(beside), name, say, told)


def _is_in_use(store: RunStore, folder: str, say: Callable[[str], None]) -> bool:
    """Whether the launch of a killed driver may still write there."""
    from orchestrator.launch.start.attempt_claim import BUSY_WATCH_S

    for name in store.storage.beside(folder).list(""):
        inner = RunStore(store.storage.beside(join(folder, name)))
        ended = AllEnded(inner, partial(journal_process, inner.storage))
        newest = inner.newest_claim()
        if newest is not None and inner.read_end(newest.number) is None and not ended(newest):
            say(f"{folder}: checking for {BUSY_WATCH_S:.0f} s whether its launch still runs")
        found = inner.watch_busy(BUSY_WATCH_S, time.monotonic, time.sleep, ended)
        if isinstance(found, Busy):
            return True
    return False


def _remove(storage: Storage, name: str, say: Callable[[str], None], told: str) -> None:
    folder, there = join(storage.root, name), True
    if storage.folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        there = os.path.exists(folder)
    else:
        with suppress(StorageError):
            storage.delete_folder(name)
            there = False
    say(f"warning: {folder} could not be removed; {_by_hand(folder)}" if there else told)


def _by_hand(folder: str) -> str:
    if is_bucket(folder):
        return f"delete all objects below {folder}/"
    return f"remove it: rm -r {shlex.quote(folder)}"


def _machine() -> str:
    return blake3(machine_id().encode()).hexdigest()[:12]
