"""Which loggers the metrics of an attempt go to: a TensorBoard file in the run's folder, Ray's metrics where
the attempt runs in a Ray cluster, and those that the user asks for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.cluster.ray_metrics import RayMetrics, in_a_cluster
from orchestrator.coordinator.attempt import Attempt
from orchestrator.history.loggers import LoggedRun, logger
from orchestrator.history.metric_log import MetricLog, MetricLogs, Sink, TensorBoard
from orchestrator.history.metrics import METRICS, PREFIX, Meter, Sample
from orchestrator.history.published_folder import PublishedFolder
from orchestrator.history.saved_history import SavedHistory
from orchestrator.storage.open import open_storage


class RaySink:
    """Every declared metric, tagged with the run's name."""

    name = "Ray's metrics"

    def __init__(self, run: str) -> None:
        self._run = run
        self._metrics: RayMetrics | None = None

    def take(self, sample: Sample, now: float) -> None:
        """See `Sink`."""
        if self._metrics is None:  # here and not before: what Ray raises then ends the use of this alone
            self._metrics = self._declare()
        for name, value in sample.values.items():
            self._metrics.set(PREFIX + name, value)

    def flush(self) -> None:
        """Ray's agent collects by itself."""

    def _declare(self) -> RayMetrics:
        declared = [
            (PREFIX + m.name, m.kind, f"{m.meaning}{f' [{m.unit}]' if m.unit else ''}")
            for m in METRICS.values()
        ]
        return RayMetrics(declared, {"run": self._run})


def measured(flat_config: Mapping[str, Any], location: str, run: str, attempt: Attempt) -> MetricLogs:
    """The metrics of an attempt of the run at `location` (as `open_storage` takes it); it hears them from the
    journal. What a logger keeps in files lies in a folder of this machine where the run lies in a bucket,
    and is published from there.
    """
    storage = open_storage(location)
    folder = storage.folder or _scratch(attempt)
    saved_tokens = attempt.point.cursor.consumed_tokens if attempt.point else 0
    sinks: list[Sink] = []
    if flat_config.get("monitor.tensorboard"):
        sinks.append(TensorBoard(folder, attempt.number))
    if in_a_cluster():
        sinks.append(RaySink(run))
    logged = LoggedRun(name=run, id=attempt.run_id, folder=folder, config=flat_config)
    asked: list[list[Sink]] = [
        [logger(name, logged, SavedHistory(attempt.history, attempt.history_saved_to))]
        for name in flat_config.get("monitor.loggers") or ()
    ]
    logs = [MetricLog(Meter(saved_tokens), each) for each in (sinks, *asked)]
    keeps_files = bool(flat_config.get("monitor.tensorboard") or asked)
    if storage.folder is not None or not keeps_files:
        return MetricLogs(logs)
    return MetricLogs(logs, lambda trouble: PublishedFolder(storage, folder, trouble))


def _scratch(attempt: Attempt) -> Path:
    """The same one for all attempts of the run on this machine."""
    folder = Path(tempfile.gettempdir()) / f"orchestrator-{attempt.run_id or 'run'}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
