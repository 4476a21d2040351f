"""A node dies, and comes back: the others go on at once, and nothing is lost."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.launch.api import RunResult
from orchestrator.storage.files import Storage
from tests.system.harness import LIMIT_S, Job, assert_exactly_once, log_text, when_step

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


@pytest.mark.chaos
def test_a_node_that_holds_rows_is_drained_and_leaves_after_the_point_of_that_step(
    job: Job, three_nodes: Any
) -> None:
    results: list[RunResult] = []
    changes = {"train__numerics": "fast", "train__parallel": "shard", "resume__memory_every_steps": None}
    many = {"train__max_steps": 100_000, "cluster__cpus_per_worker": 2, "resume__every_steps": 1000}
    training = threading.Thread(target=lambda: results.append(job.train(**changes, **many)))
    training.start()
    when_step(job, 5, lambda: None).join()
    drain(three_nodes, three_nodes.workers.pop(), grace_s=200)
    alone = wait_for_world(job, 1)
    assert job.run.stop().outcome == "done"
    training.join(timeout=LIMIT_S)
    assert results, "the run did not end"
    assert results[0].outcome == "stopped", results[0].reason
    journal = read_journal(Storage(job.run.uri))
    after = next(start for start in journal.generations if start.generation == alone)
    before = [r.step for r in journal.records if r.generation < alone]
    assert after.parent is not None
    assert (after.cause, after.step) == ("node drained", max(before)), "it is the last step that was made"
    assert after.parent.point_name in [point["name"] for point in job.run.list_points()]
    assert not [event for event in journal.events if event.kind in ("failure", "member dead", "left out")]
    assert "about to be taken away" in log_text(job)
    assert_exactly_once(job)


def drain(cluster: Any, node: Any, grace_s: int) -> None:
    """What `ray drain-node` does, and who takes spot machines away: the node gets nothing new, and goes when
    it is idle or the time is over.
    """
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    deadline_ms = int((time.time() + grace_s) * 1000)
    gcs, reason = GcsClient(address=cluster.address), DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    accepted, refusal = gcs.drain_node(node.node_id, reason, "spot", deadline_ms)
    assert accepted, refusal


def wait_for_world(job: Job, size: int, after: int = -1) -> int:
    """The first generation of this size that began after generation `after`."""
    from orchestrator.checkpoint.points.store import RunStore
    from orchestrator.coordinator.attempt.survey import survey

    never = threading.Event()
    for _ in range(int(LIMIT_S / 0.1)):
        starts = survey(RunStore(Storage(job.run.uri))).journal.generations
        found = [s.generation for s in starts if s.world_size == size and s.generation > after]
        if found:
            return found[0]
        never.wait(0.1)
    raise AssertionError(f"no generation of {size} members was formed")
