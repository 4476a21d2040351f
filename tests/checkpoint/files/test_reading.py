"""Any layout reads any point: each rank gets exactly its rows, straight or by way of a buffer, and nothing
that was not saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.checkpoint.files import part_file, reading
from orchestrator.checkpoint.files.manifest import PartDamage, PartManifest
from orchestrator.checkpoint.files.part_file import PartRows, part_sum
from orchestrator.checkpoint.files.reading import BytesTarget, PointReader, TensorRequest
from orchestrator.planning.state.state_layout import Layout, held_rows, layout_of, weights_sum, written_rows
from orchestrator.storage.files import Storage
from tests.checkpoint.files.samples import DTYPES, STATE, bytes_of, read_rank, write_point

LAYOUTS = sorted(
    {layout_of(world, shards) for world in range(1, 9) for shards in (1, None, 2, 3, 4)},
    key=lambda layout: (layout.world_size, layout.num_shards),
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have several pieces, come to their targets in both ways, and by many reads."""
    monkeypatch.setattr(part_file, "PIECE_BYTES", 64)
    monkeypatch.setattr(reading, "REQUEST_BYTES", 150)
    monkeypatch.setattr(reading, "_DIRECT_BYTES", 40)


class Elsewhere(BytesTarget):
    """A target that cannot be read to."""

    def view(self, start: int, num_bytes: int) -> None:
        return None


def sums_of(storage: Storage, manifest: PartManifest, layout: Layout) -> dict[str, str]:
    """The sums of a state that a group of this layout has read: of each row by who writes it."""
    sums: dict[str, list[int]] = {"model": [], "optimizer": []}
    for rank in range(layout.world_size):
        held = read_rank(storage, manifest, layout, rank)
        for whole, rows in zip(STATE, written_rows(STATE, layout, rank), strict=True):
            theirs, memory = held[whole.group, whole.name]
            first = (rows.start - theirs.start) * whole.row_bytes
            data = memoryview(memory)[first : first + len(rows) * whole.row_bytes]
            part = PartRows(tensor=whole, dtype=DTYPES[whole.itemsize], rows=rows, data=data)
            sums[whole.group].append(part_sum(part) if rows else 0)
    return {group: weights_sum(found) for group, found in sums.items()}


def points(folder: Path) -> Iterator[tuple[str, Storage, PartManifest]]:
    for number, layout in enumerate(LAYOUTS):
        storage = Storage(str(folder / str(number)))
        yield f"{layout}", storage, write_point(storage, layout)


@pytest.mark.quick("4")
@pytest.mark.parametrize("every", [1, 4])
def test_every_layout_reads_every_layout_with_equal_sums(tmp_path: Path, every: int) -> None:
    assert len(LAYOUTS) == 20
    found = {
        (what, layout): sums_of(storage, manifest, layout)
        for what, storage, manifest in points(tmp_path)
        for layout in LAYOUTS[::every]
    }
    assert len(found) == 20 * 20 // every
    first = next(iter(found.values()))
    assert {pair for pair, sums in found.items() if sums != first} == set()


@pytest.mark.quick("BytesTarget")
@pytest.mark.parametrize("target", [BytesTarget, Elsewhere])
def test_a_rank_gets_the_bytes_of_its_rows(tmp_path: Path, target: type[BytesTarget]) -> None:
    for (what, storage, manifest), layout in itertools.product(points(tmp_path), LAYOUTS[::5]):
        for rank in range(layout.world_size):
            held = read_rank(storage, manifest, layout, rank, target)
            for whole in STATE:
                rows, memory = held[whole.group, whole.name]
                expected = bytes_of(whole)[rows.start * whole.row_bytes : rows.stop * whole.row_bytes]
                assert memory == expected, (what, layout, rank, whole)


def test_only_files_with_wanted_rows_are_opened(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    manifest = write_point(storage, layout_of(8, None))
    for rank in range(8):
        if rank != 5:
            (tmp_path / "points" / manifest.point / f"state/{rank:05d}-of-00008.safetensors").unlink()
    whole = STATE[0]
    rows = held_rows(whole, 8, 5)
    memory = bytearray(len(rows) * whole.row_bytes)
    reader = PointReader(storage, manifest)
    reader.read({(whole.group, whole.name): TensorRequest(rows=rows, target=BytesTarget(memory))})
    assert memory == bytes_of(whole)[rows.start * whole.row_bytes : rows.stop * whole.row_bytes]
    with pytest.raises(PartDamage) as missing:
        reader.read(
            {(whole.group, whole.name): TensorRequest(rows=range(25, 32), target=BytesTarget(bytearray(140)))}
        )
    assert missing.value.file == "state/00006-of-00008.safetensors"
    assert isinstance(missing.value.__cause__, FileNotFoundError)


def test_the_buffer_is_all_that_is_taken_and_is_taken_once(tmp_path: Path) -> None:
    storage, asked = Storage(str(tmp_path)), list[int]()
    manifest = write_point(storage, layout_of(3, 1))

    def buffer(num_bytes: int) -> memoryview:
        asked.append(num_bytes)
        return reading.new_buffer(num_bytes)

    wanted = {
        (each.group, each.name): TensorRequest(
            rows=range(each.num_rows), target=Elsewhere(bytearray(each.num_rows * each.row_bytes))
        )
        for each in STATE
    }
    PointReader(storage, manifest, buffer).read(wanted)
    assert asked == [150]


def test_files_that_were_swapped_are_found_by_their_headers(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    manifest = write_point(storage, layout_of(4, 2))
    folder = tmp_path / "points" / manifest.point / "state"
    one, other = sorted(folder.iterdir())[1:3]
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with pytest.raises(PartDamage) as swapped:
        sums_of(storage, manifest, layout_of(1, 1))
    theirs = {entry.path: entry.digest for entry in manifest.files.values()}
    assert all(theirs[f"state/{each.name}"] in swapped.value.reason for each in (one, other))
    assert swapped.value.file in (f"state/{one.name}", f"state/{other.name}")
