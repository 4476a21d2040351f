"""Trains with a user's optimizer: finds out by trial steps which state it keeps, and saves and restores it.

The user's function returns a `torch.optim.Optimizer`, as classes of torch and of other libraries do. Each
parameter has an optimizer of its own. So its numbers, which such classes keep for a group of parameters, are
part of the state as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError, TrainingError
from orchestrator.trainer.model.factory_output import is_of_this_machine
from orchestrator.trainer.optimizer.kinds import ParamGroups, StateForm
from orchestrator.user_function import find_function

_OF_GROUP = "group."  # begins the names of numbers in `param_groups`
_LR = 1e-3
_SMALL = 4  # the length of dimensions with which values are compared
_STATE, _FAILS = "optimizer.state", "optimizer.fails"
# the trial failed for want of memory or a GPU; a worker may have both
NOT_TRIED = "optimizer.not_tried"


class PlugIn:
    """The function of `train.optimizer`.

    Its attribute `elementwise` states that it works element by element; without it, parameters are stepped
    whole.
    """

    steps_alone = True

    def __init__(self, path: str, arguments: Mapping[str, Any]) -> None:
        """Raises `ConfigError` if there is no function `path`, or if it takes no `lr` or not `arguments`."""
        self.name, self._arguments = path, dict(arguments)
        asked = {"lr": _LR, **arguments}
        self._function = find_function("train.optimizer", path, "optimizer.not_callable", 1, asked)
        self.elementwise = bool(getattr(self._function, "elementwise", False))
        self.has_weight_decay = _takes(self._function, "weight_decay") and "weight_decay" not in arguments
        self._forms: dict[tuple[tuple[int, ...], torch.dtype], tuple[StateForm, ...]] = {}
        self._constants: dict[tuple[str, ...], dict[str, Any]] = {}  # by the names of forms

    def forms(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StateForm, ...]:
        """Returns what the optimizer keeps of a parameter, as two trial steps of this shape show it.

        The steps are made on torch's meta device, on the CPU if that fails, and on a GPU if that fails, too.
        Raises `ConfigError` if they fail (with `NOT_TRIED` if another machine may do better), and for a state
        that cannot be saved.
        """
        known = self._forms.get((shape, dtype))
        if known is None:
            if not self._forms:
                self._require_independent(torch.float32)
            known = self._forms[shape, dtype] = self._tried(shape, dtype)
        return known

    def require_fit(self, name: str, parameter: Tensor) -> None:
        """Raises `ConfigError` if trial steps with a parameter of this shape fail."""
        del name
        self.forms(tuple(parameter.shape), parameter.dtype)

    def build(self, groups: ParamGroups) -> torch.optim.Optimizer:
        """Returns the user's optimizer. Raises what the user's code raises."""
        if not self.has_weight_decay:
            groups = [{key: value for key, value in g.items() if key != "weight_decay"} for g in groups]
        made = self._function(groups, lr=groups[0]["lr"], **self._arguments)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"train.optimizer={self.name} returned {type(made).__name__}; return a torch.optim.Optimizer",
                code="optimizer.not_callable",
            )
        return made

    def bind(
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Tensor], steps: int
    ) -> None:
        """Before the first step the optimizer makes its own state."""
        if not steps:
            return
        (group,) = optimizer.param_groups
        kept: dict[str, Any] = dict(self._constants[tuple(state)])
        for form in self._forms_of(state):
            value: Any = state[form.name]
            if form.number is not None:
                value = form.number(value.item())
            if form.name.startswith(_OF_GROUP):
                group[form.name.removeprefix(_OF_GROUP)] = value
            else:
                kept[form.name] = value
        optimizer.state[parameter] = kept

    def read(
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Tensor]
    ) -> None:
        """Raises `TrainingError` if the optimizer keeps other tensors than in its trial steps."""
        kept = _kept(optimizer, parameter)
        for form in self._forms_of(state):
            value, target = kept.get(form.name), state[form.name]
            if form.number is not None:
                is_same = isinstance(value, int | float)
            else:
                is_same = isinstance(value, Tensor) and value.shape == target.shape
            if not is_same:
                raise TrainingError(
                    f"train.optimizer={self.name} keeps {form.name}={value!r:.60} of a parameter of shape "
                    f"{tuple(parameter.shape)}, and in its trial steps a tensor of shape "
                    f"{tuple(target.shape)}; keep tensors of one shape in every step",
                    code=_STATE,
                )
            assert value is not None
            if form.number is not None:
                target.fill_(value)
            elif value is not target:
                target.copy_(value)

    # ------------------------------------------------------------------------------------------------ inside
    def _forms_of(self, state: Mapping[str, Tensor]) -> Sequence[StateForm]:
        """Returns the forms by their names. The shapes are those of some parameter."""
        return next(forms for forms in self._forms.values() if [f.name for f in forms] == list(state))

    def _tried(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StateForm, ...]:
        error: Exception | None = None
        for kind in ("meta", "cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            try:
                return self._two_steps(shape, dtype, torch.device(kind))
            except ConfigError:
                raise
            except Exception as found:  # noqa: BLE001  it may need values, or a GPU
                error = found
        assert error is not None
        raise ConfigError(
            f"train.optimizer={self.name} fails for a parameter of shape {shape} and type {dtype}: "
            f"{type(error).__name__}: {error}; correct it, or give such parameters another optimizer in "
            "train.param_groups",
            code=NOT_TRIED if is_of_this_machine(error) else _FAILS,
        ) from error

    def _two_steps(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[StateForm, ...]:
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
        optimizer = self.build([{"params": [parameter], "lr": _LR, "weight_decay": 0.0}])
        numbers, own = _numbers(optimizer.param_groups[0]), _numbers(vars(optimizer))
        states = []
        for _ in range(2):
            parameter.grad = torch.full_like(parameter, 0.01)
            optimizer.step()
            states.append(_kept(optimizer, parameter))
        later = _numbers(vars(optimizer))
        if changed := sorted(name for name, value in later.items() if own.get(name) != value):
            raise self._unsaved(f"its attribute {changed[0]}, which a resume point does not hold")
        first, second = (
            {name: _form(name, value, device) for name, value in each.items()} for each in states
        )
        forms, constants = [], {}
        for name, form in second.items():
            setting = numbers.get(name.removeprefix(_OF_GROUP)) if name.startswith(_OF_GROUP) else None
            if setting is not None and all(each.get(name) == setting for each in states):
                continue  # no state
            if name in (f"{_OF_GROUP}lr", f"{_OF_GROUP}weight_decay"):
                raise self._unsaved(f"a changing `{name.removeprefix(_OF_GROUP)}` of its own")
            if form != first.get(name):
                raise self._unsaved(f"{name} as {form} after a step and {first.get(name)} before it")
            if isinstance(form, StateForm):
                forms.append(form)
            elif isinstance(form, bool | str | None):
                constants[name] = form
            else:
                raise self._unsaved(f"{name} of type {form.__name__}")
        if self._constants.setdefault(tuple(form.name for form in forms), constants) != constants:
            raise self._unsaved(f"{constants} for a parameter of shape {shape} and others for another shape")
        return tuple(forms)

    def _unsaved(self, what: str) -> ConfigError:
        return ConfigError(
            f"train.optimizer={self.name} keeps {what}; keep tensors and numbers in `state` (and numbers in "
            "`param_groups`), the same ones in every step",
            code=_STATE,
        )

    def _require_independent(self, dtype: torch.dtype) -> None:
        """Raises `ConfigError` if parameters of a group change each other's steps, or if an optimizer that is
        said to work element by element does not.
        """
        generator = torch.Generator().manual_seed(0)

        def drawn() -> list[Tensor]:
            return [torch.randn(_SMALL, 3, generator=generator, dtype=dtype) for _ in range(3)]

        (one, *its), (two, *others) = drawn(), drawn()
        try:
            pair = self._stepped([one, two], [its, others])
            alone = self._stepped([one], [its]) + self._stepped([two], [others])
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001  it may not take so small matrices; the model's are tried
            return
        if not all(_close(a, b) for a, b in zip(pair, alone, strict=True)):
            raise ConfigError(
                f"train.optimizer={self.name} steps a parameter otherwise if it has another one beside it, "
                "and here each parameter is stepped by itself; take an optimizer whose parameters do not "
                "depend on each other",
                code="optimizer.couples_parameters",
            )
        if not self.elementwise:
            return
        half = _SMALL // 2
        parts = [
            self._stepped([one[part]], [[gradient[part] for gradient in its]])[0]
            for part in (slice(half), slice(half, None))
        ]
        if not _close(torch.cat(parts), alone[0]):
            raise ConfigError(
                f"train.optimizer={self.name} has the attribute elementwise, and steps rows of a matrix "
                "otherwise than the whole; leave the attribute out",
                code="optimizer.not_elementwise",
            )

    def _stepped(self, weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        optimizer = self.build([{"params": parameters, "lr": _LR, "weight_decay": 0.0}])
        for step in range(len(gradients[0])):
            for parameter, its in zip(parameters, gradients, strict=True):
                parameter.grad = its[step].clone()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]


def _close(one: Tensor, two: Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-5, atol=1e-7)


def _takes(function: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return False
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)


def _numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and not name.startswith("_")
    }


def _kept(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Returns what an optimizer of one parameter keeps, numbers of its group with `_OF_GROUP` before them."""
    of_group = _numbers(optimizer.param_groups[0])
    return {**optimizer.state[parameter], **{_OF_GROUP + name: value for name, value in of_group.items()}}


def _form(name: str, value: Any, device: torch.device) -> Any:
    """Returns the form of a value that is saved, a constant itself, and the type of another value."""
    if isinstance(value, Tensor):
        return StateForm(name, tuple(value.shape), value.dtype, on_cpu=value.device.type != device.type)
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int | float):
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        return StateForm(name, (), dtype, type(value), on_cpu=True)
    return type(value)
