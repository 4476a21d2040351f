"""Live progress of a launch: a line that is kept up to date on a terminal, one plain line every few seconds
elsewhere. All on stderr.
"""

from __future__ import annotations

import sys
import time
from collections import deque

from orchestrator.records import RunStatus


class Progress:
    """Is told every new status; shows step, loss, tokens per second, data wait and the last resume point."""

    def __init__(self, every_s: float, total_steps: int | None) -> None:
        self._every_s, self._total = every_s, total_steps
        self._shown_at = 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=50)
        self._last_text = ""
        self._live = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.status import Status

            self._live = Status("starting", console=Console(stderr=True))
            self._live.start()

    def show(self, status: RunStatus) -> None:
        """A new status. Its warnings are lines of their own, at once."""
        for warning in status.warnings:
            self.say(f"warning: {warning}")
        now, step = time.monotonic(), status.last_step
        if step is not None and (not self._marks or self._marks[-1][1] != step.consumed_tokens):
            self._marks.append((now, step.consumed_tokens))
        text = self._text(status)
        if self._live is not None:
            self._live.update(text)
        elif text != self._last_text and now - self._shown_at >= self._every_s:
            self._shown_at, self._last_text = now, text
            self.say(text)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Nothing more will be shown."""
        if self._live is not None:
            self._live.stop()

    def _text(self, status: RunStatus) -> str:
        step = status.last_step
        if step is None:
            here = f"a group of {status.world_size} has formed" if status.world_size else "workers are coming"
            return f"starting: {here}"
        of = f"/{self._total}" if self._total is not None else ""
        waiting = (
            f", waiting for workers for {status.waiting_since:.0f} s"
            if status.waiting_since is not None
            else ""
        )
        return (
            f"step {step.step}{of}  loss {step.loss:.4f}  {self._rate():,.0f} tokens/s  data wait "
            f"{step.data_wait_s * 1000:.0f} ms  "
            f"lr {step.lr:.2e}  workers {status.world_size}  last point "
            f"{status.newest_point or 'none'}{waiting}"
        )

    def _rate(self) -> float:
        if len(self._marks) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self._marks[0], self._marks[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0
