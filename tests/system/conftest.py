"""One Ray cluster per module, of real raylets, and a small job on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Job

# a dead raylet is noticed after 2 to 3 s; read by Ray when a node is started
for _name, _value in {"period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "3"}.items():
    os.environ.setdefault(f"RAY_health_check_{_name}", _value)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with room for workers and tokenizers; this process is connected to it."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 5, "include_dashboard": False, "object_store_memory": 300 << 20},
    )
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def job(tiny_config: Callable[[Mapping[str, Any]], dict[str, Any]], tmp_path: Path) -> Iterator[Job]:
    """16 steps of 8 × 32 tokens, a point every 4, two workers."""
    mapping = tiny_config(
        {
            "train.max_steps": 16,
            "resume.every_steps": 4,
            "cluster.num_workers": 2,
            "data.num_tokenizers": 1,
            "data.window_bytes": 1 << 18,
            "data.fragment_bytes": 1 << 16,
        }
    )
    made = Job(mapping, tmp_path)
    yield made
    for driver in made.drivers:
        driver.kill()
        driver.communicate()
