"""The tensors of a training state, by group and name, and the rows of each that a member holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.planning.state_layout import StateTensor

MODEL, OPTIMIZER = "model", "optimizer"
STEPS = "steps"  # the item that counts optimizer steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Rows of a tensor of the state, as themselves: who writes to `tensor` changes the state. Tied weights
    are one item. `tensor` has the rows from `first_row` on that this member holds of `whole`: all of them
    under replicate.
    """

    whole: StateTensor
    tensor: Tensor
    first_row: int = 0

    @property
    def group(self) -> str:
        """MODEL or OPTIMIZER."""
        return self.whole.group

    @property
    def name(self) -> str:
        """Unique in its group."""
        return self.whole.name


def whole_item(group: str, name: str, tensor: Tensor, *, sharded: bool) -> Item:
    """The item of a tensor that is held whole; `sharded`: its rows are divided where there are shards."""
    whole = StateTensor(
        group=group,
        name=name,
        shape=tuple(tensor.shape),
        itemsize=tensor.element_size(),
        sharded=sharded and tensor.ndim > 0,
    )
    return Item(whole=whole, tensor=tensor)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's values as bytes, in order; a copy only where it lies on a GPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def own_tensors(held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by name; of tied ones only the first name, the others are aliases."""
    seen: set[int] = set()
    for name, tensor in held.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
