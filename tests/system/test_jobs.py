"""`orchestrator submit`, and `jobs/train.py` as a Ray job, as README says: a real job server, real stops."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orchestrator.config.schema import JobConfig
from orchestrator.history.metrics.declared import METRICS
from orchestrator.history.metrics.metric_log import FOLDER
from tests.ports import free_ports
from tests.system.harness import Job, assert_exactly_once, when_step

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 480.0
PER_STEP = tuple(name for name, metric in METRICS.items() if metric.per_step)
# it ends when it is stopped, and only a save on stop leaves a point
SHAPE = {"train.max_steps": 100_000, "resume.every_steps": 100_000}

# `ray start` whose workers begin as the first word says, and without what serves no job
START = """
import sys
from ray._private.node import Node
from ray.scripts.scripts import main

sys.executable = sys.argv.pop(1)
Node.start_ray_client_server = lambda self: None
main()
"""


class JobServer:
    """A Ray cluster of one node with its dashboard, as a child process with ports, a token and a folder of
    its own.

    Another Ray on this machine neither finds it nor is found by it. `close` ends every process of it.
    Workers, commands and the drivers of jobs begin by `warm`.
    """

    def __init__(self, warm: str) -> None:
        self._warm = warm
        # a short path: Ray puts sockets there, and a socket's path has at most 107 characters
        self._folder = Path(tempfile.mkdtemp(prefix="jobs-"))
        token = secrets.token_hex(16)
        (self._folder / "token").write_text(token)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "PATH": os.pathsep.join((str(Path(warm).parent), os.environ["PATH"])),  # a job's `python`
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._folder / "token"),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_metrics_report_interval_ms": "1000",
        }
        gcs, dashboard, agent, metrics = free_ports(4)
        options = {
            "node-ip-address": "127.0.0.1",
            "port": gcs,
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": agent,
            "metrics-export-port": metrics,
            "include-log-monitor": False,
            "num-cpus": 2,
            "object-store-memory": 200 << 20,
            "temp-dir": self._folder / "ray",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        flags = ["--head", "--block", "--no-monitor", "--disable-usage-stats"]
        with (self._folder / "head.log").open("wb") as log:
            self._head = subprocess.Popen(
                [sys.executable, "-c", START, self._warm, "start", *flags, *words],
                cwd=self._folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.address, self._metrics = f"127.0.0.1:{gcs}", f"http://127.0.0.1:{metrics}/metrics"
        self.url, self._headers = f"http://127.0.0.1:{dashboard}", {"Authorization": f"Bearer {token}"}

    def connect(self) -> None:
        """Waits until the job server answers; `client` is set then."""
        from ray.job_submission import JobSubmissionClient

        never, deadline = threading.Event(), time.monotonic() + LIMIT_S
        while True:
            try:
                self.client = JobSubmissionClient(self.url, headers=self._headers)
                return
            except ConnectionError:
                log = (self._folder / "head.log").read_text()
                assert self._head.poll() is None, f"ray start has ended:\n{log}"
                assert time.monotonic() < deadline, f"the job server does not answer:\n{log}"
                never.wait(0.2)

    def close(self) -> None:
        """Ends every process of the cluster and removes its folder."""
        self._head.terminate()
        self._head.wait(timeout=LIMIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def command(
        self, config: JobConfig, *options: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """`orchestrator submit`, in the folder of the package."""
        words = [self._warm, "-m", "orchestrator.cli.commands", "submit", str(_written(config)), *options]
        return subprocess.run(
            [*words, f"--address={self.url}", "--stop-wait=300"],
            check=False,
            cwd=ROOT,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def submit(self, config: JobConfig, *overrides: str) -> str:
        """README's submission of a job by Ray's own client, with absolute paths. Each override is for a start
        of its own, after one that was refused (exit code 2).
        """
        path = _written(config)
        starts = [f"python jobs/train.py {path} {override}".strip() for override in overrides or [""]]
        return self.client.submit_job(
            entrypoint="; [ $? = 2 ] && ".join(starts),
            runtime_env={"working_dir": str(ROOT), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}},
        )

    def metrics(self, wanted: str) -> dict[str, float]:
        """Ours, as Prometheus reads them, once there is one of the name `wanted`."""
        never, deadline = threading.Event(), time.monotonic() + LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(self._metrics, timeout=10) as answer:
                    lines = answer.read().decode().splitlines()
            except OSError:
                lines = []
            ours = [line for line in lines if line.startswith("ray_orchestrator_")]
            found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in ours}
            if wanted in found:
                return found
            assert time.monotonic() < deadline, f"no {wanted} within {LIMIT_S} s, but {found}"
            never.wait(0.5)

    def end(self, submission: str) -> tuple[str, str]:
        """(status, logs) of a job that ends by itself or was stopped."""
        never, deadline = threading.Event(), time.monotonic() + LIMIT_S
        while not (status := self.client.get_job_status(submission)).is_terminal():
            assert time.monotonic() < deadline, (
                f"the job is {status} after {LIMIT_S} s:\n{self.client.get_job_logs(submission)}"
            )
            never.wait(0.1)
        return status, self.client.get_job_logs(submission)


def _written(config: JobConfig) -> Path:
    path = Path(config.run.storage).parent / f"{Path(config.run.storage).name}.yaml"
    path.write_text(yaml.safe_dump(config.to_json()))
    return path


@pytest.fixture(scope="module")
def server(warm: str) -> Iterator[JobServer]:
    made = JobServer(warm)
    try:
        made.connect()
        yield made
    finally:
        made.close()


@pytest.fixture
def job(tiny_config: Callable[[Mapping[str, Any]], dict[str, Any]], tmp_path: Path) -> Job:
    return Job(tiny_config(SHAPE), tmp_path)


def test_a_stopped_job_saves_and_the_same_submission_continues(job: Job, server: JobServer) -> None:
    submitted = server.command(job.config(), "--no-wait", "--json")
    assert submitted.returncode == 0, submitted.stderr
    submission = json.loads(submitted.stdout)["job"]
    second: list[subprocess.CompletedProcess[str]] = []
    measured: list[dict[str, float]] = []

    def submit_again_and_stop() -> None:
        second.append(server.command(job.config(train__max_steps=7)))
        measured.append(server.metrics("ray_orchestrator_steps_total"))
        server.client.stop_job(submission)

    watch = when_step(job, 2, submit_again_and_stop)
    status, logs = server.end(submission)
    watch.join()
    assert status == "STOPPED", logs
    assert second[0].returncode == 2
    assert f"job {submission} works on it (running), so nothing was submitted" in second[0].stderr
    assert measured[0].keys() <= {metric.prometheus for metric in METRICS.values()}
    known = set(PER_STEP) - {"mfu"}  # a CPU's peak is not known
    assert measured[0].keys() >= {f"ray_orchestrator_{name}" for name in known}
    assert measured[0]["ray_orchestrator_world_size"] == 1
    assert "SIGTERM: saving and stopping" in logs
    (newest,) = job.run.list_points()
    assert newest["step"] >= 2, logs
    assert newest["consumed_samples"] == job.run.records()[-1].consumed_samples, "a finished step was lost"

    ended = server.command(job.config(train__max_steps=newest["step"] + 5))
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"job tiny-\w+: succeeded.*\n", ended.stdout)
    assert f"resumes from {newest['name']}" in ended.stderr
    assert job.run.records()[-1].step == newest["step"] + 5
    assert_exactly_once(job)
    assert job.run.audit()["attempts"] == 2
    shown = EventAccumulator(str(Path(job.run.uri) / FOLDER)).Reload().Scalars("loss")
    steps = job.run.records()
    assert [event.step for event in shown] == [step.consumed_tokens for step in steps]
    assert [event.value for event in shown] == pytest.approx([step.loss for step in steps], rel=1e-6)


def test_a_submission_without_the_token_is_stopped_before_anything_is_copied(
    job: Job, server: JobServer
) -> None:
    refused = server.command(job.config(), RAY_AUTH_MODE="disabled")
    assert refused.returncode == 2
    assert "requires a token; nothing was submitted. Set RAY_AUTH_MODE=token" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.chaos
def test_a_refused_job_fails_with_the_reason_and_writes_nothing(job: Job, server: JobServer) -> None:
    submission = server.submit(job.config(), "train.max_stepz=5", "run.storage=./runs")
    status, logs = server.end(submission)
    assert status == "FAILED", logs
    assert server.client.get_job_info(submission).driver_exit_code == 2
    assert "train.max_stepz is not a known field; did you mean train.max_steps?" in logs
    assert "a Ray job's copy of its working directory, which Ray deletes" in logs
    assert "Traceback" not in logs
    assert list(Path(job.config().run.storage).iterdir()) == []
