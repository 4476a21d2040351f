"""The initial weights of a model, which are made or read only where they are needed.

A resume overwrites all of them, so it builds an outline: the model without weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestrator.trainer.model.build_model import bare_on_cpu, first_model
from orchestrator.trainer.state.lazy_init import DeferredModel, defer
from orchestrator.trainer.weights.initial import fill_rows, named_state
from orchestrator.trainer.weights.state_tensors import Item, copy_rows, own_tensors

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig, TrainConfig
    from orchestrator.trainer.state.frozen_weights import AdapterBase

_CPU = torch.device("cpu")


class FirstWeights:
    """The initial weights of a job's model.

    With `by_name` each drawn weight of a model without a factory has `NamedNumbers`. Otherwise, and where the
    model cannot be deferred in this way, weights have the bits of `build_model`.
    """

    def __init__(
        self, config: ModelConfig, train: TrainConfig, device: torch.device, invariant: bool, by_name: bool
    ) -> None:
        self._config, self._train, self._device, self._invariant = config, train, device, invariant
        self._by_name = by_name and config.factory is None and config.lora is None
        self._later: DeferredModel | None = None

    def outline(self) -> nn.Module | None:
        """Returns the model on the CPU, with its buffers and with parameters on the meta device.

        Parameters that the model's code does not leave uninitialized have values. Returns None if the model
        cannot be built without weights. An error of the model's own is raised again when it is built whole.
        """
        outline = _deferred(self._bare, self._train.seed)
        if outline is not None and self._by_name:
            self._later = outline
        elif outline is None or outline.holds_random_values:  # these would have other values
            outline = self._later = _deferred(self._bare)
        return None if outline is None else copy.deepcopy(outline.model)  # its parameters are replaced

    def fill(self, items: Sequence[Item], model: nn.Module, base: AdapterBase) -> None:
        """Fills this member's rows of all weights of `model`, of which names, shapes and types are used.

        A weight of which this member has no row is not made. Each weight briefly takes the memory of the
        whole tensor. Of `model.pretrained` and `model.init_from` only this member's rows are read. Weights
        that `fill_rows` cannot read in this way, and a factory that `defer` does not support, are first built
        whole in the machine's memory.
        """
        rest = self._read(items, model, base)
        if not rest:
            return
        value = self.values(base)
        for item in rest:
            if item.tensor.numel():
                copy_rows(item, value(item.name, _elements(item)))

    def forget(self) -> None:
        """Frees what `outline` has kept for `fill`."""
        self._later = None

    def _read(self, items: Sequence[Item], model: nn.Module, base: AdapterBase) -> Sequence[Item]:
        """Fills weights from files. Returns those that files do not hold, or not in this form."""
        if base.exists:
            return base.fill_copies(items)
        from_files = self._config.base is not None
        is_read = from_files and fill_rows(self._config, named_state(model), items)
        return [] if is_read else items

    def values(self, base: AdapterBase) -> Callable[[str, range | None], Tensor]:
        """Returns a function that makes a tensor by its name; of `elements` see `DeferredModel.make`."""
        if self._config.base is None or base.exists:  # adapters are drawn
            later = self._later or self._deferred_again()
            if later is not None:
                recorded = _own_tensors(later.model)
                return lambda name, elements: later.make(recorded[name], elements)
        made = first_model(self._config, self._train.precision, self._train.seed, _CPU, invariant=False)
        values = _own_tensors(made)
        return lambda name, elements: values[name].detach()

    def _deferred_again(self) -> DeferredModel | None:
        by_name = _deferred(self._bare, self._train.seed) if self._by_name else None
        return by_name or _deferred(self._bare)

    def _bare(self) -> nn.Module:
        train = self._train
        return bare_on_cpu(self._config, train.precision, train.seed, self._device, self._invariant)


def _deferred(build: Callable[[], nn.Module], seed: int | None = None) -> DeferredModel | None:
    """Returns None for a model whose weights cannot be made one by one.

    This includes a model that fails while its weights are deferred (`parameter.data = …`).
    """
    try:
        return defer(build, seed)
    except Exception:  # noqa: BLE001  user code receives tensors without values
        return None


def _elements(item: Item) -> range | None:
    """The elements of an item's rows in the whole tensor."""
    if not item.whole.sharded or not item.tensor.ndim:
        return None
    per_row = item.tensor[0].numel() if len(item.tensor) else 0
    return range(item.first_row * per_row, (item.first_row + len(item.tensor)) * per_row)


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(own_tensors(model.state_dict(keep_vars=True)))
