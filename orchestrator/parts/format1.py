"""Points of format 1, as versions before staged saves wrote them, read into the manifest of all formats.

Each rank wrote at most one file per group, with whole tensors under their own names; parts.json lists every
tensor with the blake3 (64 hex digits) of its bytes, and its `weights_digest` is that of these digests. None
is written any more; they are read for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import orjson

from orchestrator.parts.dtypes import SAFETENSORS
from orchestrator.parts.manifest import Manifest, Name, PartDamage
from orchestrator.parts.part_file import LENGTH_BYTES, Extent
from orchestrator.planning.weights_digest import weights_digest
from orchestrator.records.points import FileEntry, SavedTensor, TensorChunk, TensorEntry

_DIGEST_DIGITS = 64


def manifest_of_format_1(
    point: str, listed: dict[str, FileEntry], entries: Sequence[TensorEntry]
) -> Manifest:
    """See `manifest.manifest_of`. Raises `ValueError` if the tensors are not whole, or lie in files that are
    not listed.
    """
    tensors: dict[Name, SavedTensor] = {}
    chunks: dict[Name, tuple[TensorChunk, ...]] = {}
    for entry in entries:
        name = (entry.group, entry.name)
        rows = sorted(_rows_of(entry, chunk) for chunk in entry.chunks)
        num_rows = entry.shape[0] if entry.shape else 1
        ends = [0, *(last for _, last in rows)]
        if name in tensors or [first for first, _ in rows] != ends[:-1] or ends[-1] != num_rows:
            raise ValueError(f"it does not list all of {entry.group}/{entry.name} once")
        if len({chunk.file for chunk in entry.chunks}) != len(entry.chunks):
            raise ValueError(f"it has {entry.group}/{entry.name} twice in one file")
        if elsewhere := {chunk.file for chunk in entry.chunks} - listed.keys():
            raise ValueError(f"it names {sorted(elsewhere)}, which COMMIT does not list")
        if any(len(chunk.digest) != _DIGEST_DIGITS for chunk in entry.chunks):
            raise ValueError(f"it has {entry.group}/{entry.name} with a digest that is none")
        if entry.dtype not in SAFETENSORS:
            raise ValueError(f"it has {entry.group}/{entry.name} as {entry.dtype}")
        tensors[name] = SavedTensor(
            group=entry.group, name=entry.name, dtype=entry.dtype, shape=entry.shape, sharded=False
        )
        chunks[name] = entry.chunks
    return Manifest(point=point, layout=None, tensors=tensors, files=listed, chunks=chunks)


def weights_digest_of_format_1(manifest: Manifest) -> str:
    """The `weights_digest` of a point of format 1, from the digests in its parts.json."""
    return weights_digest(
        TensorEntry(
            name=tensor.name, group=tensor.group, dtype=tensor.dtype, shape=tensor.shape, chunks=chunks
        )
        for tensor, chunks in zip(manifest.tensors.values(), manifest.chunks.values(), strict=True)
    )


def extents_of_format_1(manifest: Manifest, file: str, header: bytes, size: int) -> dict[Name, Extent]:
    """Where the tensors lie that parts.json says are in `file`, whose header this is. The header itself has
    no digest: it is believed only as far as the bytes that it leads to have theirs. Raises `PartDamage`.
    """
    try:
        content: dict[str, Any] = orjson.loads(header[LENGTH_BYTES:])
        places = {
            name: (each["dtype"], tuple(each["shape"]), *map(int, each["data_offsets"]))
            for name, each in content.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PartDamage(file, f"is not a valid safetensors file ({error})") from error
    found: dict[Name, Extent] = {}
    for name, chunks in manifest.chunks.items():
        for chunk in chunks:
            if chunk.file != file:
                continue
            if name[1] not in places:
                raise PartDamage(file, f"does not hold {name[1]}")
            tensor = manifest.tensors[name]
            dtype, width = SAFETENSORS[tensor.dtype]
            *form, begin, end = places[name[1]]
            num_bytes = math.prod(chunk.sizes) * width
            if form != [dtype, chunk.sizes] or end - begin != num_bytes or begin < 0:
                raise PartDamage(file, f"holds {name[1]} as {form}, saved was {[dtype, chunk.sizes]}")
            if len(header) + end > size:
                raise PartDamage(file, f"has {size} bytes, which do not hold all of {name[1]}")
            first, last = _rows(chunk)
            found[name] = Extent(
                dtype=tensor.dtype,
                shape=chunk.sizes,
                rows=range(first, last),
                start=len(header) + begin,
                num_bytes=num_bytes,
                digests=(chunk.digest,),
                piece_bytes=max(1, num_bytes),
            )
    return found


def _rows(chunk: TensorChunk) -> tuple[int, int]:
    """First row, and row after the last."""
    return (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) if chunk.sizes else (0, 1)


def _rows_of(entry: TensorEntry, chunk: TensorChunk) -> tuple[int, int]:
    if len(chunk.sizes) != len(entry.shape) or len(chunk.offsets) != len(entry.shape):
        raise ValueError(f"it has a chunk of {entry.name} with other dimensions")
    if chunk.sizes[1:] != entry.shape[1:] or any(chunk.offsets[1:]):
        raise ValueError(f"it has a chunk of {entry.name} that is not of whole rows")
    return _rows(chunk)
