"""Loading into tensors of any layout: the same state for all pairs, within one buffer beside the state."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint.points.store import CommittedFiles
from orchestrator.errors import ResumePointError
from orchestrator.planning.state.state_layout import Layout, StateTensor, held_rows, layout_of, weights_sum
from orchestrator.storage.files import Storage
from orchestrator.trainer.saving.staging import StagingBuffer
from orchestrator.trainer.weights.state_tensors import Item, digest_of, load, sum_of
from tests.devices import PAIRS
from tests.raising import raises
from tests.trainer.saved_states import KEY, items_of, save, whole_tensors
from tests.trainer.staged import content, placed

LAYOUTS = [layout_of(1, 1), layout_of(3, 1), layout_of(4, None), layout_of(4, 2), layout_of(7, None)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIB = 1 << 20


def staged(items: Sequence[Item], buffer: StagingBuffer) -> list[Item]:
    """What lies in the buffer after they were staged."""
    copies = []
    for item in items:
        place = placed([item.tensor])
        buffer.reserve(item.tensor.nbytes)
        buffer.stage(place, lambda: None, lambda: None).done.result(60)
        (data,) = content(buffer, place)
        copy = torch.frombuffer(bytearray(data), dtype=item.tensor.dtype) if data else item.tensor.cpu()
        copies.append(dataclasses.replace(item, tensor=copy.reshape(item.tensor.shape)))
    return copies


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("saved_on", "loaded_on"), PAIRS)
def test_all_pairs_of_layouts_and_devices_give_the_same_bits(
    tmp_path: Path, saved_on: torch.device, loaded_on: torch.device, dtype: str
) -> None:
    whole = whole_tensors(DTYPES[dtype])
    there = {name: tensor.to(saved_on) for name, tensor in whole.items()}
    digests = {digest_of(items_of(whole, layout_of(1, 1), 0)), digest_of(items_of(there, layout_of(1, 1), 0))}
    buffer = StagingBuffer(saved_on)
    for number, saving in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        shares = [staged(items_of(there, saving, rank), buffer) for rank in range(saving.world_size)]
        digests.add(save(folder, saving, shares))
        files = CommittedFiles(Storage(str(folder)))
        for loading in LAYOUTS:
            blank = {name: torch.zeros_like(tensor, device=loaded_on) for name, tensor in whole.items()}
            sums = []
            for rank in range(loading.world_size):
                items = items_of(blank, loading, rank)
                load(items, KEY.point_name, files)
                for item, expected in zip(items, items_of(whole, loading, rank), strict=True):
                    assert torch.equal(item.tensor.cpu(), expected.tensor), (saving, loading, rank, item.name)
                sums += [sum_of(i) for i in items if i.group == "model" and rank < loading.num_shards]
            digests.add(weights_sum(sums))
    buffer.close()
    assert len(digests) == 1, "who holds what, and where, changes no digest"


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"name": "other"}, ["['model/other']", "['model/embedding']"]),
        ({"shape": (51, 6)}, ["model/embedding as ('float32', (50, 6))", "(51, 6)"]),
    ],
)
def test_another_model_is_refused_by_what_differs(
    tmp_path: Path, change: dict[str, object], values: list[str]
) -> None:
    whole, layout = whole_tensors(torch.float32), layout_of(2, None)
    save(tmp_path, layout, [items_of(whole, layout, rank) for rank in range(2)])
    first, *rest = items_of(whole, layout_of(1, 1), 0)
    other = dataclasses.replace(first, whole=dataclasses.replace(first.whole, **change))
    with raises(ResumePointError, "point.other_model", KEY.point_name, *values):
        load([other, *rest], KEY.point_name, CommittedFiles(Storage(str(tmp_path))))


# ------------------------------------------------------------------------------------------------ memory
def large_state(layout: Layout, rank: int) -> list[Item]:
    whole = StateTensor(group="model", name="w", shape=(100_000, 512), itemsize=4, sharded=True)
    rows = held_rows(whole, layout.num_shards, layout.shard_of(rank))
    return [Item(whole=whole, tensor=torch.ones(len(rows), 512), first_row=rows.start)]


def beyond_the_state(folder: str, layout: Layout, rank: int) -> int:
    """How far the process grows while it loads, when the state itself is there."""
    files = CommittedFiles(Storage(folder))
    manifest = files.manifest(KEY.point_name)
    files.manifest = lambda point: manifest  # type: ignore[method-assign]  # what it took is no part of loading
    items = large_state(layout, rank)
    # the most that was taken before must not hide what loading takes
    Path("/proc/self/clear_refs").write_text("5")
    held = _peak()
    load(items, KEY.point_name, files)
    beyond = _peak() - held
    (item,) = items
    assert torch.equal(item.tensor[:, 7], numbers(item)), "it must have loaded"
    return beyond


def numbers(item: Item) -> torch.Tensor:
    """A number to each row that it holds."""
    return torch.arange(item.first_row, item.first_row + len(item.tensor), dtype=torch.float32)


def _peak() -> int:
    """The most resident memory since it was reset, in bytes."""
    (line,) = [
        each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM")
    ]
    return int(line.split()[1]) * 1024


@pytest.mark.chaos
@pytest.mark.parametrize("world_size", [1, 3])
def test_loading_takes_one_buffer_beside_the_state(tmp_path: Path, world_size: int) -> None:
    saving = layout_of(2, None)
    items = [large_state(saving, rank) for rank in range(saving.world_size)]
    for (item,) in items:
        item.tensor.copy_(numbers(item)[:, None])
    save(tmp_path, saving, items)
    code = (
        "import sys\n"
        "from tests.trainer.test_loading import beyond_the_state, layout_of\n"
        f"print(beyond_the_state(sys.argv[1], layout_of({world_size}, None), {world_size} // 2))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, check=True, text=True
    )
    buffer = 0 if world_size == 1 else 64
    assert int(ended.stdout) <= (buffer + 12) * MIB, "195 MiB are saved"
