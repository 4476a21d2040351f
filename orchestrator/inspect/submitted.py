"""A run with the launch that this process has submitted.

It may not have begun yet, and can be waited for, stopped and watched like any other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from orchestrator import errors
from orchestrator.config.loading import as_job
from orchestrator.config.schema import JobConfig
from orchestrator.errors import OrchestratorError, RefusedError
from orchestrator.inspect.run import Run
from orchestrator.inspect.run_control import Reply, unheard
from orchestrator.inspect.status.snapshot import FAILED, STARTING
from orchestrator.inspect.status.view import Quiet, RunView
from orchestrator.storage.open import join, open_storage

_TAIL_BYTES = 64 << 10


class LocalLaunch:
    """`orchestrator train` as an independent process on this machine, with this one's folder and environment.

    Neither Ctrl-C here nor the end of this process ends it. Its output is in `folder`.
    """

    def __init__(self, config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="orchestrator-"))
        if isinstance(config, JobConfig | Mapping):
            document = config.to_json() if isinstance(config, JobConfig) else config
            config = self.folder / "config.yaml"  # JSON is YAML, too
            config.write_text(json.dumps(document, indent=2), encoding="utf-8")
        command = [sys.executable, "-m", "orchestrator.cli.commands", "train", str(config), *overrides]
        environment = {**os.environ, errors.ERROR_FILE: str(self.folder / "error.json")}
        with (self.folder / "stderr.log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )

    def __str__(self) -> str:
        return f"process {self._process.pid}"

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Same as Ctrl-C there: the first saves and stops, the second stops at once."""
        if self.is_alive():
            self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def error(self) -> OrchestratorError:
        """Why it ended: its own error, else its last output."""
        with suppress(FileNotFoundError, ValueError):
            said = json.loads((self.folder / "error.json").read_text(encoding="utf-8"))
            kind: type[OrchestratorError] = getattr(errors, said["class"], OrchestratorError)
            return kind(said["text"], code=said["code"])
        log = self.folder / "stderr.log"
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES), os.SEEK_SET)
            text = file.read().decode(errors="replace")
        last = text.strip()[-2000:] or "no output"
        return OrchestratorError(
            f"{self} ended with exit code {self._process.returncode}: {last} (its whole output is in {log})",
            code="launch.process_died",
        )


_LOOK_S = 0.5


class LaunchProcess(Protocol):
    """The process of the launch: one here, or a job on a cluster. `str` names it for people."""

    def is_alive(self) -> bool:
        """Whether it runs, or will run."""

    def interrupt(self) -> None:
        """Lets the launch save and stop; a second call stops it at once."""

    def wait(self, timeout_s: float) -> bool:
        """Returns whether it ended within that time."""

    def error(self) -> OrchestratorError:
        """Why it ended, if the run itself does not say it."""


def submit(config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> SubmittedRun:
    """Starts or continues the run in a process of its own on this machine, and returns at once.

    The process continues when this one ends. `orchestrator.open` finds the run again. Raises `ConfigError`
    for a wrong configuration, and `RefusedError` for what `plan` refuses. `wait` raises what only the start
    itself can see.
    """
    from orchestrator.launch.api import plan

    job = as_job(config, overrides)
    looked_ahead = plan(job)
    if looked_ahead.action == "refuse":
        raise looked_ahead.refusal
    return SubmittedRun(job.run.run_uri, LocalLaunch(config, overrides))


class SubmittedRun(Run):
    """A run that a launch of ours works on, or will. `launch` is what runs it."""

    def __init__(self, run_uri: str, launch: LaunchProcess) -> None:
        self.launch = launch
        super().__init__(run_uri)
        self._before = max(self._store.claim_numbers(), default=0)

    def _require_run(self) -> None:
        """Requires nothing: the run may not exist yet."""

    def _view(self, watch_s: float, quiet_s: Quiet) -> RunView:
        """The view, as of any run: `starting` until the launch has claimed its attempt, `failed` if it never
        did.
        """
        alive = self.launch.is_alive()  # first: what it wrote before its end is then seen
        if self._has_begun():
            return super()._view(watch_s, quiet_s)
        return _not_begun(super()._view(0.0, quiet_s), str(self.launch), alive, self._why_not(alive))

    def wait(self, timeout_s: float | None = None) -> RunView:
        """Waits until the launch has ended, at most `timeout_s` seconds. Returns the run at that moment.

        An interrupt (Ctrl-C, or the notebook's stop button) makes the launch save and stop, and the wait
        continues; a second one stops it at once. Raises the error with which the launch was refused.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                while not self.launch.wait(_LOOK_S):
                    if deadline is not None and time.monotonic() > deadline:
                        return self.status()
                break
            except KeyboardInterrupt:
                self.launch.interrupt()
        if not self._has_begun():
            raise self.launch.error()
        return self.status(0.0)

    def stop(self, now: bool = False, wait: bool = True, tell: Callable[[str], None] = unheard) -> Reply:
        """Stops it, as any run. A launch that has not begun is ended before it does."""
        if self._has_begun() or not self.launch.is_alive():
            return super().stop(now, wait, tell)
        self.launch.interrupt()
        if wait:
            while not self.launch.wait(_LOOK_S):
                pass
        return Reply(request=0, what="stop", outcome="done", text=f"{self.launch} was told before it began")

    def _interrupted(self) -> None:
        """Handles an interrupted cell that watches: as Ctrl-C, which saves and stops."""
        self.launch.interrupt()
        with suppress(OrchestratorError):
            self.wait()

    def _has_begun(self) -> bool:
        return max(self._store.claim_numbers(), default=0) > self._before

    def _why_not(self, alive: bool) -> str:
        return "" if alive else str(self.launch.error())


def _not_begun(view: RunView, launch: str, alive: bool, error: str) -> RunView:
    if alive:
        return replace(
            view, state=STARTING, alive=True, verdict=f"starting: {launch} has claimed no attempt yet"
        )
    return replace(
        view, state=FAILED, alive=False, verdict=f"{launch} began no attempt: {error}", reason=error
    )


def runs(storage: str | Path) -> list[Run]:
    """The runs that lie in a storage, a folder or a prefix of a bucket, by name. Raises `RefusedError` if
    there is no such folder, `ConfigError` for a URI of another kind.
    """
    where = open_storage(str(storage))
    names = where.list("")
    if not names and where.folder is not None and not where.folder.is_dir():
        raise RefusedError(
            f"{storage} is no folder; give the one that `run.storage` names", code="storage.not_found"
        )
    found = []
    for name in names:
        with suppress(RefusedError):
            found.append(Run(join(str(storage), name)))
    return found
