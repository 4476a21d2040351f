"""What training needs to know of an optimizer, besides the class of torch or of a user that computes it.

Which tensors it keeps of a parameter, in which shapes, and whether it works element by element.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from orchestrator.config.optimizer_fields import ADAMW

ParamGroups = list[dict[str, Any]]  # of torch: `params`, `lr`, `weight_decay`


@dataclass(frozen=True, slots=True)
class StateForm:
    """A tensor that an optimizer keeps of one parameter. `shape` is that for the whole parameter.

    If the first dimension has the parameter's length, the tensor is divided among shards with the
    parameter's rows. Otherwise every rank holds all of it. `number`: the optimizer itself has a Python number
    there (int or float), which is kept as a tensor without dimensions. `on_cpu`: the optimizer keeps it there
    whatever the parameter's device is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: type[int] | type[float] | None = None
    on_cpu: bool = False


class Kind(Protocol):
    """An optimizer with its arguments."""

    @property
    def name(self) -> str:
        """The name in the configuration."""

    @property
    def elementwise(self) -> bool:
        """Whether rows of a parameter get the same bits as in the whole parameter.

        Each rank then steps its own rows. Otherwise whole parameters are stepped, each by one rank. (torch's
        fused AdamW on a CPU rounds the last elements of a short run of memory otherwise than the others.)
        """

    @property
    def steps_alone(self) -> bool:
        """Whether an optimizer must be built for each parameter. Otherwise one steps all of them."""

    @property
    def has_weight_decay(self) -> bool:
        """Whether the optimizer takes a weight decay."""

    def forms(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StateForm, ...]:
        """Returns what the optimizer keeps of a whole parameter."""

    def require_fit(self, name: str, parameter: Tensor) -> None:
        """Raises `ConfigError` if the optimizer cannot train this parameter."""

    def build(self, groups: ParamGroups) -> torch.optim.Optimizer:
        """Returns the optimizer. Each group has `params`, `lr` and `weight_decay`."""

    def bind(
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Tensor], steps: int
    ) -> None:
        """Gives the optimizer its state of a parameter, after so many steps.

        The tensors themselves are used where the optimizer keeps tensors. Before the first step `state` has
        zeros, and an optimizer that begins with other values makes its state itself.
        """

    def read(
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Tensor]
    ) -> None:
        """Copies the optimizer's state of a parameter into `state`, where it is not in it already."""

    def naming_errors(self, step: int) -> AbstractContextManager[None]:
        """Within it, the optimizer's step number `step` runs. Errors of user code become `TrainingError`."""


def stored_name(kind: Kind, form: StateForm, parameter: str) -> str:
    """Returns the name of a state tensor in points: `exp_avg.X` for AdamW, `muon.momentum_buffer.X` else."""
    return f"{form.name}.{parameter}" if kind.name == ADAMW else f"{kind.name}.{form.name}.{parameter}"


@dataclass(frozen=True, slots=True)
class Setting:
    """How one parameter is trained."""

    kind: Kind
    lr_scale: float
    weight_decay: float


def step_alone(
    setting: Setting, lr: float, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], steps: int
) -> None:
    """Runs one step of a whole parameter, after `steps` steps before it. Writes to `weight` and `state`."""
    kind, parameter = setting.kind, nn.Parameter(weight.detach())
    parameter.grad = gradient
    group = {
        "params": [parameter],
        "lr": lr * setting.lr_scale,
        "weight_decay": setting.weight_decay,
    }
    with kind.naming_errors(steps + 1):
        optimizer = kind.build([group])
        kind.bind(optimizer, parameter, state, steps)
        optimizer.step()
    kind.read(optimizer, parameter, state)
    if parameter.data_ptr() != weight.data_ptr():  # a plug-in may replace `parameter.data`
        weight.copy_(parameter.detach())
