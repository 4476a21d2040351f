"""Each node keeps its workers' parts of points on its own disk: the run goes on without a lost node, from its
neighbour's copies; and where these are lost, too, says which nodes it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import UnreachableNodeError
from tests.conftest import only_what_a_launch_needs, python_is
from tests.raising import raises
from tests.system.harness import Job, assert_same_training, log_text
from tests.torchrun.ranks import ranks

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
DISK = "NODE_DISK_OF_THE_TEST"  # each node has another one
KEY: dict[str, Any] = {"resume__node_folder": f"${DISK}/points", "cluster__cpus_per_worker": 2}


@pytest.fixture
def nodes(warm: str, tmp_path: Path) -> Iterator[Any]:
    """A head, which holds the tokenizer and no disk of its own, and two nodes with one worker each."""
    import ray
    from ray.cluster_utils import Cluster

    with python_is(warm), only_what_a_launch_needs():
        made = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "object_store_memory": 200 << 20,
                "env_vars": {DISK: str(tmp_path / "disk-0")},
            },
        )
        # connected while there is only the head, which outlives the others
        ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
        made.workers = {number: started(made, tmp_path, number) for number in (1, 2)}
        made.wait_for_nodes()
        yield made
        ray.shutdown()
        made.shutdown()


def started(cluster: Any, folder: Path, number: int) -> Any:
    """A node whose disk is `disk-<number>`."""
    disk = {DISK: str(folder / f"disk-{number}")}
    return cluster.add_node(num_cpus=2, object_store_memory=100 << 20, env_vars=disk)


def lose(cluster: Any, folder: Path, number: int) -> None:
    """The node dies, and nobody has its disk."""
    cluster.remove_node(cluster.workers.pop(number), allow_graceful=False)
    (folder / f"disk-{number}").rename(folder / f"lost-{number}")


def parts_on(folder: Path, number: int) -> list[str]:
    return sorted(path.name for path in folder.glob(f"disk-{number}/points/*/points/*/state/*"))


@pytest.mark.chaos
def test_a_run_goes_on_without_a_lost_node_and_names_the_nodes_where_both_copies_are_lost(
    job: Job, nodes: Any, tmp_path: Path, unbroken: tuple[str, list[float]]
) -> None:
    first = job.train(**KEY, train__max_steps=9, resume__export_every=1)
    assert (first.outcome, first.step) == ("done", 9), first.reason
    assert parts_on(tmp_path, 1) == parts_on(tmp_path, 2), "each has its own part and the other's"
    assert not list(Path(job.run.uri).glob("points/*/state"))
    assert "has no copy" not in log_text(job)
    assert len(list(Path(job.run.uri).glob("exports/00000009-*/EXPORT"))) == 1, log_text(job)
    folder, before = tmp_path / "disk-1", len(job.run.records())

    lose(nodes, tmp_path, 1)
    second = job.train(**KEY, train__max_steps=12, cluster__num_workers=1)
    assert (second.outcome, second.step) == ("done", 12), second.reason
    assert not folder.exists()
    assert [record.step for record in job.run.records()] == [*range(1, 13)]
    assert before == 9

    lose(nodes, tmp_path, 2)
    nodes.workers[3] = started(nodes, tmp_path, 3)
    nodes.wait_for_nodes()
    with raises(UnreachableNodeError, "storage.unreachable_node", "disk-2/points"):
        job.train(**KEY, cluster__num_workers=1)
    points = job.run.list_points()
    assert [(row["healthy"], bool(row["away"])) for row in points if row["on_lineage"]][-1] == (None, True)
    assert not [row for row in points if row["quarantined"]]

    (tmp_path / "lost-2").rename(tmp_path / "disk-2")
    nodes.workers[2] = started(nodes, tmp_path, 2)  # Ray knows it by another id
    nodes.wait_for_nodes()
    last = job.train(**KEY, cluster__num_workers=2)
    assert (last.outcome, last.step) == ("done", 16), last.reason
    assert_same_training(job, unbroken)
    kept = {row["name"] for row in job.run.list_points()}
    left = {path.name for disk in ("disk-2", "disk-3") for path in tmp_path.glob(f"{disk}/points/*/points/*")}
    assert left <= kept, "pruned points are gone from the nodes, too"


@pytest.mark.chaos
def test_under_torchrun_the_ranks_of_one_machine_share_its_disk_and_several_disks_are_refused(
    job: Job, tmp_path: Path, unbroken: tuple[str, list[float]]
) -> None:
    apart = job.config(resume__node_folder=str(tmp_path / "disk-$RANK"))
    with ranks(tmp_path, 2, apart) as group:
        assert group.end(300.0) == [2, 1], group.said()
        assert "the 2 ranks of this group see 2 disks there" in group.said()
    assert not Path(job.config().run.run_uri).exists()
    disk = tmp_path / "disk"
    with ranks(tmp_path, 2, job.config(resume__node_folder=str(disk), train__max_steps=9)) as group:
        assert group.end(300.0) == [0, 0], group.said()
    assert len(list(disk.glob("*/points/*/state/*"))) == 2 * len(job.run.list_points())
    assert not list(Path(job.run.uri).glob("points/*/state"))
    # this machine has the disk, with the key and without it
    with ranks(tmp_path, 1, job.config()) as group:
        assert group.end(300.0) == [0], group.said()
    assert all(row["healthy"] for row in job.run.verify())
    assert_same_training(job, unbroken)
