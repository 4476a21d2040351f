"""The rows of a trained parameter that one member holds, with the optimizer's state of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.checkpoint.files.manifest import OPTIMIZER
from orchestrator.planning.state.state_layout import StateTensor
from orchestrator.trainer.loading.state_tensors import Item
from orchestrator.trainer.optimizer.kinds import Setting, StateForm, stored_name


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """This member's rows of a trained parameter, with what the optimizer keeps of them."""

    item: Item
    setting: Setting
    forms: tuple[StateForm, ...]
    state: Mapping[str, Tensor]

    def items(self) -> Iterator[Item]:
        """Yields the state's tensors as items of the training state."""
        for form in self.forms:
            is_divided = self.is_divided(form)
            whole = StateTensor(
                group=OPTIMIZER,
                name=stored_name(self.setting.kind, form, self.item.name),
                shape=form.shape,
                itemsize=form.dtype.itemsize,
                sharded=is_divided,
            )
            first_row = self.item.first_row if is_divided else 0
            yield Item(whole=whole, tensor=self.state[form.name], first_row=first_row)

    def is_divided(self, form: StateForm) -> bool:
        """Whether this tensor of the state is divided with the parameter's rows."""
        whole = self.item.whole
        return whole.sharded and form.shape[:1] == whole.shape[:1]


def trained_rows(item: Item, setting: Setting, device: torch.device) -> TrainedRows:
    """Returns the rows with a state of zeros, as before the first step."""
    forms = setting.kind.forms(item.whole.shape, item.tensor.dtype)
    rows = TrainedRows(item, setting, forms, {})
    state = {}
    for form in forms:
        shape = (len(item.tensor), *form.shape[1:]) if rows.is_divided(form) else form.shape
        state[form.name] = torch.zeros(shape, dtype=form.dtype, device="cpu" if form.on_cpu else device)
    return TrainedRows(item, setting, forms, state)
