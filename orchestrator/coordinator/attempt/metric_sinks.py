"""Chooses the metric loggers of an attempt.

They are a TensorBoard file in the run's folder, Ray's metrics if the attempt runs in a Ray cluster, and the
loggers that the user configured. Each node's Ray agent shows Ray's metrics to Prometheus, with `ray_` before
the name.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.history.metrics.declared import METRICS, PREFIX, Meter, Sample
from orchestrator.history.metrics.loggers import LoggedRun, SavedHistory, logger
from orchestrator.history.metrics.metric_log import MetricLog, MetricLogs, Sink, TensorBoard
from orchestrator.history.metrics.published_folder import PublishedFolder
from orchestrator.storage.open import open_storage


def in_a_cluster() -> bool:
    """Returns whether this process belongs to a Ray cluster. Loads no Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


class RayMetrics:
    """Gauges and counters of this process. A value that Ray does not take is left out: one that is no number,
    or a counter that does not grow.
    """

    def __init__(self, declared: Iterable[tuple[str, str, str]], tags: Mapping[str, str]) -> None:
        """`declared`: (name, gauge or counter, description)."""
        from ray.util.metrics import Counter, Gauge

        self._kinds: dict[str, Any] = {"gauge": Gauge, "counter": Counter}
        self._tags, self._metrics = dict(tags), dict[str, Any]()
        for name, kind, text in declared:
            self._declare(name, kind, text)

    def _declare(self, name: str, kind: str, text: str) -> None:
        self._metrics[name] = self._kinds[kind](name, description=text, tag_keys=tuple(self._tags))
        self._metrics[name].set_default_tags(self._tags)

    def set(self, name: str, value: float) -> None:
        """Sets a gauge's new value, or adds to a counter. An unknown name is a metric of the objective."""
        if name not in self._metrics:
            self._declare(name, "gauge", "Metric of the objective.")
        metric = self._metrics[name]
        if hasattr(metric, "inc"):
            if value > 0:
                metric.inc(value)
        else:
            metric.set(value)


class RaySink(Sink):
    """Sends every declared metric to Ray, tagged with the run's name."""

    name = "Ray's metrics"

    def __init__(self, run: str) -> None:
        self._run = run
        self._metrics: RayMetrics | None = None

    @override
    def take(self, sample: Sample, now: float) -> None:
        # Declared here and not earlier, so that an error of Ray ends only the use of this sink.
        if self._metrics is None:
            self._metrics = self._declare()
        for name, value in sample.values.items():
            self._metrics.set(PREFIX + re.sub(r"\W", "_", name), value)  # of a source any name

    def flush(self) -> None:
        """Does nothing: Ray's agent collects by itself."""

    def _declare(self) -> RayMetrics:
        declared = [
            (PREFIX + m.name, m.kind, f"{m.meaning}{f' [{m.unit}]' if m.unit else ''}")
            for m in METRICS.values()
        ]
        return RayMetrics(declared, {"run": self._run})


def measured(flat_config: Mapping[str, Any], location: str, run: str, attempt: Attempt) -> MetricLogs:
    """Builds the metrics of an attempt, which are fed by the journal.

    The run is at `location` (as `open_storage` takes it). If the run is in a bucket, loggers write their
    files into a folder of this machine, which is published from there.
    """
    storage = open_storage(location)
    folder, troubles = storage.folder, list[str]()
    if folder is None and (flat_config.get("monitor.tensorboard") or flat_config.get("monitor.loggers")):
        try:
            folder = _scratch(attempt)
        except OSError as error:
            troubles.append(
                f"TensorBoard and monitor.loggers have no folder on this machine ({error}): this attempt "
                "sends no metrics to them. The run continues, and the journal has every step"
            )
    sinks: list[Sink] = []
    if folder is not None and flat_config.get("monitor.tensorboard"):
        sinks.append(TensorBoard(folder, attempt.number))
    if in_a_cluster():
        sinks.append(RaySink(run))
    asked = [] if folder is None else _loggers(flat_config, run, folder, attempt)
    saved_tokens = attempt.point.cursor.consumed_tokens if attempt.point else 0
    logs = [MetricLog(Meter(saved_tokens), each) for each in (sinks, *asked)]
    if folder is None or storage.folder is not None:
        return MetricLogs(logs, troubles=troubles)
    here = folder
    return MetricLogs(logs, lambda trouble: PublishedFolder(storage, here, trouble))


def _loggers(flat_config: Mapping[str, Any], run: str, folder: Path, attempt: Attempt) -> list[list[Sink]]:
    """Builds the loggers that the user configured."""
    logged = LoggedRun(name=run, id=attempt.run_id, folder=folder, config=flat_config)
    return [
        [logger(name, logged, SavedHistory(attempt.history, attempt.history_saved_to))]
        for name in flat_config.get("monitor.loggers") or ()
    ]


def _scratch(attempt: Attempt) -> Path:
    """Returns the scratch folder, the same for all attempts of the run on this machine."""
    folder = Path(tempfile.gettempdir()) / f"orchestrator-{attempt.run_id or 'run'}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
