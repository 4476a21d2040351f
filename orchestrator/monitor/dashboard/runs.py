"""The runs of one storage folder, each opened once and read on as it grows.

Names come from outside: what is opened lies directly in the folder, whatever a name or a link says.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.config.schema import NAME
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.monitor.dashboard.answers import UNANSWERABLE, Problem, RouteError, not_found
from orchestrator.monitor.missing import missing_text
from orchestrator.monitor.run import Run
from orchestrator.monitor.views.lanes import Fork
from orchestrator.monitor.views.lines import UnreadableError
from orchestrator.monitor.views.run_views import RunViews
from orchestrator.monitor.views.summary import sentence
from orchestrator.resume.run_file import RUN_FILE
from orchestrator.resume.store import RunStore
from orchestrator.storage.files import Storage

REFRESH_S = 0.5  # a run is not read anew more often than this


@dataclass(kw_only=True)
class OpenRun:
    """One run. Its views are read by one thread at a time (`reading`)."""

    name: str
    uri: str
    store: RunStore
    views: RunViews
    clock: Callable[[], float] = time.monotonic
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _read_at: float = float("-inf")
    _missing: tuple[UnreadableError, str] | None = None

    def look_again(self) -> None:
        """What is asked for next is read anew."""
        self._read_at = float("-inf")

    @contextmanager
    def known(self) -> Iterator[RunViews]:
        """The views as they were read last."""
        with self._lock:
            yield self.views

    @contextmanager
    def reading(self, anew: bool = False) -> Iterator[RunViews]:
        """The views, as new as `REFRESH_S`, or as new as can be."""
        with self._lock:
            if anew or self.clock() - self._read_at >= REFRESH_S:
                self.views.refresh()
                self._read_at = self.clock()
            yield self.views

    @contextmanager
    def readable(self, anew: bool = False) -> Iterator[RunViews]:
        """The same of a run that can be read. Raises `RouteError` of one that cannot."""
        with self.reading(anew) as views:
            if (error := views.unreadable) is not None:
                raise RouteError(
                    Problem(
                        status=UNANSWERABLE,
                        code="unreadable",
                        text=str(error),
                        do="Restore the file from a copy of the storage; until then nothing of this run is "
                        "shown, because what comes after that place cannot be trusted.",
                        more={
                            "file": error.file,
                            "line": error.line or None,
                            "reason": error.reason,
                            "points": self.store.point_names()[-3:],
                            "missing_text": self._missing_text(error),
                        },
                    )
                )
            yield views

    def _missing_text(self, error: UnreadableError) -> str:
        """What `status` says is gone of its folder, empty if it says nothing; found once for an error."""
        if self._missing is None or self._missing[0] is not error:
            gone: tuple[str, ...] = ()
            with suppress(OrchestratorError):  # of a run that cannot be read it may have nothing to say
                gone = Run(self.uri).status(0).missing
            self._missing = error, sentence(missing_text(gone)) if gone else ""
        return self._missing[1]


class Runs:
    """What lies in `storage`, a folder of runs or one run's own folder. Safe to use from threads."""

    def __init__(self, storage: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` is that of the views, seconds since 1970."""
        self._only = storage.name if (storage / RUN_FILE).is_file() else None
        self.root = storage.parent if self._only else storage
        self._clock, self._lock = clock, threading.Lock()
        self._open: dict[str, tuple[tuple[int, int], OpenRun]] = {}

    def names(self) -> list[str]:
        """The runs that lie there. Raises `StorageError` if the folder cannot be read."""
        try:
            found = sorted(entry.name for entry in os.scandir(self.root))
        except OSError as error:
            raise StorageError(
                f"the storage {self.root} cannot be read: {error.strerror or error}; is the disk or the "
                "mount there?"
            ) from error
        return [name for name in found if self._stamp(name) is not None]

    def open(self, name: str) -> OpenRun:
        """The run of this name. Raises `RouteError` (404) if there is none in the folder."""
        if (stamp := self._stamp(name)) is None:
            raise not_found(
                "no_run",
                f"there is no run {name[:100]!r} in {self.root}",
                "`orchestrator dashboard STORAGE` shows the runs of another folder",
            )
        with self._lock:
            known = self._open.get(name)
            if known is not None and known[0] == stamp:
                return known[1]
            folder = str(self.root / name)
            store = RunStore(Storage(folder))
            views = RunViews(store, self._clock)
            run = OpenRun(name=name, uri=folder, store=store, views=views)
            self._open[name] = (stamp, run)
            return run

    def forks(self) -> list[Fork]:
        """Which of the runs are forks, and of what. Raises `StorageError`."""
        found = []
        for name in self.names():
            with self.open(name).reading() as views:
                found.append(views.forked_from())
        return [fork for fork in found if fork is not None]

    def is_here(self, uri: str) -> bool:
        """Whether a folder that a run names is one of the runs."""
        folder = Path(uri)
        return folder.parent == self.root.resolve() and self._stamp(folder.name) is not None

    def _stamp(self, name: str) -> tuple[int, int] | None:
        """Which run.json lies there; None if it is no run's folder, or lies elsewhere."""
        if not re.fullmatch(NAME, name) or (self._only is not None and name != self._only):
            return None
        folder = self.root / name
        try:
            if folder.resolve() != self.root.resolve() / name:
                return None
            found = os.stat(folder / RUN_FILE)
        except (OSError, RuntimeError):  # a loop of links
            return None
        return found.st_ino, found.st_mtime_ns
