"""A run that goes from the CPU to the GPU of this machine and back: every point is loaded as it was saved,
and the losses are those of a run that stays where it began.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.loading import parse_config
from orchestrator.inspect.run import Run
from tests.devices import GPU
from tests.torchrun.ranks import ranks

pytestmark = pytest.mark.xdist_group("forked")

LIMIT_S = 300.0


def trained(mapping: dict[str, Any], folder: Path, max_steps: int, use_gpu: bool, precision: str) -> Run:
    """The run after one rank has gone on with it, up to `max_steps`."""
    job = {**mapping, "train": {**mapping["train"], "max_steps": max_steps, "precision": precision}}
    config = parse_config({**job, "cluster": {**mapping["cluster"], "use_gpu": use_gpu}})
    with ranks(folder, 1, config) as group:
        assert group.end(LIMIT_S) == [0], group.said()
    return Run(config.run.run_uri)


@GPU
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_a_run_goes_to_the_gpu_and_back(
    tiny_config: Any, tmp_path: Path, parallel: str, precision: str
) -> None:
    settings = {"resume.every_steps": 2, "train.parallel": parallel, "train.numerics": "fast"}
    expected = trained(tiny_config(settings), tmp_path, 10, False, "float32")
    moving = tiny_config(settings)
    trained(moving, tmp_path, 4, False, precision)
    trained(moving, tmp_path, 8, True, precision)
    run = trained(moving, tmp_path, 10, False, precision)
    assert all(row["healthy"] for row in run.verify())
    assert run.audit()["exactly_once"]
    losses = [[record.loss for record in of.records()] for of in (run, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3 if precision == "float32" else 5e-2)
