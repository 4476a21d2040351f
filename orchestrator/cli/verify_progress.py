"""The progress of `verify` on stderr: a bar on a terminal, elsewhere a line per point."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.checkpoint.points.reading_progress import ReadingProgress
from orchestrator.cli.shared import say
from orchestrator.history.sentences import count
from orchestrator.inspect.status.verifying import HEALTH, Progress


class _Lines:
    """Prints a line per point, if there is more than one, and every few seconds one with the bytes read."""

    def __init__(self) -> None:
        self._num_points, self._done, self._since = 0, 0, time.monotonic()
        self._bytes = ReadingProgress(say, "resume points")

    def begin(self, num_points: int, num_bytes: int) -> None:
        """See `Progress`."""
        self._num_points, self._done = num_points, 0
        self._bytes = ReadingProgress(say, "resume points")
        self._bytes.expect(num_bytes)
        if num_points > 1:
            say(f"reading {num_points} points, {num_bytes / 2**20:,.1f} MiB")

    def read(self, num_bytes: int) -> None:
        """See `Progress`."""
        self._bytes.read(num_bytes)

    def done(self, point: str, healthy: bool | None) -> None:
        """See `Progress`."""
        self._done += 1
        if self._num_points > 1:
            seconds = time.monotonic() - self._since
            say(f"{self._done}/{self._num_points} {point}: {HEALTH[healthy]} ({seconds:.0f} s)")


@contextmanager
def shown() -> Iterator[Progress]:
    """The receiver of `verify`'s progress."""
    if not sys.stderr.isatty():
        yield _Lines()
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

        class Bar:
            """The bar of all points."""

            def begin(self, num_points: int, num_bytes: int) -> None:
                """See `Progress`."""
                bar.reset(task, total=num_bytes, description=f"reading {count(num_points, 'point')}")

            def read(self, num_bytes: int) -> None:
                """See `Progress`."""
                bar.advance(task, num_bytes)

            def done(self, point: str, healthy: bool | None) -> None:
                """See `Progress`."""
                bar.update(task, description=f"{point} {HEALTH[healthy]}")

        yield Bar()
