"""A node dies, and comes back: the others go on at once, and nothing is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from orchestrator.launch.api import RunResult
from tests.system.harness import LIMIT_S, Job, assert_exactly_once, when_step

pytestmark = pytest.mark.system


@pytest.fixture
def job(llama: Job) -> Job:
    """Here with a model of transformers."""
    return llama


def test_one_node_of_two_dies_and_another_one_comes(job: Job, three_nodes: Any) -> None:
    results: list[RunResult] = []
    # far more steps than it takes: it is stopped when both have been seen
    changes = {"train__max_steps": 100_000, "cluster__cpus_per_worker": 2, "resume__every_steps": 1000}
    training = threading.Thread(target=lambda: results.append(job.train(**changes)))
    training.start()
    when_step(job, 5, lambda: None).join()
    # raylets are ended and started from the main thread only
    three_nodes.remove_node(three_nodes.workers.pop(), allow_graceful=False)
    alone = wait_for_world(job, 1)
    three_nodes.workers.append(three_nodes.add_node(num_cpus=2, object_store_memory=100 << 20))
    together = wait_for_world(job, 2, after=alone)
    assert job.run.stop().outcome == "done"
    training.join(timeout=LIMIT_S)
    assert results, "the run did not end"
    assert results[0].outcome == "stopped", results[0].reason
    assert alone < together
    assert len({record.attempt for record in job.run.records()}) == 1, "no coordinator was restarted"
    assert_exactly_once(job)


def wait_for_world(job: Job, size: int, after: int = -1) -> int:
    """The first generation of this size that began after generation `after`."""
    from orchestrator.coordinator.survey import survey
    from orchestrator.resume.store import RunStore
    from orchestrator.storage.files import Storage

    never = threading.Event()
    for _ in range(int(LIMIT_S / 0.1)):
        starts = survey(RunStore(Storage(job.run.uri))).journal.generations
        found = [s.generation for s in starts if s.world_size == size and s.generation > after]
        if found:
            return found[0]
        never.wait(0.1)
    raise AssertionError(f"no generation of {size} members was formed")
