"""The optimizers that the configuration names without a module. torch computes all of them but Lion."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestrator.config.optimizer_fields import ADAFACTOR, ADAMW, LION, MUON, SGD
from orchestrator.errors import ConfigError
from orchestrator.trainer.optimizer.kinds import Kind, ParamGroups, StateForm
from orchestrator.trainer.optimizer.lion import Lion
from orchestrator.trainer.optimizer.plug_in import PlugIn

if TYPE_CHECKING:
    from orchestrator.config.sections import TrainConfig


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """An optimizer class whose state has only tensors, and perhaps the number of its steps.

    `like`: the tensors of the parameter's own shape. `count`: where it keeps its number of steps, which is
    not stored: the state of a run has it once. `begins_at_zero`: zeros are its state before the first step.
    """

    name: str
    elementwise: bool
    make: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    like: tuple[str, ...] = ()
    count: str | None = None
    begins_at_zero: bool = True
    has_weight_decay: bool = True

    @property
    def steps_alone(self) -> bool:  # noqa: D102
        return not self.elementwise

    def forms(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StateForm, ...]:  # noqa: D102
        return tuple(StateForm(name, shape, dtype) for name in self.like)

    def require_fit(self, name: str, parameter: Tensor) -> None:
        """Any parameter fits."""

    def build(self, groups: ParamGroups) -> torch.optim.Optimizer:  # noqa: D102
        made: torch.optim.Optimizer = self.make(groups, **self.arguments)
        return made

    def bind(  # noqa: D102
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Tensor], steps: int
    ) -> None:
        optimizer.state.pop(parameter, None)
        if not steps and not self.begins_at_zero:
            return
        optimizer.state[parameter] = dict(state)
        if self.count is not None:
            device = parameter.device if self.arguments.get("fused") else None
            optimizer.state[parameter][self.count] = torch.tensor(
                float(steps), dtype=torch.float32, device=device
            )

    def read(  # noqa: D102
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Tensor]
    ) -> None:
        kept = optimizer.state[parameter]
        for name, tensor in state.items():
            if kept[name] is not tensor:
                tensor.copy_(kept[name])
                kept[name] = tensor

    def naming_errors(self, step: int) -> AbstractContextManager[None]:  # noqa: D102
        del step
        return nullcontext()  # it is no code of a user


class _Adafactor(BuiltIn):
    """torch's Adafactor keeps a mean of squares for each row and each column of a matrix."""

    def forms(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StateForm, ...]:
        if len(shape) < 2:
            return (StateForm("variance", shape, dtype),)
        rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        return StateForm("row_var", rows, dtype), StateForm("col_var", columns, dtype)


class _Muon(BuiltIn):
    """torch's Muon takes matrices only."""

    def require_fit(self, name: str, parameter: Tensor) -> None:
        if parameter.ndim != 2:
            raise ConfigError(
                f"train.param_groups gives muon the parameter {name} of shape {tuple(parameter.shape)}, and "
                "Muon trains matrices only; let it match matrices, or give these adamw",
                code="optimizer.shape",
            )


def kind_of(name: str, train: TrainConfig) -> Kind:
    """Returns the optimizer `name`. It has `train.optimizer_args` if it is that of `train.optimizer`.

    Raises `ConfigError` if there is no such plug-in.
    """
    arguments = dict(train.optimizer_args) if name == train.optimizer else {}
    if name == ADAMW:
        own = {"betas": (train.betas[0], train.betas[1]), "eps": train.eps, "fused": True}
        moments = ("exp_avg", "exp_avg_sq")
        return BuiltIn(
            name=name, elementwise=True, make=torch.optim.AdamW, arguments=own, like=moments, count="step"
        )
    if name == SGD:
        like = ("momentum_buffer",) if arguments.get("momentum") else ()
        return BuiltIn(
            name=name,
            elementwise=True,
            make=torch.optim.SGD,
            arguments=arguments,
            like=like,
            begins_at_zero=False,  # torch's first momentum is the gradient itself, whatever the dampening is
        )
    if name == LION:
        return BuiltIn(name=name, elementwise=True, make=Lion, arguments=arguments, like=("exp_avg",))
    if name == MUON:
        # the learning rate of AdamW, which trains the other parameters, also fits Muon's matrices then
        arguments = {"adjust_lr_fn": "match_rms_adamw"} | arguments
        return _Muon(
            name=name,
            elementwise=False,
            make=torch.optim.Muon,
            arguments=arguments,
            like=("momentum_buffer",),
        )
    if name == ADAFACTOR:
        return _Adafactor(
            name=name,
            elementwise=False,
            make=torch.optim.Adafactor,
            arguments={**arguments, "foreach": False},
            count="step",
        )
    return PlugIn(name, arguments)
