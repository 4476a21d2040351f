"""Every point that was committed in a run with kills is whole, and any layout reads the same from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint.points.rank_files import CommittedFiles
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.sections import ModelConfig, TrainConfig
from orchestrator.planning.state.state_layout import held_rows
from orchestrator.planning.state.weights_sum import MODULUS
from orchestrator.storage.files import Storage
from orchestrator.trainer.interfaces.job import TrainJob
from orchestrator.trainer.loading.state_tensors import MODEL, Item, digest_of, load, sum_of
from orchestrator.trainer.state.train_state import TrainState
from tests.trainer.member import Plan, members, tiny_job

pytestmark = pytest.mark.xdist_group("forked")

REPLICATE, SHARD, HSDP = "replicate", "shard", {"shard": 2, "replicate": 2}
# at the first save: a later one may wait until that is decided, and come at another step
SAVES = ("staging_begun", "staged", "save_part_written")
STEPS = ("step_begin", "gradient_done", "summary_received", "applied")


def job_of(parallel: Any) -> TrainJob:
    return tiny_job(
        train__numerics="fast",
        train__parallel=parallel,
        train__max_steps=8,
        resume__every_steps=2,
        resume__keep_latest=100,
    )


def read_back(storage: Storage, model: ModelConfig, train: TrainConfig) -> int:
    """Reads all points of the run whole, and in other layouts; how many there are."""
    store, files = RunStore(storage), CommittedFiles(storage)
    names = store.point_names()
    for name in names:
        assert store.verify_point(name) == []
        whole = TrainState(model, train, torch.device("cpu"), invariant=False)
        items = whole.items()
        _spoil(items)
        load(items, name, files)
        whole.filled()
        point = store.read_point(name)
        assert digest_of(items) == point.commit.weights_digest
        assert whole.optimizer_steps == point.commit.optimizer_steps
        for num_shards in (2, 3, 5):
            _in_shards(items, num_shards, name, files)
    return len(names)


def _in_shards(items: list[Item], num_shards: int, name: str, files: CommittedFiles) -> None:
    """What the ranks of another layout load are the rows of the whole, and add up to its sums."""
    total = 0
    for shard in range(num_shards):
        mine = [_blank(item, num_shards, shard) for item in items]
        _spoil(mine)
        load(mine, name, files)
        for item, part in zip(items, mine, strict=True):
            own = item.tensor
            if item.whole.shape:
                own = own[part.first_row : part.first_row + len(part.tensor)]
            assert torch.equal(part.tensor, own), (item.name, num_shards, shard)
            if item.group == MODEL and (item.whole.sharded or shard == 0):
                total += sum_of(part)
    assert total % MODULUS == sum(sum_of(item) for item in items if item.group == MODEL) % MODULUS


def _blank(item: Item, num_shards: int, shard: int) -> Item:
    rows = held_rows(item.whole, num_shards, shard)
    if not item.whole.shape:
        return Item(whole=item.whole, tensor=torch.empty_like(item.tensor))
    blank = torch.empty_like(item.tensor[rows.start : rows.stop])
    return Item(whole=item.whole, tensor=blank, first_row=rows.start)


def _spoil(items: list[Item]) -> None:
    for item in items:
        item.tensor.fill_(7)


def campaign(root: Path, parallel: Any, place: str, step: int) -> int:
    names = ["m0", "m1", "m2", "m3"]
    with members(root, names, {"m2": Plan(kill=(place, step))}, job=job_of(parallel)) as group:
        group.finish()
        assert len(group.launch.views) > 1, "a member was lost"
    job = job_of(REPLICATE)
    return read_back(group.launch.storage, job.model, job.train)


@pytest.mark.chaos
def test_every_point_of_a_run_with_a_kill_is_read_back_in_other_layouts(tmp_path: Path) -> None:
    assert campaign(tmp_path, SHARD, "staged", 2) >= 1


@pytest.mark.chaos
@pytest.mark.parametrize("parallel", [REPLICATE, SHARD, HSDP], ids=["replicate", "shard", "hsdp"])
@pytest.mark.parametrize(
    ("place", "step"), [*((place, 2) for place in SAVES), *((place, 5) for place in STEPS)]
)
def test_every_point_of_a_campaign_is_read_back_in_other_layouts(
    tmp_path: Path, parallel: Any, place: str, step: int
) -> None:
    assert campaign(tmp_path, parallel, place, step) >= 1
