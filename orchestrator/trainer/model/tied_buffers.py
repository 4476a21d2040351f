"""Keeps buffers that several modules share one tensor when a model is moved or made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def shared_buffers_kept(model: nn.Module) -> Iterator[None]:
    """Wraps code that may replace buffers in the modules of `model`, and keeps shared buffers shared.

    Buffers that were one tensor before are one afterwards: the one under the first name. When torch moves a
    model to another device or type, it keeps parameters tied, but makes one tensor per name of a buffer. The
    state would then have other names.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    kept: list[Tensor] = []  # an address is unique only while its tensor lives
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept.append(buffer)
                places.setdefault(id(buffer), []).append((module, name))
    yield
    for (first, name), *others in places.values():
        for module, alias in others:
            module._buffers[alias] = first._buffers[name]
