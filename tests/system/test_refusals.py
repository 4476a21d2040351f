"""What cannot begin is refused within seconds, with what is needed and what is there, before anything is
written.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.connection import nodes
from orchestrator.errors import BusyError, ConfigError, OrchestratorError, ResourceError, StorageError
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.launch.start import attempt_claim
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.files import Storage
from tests.raising import raises
from tests.system.harness import Job, assert_exactly_once, log_text

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
LIMIT_S = 200.0  # on a busy machine


@pytest.fixture
def job(llama: Job) -> Job:
    """Here with a model of transformers."""
    return llama


def refused(
    job: Job, kind: type[OrchestratorError], code: str, values: Sequence[str], **changes: Any
) -> None:
    with raises(kind, code, *values):
        job.train(**changes)
    folder = Path(job.config(**changes).run.run_uri)
    assert not folder.exists(), f"{folder} was written although the start was refused"


def test_missing_files_and_tokenizers_are_named(job: Job, tmp_path: Path) -> None:
    source = {"name": "stdlib", "path": str(tmp_path / "*.jsonl"), "format": "jsonl"}
    refused(job, ConfigError, "data.no_matching_file", ["*.jsonl"], data__sources=[source])
    tokenizer = str(tmp_path / "no-such-tokenizer")
    refused(job, ConfigError, "tokenizer.not_found", [tokenizer], data__tokenizer=tokenizer)


def test_a_vocabulary_that_is_too_small_is_refused_with_both_numbers(job: Job) -> None:
    model = {**(job.config().model.config or {}), "vocab_size": 10}
    refused(job, ConfigError, "model.vocabulary", ["vocab_size=10", "1000"], model__config=model)


def test_a_storage_path_that_cannot_be_written_is_named(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    file = tmp_path / "file"
    refused(job, StorageError, "storage.not_writable", [str(file)], run__storage=str(file / "runs"))


def test_a_cluster_that_does_not_answer_is_named_with_what_to_do(job: Job) -> None:
    import ray

    assert not ray.is_initialized(), "this test comes before the module's cluster"
    refused(
        job,
        ResourceError,
        "cluster.unreachable",
        ["cluster.address=127.0.0.1:9 "],
        cluster__address="127.0.0.1:9",
    )


ABSURD = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 8}
TOO_MUCH = ["GiB", "2 workers", "parameters × 4 bytes"]


def test_a_model_that_no_memory_holds_is_refused_before_ray_is_started(job: Job, tmp_path: Path) -> None:
    model = {**(job.config().model.config or {}), **ABSURD}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.config(model__config=model).to_json()))
    command = [sys.executable, "-m", "orchestrator.cli.commands", "train", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 2, ended.stderr
    assert all(value in ended.stderr for value in TOO_MUCH), ended.stderr
    assert not Path(job.config().run.run_uri).exists()


def test_a_cluster_whose_nodes_lack_memory_is_refused_with_each_of_them(job: Job, cluster: Any) -> None:
    model = {**(job.config().model.config or {}), **ABSURD}
    refused(job, ResourceError, "cluster.too_small", TOO_MUCH, model__config=model)


def test_too_few_cpus_are_counted_aloud(job: Job, cluster: Any) -> None:
    refused(
        job,
        ResourceError,
        "cluster.too_small",
        ["20 logical CPUs", "20 workers × 1", "5 of 5"],
        cluster__num_workers=20,
    )
    refused(job, ResourceError, "cluster.too_small", ["2 GPUs", " 0 "], cluster__use_gpu=True)


def test_what_a_node_has_free_is_known_without_rays_private_table_too(
    job: Job, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_usual = nodes()
    monkeypatch.delattr("ray._private.state.available_resources_per_node")
    assert nodes() == as_usual
    monkeypatch.delattr("ray._common.constants.HEAD_NODE_RESOURCE_NAME")
    assert nodes() == tuple(replace(node, is_head=False) for node in as_usual)
    values = ["20 logical CPUs", "5 of 5"]
    refused(job, ResourceError, "cluster.too_small", values, cluster__num_workers=20)


@pytest.fixture
def beating(job: Job) -> Callable[[], bool]:
    """Makes the run look alive: a claim of another launch whose heartbeat goes on with every call."""
    folder = Path(starting.run_storage(job.config()).root)
    store = RunStore(Storage(str(folder)))
    identity = starting.prepare(job.config(), Storage(str(folder)), freeze=False).identity()
    run = store.create_run(job.config().run.name, identity)
    store.claim(1, "another-launch", "start", "another-host", run.id)
    heartbeat = store.heartbeat(1)
    return heartbeat.beat


def test_a_run_that_another_launch_works_on_is_busy(
    job: Job, cluster: Any, beating: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.2):
            beating()

    thread = threading.Thread(target=beat)
    thread.start()
    monkeypatch.setattr(attempt_claim, "BUSY_WATCH_S", LIMIT_S)  # it is seen at once where it beats
    try:
        with raises(BusyError, "run.busy", "attempt 1 ", "another-launch", "another-host"):
            job.train()
    finally:
        over.set()
        thread.join()


@pytest.mark.chaos
def test_a_worker_that_lacks_a_module_is_refused_alone_and_named_and_the_other_one_trains(
    job: Job, cluster: Any, tmp_path: Path
) -> None:
    model = {
        "factory": "tests.system.tiny_model:build_but_on_one",
        "factory_args": {"mark": str(tmp_path / "m")},
    }
    changes = {f"model__{name}": value for name, value in {**model, "config": None}.items()}
    result = job.train(cluster__num_workers=[1, 2], **changes)
    assert result.outcome == "done", result.reason
    events = read_journal(Storage(job.run.uri)).events
    refusals = [event.fields for event in events if event.kind == EventKind.MACHINE_REFUSED]
    assert [(fields["error"], fields["retry_s"]) for fields in refusals] == [("ConfigError", 10.0)]
    assert "only_elsewhere" in refusals[0]["text"]
    assert not [event for event in events if event.kind == EventKind.FAILURE]
    assert "only_elsewhere" in log_text(job)
    assert_exactly_once(job)
