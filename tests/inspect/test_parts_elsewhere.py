"""A look at a run whose parts lie on the disks of nodes: what cannot be seen from where it is looked at is no
damage, and is said to be unseen.
"""

from __future__ import annotations

from orchestrator.checkpoint.node_local.node_storage import with_nodes
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.claims.claim_files import START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.inspect.dashboard.runs import Runs
from orchestrator.inspect.run import Run
from orchestrator.launch.start.preview import said_of_files
from orchestrator.storage.open import open_storage
from tests.checkpoint.files.node_disks import Disks, committed_point


def test_a_page_takes_parts_on_the_disks_of_nodes_for_no_damage(disks: Disks) -> None:
    name = committed_point(disks)
    run = Runs(open_storage(str(disks.folder))).open("run")
    assert run.store.verify_point(name, fast=True) == []
    with run.reading() as views:
        (row,) = views.points(state="all", sort="step", q="", offset=0, limit=9)["rows"]
    assert (row["name"], row["healthy"]) == (name, None), "nobody knows"
    assert row["away"] == row["reason"]
    assert row["away"].startswith(f"resume point {name} needs nodes")


def test_status_misses_no_parts_that_are_out_of_reach(disks: Disks) -> None:
    name = committed_point(disks)
    store = disks.store("a")
    assert (file := store.read_run()) is not None
    store.claim(1, "0" * 16, START, "host", file.id)
    store.write_parent(ClaimParent(attempt=1, parent=None))
    seen = Run(str(disks.folder / "run")).status(0)
    assert seen.newest_point == name
    assert not [path for path in seen.missing if name in path]


def test_a_plan_says_of_parts_that_are_out_of_reach_only_that_it_did_not_look(disks: Disks) -> None:
    name = committed_point(disks)
    elsewhere, there = RunStore(with_nodes(open_storage(str(disks.folder / "run")))), disks.store("a")
    point = there.read_point(name)
    assert said_of_files(there, point).startswith("sizes and headers of the point's files are right")
    said = said_of_files(elsewhere, point)
    assert said.startswith(f"not looked at from here: resume point {name} needs nodes")
    assert said.endswith("the start looks, from the cluster")
