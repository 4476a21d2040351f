"""The exponential moving average of the trained weights (`train.ema`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from orchestrator.checkpoint.files.manifest import EMA
from orchestrator.trainer.loading.state_tensors import Item


class AveragedWeights:
    """Averages in float32 over this member's rows of the trained weights.

    After each step of the optimizer an average a of a weight w becomes decay · a + (1 - decay) · w. Rows get
    the same bits as whole tensors. In bfloat16 a change of 1 - decay would be lost, so averages are float32
    whatever the weights are.
    """

    def __init__(self, items: Sequence[Item], decay: float) -> None:
        """`items`: the trained weights, with which the averages begin."""
        self._items, self._decay = items, decay
        self._averages = [item.tensor.detach().float().clone() for item in items]

    def items(self) -> Iterator[Item]:
        """Yields the averages as items of the training state, under the names of their weights."""
        for item, average in zip(self._items, self._averages, strict=True):
            whole = replace(item.whole, group=EMA, itemsize=average.dtype.itemsize)
            yield replace(item, whole=whole, tensor=average)

    @torch.no_grad()
    def step(self) -> None:
        """Takes the weights as they are now into the averages."""
        if self._items:
            weights = [item.tensor.detach().float() for item in self._items]
            torch._foreach_lerp_(self._averages, weights, 1 - self._decay)
