"""The model's tensors of a committed point, one at a time: the bytes of each are compared with its digest
before anybody gets them.

It knows safetensors files and the list of a point's tensors; it needs neither torch nor the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from blake3 import blake3

from orchestrator.errors import ResumePointError
from orchestrator.parts.dtypes import SAFETENSORS, num_bytes
from orchestrator.records import TensorChunk, TensorEntry
from orchestrator.resume.points import Damage
from orchestrator.resume.store import RunStore
from orchestrator.resume.verify import point_path

MODEL = "model"
_LENGTH_BYTES = 8  # of the header's length, with which a safetensors file begins


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a tensor lies in a file: its first byte, and its form as the file states it."""

    start: int
    size: int
    dtype: str
    shape: tuple[int, ...]


class PointTensors:
    """The model's tensors of the point `name`. `entries` are in the order of their names."""

    def __init__(self, store: RunStore, name: str) -> None:
        """Raises `ResumePointError` naming the file that is damaged."""
        self._store, self._name = store, name
        self.entries = tuple(
            sorted((e for e in store.read_parts(name) if e.group == MODEL), key=lambda each: each.name)
        )
        self._places: dict[str, dict[str, _Place]] = {}

    def read(self, entry: TensorEntry) -> bytearray:
        """The bytes of one tensor, whole, in order; memory for it alone. Raises `ResumePointError` if they
        are not those that were committed.
        """
        size = SAFETENSORS[entry.dtype][1]
        first = entry.chunks[0]
        if len(entry.chunks) == 1 and first.sizes == entry.shape:
            return self._chunk(entry, first)
        whole = np.zeros((*entry.shape, size), np.uint8)
        found = 0
        for chunk in entry.chunks:
            part = np.frombuffer(self._chunk(entry, chunk), np.uint8).reshape(*chunk.sizes, size)
            at = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[at] = part
            found += math.prod(chunk.sizes)
        if found != math.prod(entry.shape):
            raise self._damaged("parts.json", f"does not list all of {entry.name}")
        return bytearray(whole.tobytes())

    def _chunk(self, entry: TensorEntry, chunk: TensorChunk) -> bytearray:
        place = self._header(chunk.file).get(entry.name)
        if place is None:
            raise self._damaged(chunk.file, f"does not hold {entry.name}")
        form = (SAFETENSORS[entry.dtype][0], chunk.sizes)
        data = bytearray()
        if (place.dtype, place.shape) == form and place.size == num_bytes(entry.dtype, chunk.sizes):
            data = self._store.storage.read_part(self._path(chunk.file), place.start, place.size)
            if blake3(data).hexdigest() == chunk.digest:
                return data
        raise self._damaged(
            chunk.file,
            f"holds {entry.name} as {(place.dtype, place.shape)} with digest {blake3(data).hexdigest()}, "
            "saved was "
            f"{form} with {chunk.digest}",
        )

    def _header(self, file: str) -> dict[str, _Place]:
        if file not in self._places:
            self._places[file] = self._read_header(file)
        return self._places[file]

    def _read_header(self, file: str) -> dict[str, _Place]:
        storage, path = self._store.storage, self._path(file)
        try:
            size = storage.size(path)
            length = int.from_bytes(storage.read_part(path, 0, _LENGTH_BYTES), "little")
            if length > size - _LENGTH_BYTES:
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header: dict[str, Any] = orjson.loads(storage.read_part(path, _LENGTH_BYTES, length))
            begin = _LENGTH_BYTES + length
            return {
                name: _Place(
                    start=begin + each["data_offsets"][0],
                    size=each["data_offsets"][1] - each["data_offsets"][0],
                    dtype=each["dtype"],
                    shape=tuple(each["shape"]),
                )
                for name, each in header.items()
                if name != "__metadata__"
            }
        except FileNotFoundError as error:
            raise self._damaged(file, "is missing") from error
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise self._damaged(file, f"is not a valid safetensors file ({error})") from error

    def _path(self, file: str) -> str:
        return point_path(self._name, file)

    def _damaged(self, file: str, reason: str) -> ResumePointError:
        damage = Damage(point=self._name, file=file, reason=reason)
        return ResumePointError(f"{damage}; restore the file, or take another point")
