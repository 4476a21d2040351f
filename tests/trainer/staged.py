"""Where tensors lie in a staging buffer, and what another process reads there."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from orchestrator.planning.state.state_layout import BufferRows, Layout, StateTensor, flat_part
from orchestrator.trainer.saving.staging import StagingBuffer


def placed(tensors: list[Tensor]) -> list[tuple[BufferRows, Tensor]]:
    """Where one rank alone stages them."""
    whole = [
        StateTensor(
            group="model",
            name=str(number),
            shape=tuple(tensor.shape),
            itemsize=tensor.element_size(),
            sharded=tensor.ndim > 0,
        )
        for number, tensor in enumerate(tensors)
    ]
    part = flat_part(whole, Layout(num_shards=1, num_replicas=1), 0)
    return list(zip(part.places, tensors, strict=True))


def content(buffer: StagingBuffer, copies: list[tuple[BufferRows, Tensor]]) -> list[bytes]:
    """What another process finds at the places."""
    data = Path(buffer.path).read_bytes()
    return [data[place.offset : place.offset + place.num_bytes] for place, _ in copies]
