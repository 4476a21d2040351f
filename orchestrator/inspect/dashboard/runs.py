"""The runs of one storage, each opened once and read further as it grows.

Names come from outside. Only runs directly in the storage are opened, whatever a name or a link contains.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from orchestrator.checkpoint.node_local.node_storage import with_nodes
from orchestrator.checkpoint.points.run_file import RUN_FILE, RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.redaction import redacted_text
from orchestrator.config.sections import NAME
from orchestrator.errors import OrchestratorError, StorageError, text_of
from orchestrator.history.claims.liveness import Busy, Free
from orchestrator.inspect.dashboard.answers import UNANSWERABLE, Problem, RouteError, not_found
from orchestrator.inspect.run import Run
from orchestrator.inspect.status.point_rows import stamp
from orchestrator.inspect.status.snapshot import UNREADABLE, missing_text
from orchestrator.inspect.status.status_reader import SnapshotReader, attributes_kept_s
from orchestrator.inspect.views.facts.facts import WATCH_S, Life, LifeWatch, UnreadableError
from orchestrator.inspect.views.lineage_graph import Fork
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.inspect.views.summary import row, sentence
from orchestrator.storage.files import Storage
from orchestrator.storage.open import join, split
from orchestrator.storage.parallel import at_once
from orchestrator.storage.tries import problem_code

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


REFRESH_S = 0.5  # a run is not read anew more often than this
MOST_KEPT = 16  # runs whose journals are kept in memory, the last requested ones


@dataclass(kw_only=True)
class OpenRun:
    """One run. Its views are read by one thread at a time (`reading`)."""

    name: str
    uri: str
    store: RunStore
    listed: ListedRun
    make_views: Callable[[], RunViews]
    clock: Callable[[], float] = time.monotonic
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _read_at: float = float("-inf")
    _views: RunViews | None = None
    _missing: tuple[UnreadableError, str] | None = None

    def look_again(self) -> None:
        """Lets the next request read again."""
        self._read_at = float("-inf")

    @property
    def views(self) -> RunViews:
        """The views, which keep all of the journal that was read."""
        if self._views is None:
            self._views = self.make_views()
        return self._views

    def forget(self) -> None:
        """Drops what was read: the next look reads all of it. Does nothing while a thread reads it."""
        if self._lock.acquire(blocking=False):
            try:
                self._views, self._read_at = None, float("-inf")
            finally:
                self._lock.release()

    @contextmanager
    def known(self) -> Iterator[RunViews]:
        """The views as they were last read."""
        with self._lock:
            yield self.views

    @contextmanager
    def reading(self, anew: bool = False) -> Iterator[RunViews]:
        """The views, at most `REFRESH_S` old, or, with `anew`, read again now."""
        with self._lock:
            if anew or self.clock() - self._read_at >= REFRESH_S:
                self.views.refresh()
                self._read_at = self.clock()
            yield self.views

    @contextmanager
    def readable(self, anew: bool = False) -> Iterator[RunViews]:
        """The same for a run that can be read. Raises `RouteError` for one that cannot."""
        with self.reading(anew) as views:
            if (error := views.unreadable) is not None:
                raise RouteError(
                    Problem(
                        status=UNANSWERABLE,
                        code=error.code,
                        text=str(error),
                        do=f"{error.advice}; until then nothing of this run is shown, because what "
                        "comes after that place cannot be trusted.",
                        more={
                            "file": error.file,
                            "reason": error.reason,
                            "points": self.store.point_names()[-3:],
                            "missing_text": self._missing_text(error),
                        },
                    )
                )
            yield views

    def _missing_text(self, error: UnreadableError) -> str:
        """What `status` reports missing in its folder, empty if nothing; determined once for an error."""
        if self._missing is None or self._missing[0] is not error:
            gone: tuple[str, ...] = ()
            with suppress(OrchestratorError):  # for an unreadable run it may have no report
                gone = Run(self.uri).status(0).missing
            self._missing = error, sentence(missing_text(gone)) if gone else ""
        return self._missing[1]


class Runs:
    """The runs in `storage`: a folder of runs, a prefix of a bucket, or one run's own folder. Safe to use
    from threads.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        """`clock` is that of the views, seconds since 1970. Raises `StorageError` if a bucket does not
        answer.
        """
        outer, name = split(storage.root)
        self._only = name if storage.exists(RUN_FILE) else None
        self._storage = storage.beside(outer) if self._only else storage
        self.root = self._storage.root
        self._clock, self._lock = clock, threading.Lock()
        self._open: dict[str, tuple[str, OpenRun]] = {}
        self._asked: dict[str, OpenRun] = {}  # requested for more than their rows, the newest request last

    def rows(self) -> list[dict[str, Any]]:
        """The list of runs: a row for each, independent of faults in others. Raises `StorageError` if the
        storage itself cannot be listed.
        """
        names = self.names()
        with self._lock:
            for gone in self._open.keys() - names:
                del self._open[gone]
                self._asked.pop(gone, None)
        return at_once(self._storage, self._row, names)

    def _row(self, name: str) -> dict[str, Any]:
        try:
            return self._opened(name).listed.row()
        except (RouteError, OrchestratorError) as error:  # deleted meanwhile, or its run.json cannot be read
            return unreadable_row(name, join(self.root, name), str(error), self._clock())

    def names(self) -> list[str]:
        """The names of the runs in the storage. Raises `StorageError` if it cannot be read."""
        folder = self._storage.folder
        if folder is None:
            # an opened run is checked again when it is opened again
            return [name for name in self._storage.list("") if name in self._open or self._is_run(name)]
        try:
            found = sorted(entry.name for entry in os.scandir(folder))
        except OSError as error:
            raise StorageError(
                f"the storage {folder} cannot be read: {error.strerror or error}; check that its disk is "
                "mounted",
                code=problem_code(error),
            ) from error
        return [name for name in found if self._is_run(name)]

    def open(self, name: str) -> OpenRun:
        """Opens the run of this name, to read it wholly. The data of the run with the oldest request are
        dropped. Raises `RouteError` (404) if there is none in the storage.
        """
        run = self._opened(name)
        with self._lock:
            self._asked.pop(name, None)
            self._asked[name] = run
            old = list(self._asked)[:-MOST_KEPT]
            forgotten = [self._asked.pop(each) for each in old]
        for each in forgotten:
            each.forget()
        return run

    def _opened(self, name: str) -> OpenRun:
        if (stamp := self._stamp(name)) is None:
            raise not_found(
                "run.unknown",
                f"there is no run {name[:100]!r} in {self.root}",
                "`orchestrator dashboard STORAGE` shows the runs of another folder",
            )
        with self._lock:
            known = self._open.get(name)
            if known is not None and known[0] == stamp:
                return known[1]
            uri = join(self.root, name)
            store = RunStore(with_nodes(self._storage.beside(uri)))
            life = LifeWatch(self._clock, watch_s=WATCH_S + attributes_kept_s(uri))
            run = OpenRun(
                name=name,
                uri=uri,
                store=store,
                listed=ListedRun(name=name, store=store, life=life, clock=self._clock),
                make_views=lambda: RunViews(store, self._clock, life=life),
            )
            self._open[name] = (stamp, run)
            return run

    def forks(self) -> list[Fork]:
        """The runs that are forks, and their origins. Raises `StorageError`."""
        found = []
        for name in self.names():
            with suppress(RouteError):  # it was deleted meanwhile
                found.append(self._opened(name).listed.fork())
        return [fork for fork in found if fork is not None]

    def is_here(self, uri: str) -> bool:
        """Whether a folder or URI named by a run is one of the runs."""
        outer, name = split(uri)
        here = self.root if self._storage.folder is None else str(self._storage.folder.resolve())
        return outer == here and self._stamp(name) is not None

    def _is_run(self, name: str) -> bool:
        """Whether the name is a run's, including an unreadable one: its row has the reason."""
        try:
            return self._stamp(name) is not None
        except StorageError:
            return True

    def _stamp(self, name: str) -> str | None:
        """Identifies the run.json of this name. None if the name is no run's folder, or leads outside the
        storage. Raises `StorageError` if that cannot be determined.
        """
        if not re.fullmatch(NAME, name) or (self._only is not None and name != self._only):
            return None
        if self._storage.folder is None:
            return self._storage.tag(f"{name}/{RUN_FILE}")
        root = self._storage.folder
        try:
            if (root / name).resolve() != root.resolve() / name:
                return None
            with suppress(StorageError):  # what stat says of it is enough
                if not self._storage.exists(f"{name}/{RUN_FILE}"):  # on NFS a stat alone may be 60 s behind
                    return None
            found = os.stat(root / name / RUN_FILE)
        except RuntimeError:  # a loop of links
            return None
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                return None
            raise StorageError(
                f"{root / name / RUN_FILE} cannot be read: {error.strerror or error}; correct its rights, or "
                "check that its disk is mounted",
                code=problem_code(error),
            ) from error
        return f"{found.st_ino} {found.st_mtime_ns}"
