"""W&B, MLflow and trackio: logs the steps that resume points hold, over consumed tokens.

These loggers cannot delete, so they get only the steps that no failure can undo. A rewind or a damaged point
removes such steps: training from there on is another history, with its own name. Each of our runs has one run
in the logger, whatever the number of starts. A library is loaded in the thread of its sink, when the first
metric comes. Each library looks up its keys, server and project itself. It receives the parts of the
configuration that are not secret.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from orchestrator.config.redaction import redacted
from orchestrator.errors import ConfigError, RefusedError
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.metrics.declared import Sample
from orchestrator.history.metrics.metric_log import Sink
from orchestrator.records.steps import StateKey

HELD = 100_000  # steps, some 100 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStep:
    """A step that a resume point holds.

    `tokens` is its end in consumed tokens, `time` the time of its report in seconds since 1970, `values` its
    metrics by the name of their series.
    """

    tokens: int
    time: float
    values: Mapping[str, float]


class SavedHistory:
    """Holds steps until a point has them.

    `number` counts the run's histories from 1. It increases whenever a history begins before the end of the
    saved one. The series of history 1 have the names of their metrics, those of history 2
    `history2/<metric>`. Each series only grows, and where a later history has begun, the later one counts.
    """

    def __init__(self, number: int = 1, saved_to: int = 0, most: int = HELD) -> None:
        """The current history, the tokens up to which points hold it, and the maximum number of held
        steps.
        """
        self.number, self.saved_to, self._most = number, saved_to, most
        self._held: list[SavedStep] = []

    def take(self, sample: Sample) -> list[SavedStep]:
        """The steps that are saved now, oldest first, each once.

        Raises `RefusedError` if more than `most` would be held.
        """
        if sample.rewound_to is not None:
            self._rewound(sample.rewound_to)
        if sample.tokens is not None:
            prefix = "" if self.number == 1 else f"history{self.number}/"
            values = {prefix + name: value for name, value in sample.per_step.items()}
            time = sample.values["last_step_time"] if sample.evaluated_at is None else sample.evaluated_at
            self._held.append(SavedStep(tokens=sample.tokens, time=time, values=values))
        if sample.saved_to is not None:
            self.saved_to = max(self.saved_to, sample.saved_to)
        elif sample.evaluated_at is None:
            if len(self._held) > self._most:
                raise RefusedError(
                    f"no resume point has been committed for {self._most:,} steps",
                    code="metrics.too_many_unsaved",
                )
            return []
        saved = [step for step in self._held if step.tokens <= self.saved_to]
        self._held = [step for step in self._held if step.tokens > self.saved_to]
        return sorted(saved, key=lambda step: step.tokens)  # an evaluation may come after later steps

    def _rewound(self, tokens: int) -> None:
        self._held = [step for step in self._held if step.tokens <= tokens]
        if tokens < self.saved_to:
            self.number, self.saved_to = self.number + 1, tokens


def saved_before(
    generations: Iterable[GenerationStart], points: Iterable[tuple[StateKey, int]]
) -> SavedHistory:
    """The saved history when an attempt begins.

    `generations` and the committed `points` (with their consumed tokens) are those of the attempts before it.
    """
    tokens_of: dict[tuple[int, int], list[int]] = {}
    for key, tokens in points:
        tokens_of.setdefault((key.attempt, key.generation), []).append(tokens)
    history = SavedHistory()
    for start in sorted(generations, key=lambda each: each.id):
        history.take(Sample(values={}, rewound_to=start.consumed_tokens))
        for tokens in tokens_of.get(start.id, ()):
            history.take(Sample(values={}, saved_to=tokens))
    return history


PROJECT = "orchestrator"  # if the user's environment names none
TAG = "orchestrator.run_id"
FINISH_S = 4.0  # the end of a run waits this long for its loggers
_MLFLOW_BATCH = 1000  # the maximum number of metrics in a request to its server


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRun:
    """The data of a run for a logger. `id` is that of run.json, empty for a run that began before ids
    existed.

    `config` is flat.
    """

    name: str
    id: str
    folder: Path
    config: Mapping[str, Any]

    @property
    def shown_config(self) -> dict[str, Any]:
        """The configuration without secrets."""
        return {path: redacted(value, path) for path, value in self.config.items()}


class Target(Protocol):
    """An open run of a logger. An error that it raises ends its use."""

    def log(self, steps: Sequence[SavedStep]) -> None:
        """Logs steps in order, each later than the steps of its series before it."""

    def finish(self) -> None:
        """The launch has ended. A later launch continues the same run."""


class Logger(Sink):
    """A `history.metrics.metric_log.Sink` of the steps that points hold."""

    def __init__(self, name: str, open_target: Callable[[], Target], saved: SavedHistory) -> None:
        """`open_target` loads the library, and may wait for a network."""
        self.name = name
        self._open, self._saved = open_target, saved
        self._target: Target | None = None
        self._steps: list[SavedStep] = []
        self._ended = False

    @override
    def take(self, sample: Sample, now: float) -> None:
        self._steps += self._saved.take(sample)
        self._ended = sample.values.get("ended") == 1 or self._ended

    @override
    def flush(self) -> None:
        if self._target is None:
            self._target = self._open()
        if self._steps:
            self._target.log(self._steps)
            self._steps = []
        if self._ended:
            self._ended = False
            self._target.finish()


class _Wandb:
    """W&B. Its own step can only increase, so positions are a metric, which is the x axis of all others."""

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb: Any = importlib.import_module("wandb")
        logs = run.folder / "logs"
        logs.mkdir(exist_ok=True)  # not the run's own folder, if that was deleted
        self._run = wandb.init(
            id=run.id or run.name,
            resume="allow",
            name=run.name,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=os.environ.get("WANDB_DIR", str(logs)),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                x_disable_stats=True,
                x_disable_meta=True,  # it includes the command line
                login_timeout=1,  # no user can answer a prompt
                finish_timeout=FINISH_S,
            ),
        )
        self._run.config.update(run.shown_config, allow_val_change=True)
        self._run.define_metric("consumed_tokens", hidden=True)
        self._run.define_metric("*", step_metric="consumed_tokens")

    def log(self, steps: Sequence[SavedStep]) -> None:
        for step in steps:
            self._run.log({**step.values, "consumed_tokens": step.tokens})

    def finish(self) -> None:
        self._run.finish()


class _Mlflow:
    """MLflow. It assigns run ids itself, so our id is a tag by which the run is found again."""

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ConfigError(
                "MLFLOW_TRACKING_URI is not set where the coordinator runs; set it to your server, e.g. "
                "https://mlflow.example.org",
                code="metrics.no_tracking_uri",
            )
        mlflow: Any = importlib.import_module("mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.tracking.MlflowClient()
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(title)
        where = experiment.experiment_id if experiment else self._client.create_experiment(title)
        mine = run.id or run.name
        found = self._client.search_runs([where], f"tags.`{TAG}` = '{mine}'", order_by=["start_time ASC"])
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(where, tags={TAG: mine}, run_name=run.name).info.run_id
        params = [mlflow.entities.Param(path, str(value)) for path, value in run.shown_config.items()]
        self._client.log_batch(self._id, params=params)

    def log(self, steps: Sequence[SavedStep]) -> None:
        metrics = [
            self._metric(name, value, int(step.time * 1000), step.tokens)
            for step in steps
            for name, value in step.values.items()
        ]
        for first in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MLFLOW_BATCH])

    def finish(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio:
    """trackio. It resumes the newest run of a name, so the name contains the beginning of the id.

    trackio reserves the name `step`, so our label is named `step_label` there.
    """

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.id[:8]}" if run.id else run.name,
            resume="allow",
            config=run.shown_config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, steps: Sequence[SavedStep]) -> None:
        for step in steps:
            values = {re.sub(r"(^|/)step$", r"\1step_label", name): v for name, v in step.values.items()}
            self._run.log(values, step=step.tokens)

    def finish(self) -> None:
        self._run.finish()


_TARGETS: dict[str, tuple[str, Callable[[LoggedRun], Target]]] = {
    "wandb": ("W&B", _Wandb),
    "mlflow": ("MLflow", _Mlflow),
    "trackio": ("trackio", _Trackio),
}


def logger(name: str, run: LoggedRun, saved: SavedHistory) -> Logger:
    """The sink for an entry of `monitor.loggers`. Its library is not loaded yet."""
    title, target = _TARGETS[name]
    return Logger(title, lambda: target(run), saved)


def require_loggers(names: Sequence[str]) -> None:
    """Raises `ConfigError` if a requested logger is not installed in this Python. Loads none."""
    # a folder with the library's name, such as ./wandb, has a spec without an origin
    gone = [name for name in names if (s := importlib.util.find_spec(name)) is None or s.origin is None]
    if gone:
        raise ConfigError(
            f"monitor.loggers has {', '.join(gone)}, not installed in this Python. Training has not started. "
            f"Run `pip install -e '.[{','.join(gone)}]'` in the checkout on every node, or remove it from "
            "monitor.loggers",
            code="machine.missing_package",
        )
