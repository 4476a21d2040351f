"""A run as a Ray job: the submission for a configuration, and the check that no other job works on the run.

`submission` is pure except for reading the configuration; `submit` executes it. Ray is accessed only through
`cluster.job_server`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cluster.job_server import STOP_WAIT, JobServer, JobStatus
from orchestrator.config.loading import load_config
from orchestrator.errors import BusyError, ConfigError
from orchestrator.launch.start.run_preparation import run_storage
from orchestrator.storage.buckets import is_uri
from orchestrator.storage.open import is_bucket

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

RUN_KEY = "orchestrator_run"  # in a job's metadata: the run's folder
STOP_WAIT_S = 60
# parts of a working directory that no job needs, besides those in .rayignore
EXCLUDES = (".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """The submission to the job server. `run_uri` is the run's folder, as the nodes see it, or its URI."""

    job_id: str
    run_uri: str
    entrypoint: str
    runtime_env: Mapping[str, Any]
    metadata: Mapping[str, str]
    entrypoint_cpus: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A submitted job; the document of `submit --json`.

    `status` is the job server's (PENDING, RUNNING, SUCCEEDED, STOPPED, FAILED), `message` its sentence,
    `exit_code` that of the job's command, None before its end.
    """

    job: str
    run_uri: str
    address: str
    status: str
    message: str = ""
    exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def submission(
    config: str | Path,
    overrides: Sequence[str],
    *,
    folder: str | Path,
    token: str,
    python: str = "python",
    stop_wait_s: int = STOP_WAIT_S,
    entrypoint_cpus: float = 0.0,
) -> Submission:
    """The job that trains `config` from a copy of `folder`. `token` distinguishes it from other jobs of the
    run.

    Raises `ConfigError`, before anything is submitted, for every mistake that the start would find in the
    configuration, for a run.storage in the copy, and for files of the configuration that are not in it.
    """
    folder = Path(os.path.abspath(folder))
    job = load_config(config, overrides)
    run_uri = run_storage(job).root
    if not os.path.isabs(job.run.storage) and not is_bucket(job.run.storage):
        raise ConfigError(
            f"run.storage={job.run.storage} is relative: the run would lie in the job's copy of {folder}, "
            "which Ray deletes; give an absolute path that all nodes see, or a bucket's URI, e.g. "
            f"run.storage={folder / 'runs'}",
            code="storage.in_job_copy",
        )
    problems = list(_not_in_the_copy(job, Path(config), folder))
    if problems:
        raise ConfigError(
            "\n".join(["the job runs in a copy of this folder, which would lack what it names:", *problems]),
            code="job.lacks_files",
        )
    words = [*shlex.split(python), "-m", "orchestrator.cli.commands", "train", str(config), *overrides]
    return Submission(
        job_id=f"{job.run.name}-{token}",
        run_uri=run_uri,
        entrypoint=shlex.join(words),
        runtime_env={
            "working_dir": str(folder),
            "excludes": list(EXCLUDES),
            "env_vars": {STOP_WAIT: str(stop_wait_s)},
        },
        metadata={RUN_KEY: run_uri},
        entrypoint_cpus=entrypoint_cpus,
    )


def _not_in_the_copy(job: JobConfig, config: Path, folder: Path) -> Iterable[str]:
    """The relative paths in the configuration that `folder` does not have.

    The job's current folder is its copy of `folder`. Absolute paths are not checked: they are on the nodes.
    """
    named = [("CONFIG", str(config)), ("model.pretrained", job.model.pretrained or "")]
    for name, frozen in job.model.frozen.items():
        named += [(f"model.frozen.{name}", path) for path in (frozen.pretrained, frozen.init_from) if path]
    for source in job.data.sources:
        if source.format == "python":
            continue
        paths = (source.path,) if isinstance(source.path, str) else source.path
        named += [(f"data.sources: {source.name}", path) for path in paths]
    if job.data.tokenizer.startswith("."):  # else it may be a name on the hub
        named.append(("data.tokenizer", job.data.tokenizer))
    for what, path in named:
        if not path or os.path.isabs(path) or is_uri(path):
            continue
        if os.path.relpath(folder / path, folder).startswith(".."):
            yield f"  {what}: {path} lies outside of {folder}; give an absolute path that all nodes see"
        elif not any(folder.glob(os.path.normpath(path))):
            yield f"  {what}: {folder} has no {path}; submit from the folder that it is relative to"


def running_job(jobs: Iterable[JobStatus], run_uri: str) -> JobStatus | None:
    """The job that was submitted for this run and has not ended."""
    mine = (job for job in jobs if job.metadata.get(RUN_KEY) == run_uri)
    return next((job for job in mine if not job.is_over), None)


def submit(made: Submission, server: JobServer) -> Submitted:
    """Submits the job. Raises `BusyError`, and submits nothing, if a job of the cluster still works on the
    run.

    A launch that is no job of this cluster is not visible here: the job then finds the run's claim and ends
    with that reason, because no run has two launches. So does one of two jobs that are submitted at the same
    moment.
    """
    if (other := running_job(server.jobs(), made.run_uri)) is not None:
        uri = shlex.quote(made.run_uri)
        raise BusyError(
            f"run {made.run_uri}: job {other.id} works on it ({other.status.lower()}), so nothing was "
            f"submitted. Follow it (`orchestrator watch {uri}`), or stop it first, which saves "
            f"(`orchestrator stop {uri}`); submitting again then continues the run"
        )
    server.submit(
        job_id=made.job_id,
        entrypoint=made.entrypoint,
        runtime_env=made.runtime_env,
        metadata=made.metadata,
        entrypoint_cpus=made.entrypoint_cpus,
    )
    return submitted(made, server)


def submitted(made: Submission, server: JobServer) -> Submitted:
    """The current state of the job."""
    job = server.status(made.job_id)
    return Submitted(
        job=made.job_id,
        run_uri=made.run_uri,
        address=server.address,
        status=job.status,
        message=job.message,
        exit_code=job.exit_code,
    )


def commands(job: Submitted) -> list[str]:
    """Commands for a submitted job, as text."""
    uri = shlex.quote(job.run_uri)
    return [
        f"job {job.job} is submitted to {job.address}: it starts or continues {job.run_uri}",
        f"  orchestrator watch {uri}     where the run stands",
        f"  ray job logs --address {job.address} --follow {job.job}     what the job prints",
        f"  orchestrator stop {uri}     save and stop; submitting again continues",
        f"  ray job stop --address {job.address} {job.job}     the same, for one that does not answer",
    ]
