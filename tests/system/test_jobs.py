"""`jobs/train.py` as a Ray job, submitted as README says: a real job server, a real client, real stops."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ports import free_ports
from tests.system.harness import Job, assert_exactly_once, when_step

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
REFUSAL_LIMIT_S = 30.0
# steps long enough for a stop to come in between, points far enough apart that only a save on stop lies there
SHAPE = {
    "pack.seq_len": 128,
    "train.global_batch_size": 32,
    "train.max_steps": 60,
    "resume.every_steps": 100,
    "cluster.num_workers": 2,
}


class JobServer:
    """A Ray cluster of one node with its dashboard, as a child process with ports, a token and a folder of
    its own.

    Another Ray on this machine neither finds it nor is found by it. `close` ends every process of it.
    """

    def __init__(self) -> None:
        # a short path: Ray puts sockets there, and a socket's path has at most 107 characters
        self._folder = Path(tempfile.mkdtemp(prefix="jobs-"))
        token = secrets.token_hex(16)
        (self._folder / "token").write_text(token)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            # a job's `python` is the one that runs the tests
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._folder / "token"),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        gcs, dashboard, agent, ray_client = free_ports(4)
        options = {
            "node-ip-address": "127.0.0.1",
            "port": gcs,
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": agent,
            "ray-client-server-port": ray_client,
            "num-cpus": 3,
            "object-store-memory": 200 << 20,
            "temp-dir": self._folder / "ray",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        with (self._folder / "head.log").open("wb") as log:
            self._head = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *words],
                cwd=self._folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.address = f"127.0.0.1:{gcs}"
        self._url, self._headers = f"http://127.0.0.1:{dashboard}", {"Authorization": f"Bearer {token}"}

    def connect(self) -> None:
        """Waits until the job server answers; `client` is set then."""
        from ray.job_submission import JobSubmissionClient

        never, deadline = threading.Event(), time.monotonic() + LIMIT_S
        while True:
            try:
                self.client = JobSubmissionClient(self._url, headers=self._headers)
                return
            except ConnectionError:
                log = (self._folder / "head.log").read_text()
                assert self._head.poll() is None, f"ray start has ended:\n{log}"
                assert time.monotonic() < deadline, f"the job server does not answer:\n{log}"
                never.wait(0.2)

    def close(self) -> None:
        """Ends every process of the cluster and removes its folder."""
        self._head.terminate()
        self._head.wait(timeout=30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def submit(self, job: Job, *overrides: str) -> str:
        """README's submission of a job, with absolute paths; the same words for the same job."""
        config = Path(job.config().run.storage).parent / f"{Path(job.config().run.storage).name}.yaml"
        config.write_text(yaml.safe_dump(job.config().to_json()))
        return self.client.submit_job(
            entrypoint=" ".join(("python jobs/train.py", str(config), *overrides)),
            runtime_env={"working_dir": str(ROOT), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}},
        )

    def end(self, submission: str, limit_s: float = LIMIT_S) -> tuple[str, str]:
        """(status, logs) of a job that ends by itself or was stopped."""
        never, deadline = threading.Event(), time.monotonic() + limit_s
        while not (status := self.client.get_job_status(submission)).is_terminal():
            assert time.monotonic() < deadline, (
                f"the job is {status} after {limit_s} s:\n{self.client.get_job_logs(submission)}"
            )
            never.wait(0.1)
        return status, self.client.get_job_logs(submission)


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    made = JobServer()
    try:
        made.connect()
        yield made
    finally:
        made.close()


@pytest.fixture
def job(tiny_config: Callable[[Mapping[str, Any]], dict[str, Any]], tmp_path: Path) -> Job:
    return Job(tiny_config(SHAPE), tmp_path)


def test_a_stopped_job_saves_and_the_same_submission_continues(job: Job, server: JobServer) -> None:
    submission = server.submit(job)
    watch = when_step(job, 2, lambda: server.client.stop_job(submission))
    status, logs = server.end(submission)
    watch.join()
    assert status == "STOPPED", logs
    assert "SIGTERM: saving and stopping" in logs
    newest = job.run.points()[-1]
    assert 2 <= newest["step"] < SHAPE["train.max_steps"], logs
    assert newest["consumed_samples"] == job.run.steps()[-1].consumed_samples, "a finished step was lost"

    status, logs = server.end(server.submit(job))
    assert status == "SUCCEEDED", logs
    assert f"resumes from {newest['name']}" in logs
    assert_exactly_once(job)
    assert job.run.audit()["attempts"] == 2


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.max_stepz=5", "train.max_stepz is not a known field; did you mean train.max_steps?"),
        ("run.storage=./runs", "a Ray job's copy of its working directory, which Ray deletes"),
    ],
)
def test_a_refused_job_fails_with_the_reason_and_writes_nothing(
    job: Job, server: JobServer, override: str, reason: str
) -> None:
    submission = server.submit(job, override)
    status, logs = server.end(submission, REFUSAL_LIMIT_S)
    assert status == "FAILED", logs
    assert server.client.get_job_info(submission).driver_exit_code == 2
    assert reason in logs
    assert "Traceback" not in logs
    assert list(Path(job.config().run.storage).iterdir()) == []
