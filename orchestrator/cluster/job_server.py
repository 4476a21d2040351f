"""A Ray cluster's job server: submits a job, lists jobs, and follows one.

It starts no Ray here.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from orchestrator.errors import ResourceError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # in a job's environment: its time between SIGTERM and SIGKILL
SERVER = "RAY_API_SERVER_ADDRESS"  # in this process's environment: the address that Ray's own commands use
# set while a job's working directory is copied
COPY_ENVIRONMENT = {"RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1"}
_CONNECT_S = 5.0
_OVERRIDES = (SERVER, "RAY_ADDRESS")  # Ray would take these instead of the given address


def job_stop_s() -> float:
    """The time between SIGTERM and SIGKILL of this process, if it is a Ray job (inf: it is not, or that is
    not set).
    """
    wait_s = os.environ.get(STOP_WAIT, "")
    return float(wait_s) if wait_s.isdecimal() else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """One submitted job. `status` is PENDING, RUNNING, SUCCEEDED, STOPPED or FAILED. `exit_code` is that of
    its command; None while it runs or if it did not begin.
    """

    id: str
    status: str
    message: str
    exit_code: int | None
    metadata: Mapping[str, str]

    @property
    def is_over(self) -> bool:
        """Returns whether the job has ended."""
        return self.status in ("SUCCEEDED", "STOPPED", "FAILED")


class JobServer:
    """The job server at an address, `http://HOST:PORT` of the head's dashboard."""

    def __init__(self, address: str | None = None) -> None:
        """Default: $RAY_API_SERVER_ADDRESS, else this machine's.

        Raises `ResourceError` within seconds if no job server answers, one refuses this user, or the Ray
        installed here cannot submit.
        """
        self.address = (address or os.environ.get(SERVER) or DEFAULT_ADDRESS).rstrip("/")
        _check_reachable(self.address)
        with _explained(self.address), _address_heeded():
            from ray.job_submission import JobSubmissionClient

            for name in ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk"):
                logging.getLogger(name).setLevel(logging.WARNING)  # else it reports uploads on stdout
            self._client = JobSubmissionClient(self.address)

    def jobs(self) -> list[JobStatus]:
        """All jobs that the cluster has a record of."""
        with _explained(self.address):
            return [_status(details) for details in self._client.list_jobs() if details.submission_id]

    def submit(
        self,
        *,
        job_id: str,
        entrypoint: str,
        runtime_env: Mapping[str, Any],
        metadata: Mapping[str, str],
        entrypoint_cpus: float,
    ) -> None:
        """Copies the working directory and starts the job. With 0 CPUs its command runs on the head, else on
        any node that has so many. Raises `ResourceError`.
        """
        before = {name: os.environ.get(name) for name in COPY_ENVIRONMENT}
        os.environ.update(COPY_ENVIRONMENT)
        try:
            with _explained(self.address), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._client.submit_job(
                    submission_id=job_id,
                    entrypoint=entrypoint,
                    runtime_env=dict(runtime_env),
                    metadata=dict(metadata),
                    entrypoint_num_cpus=entrypoint_cpus or None,
                )
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def status(self, job_id: str) -> JobStatus:
        """The status of one job. Raises `ResourceError`."""
        with _explained(self.address):
            return _status(self._client.get_job_info(job_id))

    async def output(self, job_id: str) -> AsyncIterator[str]:
        """What the job's command prints, from its beginning, piece by piece, until its end. Raises
        `ResourceError` if the server becomes unreachable.
        """
        with _explained(self.address):
            async for text in self._client.tail_job_logs(job_id):
                yield text


def _status(details: Any) -> JobStatus:
    return JobStatus(
        id=details.submission_id,
        status=str(details.status.value),
        message=details.message or "",
        exit_code=details.driver_exit_code,
        metadata=details.metadata or {},
    )


def _check_reachable(address: str) -> None:
    """Fails fast if nothing answers. Ray itself waits for a connection without a limit."""
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ResourceError(
            f"--address={address} is not the address of a job server; give that of the head's dashboard, "
            "http://HOST:8265 (10001 and 6379 are other ports of a head)",
            code="job.server_address",
        )
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ResourceError(
            f"no job server answers at {address} ({error}); nothing was submitted. Start the head with "
            "`ray start --head --dashboard-host 0.0.0.0` (without --dashboard-host it accepts jobs from "
            "its own machine only), or correct --address",
            code="job.server_unreachable",
        ) from error


@contextmanager
def _address_heeded() -> Iterator[None]:
    """Within it Ray uses the given address and no other."""
    held = {name: os.environ.pop(name) for name in _OVERRIDES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """Converts what Ray raises to an error of ours that says what to do."""
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        raise ResourceError(
            f"the job server at {address} requires a token; nothing was submitted. Set RAY_AUTH_MODE=token, "
            "and put the cluster's token into ~/.ray/auth_token on this machine (or name its file in "
            "RAY_AUTH_TOKEN_PATH)",
            code="job.token_missing",
        ) from error
    except (RuntimeError, ConnectionError, ValueError, requests.exceptions.RequestException) as error:
        too_large = "exceeds the maximum size" in str(error)
        hint = "; name what the job does not need in .rayignore, and keep data and runs elsewhere"
        raise ResourceError(
            f"the job server at {address}: {error}{hint if too_large else ''}",
            code="job.folder_too_large" if too_large else "job.server_failure",
        ) from error
