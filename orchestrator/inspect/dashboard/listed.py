"""The rows of the page's list of runs, each made from the tail of its journal.

The cost of a row, in time and memory, does not grow with the run: at most `ROW_BYTES` of a journal are read
(for a run without an end also, once, the segments back to where its generation began). A row is read again
only when the run has changed. If a run cannot be read, its row has the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.checkpoint.points.run_file import RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.redaction import redacted_text
from orchestrator.errors import OrchestratorError, text_of
from orchestrator.history.claims.liveness import Busy, Free
from orchestrator.inspect.status.point_row import stamp
from orchestrator.inspect.status.status_reader import SnapshotReader
from orchestrator.inspect.status.verdict import UNREADABLE
from orchestrator.inspect.views.facts.life import Life, LifeWatch
from orchestrator.inspect.views.lineage_graph import Fork
from orchestrator.inspect.views.summary import row

ROW_BYTES = 1 << 20  # of a journal: some thousand steps
ANEW_S = 60.0  # a row of a run in which nothing changes is read again after so long
SEEN_FOLDERS = ("attempts", "points", "quarantine", "journal", "manifest")

Row = dict[str, Any]


@dataclass(kw_only=True)
class ListedRun:
    """One run's row. Safe to use from threads."""

    name: str
    store: RunStore
    life: LifeWatch
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _seen: Any = None
    _read_at: float = float("-inf")
    _row: Row = field(default_factory=dict)
    _run: RunFile | None = None
    _life: Life = field(default_factory=Life)

    def __post_init__(self) -> None:
        self._reader = SnapshotReader(store=self.store, most_bytes=ROW_BYTES)

    def row(self) -> Row:
        """The run's row, or the reason why it cannot be read. Never raises."""
        with self._lock:
            try:
                row = self._current()
            except OrchestratorError as error:
                row = self._unreadable(str(error))
            except Exception as error:  # noqa: BLE001  a fault in one run must not hide the others
                row = self._unreadable(f"it cannot be shown: {text_of(error)}")
            return {**row, "now": self.clock()}

    def fork(self) -> Fork | None:
        """The run and point that it is a fork of; None if it is no fork, or that cannot be read."""
        try:
            run = self._run_file()
        except OrchestratorError:
            return None
        if run is None or run.forked_from is None:
            return None
        return Fork(run=self.name, of=run.forked_from.run_id, point=run.forked_from.point)

    def _run_file(self) -> RunFile | None:
        if self._run is None:
            self._run = self.store.read_run()
        return self._run

    def _current(self) -> Row:
        store = self.store
        run, number = self._run_file(), max(store.claim_numbers(), default=0)
        end = store.read_end(number) if number else None
        over = number == 0 or end is not None
        signs = b"" if over else store.signs_of_life(number)
        life = self._life = self.life.look(number, over, signs)
        seen = (life.alive, signs, [store.storage.list(folder) for folder in SEEN_FOLDERS])
        if seen != self._seen or self.monotonic() - self._read_at >= ANEW_S:
            self._row = self._read(run, life)
            self._seen, self._read_at = seen, self.monotonic()
        told = {"last_sign": life.last_sign} if end is None and life.last_sign is not None else {}
        return {**self._row, **told}

    def _read(self, run: RunFile | None, life: Life) -> Row:
        store = self.store
        number = max(store.claim_numbers(), default=0)
        watched = {True: Busy(number=number), False: Free(number=number), None: None}[life.alive]
        at = self._reader.read(watched, life.watched_s, life.limit_s)
        return row(run.name if run is not None else self.name, at, self.clock()) | {
            "uri": store.storage.root,
            "created": stamp(run.created) if run is not None else None,
        }

    def _unreadable(self, why: str) -> Row:
        self._seen = None
        row = unreadable_row(self.name, self.store.storage.root, why, self.clock())
        created = stamp(self._run.created) if self._run is not None else None
        return {**row, "created": created, "alive": self._life.alive}


def unreadable_row(name: str, uri: str, why: str, now: float) -> Row:
    """The row of a run that cannot be read."""
    reason = redacted_text(why)
    error = {"file": None, "line": None, "reason": reason}
    row = {"name": name, "uri": uri, "now": now, "state": UNREADABLE, "reason": reason, "error": error}
    return {**row, "since": None, "created": None}
