"""A launch as an independent process on this machine, for `orchestrator.submit` without a cluster.

It continues when the process that began it ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator import errors
from orchestrator.config.schema import JobConfig
from orchestrator.errors import OrchestratorError

_TAIL_BYTES = 64 << 10


class LocalLaunch:
    """`orchestrator train` as an independent process, with this process's folder and environment.

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
