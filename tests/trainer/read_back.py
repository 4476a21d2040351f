"""Reads all points of a run whole and in other layouts."""

from __future__ import annotations

import torch

from orchestrator.checkpoint.points.store import CommittedFiles, RunStore
from orchestrator.config.sections import ModelConfig, TrainConfig
from orchestrator.planning.state.state_layout import SUM_MODULUS, held_rows
from orchestrator.storage.files import Storage
from orchestrator.trainer.weights.state_tensors import MODEL, Item, digest_of, load, sum_of
from tests.trainer.states import begun_state


def read_back(storage: Storage, model: ModelConfig, train: TrainConfig) -> int:
    """Reads all points of the run whole, and in other layouts; how many there are."""
    store, files = RunStore(storage), CommittedFiles(storage)
    names = store.point_names()
    for name in names:
        assert store.verify_point(name) == []
        whole = begun_state(model, train, torch.device("cpu"), invariant=False)
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
    assert total % SUM_MODULUS == sum(sum_of(item) for item in items if item.group == MODEL) % SUM_MODULUS


def _blank(item: Item, num_shards: int, shard: int) -> Item:
    rows = held_rows(item.whole, num_shards, shard)
    if not item.whole.shape:
        return Item(whole=item.whole, tensor=torch.empty_like(item.tensor))
    blank = torch.empty_like(item.tensor[rows.start : rows.stop])
    return Item(whole=item.whole, tensor=blank, first_row=rows.start)


def _spoil(items: list[Item]) -> None:
    for item in items:
        item.tensor.fill_(7)
