"""Whole runs in buckets of servers that fail, or refuse less than they should: saved, killed, continued, and
all of it is as it was promised.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.faults import FaultPlan
from orchestrator.inspect.run import Run
from orchestrator.storage.open import open_storage
from tests.storage.servers import CLOUD, Fault, Proxy, Rule, moto, new_bucket, no_fault, proxy_before, reach
from tests.system.harness import LIMIT_S
from tests.torchrun.ranks import Ranks

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("forked")]
Make = Callable[[Mapping[str, Any]], dict[str, Any]]
PASSING: tuple[Fault, ...] = ("500", "503", "reset", "cut", "500 after", "reset after")
BURST = range(90, 105)  # more than the library repeats one request, and fewer than a call does in all


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with moto() as url, proxy_before(url) as proxy:
        reach(monkeypatch, proxy.url, tmp_path)
        yield proxy


def trained(proxy: Proxy, tmp_path: Path, mapping: Mapping[str, Any]) -> tuple[Run, str]:
    """A run of one rank whose coordinator was killed when its first COMMIT was sent, and continued; and what
    the second launch said.
    """
    storage = f"{new_bucket(proxy.url)}/runs"
    (tmp_path / "job.json").write_text(json.dumps({**mapping, "run": {**mapping["run"], "storage": storage}}))
    environment = {name: value for name, value in os.environ.items() if name.startswith((*CLOUD, "HOME"))}
    said = ""
    for plan, ended in ((FaultPlan(folder=str(tmp_path)).kill("commit_sent"), 1), (None, 0)):
        logs = tmp_path / f"logs{ended}"
        logs.mkdir()
        group = Ranks(tmp_path, logs, 1, ["job.json"], plan, environment)
        try:
            assert group.end(LIMIT_S) == [ended], group.said()
        finally:
            group.kill()
        said = group.said()
    proxy.rule = no_fault
    return orchestrator.open(f"{storage}/tiny"), said


def require_whole(run: Run, said: str) -> None:
    """One history without a gap, each point of which can be read back."""
    report = run.audit(processes=1)
    assert (report["exactly_once"], report["attempts"]) == (True, 2)
    points = run.list_points()
    assert f"resumes from {points[0]['name']}" in said
    assert [row["healthy"] for row in run.verify()] == [True] * len(points)
    assert run.status().verdict == "done at step 12"


@pytest.fixture
def job(tiny_config: Make) -> dict[str, Any]:
    changes = {"train.max_steps": 12, "resume.every_steps": 4, "resume.keep_latest": 9}
    return tiny_config({"model.factory": "tests.system.tiny_model:build", **changes})


def failing(every: int, silences: tuple[int, ...]) -> Rule:
    """Each so-manieth request fails, in turn in each way; of a burst all do, and these get no answer."""
    numbers, lock, ways = itertools.count(1), threading.Lock(), itertools.cycle(PASSING)

    def rule(method: str, path: str) -> Fault | None:
        with lock:
            number = next(numbers)
            if number in silences:
                return "silence" if number % 2 else "silence after"
            if number in BURST:
                return "503"
            return next(ways) if number % every == 0 else None

    return rule


@pytest.mark.parametrize(
    ("every", "silences"), [(7, ()), pytest.param(3, (31, 60, 121, 150), marks=pytest.mark.chaos)]
)
@pytest.mark.chaos
def test_a_run_through_a_server_that_fails_is_killed_and_continued_without_a_gap(
    proxy: Proxy, job: dict[str, Any], tmp_path: Path, every: int, silences: tuple[int, ...]
) -> None:
    proxy.rule = failing(every, silences)
    run, said = trained(proxy, tmp_path, job)
    assert len(proxy.asked) > BURST.stop, "the burst has come"
    require_whole(run, said)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("server", "commands"),
    [("overwrites", ("train", "train --dry-run", "plan", "plan --json")), ("answers 501", ("plan --json",))],
)
def test_a_start_in_a_bucket_without_conditional_create_is_refused_by_name_and_leaves_nothing(
    proxy: Proxy,
    job: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    server: str,
    commands: tuple[str, ...],
) -> None:
    bucket = new_bucket(proxy.url)
    changed = {**job, "run": {**job["run"], "storage": f"{bucket}/runs"}}
    (tmp_path / "job.json").write_text(json.dumps(changed))
    if server == "overwrites":
        proxy.forgets = ("if-none-match",)
    else:
        proxy.unknown = ("if-none-match",)
    for command in commands:
        name, *options = command.split()
        with pytest.raises(SystemExit) as ended:
            main([name, str(tmp_path / "job.json"), *options])
        printed = capsys.readouterr()
        assert ended.value.code == 2, command
        assert bucket in printed.err + printed.out, command
        assert open_storage(bucket).list("") == [], command
    assert json.loads(printed.out)["error"]["code"] == "storage.no_conditional_create"
