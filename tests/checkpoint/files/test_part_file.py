"""The file of one rank: what safetensors reads of it, what its header says, and the sums of all layouts."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from orchestrator.checkpoint.files import part_file
from orchestrator.checkpoint.files.part_file import (
    parse_header,
    part_path,
    piece_digest,
    read_header,
    write_part,
)
from orchestrator.checkpoint.files.part_writer import PartCancelled
from orchestrator.errors import StorageError
from orchestrator.planning.state.state_layout import Layout, StateTensor, layout_of, weights_sum, written_rows
from orchestrator.storage.files import Storage
from tests.checkpoint.files.samples import POINT, STATE, bytes_of, part_of
from tests.raising import raises

LAYOUTS = [layout_of(world, shards) for world in range(1, 9) for shards in (1, None, 2)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_file, "PIECE_BYTES", 64)


@pytest.mark.parametrize("layout", [layout_of(1, 1), layout_of(3, None), layout_of(4, 2)])
@pytest.mark.usefixtures("small_pieces")
def test_safetensors_reads_the_rows_of_each_rank(tmp_path: Path, layout: Layout) -> None:
    storage = Storage(str(tmp_path))
    found: dict[StateTensor, dict[int, bytes]] = {}
    for rank in range(layout.world_size):
        entry = write_part(storage, POINT, part_of(layout, rank))
        assert entry.path == part_path(rank, layout.world_size)
        path = tmp_path / "points" / POINT / entry.path
        assert path.stat().st_size == entry.bytes
        with safe_open(path, "np") as file:
            assert file.metadata()["format"] == "pt"
            rows = dict(zip(STATE, written_rows(STATE, layout, rank), strict=True))
            assert set(file.keys()) == {f"{t.group}/{t.name}" for t, r in rows.items() if r}
            for tensor, written in rows.items():
                if not written:
                    continue
                if tensor.itemsize == 2:  # numpy has no bfloat16
                    assert file.get_slice(f"{tensor.group}/{tensor.name}").get_dtype() == "BF16"
                    continue
                array = file.get_tensor(f"{tensor.group}/{tensor.name}")
                assert array.shape == ((len(written), *tensor.shape[1:]) if tensor.shape else ())
                found.setdefault(tensor, {})[written.start] = array.tobytes()
    for tensor, by_row in found.items():
        assert b"".join(by_row[first] for first in sorted(by_row)) == bytes_of(tensor), tensor


@pytest.mark.usefixtures("small_pieces")
def test_the_header_guards_every_byte_of_the_file(tmp_path: Path) -> None:
    storage, layout = Storage(str(tmp_path)), layout_of(3, None)
    entry = write_part(storage, POINT, part_of(layout, 1))
    path = f"points/{POINT}/{entry.path}"
    data = storage.read(path)
    header = parse_header(read_header(storage, path, entry.bytes), entry.bytes)
    assert (header.point, header.rank, header.layout) == (POINT, 1, layout)
    guarded = []
    for extent in header.extents.values():
        ends = range(extent.start, extent.start + extent.num_bytes, 64)
        for begin, digest in zip(ends, extent.digests, strict=True):
            end = min(begin + 64, extent.start + extent.num_bytes)
            assert piece_digest(data[begin:end]) == digest
            guarded.append((begin, end))
    guarded.sort()
    assert all(one[1] == other[0] for one, other in itertools.pairwise(guarded))
    assert guarded[-1][1] == len(data)
    assert guarded[0][0] == len(read_header(storage, path, entry.bytes))


def test_all_layouts_have_the_same_sums_and_other_bytes_have_others() -> None:
    def digests(layout: Layout, seed: int = 0) -> list[str]:
        parts = [part_of(layout, rank, seed=seed) for rank in range(layout.world_size)]
        return [weights_sum(part.sums.get(group, 0) for part in parts) for group in ("model", "optimizer")]

    first = digests(LAYOUTS[0])
    assert all(digests(layout) == first for layout in LAYOUTS)
    assert not set(first) & set(digests(LAYOUTS[0], seed=1))


def test_a_part_without_rows_is_a_file_too(tmp_path: Path) -> None:
    storage, layout = Storage(str(tmp_path)), layout_of(70, 1)
    empty = next(part for part in (part_of(layout, rank) for rank in range(70)) if not part.sums)
    entry = write_part(storage, POINT, empty)
    header = parse_header(read_header(storage, f"points/{POINT}/{entry.path}", entry.bytes), entry.bytes)
    assert (header.extents, header.sums) == ({}, {})
    with safe_open(tmp_path / "points" / POINT / entry.path, "np") as file:
        assert list(file.keys()) == []


@pytest.mark.usefixtures("small_pieces")
def test_a_part_that_is_cancelled_anywhere_leaves_no_file(tmp_path: Path) -> None:
    storage, calls = Storage(str(tmp_path)), itertools.count()
    layout = layout_of(1, 1)

    def made(cancelled_at: int) -> int:
        calls = itertools.count()

        def check() -> None:
            if next(calls) == cancelled_at:
                raise PartCancelled("not wanted")

        part = part_of(layout, 0)
        write_part(storage, POINT, part, check)
        return next(calls)

    for cancelled_at in itertools.count():
        try:
            assert made(cancelled_at) == cancelled_at > 30
            break
        except PartCancelled:
            assert list(tmp_path.rglob("*.safetensors")) == []
        next(calls)
    assert next(calls) > 30
    with raises(StorageError, "storage.name_taken", "EEXIST"):
        made(-1)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_no_bytes_are_taken_for_a_header_that_they_are_not(data: bytes, size: int) -> None:
    with pytest.raises(ValueError, match="header"):
        parse_header(len(data).to_bytes(8, "little") + data, size)


@pytest.mark.usefixtures("small_pieces")
def test_a_header_whose_facts_do_not_fit_together_is_refused() -> None:
    part = part_of(layout_of(1, 1), 0)
    size = part.entry.bytes
    parse_header(part.header, size)
    for old, new in (
        (b'\\"model/layer.bias', b'\\"model/layer.biaS'),
        (b"[0,37]", b"[0,36]"),
        (b'"F32"', b'"F16"'),
        (b'"data_offsets":[0,', b'"data_offsets":[1,'),
        (b'\\"format\\":2', b'\\"format\\":3'),
        (b'\\"piece_bytes\\":64', b'\\"piece_bytes\\":20'),
        (b'\\"num_shards\\":1', b'\\"num_shards\\":0'),
        (part.header[part.header.index(b'layer.bias\\":\\"') :][14:30], b"0" * 8 + b" " * 8),
    ):
        changed = part.header.replace(old, new)
        assert changed != part.header, old
        with pytest.raises(ValueError, match="header"):
            parse_header(changed, size)
    with pytest.raises(ValueError, match="the file has"):
        parse_header(part.header, size + 1)


def test_sums_do_not_depend_on_where_a_block_of_rows_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = part_of(layout_of(1, 1), 0).sums
    monkeypatch.setattr(part_file, "_SUM_BLOCK_BYTES", 50)
    assert part_of(layout_of(1, 1), 0).sums == whole
    assert np.all([0 < total < 1 << 128 for total in whole.values()])
