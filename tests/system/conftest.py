"""A small job on a real Ray cluster, and two runs of it that nothing befell, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.elastic.supervision import supervisor
from tests.conftest import connected, only_what_a_launch_needs, python_is
from tests.system.harness import Job, assert_exactly_once

LLAMA = {
    "train.max_steps": 16,
    "resume.every_steps": 4,
    "cluster.num_workers": 2,
    "data.num_tokenizers": 1,
    "data.window_bytes": 1 << 18,
    "data.fragment_bytes": 1 << 16,
}
TINY = {**LLAMA, "model.factory": "tests.system.tiny_model:build"}
# a job whose training is a user's own: objective, frozen model, optimizer, averages
OPEN = {
    **TINY,
    "train.objective": "tests.system.tiny_model:near_reference",
    "model.frozen": {"reference": {"factory": "tests.system.tiny_model:build"}},
    "train.optimizer": "muon",
    "train.ema": 0.9,
}
Make = Callable[[Mapping[str, Any]], dict[str, Any]]


def with_evaluation(mapping: dict[str, Any], every_steps: int) -> dict[str, Any]:
    """The job, evaluated on the first 21 samples of its own sources."""
    parts = {"own": {"sources": mapping["data"]["sources"]}}
    return {
        **mapping,
        "eval": {"every_steps": every_steps, "at_end": True, "max_samples": 21, "parts": parts},
    }


@pytest.fixture(autouse=True)
def slow_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that takes long on a busy machine is not replaced: attempts can be counted."""
    monkeypatch.setattr(supervisor, "FROZEN_S", 60.0)


@pytest.fixture
def job(tiny_config: Make, tmp_path: Path) -> Iterator[Job]:
    """16 steps of 8 × 32 tokens, a point every 4, two workers."""
    with ended(Job(tiny_config(TINY), tmp_path)) as made:
        yield made


@pytest.fixture
def llama(tiny_config: Make, tmp_path: Path) -> Iterator[Job]:
    """The same job with a model of transformers."""
    with ended(Job(tiny_config(LLAMA), tmp_path)) as made:
        yield made


@contextmanager
def ended(job: Job) -> Iterator[Job]:
    """No driver of the job is left afterwards."""
    yield job
    for driver in job.drivers:
        driver.kill()
        driver.communicate()


@pytest.fixture(scope="session")
def undisturbed(
    head: Any, warm: str, tiny_config: Make, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Job]:
    """The same job, trained to its end by one worker and by two; only to be read."""
    jobs = {size: Job(tiny_config(TINY), tmp_path_factory.mktemp("undisturbed")) for size in (1, 2)}
    with python_is(warm), connected(head):
        for size, made in jobs.items():
            result = made.train(cluster__num_workers=size)
            assert result.outcome == "done", result.reason
            assert_exactly_once(made)
    return jobs


@pytest.fixture(scope="session")
def unbroken(undisturbed: dict[int, Job]) -> tuple[str, list[float]]:
    """The weights' digest and the losses of the job on one worker."""
    return undisturbed[1].final_digest(), undisturbed[1].losses()


@pytest.fixture
def finished(undisturbed: dict[int, Job], tmp_path: Path) -> Job:
    """A copy of the run that two workers finished."""
    return undisturbed[2].copied(tmp_path / "runs")


@pytest.fixture(scope="module")
def three_nodes(warm: str) -> Iterator[Any]:
    """A head that holds the tokenizer, and two nodes that hold a worker each."""
    import ray
    from ray.cluster_utils import Cluster

    with python_is(warm), only_what_a_launch_needs():
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 200 << 20},
        )
        # connected while there is only the head: a driver attaches to any raylet of its machine, and this one
        # shall outlive the others
        ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
        made.workers = [made.add_node(num_cpus=2, object_store_memory=100 << 20) for _ in range(2)]
        made.wait_for_nodes()
        yield made
        ray.shutdown()
        made.shutdown()
