"""Members that hold the same rows load a point together: each reads a part of it, all have the same bits
afterwards, and one outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from orchestrator.checkpoint.points.store import CommittedFiles
from orchestrator.errors import ResumePointError, StorageError
from orchestrator.planning.state.state_layout import Layout, layout_of
from orchestrator.storage.files import Storage
from orchestrator.storage.store import Traits
from orchestrator.trainer.comm.group import GenerationEnded
from orchestrator.trainer.state.sync_state import load_together
from tests.trainer.kills import killed
from tests.trainer.launch import Launch
from tests.trainer.member import Plan, members, run_to_end, tiny_job
from tests.trainer.saved_states import KEY, items_of, save, whole_tensors
from tests.trainer.sharded import formed, on_ranks, view_of

pytestmark = pytest.mark.xdist_group("forked")

POINT = KEY.point_name
SAVED = [layout_of(1, 1), layout_of(3, 1), layout_of(4, 2)]
LOADED = [layout_of(2, 1), layout_of(4, 1), layout_of(4, 2), layout_of(3, None)]


class Counting(Storage):
    """How many bytes of tensors were read; with `fails` none can be. `from_afar`: as from a bucket, which no
    machine keeps in memory.
    """

    def __init__(self, root: str, *, fails: bool = False, from_afar: bool = True) -> None:
        super().__init__(root)
        self.num_bytes, self._fails, self._from_afar = 0, fails, from_afar

    @property
    def traits(self) -> Traits:
        return replace(super().traits, cached_by_machine=not self._from_afar)

    def read_into(self, path: str, start: int, into: memoryview) -> int:
        if self._fails:
            raise StorageError(f"cannot read {path}: the cable is gone")
        self.num_bytes += len(into)
        return super().read_into(path, start, into)


def state_bytes() -> int:
    return sum(tensor.nbytes for tensor in whole_tensors(torch.float32).values())


def blank_items(layout: Layout, rank: int) -> list[Any]:
    blank = {name: torch.full_like(t, 7) for name, t in whole_tensors(torch.float32).items()}
    return items_of(blank, layout, rank)


def in_each_layout(rank: int, store: TCPStore, folders: Sequence[str]) -> dict[tuple[int, int], int]:
    """Bytes that this rank read, by (which of SAVED, which of LOADED)."""
    found, generation = {}, 0
    whole = whole_tensors(torch.float32)
    for saved, folder in enumerate(folders):
        for loaded, layout in enumerate(LOADED):
            generation += 1
            if rank >= layout.world_size:
                continue
            with formed(store, view_of(rank, layout.world_size, generation)) as group:
                storage, items = Counting(folder), blank_items(layout, rank)
                needy = range(layout.world_size)
                load_together(group, items, layout, needy, POINT, CommittedFiles(storage), lambda gives: None)
                for item, expected in zip(items, items_of(whole, layout, rank), strict=True):
                    assert torch.equal(item.tensor, expected.tensor), (saved, loaded, item.name)
                found[saved, loaded] = storage.num_bytes
    return found


def saved_in(folder: Path, layout: Layout) -> str:
    whole = whole_tensors(torch.float32)
    save(folder, layout, [items_of(whole, layout, rank) for rank in range(layout.world_size)])
    return str(folder)


@pytest.mark.chaos
def test_replicas_read_one_state_together_and_hold_its_bits(tmp_path: Path) -> None:
    folders = [saved_in(tmp_path / str(number), layout) for number, layout in enumerate(SAVED)]
    ranks = on_ranks(4, in_each_layout, folders)
    for saved, of_point in enumerate(SAVED):
        for loaded, layout in enumerate(LOADED):
            read = [found[saved, loaded] for found in ranks if (saved, loaded) in found]
            assert len(read) == layout.world_size
            if layout.num_shards in (1, of_point.num_shards):
                # and the count of steps, which every shard has
                assert sum(read) == state_bytes() + 4 * (layout.num_shards - 1), (of_point, layout)
            else:  # a piece in which there are rows of several shards is read for each
                assert sum(read) <= layout.num_shards * state_bytes()
            if layout.num_replicas > 1:
                assert max(read) < sum(read) / layout.num_shards, "nobody reads all of a shard"


def on_one_machine(rank: int, store: TCPStore, folder: str) -> int:
    layout = layout_of(2, 1)

    def half(gives: bool) -> None:
        raise AssertionError("nothing is given")

    with formed(store, view_of(rank, 2)) as group:
        storage, items = Counting(folder, from_afar=False), blank_items(layout, rank)
        load_together(group, items, layout, range(2), POINT, CommittedFiles(storage), half)
        return storage.num_bytes


def test_on_one_machine_each_reads_what_the_other_has_brought_into_memory(tmp_path: Path) -> None:
    folder = saved_in(tmp_path, layout_of(3, 1))
    assert on_ranks(2, on_one_machine, folder) == [state_bytes()] * 2


# ---- one outcome
def outcomes(rank: int, store: TCPStore, folder: str, layout: Layout, fails: Sequence[int]) -> str:
    """What loading came to on this rank; on ranks that are named in `fails` reading fails."""
    with formed(store, view_of(rank, layout.world_size)) as group:
        files = CommittedFiles(Counting(folder, fails=rank in fails))
        try:
            load_together(
                group,
                blank_items(layout, rank),
                layout,
                range(layout.world_size),
                POINT,
                files,
                lambda gives: None,
            )
        except (ResumePointError, StorageError, GenerationEnded) as error:
            return f"{type(error).__name__}: {error}"
    return "loaded"


def test_damage_that_one_rank_finds_is_named_by_file_on_all(tmp_path: Path) -> None:
    folder = saved_in(tmp_path, layout_of(3, 1))
    (path, *_) = sorted((tmp_path / "points" / POINT / "state").iterdir())[1:]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for layout in (layout_of(3, 1), layout_of(4, 2)):
        found = on_ranks(layout.world_size, outcomes, folder, layout, ())
        assert len({*found}) == 1, "all of them raise the same damages"
        assert found[0].startswith(f"DamagedPointError: resume point {POINT}: state/{path.name} holds ")


@pytest.mark.chaos
def test_storage_that_fails_for_one_rank_fails_for_all(tmp_path: Path) -> None:
    folder = saved_in(tmp_path, layout_of(3, 1))
    found = on_ranks(3, outcomes, folder, layout_of(3, 1), (0,))
    told = "StorageError: cannot read "
    assert all(text.startswith(told) and "the cable is gone" in text for text in found)
    assert [text.endswith("(found by rank 0)") for text in found] == [False, True, True]


# ---- a member is lost meanwhile
@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return run_to_end(tmp_path_factory.mktemp("calm"), 1)


@pytest.mark.quick("state_half_received")
@pytest.mark.parametrize("place", ["state_half_sent", "state_half_received"])
def test_who_is_left_loads_again_when_a_member_is_lost(tmp_path: Path, calm: Launch, place: str) -> None:
    first = run_to_end(tmp_path, 2, job=tiny_job(train__max_steps=4))
    point = first.last_point().key.point_name
    plans = {"b": Plan(kill=(place, 4))}
    with members(tmp_path, list("abc"), plans, attempt=2, point=point) as group:
        group.finish()
        assert killed(group) == {"b"}
        views = group.launch.views
        assert [(view.world_size, view.point) for view in views] == [(3, point), (2, point)]
        assert group.launch.last_point().state_digest == calm.last_point().state_digest
