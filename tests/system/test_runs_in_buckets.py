"""Whole runs whose storage is a bucket: by Ray and by plain torchrun, through a SIGKILL and with another
batch size.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import transformers

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.inspect.run import Run
from orchestrator.storage.buckets import forget_buckets
from orchestrator.storage.open import open_storage
from tests.inspect.bucket_runs import client_of, contents
from tests.storage.servers import CLOUD, moto, new_bucket, reach
from tests.system.conftest import LLAMA
from tests.system.harness import LIMIT_S, ROOT
from tests.torchrun.ranks import Ranks

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
SECRET = "hunter2-and-more"
Make = Callable[[Mapping[str, Any]], dict[str, Any]]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with moto() as url:
        reach(monkeypatch, url, tmp_path)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        forget_buckets()
        yield new_bucket(url)


def job_file(folder: Path, mapping: Mapping[str, Any]) -> str:
    (folder / "job.json").write_text(json.dumps(mapping))
    return str(folder / "job.json")


def command(*words: str) -> subprocess.Popen[str]:
    """A command of a process of its own, with a Ray of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli.commands", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trains(*words: str) -> str:
    """What a launch said that came to its end."""
    with command("train", *words) as process:
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    return said


def when_it_trains(uri: str) -> Run:
    """The run, once a step of it is in the journal."""
    never = Event()
    for _ in range(int(LIMIT_S / 0.2)):
        try:
            run = orchestrator.open(uri)
            if run.records():
                return run
        except orchestrator.OrchestratorError:
            pass
        never.wait(0.2)
    raise AssertionError(f"{uri} did not train")


def assert_no_secret(bucket: str, *said: str) -> None:
    """The secret stands in nothing that was written or said."""
    for path, content in contents(open_storage(bucket)).items():
        assert SECRET.encode() not in content, path
    for text in said:
        assert SECRET not in text


@pytest.mark.chaos
@pytest.mark.usefixtures("begun_warm")
def test_a_run_in_a_bucket_is_killed_resumed_looked_at_forked_and_exported(
    bucket: str, tiny_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"{bucket}/team/runs/tiny"
    # the last steps before the kill are trained again: no point holds them
    mapping = tiny_config({**LLAMA, "run.storage": f"{bucket}/team/runs", "resume.every_steps": 100_000})
    file = job_file(tmp_path, mapping)
    with command("train", file, "train.max_steps=1000000") as driver:
        try:
            run = when_it_trains(uri)
            saved = run.save()
            assert saved.outcome == "done", saved
            assert run.status().alive
        finally:
            os.kill(driver.pid, signal.SIGKILL)
            first, _ = driver.communicate(timeout=LIMIT_S)
    (row,) = run.list_points()
    more = row["consumed_tokens"] + 12 * 32 * 9
    changes = ["train.max_steps=null", f"train.max_tokens={more}", "train.global_batch_size=12"]
    second = trains(file, *changes, "resume.every_steps=4")
    assert f"resumes from {row['name']}" in second
    assert run.status().verdict == f"done at step {run.records()[-1].step}"
    assert run.records()[-1].consumed_tokens >= more
    assert [row["healthy"] for row in run.verify()] == [True] * len(run.list_points())
    report = run.audit(processes=1)
    assert (report["exactly_once"], report["attempts"]) == (True, 2)

    exported = run.export(tmp_path / "weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert sum(each.numel() for each in model.parameters()) > 10_000
    logs = [name for name in open_storage(uri).list("logs") if name.endswith(".log")]
    assert [name[:5] for name in logs][-1] == "0002-", "the second launch's, published at its end"
    fork = run.fork(f"{bucket}/forks/mine", exported["point"])
    assert run.list_points()[-1]["pin"]["reason"] == f"parent of fork {bucket}/forks/mine"
    third = trains(
        file, f"run.storage={bucket}/forks", "run.name=mine", "train.max_steps=null",
        f"train.max_tokens={more + 12 * 32 * 3}", "train.global_batch_size=12",
    )  # fmt: skip
    forked = orchestrator.open(fork.fork)
    assert forked.audit(processes=1)["exactly_once"]
    assert forked.records()[-1].consumed_tokens > run.records()[-1].consumed_tokens

    client = client_of(f"{bucket}/team/runs")
    assert [each["name"] for each in client.get("/api/runs").json()["runs"]] == ["tiny"]
    shown = client.get("/api/runs/tiny").json()
    assert shown["progress"]["step"] == run.records()[-1].step
    for words in (["status", uri], ["points", uri, "--tree"], ["plan", file, *changes]):
        with pytest.raises(SystemExit) as ended:
            main([*words])
        assert ended.value.code == 0
    said = capsys.readouterr()
    assert_no_secret(bucket, first, second, third, said.out, said.err)


@pytest.mark.chaos
def test_a_group_under_torchrun_trains_in_a_bucket_and_goes_on_with_another_world(
    bucket: str, tiny_config: Make, tmp_path: Path
) -> None:
    uri = f"{bucket}/runs/tiny"
    mapping = tiny_config({"run.storage": f"{bucket}/runs", "model.factory": "tests.system.tiny_model:build"})
    job_file(tmp_path, mapping)
    environment = {name: value for name, value in os.environ.items() if name.startswith((*CLOUD, "HOME"))}
    said = []
    for world, max_steps in ((2, 10), (1, 14)):
        logs = tmp_path / f"logs{world}"
        logs.mkdir()
        words = ["job.json", f"train.max_steps={max_steps}", "resume.every_steps=4"]
        group = Ranks(tmp_path, logs, world, words, environment=environment)
        try:
            assert group.end(LIMIT_S) == [0] * world, group.said()
        finally:
            group.kill()
        said += [group.said(rank) for rank in range(world)]
    run = orchestrator.open(uri)
    assert [row["world_size"] for row in run.list_points()][-1] == 1
    assert run.records()[-1].step == 14
    assert run.audit(processes=1)["exactly_once"]
    assert all(row["healthy"] for row in run.verify())
    assert_no_secret(bucket, *said)
