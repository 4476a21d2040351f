"""W&B, MLflow and trackio, each in its own offline store, get the history that counts of a run that was
killed, continued and rewound.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.loading import as_job, parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.attempt.metric_sinks import measured
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.errors import ConfigError, RefusedError
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.metrics import loggers, metric_log
from orchestrator.history.metrics.declared import Sample
from orchestrator.history.metrics.loggers import SavedHistory, require_loggers
from orchestrator.history.metrics.metric_log import MetricLogs
from orchestrator.launch import api
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.files import Storage
from tests.inspect.live_run import LiveRun
from tests.raising import raises
from tests.storage.crashfs import ModelDisk

STEP_TOKENS = 256
Series = dict[str, list[tuple[int, float]]]  # by its name: (consumed tokens, value), as they were logged


class LoggedRun(LiveRun):
    """A run whose attempts send their metrics to loggers."""

    flat: dict[str, object]
    folder: str
    log: MetricLogs

    def listener(self, attempt: Attempt) -> MetricLogs:
        self.log = measured(self.flat, self.folder, "run", attempt)
        return self.log

    def stop(self) -> list[str]:
        """The launch ends, and all that was heard is sent; returns what went wrong with that."""
        self.live.journal.event(EventKind.END, outcome="failed", reason="a test", by="failure")
        self.log.close()
        self.end()
        return self.log.troubles()


@pytest.fixture
def job(tiny_config: Any) -> JobConfig:
    return parse_config(tiny_config({"train.max_steps": 100_000}))


@pytest.fixture
def run(job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoggedRun:
    """No network, and time enough for a library that loads on a busy machine."""
    for name, value in {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "true",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_DIR", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(metric_log, "CLOSE_S", 120.0)
    monkeypatch.setattr(loggers, "FINISH_S", 60.0)
    data = starting.prepare(job, Storage(str(tmp_path / "frozen")), freeze=True)
    made = LoggedRun(ModelDisk(), job, data, keep_latest=9)
    made.folder = str(tmp_path / "run")
    Path(made.folder).mkdir()
    return made


def rewound(run: LoggedRun, logger: str) -> LoggedRun:
    """Attempt 1 saves steps 1 to 6, attempt 2 steps 7 to 12, attempt 3 goes back to step 6 and saves 7 to 9,
    attempt 4 saves 10 to 12. Each trains two more steps, which are lost.
    """
    run.flat = {**run.job.flat(), "monitor.tensorboard": False, "monitor.loggers": [logger]}
    for goes_back, num_saves in ((False, 2), (False, 2), (True, 1), (False, 1)):
        run.launch(run.on_lineage[1] if goes_back else "latest")
        for _ in range(num_saves):
            run.save(run.live)
        run.train(run.live, 2)
        assert run.stop() == []
    return run


def attempts(series: list[tuple[int, float]]) -> list[tuple[int, int]]:
    """(step, attempt that trained it): `record` makes the learning rate of the attempt."""
    return [(tokens // STEP_TOKENS, round(1000 * lr)) for tokens, lr in series]


def counting(series: Series, metric: str) -> list[tuple[int, float]]:
    """What counts: each history up to where the next one begins."""
    joined: list[tuple[int, float]] = []
    for name in (metric, f"history2/{metric}"):
        joined = [each for each in joined if each[0] < series[name][0][0]] + series[name]
    return joined


def assert_tells_what_the_journal_tells(series: Series, run: LoggedRun) -> None:
    first, second = attempts(series["lr"]), attempts(series["history2/lr"])
    assert first == [*((s, 1) for s in range(1, 7)), *((s, 2) for s in range(7, 13))]
    assert second == [*((s, 3) for s in range(7, 10)), *((s, 4) for s in range(10, 13))]
    last = 12 * STEP_TOKENS  # what comes later is in no point
    records = [r for r in survey(run.store).lineage.records if r.consumed_tokens <= last]
    for metric in ("loss", "grad_norm", "lr", "step_s", "step"):
        assert counting(series, metric) == [(r.consumed_tokens, getattr(r, metric)) for r in records]
    assert not [name for name in series if name.startswith("history3")]


def stored(path: Path) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format, after a header of seven bytes."""
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # FULL, LAST
            yield whole
            whole = b""


def in_wandb(run: LoggedRun) -> tuple[int, set[str], set[str], Series]:
    """How many files there are, the runs' ids, the axes, and the series."""
    from wandb.proto.wandb_internal_pb2 import Record

    series: Series = {}
    ids, axes = set(), set()
    files = list(Path(run.folder).glob("logs/wandb/offline-run-*/run-*.wandb"))
    files.sort(key=lambda path: path.stat().st_mtime_ns)
    for path in files:
        for data in stored(path):
            found = Record.FromString(data)
            if found.HasField("run"):
                ids.add(found.run.run_id)
            if found.HasField("metric") and found.metric.glob_name == "*":
                axes.add(found.metric.step_metric)
            row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in found.history.item}
            for name, value in row.items():
                series.setdefault(name, []).append((row["consumed_tokens"], value))
    return len(files), ids, axes, series


def test_wandb_has_one_run_whose_series_are_the_history(run: LoggedRun) -> None:
    rewound(run, "wandb")
    found = in_wandb(run)
    # a process of its own writes, which on a busy machine is later than `finish`; it tells nobody
    for _ in range(1200):
        if len(found[-1].get("history2/lr", ())) >= 6:
            break
        threading.Event().wait(0.05)
        found = in_wandb(run)
    assert found[:-1] == (4, {run.run.id}, {"consumed_tokens"})
    assert_tells_what_the_journal_tells(found[-1], run)


def test_mlflow_has_one_run_whose_series_are_the_history(run: LoggedRun) -> None:
    rewound(run, "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("orchestrator")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["pack.seq_len"] == str(run.job.pack.seq_len)
    series = {
        name: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
    }
    assert_tells_what_the_journal_tells(series, run)


def test_trackio_has_one_run_whose_series_are_the_history(run: LoggedRun) -> None:
    rewound(run, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("orchestrator")
    assert name == f"run-{run.run.id[:8]}"
    series: Series = {}
    for row in SQLiteStorage.get_logs("orchestrator", name):
        for metric, value in row.items():
            if metric not in ("step", "timestamp"):  # its own
                series.setdefault(metric.replace("step_label", "step"), []).append((row["step"], value))
    assert_tells_what_the_journal_tells(series, run)


# ------------------------------------------------------------ what goes wrong costs the logger alone
def test_mlflow_without_a_server_is_said_and_ends_the_logger_alone(
    run: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    run.flat = {**run.job.flat(), "monitor.loggers": ["mlflow"]}
    run.launch()
    run.save(run.live)
    (said,) = run.stop()
    assert said.startswith("MLflow gets no more metrics of this attempt (MLFLOW_TRACKING_URI is not set")
    assert list(Path(run.folder).glob("logs/tensorboard/*"))
    assert len(survey(run.store).lineage.records) == 3


def test_what_a_logger_says_of_its_server_is_said_without_the_password(
    run: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-store://me:hunter2@host")
    run.flat = {**run.job.flat(), "monitor.loggers": ["mlflow"]}
    run.launch()
    (said,) = run.stop()
    assert "MLflow gets no more metrics of this attempt (" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("start", [api.train, api.dry_run])
def test_a_start_with_a_logger_that_is_not_installed_is_refused_before_anything_is_written(
    start, job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as Python marks what cannot be imported
    monkeypatch.setitem(sys.modules, "trackio", None)
    storage = tmp_path / "runs"
    wanted = ["monitor.loggers=[mlflow, wandb, trackio]", f"run.storage={storage}"]
    with raises(ConfigError, "machine.missing_package", "wandb, trackio", "'.[wandb,trackio]'"):
        start(job, wanted)
    assert not storage.exists()


def test_a_folder_that_is_called_as_a_logger_is_no_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with raises(ConfigError, "machine.missing_package", "wandb"):
        require_loggers(["wandb"])


def test_a_logger_that_is_named_twice_is_refused(job: JobConfig) -> None:
    with raises(ConfigError, "config.duplicate_entry", "monitor.loggers", "wandb"):
        as_job(job, ["monitor.loggers=[wandb, wandb]"])


# ------------------------------------------------------------ which steps are saved
def step(number: int) -> Sample:
    values = {"loss": float(number), "last_step_time": 0.0}
    return Sample(values=values, tokens=number)


def taken(history: SavedHistory, *samples: Sample) -> list[tuple[int, list[str]]]:
    return [(s.tokens, list(s.values)) for sample in samples for s in history.take(sample)]


def test_a_step_is_sent_once_and_only_when_a_point_holds_it() -> None:
    history = SavedHistory()
    saved = Sample(values={}, saved_to=2)
    assert taken(history, step(1), step(2), step(3)) == []
    assert taken(history, saved, saved) == [(1, ["loss"]), (2, ["loss"])]


def test_work_that_is_lost_is_never_sent_and_begins_no_history() -> None:
    history = SavedHistory(1, 2)
    assert taken(history, step(3), Sample(values={}, rewound_to=2), Sample(values={}, saved_to=3)) == []
    assert history.number == 1


def test_what_goes_back_behind_a_point_is_another_history() -> None:
    history = SavedHistory(1, 4)
    assert taken(history, Sample(values={}, rewound_to=2), step(3), Sample(values={}, saved_to=3)) == [
        (3, ["history2/loss"])
    ]
    assert (history.number, history.saved_to) == (2, 3)


def test_a_history_that_no_point_ever_holds_does_not_fill_the_memory() -> None:
    with raises(RefusedError, "metrics.too_many_unsaved", "3 steps"):
        taken(SavedHistory(most=3), *(step(n) for n in range(1, 6)))
