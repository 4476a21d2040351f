"""A small state as bytes, in any layout, and the parts that ranks make of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from orchestrator.checkpoint.files.manifest import Name, PartManifest, manifest_of, parts_document
from orchestrator.checkpoint.files.part_file import PartFile, PartRows, make_part, write_part
from orchestrator.checkpoint.files.part_writer import JobPart, PartJob
from orchestrator.checkpoint.files.reading import BytesTarget, PointReader, TensorRequest
from orchestrator.planning.state.state_layout import BufferRows, Layout, StateTensor, held_rows, written_rows
from orchestrator.records.points import SavedTensor
from orchestrator.storage.files import Storage

POINT = "00000010-a0001-g0001"
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}


def tensor(
    group: str, name: str, shape: tuple[int, ...], itemsize: int = 4, sharded: bool = True
) -> StateTensor:
    return StateTensor(
        group=group, name=name, shape=shape, itemsize=itemsize, sharded=sharded and bool(shape)
    )


STATE = (
    tensor("model", "embedding.weight", (37, 5)),
    tensor("model", "layer.weight", (8, 3, 2), itemsize=2),
    tensor("model", "layer.bias", (8,)),
    tensor("model", "frequencies", (6,), sharded=False),
    tensor("model", "empty", (0, 4)),
    tensor("model", "flat", (3, 0)),
    tensor("optimizer", "steps", (), itemsize=8),
    tensor("optimizer", "exp_avg.embedding.weight", (37, 5)),
    tensor("optimizer", "exp_avg.layer.bias", (8,)),
)


def bytes_of(whole: StateTensor, seed: int = 0) -> bytes:
    """All rows of a tensor: other bytes for another name, or another seed."""
    generator = np.random.default_rng([seed, *f"{whole.group}/{whole.name}".encode()])
    return generator.integers(0, 256, whole.num_rows * whole.row_bytes, np.uint8).tobytes()


def rows_of(whole: StateTensor, rows: range, seed: int = 0) -> PartRows:
    data = memoryview(bytes_of(whole, seed))[rows.start * whole.row_bytes : rows.stop * whole.row_bytes]
    return PartRows(tensor=whole, dtype=DTYPES[whole.itemsize], rows=rows, data=data)


def part_of(
    layout: Layout, rank: int, state: Sequence[StateTensor] = STATE, seed: int = 0, point: str = POINT
) -> PartFile:
    rows = written_rows(state, layout, rank)
    return make_part(point, layout, rank, [rows_of(t, r, seed) for t, r in zip(state, rows, strict=True)])


def job_of(buffer: Path, state: Sequence[StateTensor] = STATE, point: str = POINT) -> PartJob:
    """A job of one rank that writes all; its rows lie in the file `buffer`."""
    places, at = [], 0
    with open(buffer, "wb") as file:
        for whole in state:
            place = BufferRows(tensor=whole, rows=range(whole.num_rows), offset=at)
            places.append(JobPart(place=place, dtype=DTYPES[whole.itemsize]))
            file.write(bytes_of(whole) + bytes(7))
            at = file.tell()
    return PartJob(
        point=point,
        layout=Layout(num_shards=1, num_replicas=1),
        rank=0,
        parts=tuple(places),
        buffer=os.fspath(buffer),
    )


def byte_of(path: Path, group: str = "model") -> int:
    """Where the first byte of the first tensor of a group lies in a part."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    places = [each["data_offsets"] for name, each in header.items() if name.startswith(f"{group}/")]
    return begin + min(first for first, last in places if last > first)


def saved(state: Sequence[StateTensor] = STATE) -> dict[Name, SavedTensor]:
    return {
        (each.group, each.name): SavedTensor(
            group=each.group,
            name=each.name,
            dtype=DTYPES[each.itemsize],
            shape=each.shape,
            sharded=each.sharded,
        )
        for each in state
    }


def write_point(storage: Storage, layout: Layout, point: str = POINT, seed: int = 0) -> PartManifest:
    """The files that all ranks of a group write, and what the documents of the point say of them."""
    parts = [part_of(layout, rank, seed=seed, point=point) for rank in range(layout.world_size)]
    entries = [write_part(storage, point, part) for part in parts]
    document = json.loads(json.dumps(parts_document(layout, saved().values())))
    return manifest_of(point, entries, document)


def read_rank(
    storage: Storage,
    manifest: PartManifest,
    layout: Layout,
    rank: int,
    target: type[BytesTarget] = BytesTarget,
) -> dict[Name, tuple[range, bytearray]]:
    """What a rank of a group of another layout holds after it has read the point."""
    held, wanted = {}, {}
    for whole in STATE:
        name, rows = (whole.group, whole.name), held_rows(whole, layout.num_shards, layout.shard_of(rank))
        memory = bytearray(b"\xee" * (len(rows) * whole.row_bytes))
        held[name], wanted[name] = (rows, memory), TensorRequest(rows=rows, target=target(memory))
    PointReader(storage, manifest).read(wanted)
    return held
