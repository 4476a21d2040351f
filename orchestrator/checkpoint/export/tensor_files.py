"""Writes tensors into safetensors files one at a time, split into shards as transformers does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson
from blake3 import blake3

from orchestrator.checkpoint.files.dtypes import SAFETENSORS, num_bytes
from orchestrator.records.points import FileEntry
from orchestrator.storage.files import Storage

SHARD_BYTES = 5 * 10**9
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A tensor as it is written. `dtype` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in bytes."""
        return num_bytes(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tensors that are produced together: `make` returns the bytes of each of `forms`, by name."""

    forms: tuple[Form, ...]
    make: Callable[[], Mapping[str, Buffer]]

    @property
    def num_bytes(self) -> int:
        """Their total size in bytes."""
        return sum(form.num_bytes for form in self.forms)


def write_tensors(
    storage: Storage, folder: str, pieces: Iterable[Piece], shard_bytes: int = SHARD_BYTES
) -> list[FileEntry]:
    """Writes new files in `folder`: `model.safetensors`, or shards of at most `shard_bytes` and their index.

    A piece is not split. The files are durable afterwards. Returns them, with paths relative to `folder`.
    Raises `StorageError`, and what `make` raises; files may exist then.
    """
    # Tensors with larger numbers come first, so that every tensor is at a multiple of its number's size.
    order = sorted(pieces, key=lambda p: (-SAFETENSORS[p.forms[0].dtype][1], p.forms[0].name))
    shards = _shards(order, shard_bytes)
    if len(shards) == 1:
        return [_write_shard(storage, folder, SINGLE, shards[0])]
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    written = [_write_shard(storage, folder, name, s) for name, s in zip(names, shards, strict=True)]
    total = sum(piece.num_bytes for piece in order)
    where = {
        form.name: name
        for name, shard in zip(names, shards, strict=True)
        for piece in shard
        for form in piece.forms
    }
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return [*written, write_file(storage, folder, INDEX, orjson.dumps(index, option=orjson.OPT_INDENT_2))]


def write_file(storage: Storage, folder: str, name: str, data: bytes) -> FileEntry:
    """Writes a new, durable file in `folder`; the returned path is relative to `folder`."""
    written = storage.write(f"{folder}/{name}" if folder else name, data)
    storage.sync(folder)
    return dataclasses.replace(written, path=name)


def _shards(pieces: Sequence[Piece], shard_bytes: int) -> list[list[Piece]]:
    shards: list[list[Piece]] = [[]]
    room = shard_bytes
    for piece in pieces:
        if shards[-1] and piece.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(piece)
        room -= piece.num_bytes
    return shards


def _write_shard(storage: Storage, folder: str, name: str, shard: Sequence[Piece]) -> FileEntry:
    head = _header([form for piece in shard for form in piece.forms])
    size = len(head) + sum(piece.num_bytes for piece in shard)
    digest = ""

    def content() -> Iterator[Buffer]:
        nonlocal digest
        hasher = blake3(head)
        yield head
        for piece in shard:
            made = piece.make()
            for form in piece.forms:
                data = made[form.name]
                assert len(data) == form.num_bytes, f"{form.name} has {len(data)} bytes, not {form.num_bytes}"
                hasher.update(data)
                yield data
        digest = hasher.hexdigest()

    storage.put(f"{folder}/{name}" if folder else name, content, size)
    storage.sync(folder)
    return FileEntry(path=name, bytes=size, digest=digest)


def _header(forms: Iterable[Form]) -> bytes:
    """Returns the header: its length, and JSON with each tensor's place, padded with spaces to a multiple of
    8 bytes.
    """
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}  # required by transformers
    at = 0
    for form in forms:
        dtype = SAFETENSORS[form.dtype][0]
        content[form.name] = {
            "dtype": dtype,
            "shape": list(form.shape),
            "data_offsets": [at, at + form.num_bytes],
        }
        at += form.num_bytes
    text = orjson.dumps(content)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
