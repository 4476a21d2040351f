"""The progress of `audit` and `verify` on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from typing_extensions import override

from orchestrator.checkpoint.points.verify import ReadingProgress
from orchestrator.cli.shared import say
from orchestrator.history.sentences import count
from orchestrator.inspect.audit.audit_run import AuditProgress, NoAuditProgress
from orchestrator.inspect.status.integrity import HEALTH, VerifyProgress

EVERY_S = 10.0  # between two lines
_MANY = 1e6


class _AuditLines(AuditProgress):
    """Prints a line now and then; none for what is done before the first is due."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what, self._unit, self._total, self._done = "", "", 0, 0
        self._began = self._said = clock()

    @override
    def begin(self, what: str, unit: str, total: int) -> None:
        self._what, self._unit, self._total, self._done = what, unit, total, 0
        self._began = self._said = self._clock()

    @override
    def advance(self, num: int) -> None:
        self._done += num
        now = self._clock()
        if now - self._said < EVERY_S:
            return
        self._said = now
        share = 100 * self._done / max(1, self._total)
        speed = self._done / (now - self._began)
        left = max(0, self._total - self._done) / speed if speed else 0.0
        say(
            f"{self._what}: {share:.0f} % ({self._done / _MANY:,.1f} of {self._total / _MANY:,.1f} million "
            f"{self._unit}, {speed / _MANY:,.1f} million a second), about {left:.0f} s left"
        )


@contextmanager
def show_audit_progress(quiet: bool = False) -> Iterator[AuditProgress]:
    """The receiver of `audit`'s progress. `quiet`: no lines, for readers of JSON; a terminal has its bar."""
    if not sys.stderr.isatty():
        yield NoAuditProgress() if quiet else _AuditLines()
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(show_speed=True),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the journal", total=None)

        class Bar(AuditProgress):
            """The bar of the current half."""

            @override
            def begin(self, what: str, unit: str, total: int) -> None:
                bar.reset(task, total=total, description=f"{what} ({total / _MANY:,.1f} million {unit})")

            @override
            def advance(self, num: int) -> None:
                bar.advance(task, num)

        yield Bar()


class _VerifyLines(VerifyProgress):
    """Prints a line per point, if there is more than one, and every few seconds one with the bytes read."""

    def __init__(self) -> None:
        self._num_points, self._done, self._since = 0, 0, time.monotonic()
        self._bytes = ReadingProgress(say, "resume points")

    @override
    def begin(self, num_points: int, num_bytes: int) -> None:
        self._num_points, self._done = num_points, 0
        self._bytes = ReadingProgress(say, "resume points")
        self._bytes.expect(num_bytes)
        if num_points > 1:
            say(f"reading {num_points} points, {num_bytes / 2**20:,.1f} MiB")

    @override
    def read(self, num_bytes: int) -> None:
        self._bytes.read(num_bytes)

    @override
    def done(self, point: str, healthy: bool | None) -> None:
        self._done += 1
        if self._num_points > 1:
            seconds = time.monotonic() - self._since
            say(f"{self._done}/{self._num_points} {point}: {HEALTH[healthy]} ({seconds:.0f} s)")


@contextmanager
def show_verify_progress() -> Iterator[VerifyProgress]:
    """The receiver of `verify`'s progress."""
    if not sys.stderr.isatty():
        yield _VerifyLines()
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)

        class Bar(VerifyProgress):
            """The bar of all points."""

            @override
            def begin(self, num_points: int, num_bytes: int) -> None:
                bar.reset(task, total=num_bytes, description=f"reading {count(num_points, 'point')}")

            @override
            def read(self, num_bytes: int) -> None:
                bar.advance(task, num_bytes)

            @override
            def done(self, point: str, healthy: bool | None) -> None:
                bar.update(task, description=f"{point} {HEALTH[healthy]}")

        yield Bar()
