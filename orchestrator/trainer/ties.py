"""Buffers that several modules share stay one tensor when a model is moved or made.

It knows modules and tensors, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def shared_buffers_kept(model: nn.Module) -> Iterator[None]:
    """Around what may put other buffers into the modules of `model`: those that were one tensor before are
    one afterwards, the one under the first name. torch keeps parameters tied when a model goes to another
    device or type, and makes a tensor for each name of a buffer: the state would have other names there.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    kept: list[Tensor] = []  # an address is its own as long as the tensor lives
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept.append(buffer)
                places.setdefault(id(buffer), []).append((module, name))
    yield
    for (first, name), *others in places.values():
        for module, alias in others:
            module._buffers[alias] = first._buffers[name]
