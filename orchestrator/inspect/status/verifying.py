"""Reads every byte of a run's points, several files in parallel, with progress reports.

An interrupted verification can be continued.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from typing_extensions import override

from orchestrator.checkpoint.points.point_files import PointFiles
from orchestrator.checkpoint.points.verify import FileRange
from orchestrator.errors import ResumePointError, StorageError, UnreachableNodeError
from orchestrator.history.numbered_files import VERIFY, Finding, asker, verify_result
from orchestrator.records.points import Damage
from orchestrator.storage.parallel import answers_at_once, asked_at_a_time, at_once

HEALTH = {True: "healthy", False: "damaged", None: "away"}  # a row's `healthy` in words
NOTE_EVERY_S = 30.0  # interval at which results are noted meanwhile


class VerifyProgress(Protocol):
    """A receiver of progress."""

    def begin(self, num_points: int, num_bytes: int) -> None:
        """Called with the amount to read, at most; it may be called again."""

    def read(self, num_bytes: int) -> None:
        """Called when a file of so many bytes was read, from any thread."""

    def done(self, point: str, healthy: bool | None) -> None:
        """Called when a point was read, or was before (see `done_before`). None: it cannot be read from
        here.
        """


class NoVerifyProgress(VerifyProgress):
    """A receiver that does nothing."""

    @override
    def begin(self, num_points: int, num_bytes: int) -> None:
        ...

    @override
    def read(self, num_bytes: int) -> None:
        ...

    @override
    def done(self, point: str, healthy: bool | None) -> None:
        ...


def done_before(findings: Sequence[Finding]) -> frozenset[str]:
    """The points that an interrupted verification found whole: those read since the newest verification that
    completed all points.
    """
    healthy: set[str] = set()
    for found in findings:
        if found.what != VERIFY or found.unreadable:
            continue
        if found.result.get("all", True):
            healthy.clear()
            continue
        for each in found.result["points"]:
            (healthy.add if each["healthy"] else healthy.discard)(each["point"])
    return frozenset(healthy)


@dataclass(kw_only=True)
class Verifying:
    """Reads points, `num_threads` files at a time; from afar at least `ASKED_AT_A_TIME`, of several points.

    `note` receives the results meanwhile, at least every `NOTE_EVERY_S` and on an interruption, but not the
    last ones, which the caller has. `before`: points that need not be read. A damaged point is marked, a
    whole one's mark is removed (`checkpoint.points.quarantine`), if this process may write there; `by` is the
    user.
    """

    store: PointFiles
    note: Callable[[dict[str, Any]], None] = lambda result: None
    progress: VerifyProgress = field(default_factory=NoVerifyProgress)
    before: Collection[str] = ()
    by: str = field(default_factory=asker)
    num_threads: int = 2 * (os.cpu_count() or 1)
    clock: Callable[[], float] = time.monotonic

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each point: `name`, `healthy`, `damaged`, `quarantined`, `away`.

        Interruptions pass through. `away` names the nodes whose disks hold files that cannot be reached from
        here. `healthy` is None then, because it is unknown.
        """
        storage = self.store.storage
        self.progress.begin(len(names), sum(at_once(storage, self._num_bytes, names)))
        rows: list[dict[str, Any]] = []
        noted, noted_at = 0, self.clock()
        try:
            pool = self._threads()
            # interrupted, the files end first: what has begun to read a point must not wait for all of them
            with closing(answers_at_once(storage, partial(self._row, pool), names)) as found, _ended(pool):
                for name, row in zip(names, found, strict=True):
                    rows.append(row)
                    self.progress.done(name, row["healthy"])
                    if self.clock() - noted_at >= NOTE_EVERY_S and len(rows) < len(names):
                        self.note(verify_result(rows[noted:], every=False))
                        noted, noted_at = len(rows), self.clock()
        except BaseException:
            if rows[noted:]:
                self.note(verify_result(rows[noted:], every=False))
            raise
        return rows

    def _row(self, pool: ThreadPoolExecutor, name: str) -> dict[str, Any]:
        damages: list[Damage] = []
        if name not in self.before:

            def each(look: Callable[[FileRange], Damage | None], stretches: Sequence[FileRange]) -> Any:
                return pool.map(lambda stretch: self._looked(look, stretch), stretches)

            try:
                damages = self.store.verify_point(name, each=each)
            except UnreachableNodeError as error:
                marked = self.store.is_quarantined(name)
                return {
                    "name": name,
                    "healthy": None,
                    "damaged": [],
                    "quarantined": marked,
                    "away": str(error),
                }
            with suppress(StorageError):  # without the right to write, it only reads
                self.store.note_reading(name, damages, self.by)
        damaged = [{"file": damage.file, "reason": damage.reason} for damage in damages]
        marked = self.store.is_quarantined(name)
        row = {"name": name, "healthy": not damages, "damaged": damaged, "quarantined": marked}
        return {**row, "away": ""}

    def _looked(self, look: Callable[[FileRange], Damage | None], stretch: FileRange) -> Damage | None:
        found = look(stretch)
        self.progress.read(stretch.bytes)
        return found

    def _num_bytes(self, name: str) -> int:
        if name in self.before:
            return 0
        try:
            return self.store.read_point(name).num_bytes
        except ResumePointError:
            return 0  # damaged, which is said when it is read

    def _threads(self) -> ThreadPoolExecutor:
        num_threads = max(self.num_threads, asked_at_a_time(self.store.storage))
        return ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="verify")


@contextmanager
def _ended(pool: ThreadPoolExecutor) -> Iterator[None]:
    """On any end, files that are not begun are not read any more."""
    try:
        yield
    finally:
        pool.shutdown(cancel_futures=True)
