"""The progress of `audit` on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.cli.shared import say
from orchestrator.inspect.audit.audit_run import AuditProgress, NoAuditProgress

EVERY_S = 10.0  # between two lines
_MANY = 1e6


class _Lines:
    """Prints a line now and then; none for what is done before the first is due."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what, self._unit, self._total, self._done = "", "", 0, 0
        self._began = self._said = clock()

    def begin(self, what: str, unit: str, total: int) -> None:
        """See `AuditProgress`."""
        self._what, self._unit, self._total, self._done = what, unit, total, 0
        self._began = self._said = self._clock()

    def advance(self, num: int) -> None:
        """See `AuditProgress`."""
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
def shown(quiet: bool = False) -> Iterator[AuditProgress]:
    """The receiver of `audit`'s progress. `quiet`: no lines, for readers of JSON; a terminal has its bar."""
    if not sys.stderr.isatty():
        yield NoAuditProgress() if quiet else _Lines()
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

        class Bar:
            """The bar of the current half."""

            def begin(self, what: str, unit: str, total: int) -> None:
                """See `AuditProgress`."""
                bar.reset(task, total=total, description=f"{what} ({total / _MANY:,.1f} million {unit})")

            def advance(self, num: int) -> None:
                """See `AuditProgress`."""
                bar.advance(task, num)

        yield Bar()
