"""A step without target tokens has no loss, moves no weight, and never makes a point the best one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.views.facts.columns import read_columns
from tests.trainer.feed import FormulaFeed
from tests.trainer.launch import Launch
from tests.trainer.member import members, tiny_job

SILENT = 4  # the step whose samples have no targets
FEED = FormulaFeed(silent_samples=range(36, 48))
CHANGES = {"resume__every_steps": 1, "train__max_steps": 6, "train__warmup_steps": 1}
SHARDED = {"train__parallel": "shard", "train__numerics": "fast"}


@pytest.mark.quick("shard")
@pytest.mark.parametrize("changes", [{}, SHARDED], ids=["replicate", "shard"])
def test_a_step_without_targets_has_no_loss_and_moves_no_weight(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    sharded = bool(changes)
    with members(tmp_path, "ab", job=tiny_job(**CHANGES, **changes), feed=FEED, sharded=sharded) as group:
        group.finish()
        launch: Launch = group.launch
    losses = {record.step: record.loss for record in launch.records.values()}
    assert [step for step, loss in losses.items() if loss is None] == [SILENT]
    digests = {point.key.step: point.state_digest for point in launch.points.values()}
    moved = [
        (step, digests[step] != digests[step - 1])
        for step in range(2, 7)
        if {step, step - 1} <= digests.keys()
    ]
    assert all(has == (step != SILENT) for step, has in moved), moved
    read = launch.journal().records
    assert {record.step: record.loss for record in read} == losses
    columns = read_columns(launch.storage)
    rows = range(len(columns))
    assert {columns.record(row).step: columns.record(row).loss for row in rows} == losses
    means = [
        (int(event.fields["point"].split("-")[0]), event.fields["mean_loss"])
        for event in launch.journal().events
        if event.kind == EventKind.POINT_COMMITTED
    ]
    assert all(mean is None or mean > 0 for _, mean in means), means
