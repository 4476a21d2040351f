"""The machines by which a plan judges, what an attempt notes of them, and what the next start says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.cluster.machine import gpu_memory_here, memory_bytes
from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.history.journal.journal_reader import newest_choice
from orchestrator.launch.capacity.placement_check import known_machines, machines_here, noted_machines
from orchestrator.launch.process import launch_report
from orchestrator.planning.state.memory import Machine, ParallelChoice
from tests.launch.runner import Runner

GIB = 1 << 30
HEAD = "head:6379"
SMALL = (Machine(host="n1", memory_bytes=2 * GIB), Machine(host="n2", memory_bytes=2 * GIB))


@pytest.fixture
def mapping(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job whose worker takes several GiB, on a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    model = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 2048, "intermediate_size": 8192}
    changes = {"model.config": {**model, "num_hidden_layers": 8, "num_attention_heads": 16}}
    made: dict[str, Any] = tiny_config({**changes, "train.max_steps": 1000, "cluster.address": HEAD})
    return made


def noted(runner: Runner, choice: ParallelChoice | None) -> list[str]:
    """An attempt that has begun with this; what it said."""
    attempt = replace(runner.begin(), parallel=choice)
    journal = runner.journal(attempt)
    note_beginning(journal, attempt, runner.config().flat())
    journal.close()
    said: list[str] = []
    launch_report.announce(said.append, runner.config(), attempt, runner.plan())
    return said


def test_a_plan_on_a_cluster_judges_by_what_the_newest_attempt_found_there(mapping: dict[str, Any]) -> None:
    runner = Runner(mapping)
    before = orchestrator.plan(mapping)
    assert before.action == "start"
    assert "the machines' memory is not known here, nothing is refused by it: the start looks at them" in (
        before.notes
    )
    noted(runner, ParallelChoice(num_shards=1, reason="it fits", machines=SMALL, cluster=HEAD))
    found = orchestrator.plan(mapping)
    assert found.action == "refuse"
    (refusal,) = found.refusals
    assert "GiB of memory are needed" in refusal
    assert "4.0 GiB are there (n1: 2.0 GiB, n2: 2.0 GiB)" in refusal
    assert refusal.endswith("(judged by the machines that attempt 1 found; a start looks anew)")


def test_machines_of_another_cluster_are_not_judged_by(mapping: dict[str, Any]) -> None:
    runner = Runner(mapping)
    noted(runner, ParallelChoice(num_shards=1, reason="", machines=SMALL, cluster="other:6379"))
    assert known_machines(runner.config(), runner.store).machines == ()
    assert noted_machines(runner.store).machines == SMALL, "for a page, that need not run beside the workers"


def test_where_a_start_would_start_ray_this_machine_counts_whatever_was_noted(
    mapping: dict[str, Any],
) -> None:
    runner = Runner({**mapping, "cluster": {**mapping["cluster"], "address": None}})
    noted(runner, ParallelChoice(num_shards=1, reason="", machines=SMALL, cluster=HEAD))
    (here,) = known_machines(runner.config(), runner.store).machines
    assert here == machines_here(use_gpu=False)[0]
    assert here.memory_bytes == memory_bytes()


def test_attempts_that_noted_nothing_are_passed_over(mapping: dict[str, Any]) -> None:
    runner, choice = Runner(mapping), ParallelChoice(num_shards=4, reason="so", machines=SMALL, cluster=HEAD)
    assert newest_choice(runner.store.storage, runner.store.claim_numbers()) is None
    noted(runner, choice)
    noted(runner, None)
    assert newest_choice(runner.store.storage, runner.store.claim_numbers()) == (1, choice)


def test_a_start_whose_auto_chooses_otherwise_says_so_and_from_which_attempt(mapping: dict[str, Any]) -> None:
    runner = Runner(mapping)
    assert not any(
        "train.parallel" in line for line in noted(runner, ParallelChoice(num_shards=1, reason=""))
    )
    assert not any(
        "train.parallel" in line for line in noted(runner, ParallelChoice(num_shards=1, reason=""))
    )
    said = noted(runner, ParallelChoice(num_shards=None, reason="replicate does not fit"))
    (line,) = [line for line in said if "train.parallel" in line]
    assert line.startswith(
        "note: train.parallel=auto is shard now, it was replicate in attempt 2: any layout"
    )


# ------------------------------------------------------------------------------ the driver's program
@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of NVIDIA's, which says what stands in a file, and notes its arguments."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/says\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_the_memory_of_gpus_is_the_drivers(driver: Path) -> None:
    (driver / "says").write_text("81559\n81559\n[N/A]\n")
    assert gpu_memory_here() == (81559 << 20, 81559 << 20, 0), "a part of a GPU says nothing"
    assert machines_here(use_gpu=True)[0].gpu_bytes == gpu_memory_here()
    assert machines_here(use_gpu=False)[0].gpu_bytes == ()


@pytest.mark.parametrize(("visible", "asked"), [("1,3", "--id=1,3"), ("", ""), ("-1", "")])
def test_only_the_gpus_that_a_process_may_see_are_asked_for(
    driver: Path, monkeypatch: pytest.MonkeyPatch, visible: str, asked: str
) -> None:
    """Ray hides all of them from a task that takes none, and such a one looks."""
    (driver / "says").write_text("1\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu_memory_here()
    assert ("--id" in (driver / "asked").read_text()) == bool(asked)
    assert asked in (driver / "asked").read_text()


def test_a_machine_without_a_driver_has_no_gpus(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (driver / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert gpu_memory_here() == ()
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_memory_here() == ()
