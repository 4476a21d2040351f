"""The tensors of a training state, by group and name, with the rows of each that a member holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.planning.state.state_layout import StateTensor

MODEL, OPTIMIZER = "model", "optimizer"
STEPS = "steps"  # the item that counts optimizer steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """The rows of a state tensor that this member holds.

    `tensor` is the state itself, not a copy: writing to it changes the state. It holds the rows of `whole`
    from `first_row` on (all rows under replicate). Tied weights are one item.
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
    """Builds the item of a tensor that is held whole. `sharded`: its rows are divided if there are shards."""
    whole = StateTensor(
        group=group,
        name=name,
        shape=tuple(tensor.shape),
        itemsize=tensor.element_size(),
        sharded=sharded and tensor.ndim > 0,
    )
    return Item(whole=whole, tensor=tensor)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the tensor's values as bytes, in order. Copies them only if the tensor is on a GPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def own_tensors(held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and persistent buffers by name. Of tied tensors only the first name is yielded."""
    seen: set[int] = set()
    for name, tensor in held.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
