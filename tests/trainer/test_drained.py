"""The node of a member is about to be taken away while a sharded group trains: the member leaves, and not one
step is lost by it; the end is that of a calm run of the same worlds, to the last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.steps import StateKey
from orchestrator.trainer.interfaces.loop_interface import DONE, LEFT
from tests.trainer.launch import Launch
from tests.trainer.member import Plan, members
from tests.trainer.sharded_kills import SHARD, assert_as_if_nothing_happened, job_of

pytestmark = pytest.mark.xdist_group("forked")


def drained_at_5(
    folder: Path, sharded: bool, plans: dict[str, Plan] | None = None, memory: int | None = None
) -> Launch:
    """a, b and c train; before step 5 is made it is heard that c's node goes in 200 s. `memory`: every so
    many steps a memory point.
    """
    job = job_of(SHARD, resume__memory_every_steps=memory)
    plans = {"a": Plan(hold=("step_begin", 5)), **(plans or {})}
    with members(folder, list("abc"), plans, job, sharded=sharded) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("a") is not None)
        launch.run(launch.coordinator.draining("node-c", "host-c", 200.0))
        launch.wait_for(lambda: launch.is_asked(save=sharded, reform=True))
        launch.release("a")
        group.finish()
        return launch


@pytest.mark.chaos
def test_a_point_of_the_step_is_committed_and_the_others_go_on_from_it(tmp_path, calm, alone):
    launch = drained_at_5(tmp_path, sharded=True, memory=2)
    first, second = launch.views
    saved = StateKey(attempt=1, generation=1, step=5)
    assert (second.world_size, second.parent, second.point) == (2, saved, saved.point_name)
    assert {name: outcome.reason for name, outcome in launch.outcomes.items()} == {
        "a": DONE,
        "b": DONE,
        "c": LEFT,
    }
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)
    events = launch.journal().events
    kinds = [event.kind for event in events]
    committed = [
        e.fields["point"] for e in events[: kinds.index(EventKind.MEMBER_LEFT)] if "cursor" in e.fields
    ]
    assert saved.point_name in committed, "before it left"
    (course,) = [e.fields for e in events if e.kind == EventKind.DRAIN_COURSE]
    assert (course["course"], course["nodes"], course["fits"]) == ("save and leave", ["node-c"], True)
    assert EventKind.FAILURE not in kinds
    causes = [generation.cause for generation in launch.journal().generations]
    assert causes[1] == "node drained"


@pytest.mark.chaos
def test_where_nobody_knew_that_a_save_is_needed_the_one_before_the_reform_is_it(tmp_path, calm, alone):
    launch = drained_at_5(tmp_path, sharded=False)
    assert [(view.world_size, view.step) for view in launch.views] == [(3, 0), (2, 5)]
    assert launch.views[1].point == StateKey(attempt=1, generation=1, step=5).point_name
    assert launch.outcomes["c"].reason == LEFT
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


@pytest.mark.chaos
def test_where_that_one_fails_the_group_meets_finds_out_and_saves_the_next_step(tmp_path, calm, alone):
    launch = drained_at_5(tmp_path, sharded=False, plans={"b": Plan(full_disk_at=5)})
    assert [(view.world_size, view.step) for view in launch.views[:2]] == [(3, 0), (3, 5)]
    assert launch.views[-1].world_size == 2
    assert launch.outcomes["c"].reason == LEFT
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


def test_where_its_part_cannot_be_written_all_go_on_together_and_no_step_is_lost(tmp_path, calm, alone):
    launch = drained_at_5(tmp_path, sharded=True, plans={"b": Plan(full_disk_at=5)})
    assert [(view.world_size, view.step, view.point) for view in launch.views[:2]] == [
        (3, 0, None),
        (3, 5, None),
    ]
    assert all(view.step >= 5 for view in launch.views[1:])
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)
