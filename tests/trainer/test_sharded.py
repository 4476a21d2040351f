"""FSDP2 and HSDP train what one process trains, in any layout, with uneven shards, tied, frozen and unused
weights.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.trainer.member import tiny_job
from tests.trainer.sharded import Trained, alone, in_each_layout, on_ranks

# (world size, number of shards): replicate, FSDP2, HSDP; later ones after earlier ones in the same processes
LAYOUTS = [(1, None), (2, 1), (3, None), (4, 1), (4, 2), (4, None), (2, None), (3, 2), (2, 2)]
SHARDED = [layout for layout in LAYOUTS if layout[1] != 1]
ODD = {"model__factory": "tests.trainer.sharded:Odd"}  # DDP takes no model with a weight that nobody uses


def assert_trained_alike(found: Trained, expected: Trained, tolerance: float) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=10 * tolerance)
    assert list(found.state) == list(expected.state), "the same tensors in the same order"
    for name, tensor in expected.state.items():
        assert found.state[name].dtype == tensor.dtype


@pytest.mark.parametrize(
    ("changes", "tolerance", "layouts"),
    [({}, 1e-5, LAYOUTS), (ODD, 1e-5, SHARDED), ({"train__precision": "bf16"}, 5e-3, LAYOUTS[1:6])],
)
def test_every_layout_trains_what_one_process_trains(changes, tolerance, layouts):
    job = tiny_job(train__numerics="fast", train__micro_batch_size=5, **changes)
    expected = alone(job, 4)
    by_rank = on_ranks(4, in_each_layout, job, layouts, 4)
    assert set(by_rank[0]) == set(layouts)
    for layout, found in by_rank[0].items():
        whole = next(other[layout] for other in by_rank if layout in other and other[layout].state)
        found = replace(found, state=whole.state)  # noqa: PLW2901  which rank 0 of the group has
        assert_trained_alike(found, expected, tolerance)
        for other in by_rank[1:]:
            if layout in other:
                assert other[layout].losses == found.losses
                assert other[layout].norms == found.norms, "the same on every rank"
        if tolerance < 1e-3:
            for name, tensor in expected.state.items():
                assert torch.allclose(found.state[name].double(), tensor.double(), atol=1e-4), name
