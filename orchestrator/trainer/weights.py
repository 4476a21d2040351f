"""Tensors of a state in files and back: DCP's planners say who writes and reads what, the files are
safetensors, the digests ours.

No collective, no pickle; any world size loads what any other wrote. It knows nothing of steps, votes or
commits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import safetensors
import safetensors.torch
import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from orchestrator.errors import OrchestratorError, ResumePointError
from orchestrator.json_form import decode
from orchestrator.planning.weights_digest import weights_digest
from orchestrator.records import FileEntry, TensorChunk, TensorEntry
from orchestrator.trainer.state import MODEL, Item, tensor_bytes

POINTS, PARTS = "points", "parts.json"


class StateFiles(Protocol):
    """Where files of points lie; `storage.Storage` is one. Paths are relative to the run's folder:
    `points/<name>/model/…`.
    """

    def write(self, path: str, data: bytes | memoryview) -> FileEntry:
        """A new file, its content synced; raises `StorageError`, also if the name is taken."""

    def sync(self, folder: str) -> None:
        """The names in `folder`, and above it, are durable afterwards."""

    def read(self, path: str) -> bytes:
        """All of a file; FileNotFoundError if it is surely absent, `StorageError` if that cannot be
        determined.
        """


def share_of(items: Sequence[Item], rank: int, world_size: int) -> list[Item]:
    """The items that `rank` writes: every item is written by exactly one rank, with about equal numbers of
    bytes.

    All ranks hold the same items (DDP), so each computes the plan that DCP's coordinator would make of all
    their plans.
    """
    planner = DefaultSavePlanner()
    by_name = {_full_name(item.group, item.name): item for item in items}
    planner.set_up_planner({name: item.tensor for name, item in by_name.items()}, is_coordinator=True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()] * world_size)
    return [by_name[item.index.fqn] for item in plans[rank].items]


def write_share(
    items: Sequence[Item], point: str, rank: int, world_size: int, files: StateFiles
) -> tuple[tuple[FileEntry, ...], tuple[TensorEntry, ...]]:
    """Writes this rank's share of `items` as at most one safetensors file per group, synced, and says what
    lies where.

    Paths in the answer are relative to the point's folder. Raises `StorageError`.
    """
    return write_items(share_of(items, rank, world_size), point, rank, world_size, files)


def write_items(
    share: Sequence[Item], point: str, rank: int, world_size: int, files: StateFiles
) -> tuple[tuple[FileEntry, ...], tuple[TensorEntry, ...]]:
    """`write_share` of items that are this rank's already."""
    entries: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    for group in dict.fromkeys(item.group for item in share):
        mine = {item.name: item for item in share if item.group == group}
        path = f"{group}/{rank:05d}-of-{world_size:05d}.safetensors"
        # "format" is what transformers asks for in weights that it opens
        data = safetensors.torch.save(
            {name: item.tensor.detach().cpu() for name, item in mine.items()}, {"format": "pt"}
        )
        written = files.write(f"{POINTS}/{point}/{path}", data)
        files.sync(f"{POINTS}/{point}/{group}")
        entries.append(FileEntry(path=path, bytes=written.bytes, digest=written.digest))
        tensors += [_entry(item, path) for item in mine.values()]
    return tuple(entries), tuple(tensors)


def _entry(item: Item, path: str) -> TensorEntry:
    shape = tuple(item.tensor.shape)
    whole = TensorChunk(
        offsets=(0,) * len(shape),
        sizes=shape,
        file=path,
        digest=blake3(tensor_bytes(item.tensor)).hexdigest(),
    )
    return TensorEntry(
        name=item.name, group=item.group, dtype=_dtype(item.tensor), shape=shape, chunks=(whole,)
    )


def digest_of(items: Sequence[Item]) -> str:
    """The `weights_digest` that a point of this state has, whichever number of ranks saves it: a member holds
    every tensor whole, and so they are saved.
    """
    return weights_digest(_entry(item, "") for item in items if item.group == MODEL)


def load(items: Sequence[Item], point: str, files: StateFiles) -> None:
    """Fills `items` with the tensors of a point, each chunk's digest checked before it is used;
    `TrainState.filled` must follow.

    Raises `ResumePointError` naming the file that is damaged, or the tensors that this model has and the
    point does not (or the other way round); then part of the items may have been filled: the state is blank.
    """
    entries = {_full_name(entry.group, entry.name): entry for entry in read_parts(point, files)}
    state = {_full_name(item.group, item.name): item.tensor for item in items}
    _check_form(point, entries, state)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), _metadata(entries), is_coordinator=True)
    by_file: dict[str, list[tuple[TensorEntry, TensorChunk, ReadItem]]] = {}
    for read in planner.create_local_plan().items:
        entry = entries[read.storage_index.fqn]
        chunk = _chunk(entry, read.storage_index)
        by_file.setdefault(chunk.file, []).append((entry, chunk, read))
    for file, wanted in by_file.items():
        tensors = _read_tensors(point, file, files)
        chunks = [_verified(point, entry, chunk, tensors) for entry, chunk, _ in wanted]
        for tensor, (_, _, read) in zip(chunks, wanted, strict=True):
            source = tensor
            for dimension, (offset, length) in enumerate(
                zip(read.storage_offsets, read.lengths, strict=True)
            ):
                source = source.narrow(dimension, offset, length)
            target = planner.resolve_tensor(read)
            target.copy_(source)
            planner.commit_tensor(read, target)


def checked_tensors(
    point: str, files: StateFiles, group: str
) -> Iterator[tuple[TensorEntry, TensorChunk, Tensor]]:
    """The chunks of one group of a point's tensors, a file after the other, each digest checked. Raises
    `ResumePointError` naming the file that is damaged.
    """
    by_file: dict[str, list[tuple[TensorEntry, TensorChunk]]] = {}
    for entry in read_parts(point, files):
        for chunk in entry.chunks if entry.group == group else ():
            by_file.setdefault(chunk.file, []).append((entry, chunk))
    for file, wanted in by_file.items():
        tensors = _read_tensors(point, file, files)
        for entry, chunk in wanted:
            yield entry, chunk, _verified(point, entry, chunk, tensors)


def read_parts(point: str, files: StateFiles) -> tuple[TensorEntry, ...]:
    """A point's tensors and where their chunks lie. Raises `ResumePointError` if the list is missing or
    cannot be read.
    """
    try:
        content = json.loads(files.read(f"{POINTS}/{point}/{PARTS}"))
        return tuple(decode(TensorEntry, tensor, PARTS) for tensor in content["tensors"])
    except FileNotFoundError as error:
        raise _damaged(point, PARTS, "is missing") from error
    except (ValueError, KeyError, TypeError, OrchestratorError) as error:
        if isinstance(error, OrchestratorError) and type(error) is not OrchestratorError:
            raise  # the storage's own
        raise _damaged(point, PARTS, f"cannot be read ({error})") from error


# ---------------------------------------------------------------------------------------------------- inside
def _check_form(point: str, entries: Mapping[str, TensorEntry], state: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(set(state) - set(entries)), sorted(set(entries) - set(state))
    if missing or unknown:
        raise ResumePointError(
            f"resume point {point} has no tensors {missing[:5]} and has {unknown[:5]}, which the model of "
            "this job has not; use the model that the point was made with"
        )
    for name, entry in entries.items():
        theirs, ours = (entry.dtype, entry.shape), (_dtype(state[name]), tuple(state[name].shape))
        if theirs != ours:
            raise ResumePointError(
                f"resume point {point} has {name} as {theirs}, the model of this job as {ours}; "
                "use the model that the point was made with"
            )
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.shape):
            raise _damaged(point, PARTS, f"does not list all of {name}")


def _metadata(entries: Mapping[str, TensorEntry]) -> Metadata:
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks
                ],
            )
            for name, entry in entries.items()
        }
    )


def _chunk(entry: TensorEntry, index: MetadataIndex) -> TensorChunk:
    return next(c for c in entry.chunks if index.offset is None or tuple(index.offset) == c.offsets)


def _read_tensors(point: str, file: str, files: StateFiles) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(files.read(f"{POINTS}/{point}/{file}"))
    except FileNotFoundError as error:
        raise _damaged(point, file, "is missing") from error
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise _damaged(point, file, f"is not a valid safetensors file ({error})") from error


def _verified(point: str, entry: TensorEntry, chunk: TensorChunk, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors.get(entry.name)
    if tensor is None:
        raise _damaged(point, chunk.file, f"does not hold {entry.name}")
    found = blake3(tensor_bytes(tensor)).hexdigest()
    form = (_dtype(tensor), tuple(tensor.shape))
    if found != chunk.digest or form != (entry.dtype, chunk.sizes):
        raise _damaged(
            point,
            chunk.file,
            f"holds {entry.name} as {form} with digest {found}, "
            f"saved was {(entry.dtype, chunk.sizes)} with {chunk.digest}",
        )
    return tensor


def _damaged(point: str, file: str, reason: str) -> ResumePointError:
    return ResumePointError(
        f"resume point {point}: {file} {reason}; restore the file, or resume from another point"
    )


def _full_name(group: str, name: str) -> str:
    return f"{group}/{name}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
