"""What is submitted for a configuration, and what is refused before anything is."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cluster.job_server import JobServer, JobStatus
from orchestrator.errors import ConfigError, ResourceError
from orchestrator.launch.submit import EXCLUDES, RUN_KEY, running_job, submission
from tests.ports import free_ports
from tests.raising import raises


@pytest.fixture
def folder(tiny_config: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    """A folder with `job.yaml` and all that it names."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tiny_config({"run.storage": str(tmp_path / "runs")})))
    return tmp_path


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_a_job_is_the_train_command_in_a_copy_of_the_folder_with_time_to_save(folder: Path) -> None:
    made = submission("job.yaml", ["train.lr=1e-3"], folder=".", token="5f", python="/opt/py/python -X dev")
    words = shlex.split(made.entrypoint)
    train = ["-m", "orchestrator.cli.commands", "train", "job.yaml", "train.lr=1e-3"]
    assert words == ["/opt/py/python", "-X", "dev", *train]
    assert made.runtime_env == {
        "working_dir": str(folder),
        "excludes": list(EXCLUDES),
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"},
    }
    assert made.run_uri == str(folder / "runs" / "tiny")
    assert made.metadata == {RUN_KEY: made.run_uri}
    assert made.job_id == "tiny-5f"
    assert made.entrypoint_cpus == 0


def test_an_override_with_spaces_and_quotes_arrives_as_it_was_given(folder: Path) -> None:
    override = f"data.tokenizer={folder / 'the tokenizer'}'s"
    words = shlex.split(submission("job.yaml", [override], folder=".", token="1").entrypoint)
    assert words[-1] == override


def test_a_run_in_a_bucket_is_submitted_by_its_uri(folder: Path) -> None:
    made = submission("job.yaml", ["run.storage=s3://bucket/team/"], folder=folder, token="t1")
    assert made.run_uri == made.metadata[RUN_KEY]
    assert made.run_uri.startswith("s3://bucket/team/")
    with raises(ConfigError, "config.uri_with_secret", "run.storage: ", "s3://"):
        submission("job.yaml", ["run.storage=s3://me:hush@bucket/team"], folder=folder, token="t1")


def test_a_source_that_is_code_is_no_file_that_the_copy_could_lack() -> None:
    source = "{name: a, path: 'my.module:records', format: python}"
    made = submission("job.yaml", [f"data.sources=[{source}]"], folder=".", token="1")
    assert "my.module:records" in made.entrypoint


@pytest.mark.parametrize(
    ("overrides", "code", "values"),
    [
        (["run.storage=./runs"], "storage.in_job_copy", ("run.storage=./runs", "run.storage={folder}/runs")),
        (["train.max_stepz=5"], "config.unknown_key", ("train.max_stepz",)),
        (
            ['data.sources=[{name: a, path: "no/*.jsonl", format: jsonl}]'],
            "job.lacks_files",
            ("data.sources: a: ", "no/*.jsonl"),
        ),
        (["data.tokenizer=./tok"], "job.lacks_files", ("data.tokenizer", "has no ./tok")),
        (["model.config=null", "model.pretrained=../m"], "job.lacks_files", ("model.pretrained: ../m",)),
    ],
)
def test_what_the_job_could_not_do_is_refused_before_it_is_submitted(
    overrides: list[str], code: str, values: tuple[str, ...], folder: Path
) -> None:
    with raises(ConfigError, code, *(value.replace("{folder}", str(folder)) for value in values)):
        submission("job.yaml", overrides, folder=".", token="1")


def job(number: int, status: str, run: str | None) -> JobStatus:
    metadata = {} if run is None else {RUN_KEY: run}
    return JobStatus(id=f"job-{number}", status=status, message="", exit_code=None, metadata=metadata)


@pytest.mark.parametrize(("status", "works"), [("PENDING", True), ("RUNNING", True), ("STOPPED", False)])
def test_only_a_job_of_the_same_run_that_has_not_ended_is_in_the_way(status: str, works: bool) -> None:
    jobs = [job(1, "FAILED", "/runs/a"), job(2, status, "/runs/a"), job(3, "RUNNING", "/runs/b")]
    found = running_job([*jobs, job(4, "RUNNING", None)], "/runs/a")
    assert (found.id if found else None) == ("job-2" if works else None)


def test_an_address_that_nobody_answers_is_refused_with_what_to_start() -> None:
    (port,) = free_ports(1)
    with raises(ResourceError, "job.server_unreachable", f"http://127.0.0.1:{port} ", "`ray start"):
        JobServer(f"http://127.0.0.1:{port}/")
    with raises(ResourceError, "job.server_address", "--address=head:6379"):
        JobServer("head:6379")
