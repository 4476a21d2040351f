"""A bit that flips in one worker's memory is noticed at the next save: no point is made of it, and the run
continues from the last good point to the bits of the unbroken run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.history.journal.line_format import EventKind
from orchestrator.planning.state.state_layout import Layout
from orchestrator.trainer.saving.staging import BLOCK_BYTES, block_sums, replica_digests, shared_rows
from orchestrator.trainer.weights.state_tensors import whole_item
from tests.trainer.launch import Launch
from tests.trainer.member import Plan, members, tiny_job

REPLICATE = {"resume__every_steps": 2}
SHARDED = {**REPLICATE, "train__numerics": "fast"}
HSDP = {**SHARDED, "train__parallel": {"shard": 2, "replicate": 2}}
FSDP = {**SHARDED, "train__parallel": "shard"}


def trained_to_the_end(
    folder: Path, names: str, plan: Plan, changes: dict[str, Any], **launch: Any
) -> Launch:
    sharded = "train__parallel" in changes
    with members(folder, names, {"b": plan}, tiny_job(**changes), sharded=sharded, **launch) as group:
        group.join_all()
        assert not group.launch.errors
        return group.launch


def refused(launch: Launch) -> list[str]:
    """The points that were refused because replicas differed."""
    events = launch.journal().events
    return [
        event.fields["point"]
        for event in events
        if event.kind == EventKind.SAVE_GIVEN_UP and "replicas differ" in event.fields["reason"]
    ]


@pytest.mark.quick("replicate")
@pytest.mark.parametrize(
    ("changes", "names"), [(REPLICATE, "abc"), (HSDP, "abcd")], ids=["replicate", "hsdp"]
)
def test_a_flipped_bit_makes_no_point_and_the_run_ends_in_the_bits_of_the_unbroken_one(
    tmp_path: Path, changes: dict[str, Any], names: str
) -> None:
    unbroken = trained_to_the_end(tmp_path / "unbroken", names, Plan(), changes)
    launch = trained_to_the_end(tmp_path / "flipped", names, Plan(flip=("applied", 5)), changes)
    (point,) = refused(launch)
    parent = launch.views[1].parent
    assert parent is not None
    assert parent.step < 5 <= int(point.split("-")[0])
    assert launch.views[1].source_rank is None, "every member loads the point"
    assert launch.last_point().state_digest == unbroken.last_point().state_digest
    assert launch.last_point().cursor == unbroken.last_point().cursor
    (failure,) = [e.fields["reason"] for e in launch.journal().events if e.kind == EventKind.FAILURE]
    holders = 3 if changes is REPLICATE else 2  # of the flipped row
    assert failure.count("(pid ") == holders


def test_a_worker_whose_memory_keeps_failing_ends_the_run_after_max_failures(tmp_path: Path) -> None:
    plan = Plan(flip=("applied", 5), flips=99)
    launch = trained_to_the_end(tmp_path, "abc", plan, REPLICATE, max_failures=1)
    status = launch.wait_for_end()
    assert status.ended == "failed"
    last = launch.last_point().key
    assert last.step < 5
    # a save may have been under way when the first bit flipped: its point is a new start
    since = [name for name in refused(launch) if (at := parse_point_name(name)) and at > last]
    assert len(since) == 2


@pytest.mark.chaos
def test_rows_that_one_rank_alone_holds_are_not_compared(tmp_path: Path) -> None:
    launch = trained_to_the_end(tmp_path, "ab", Plan(flip=("applied", 5)), FSDP)
    assert not refused(launch)
    assert launch.last_point().key.step == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("length", [0, 1, 7, 9, BLOCK_BYTES // 8, BLOCK_BYTES + 3])
def test_every_bit_counts_whatever_the_type_and_the_length(dtype: torch.dtype, length: int) -> None:
    tensor = torch.zeros(length + 1, dtype=dtype)[1:]  # not aligned to 8 bytes
    before = block_sums([tensor])
    for place in {0, length // 2, length - 1} & set(range(length)):
        data = tensor.view(torch.uint8)
        at = place * tensor.element_size()
        for bit in range(8 if dtype is not torch.bool else 1):
            data[at : at + 1].bitwise_xor_(1 << bit)
            assert not torch.equal(block_sums([tensor]), before)
            data[at : at + 1].bitwise_xor_(1 << bit)
    assert torch.equal(block_sums([tensor]), before)


def test_only_rows_that_others_hold_are_read() -> None:
    items = [
        whole_item("model", "divided", torch.ones(4, 2), sharded=True),
        whole_item("model", "everywhere", torch.ones(3), sharded=False),
    ]
    read = {
        layout: replica_digests(
            shared_rows(items, Layout(num_shards=layout[0], num_replicas=layout[1])).sums()
        )
        for layout in ((1, 1), (2, 1), (1, 2), (2, 2))
    }
    assert (read[1, 1].of_shard, read[1, 1].of_all) == ("", "")
    assert (bool(read[2, 1].of_shard), bool(read[2, 1].of_all)) == (False, True)
    assert read[1, 2].of_shard
    assert read[2, 2] == read[1, 2]
