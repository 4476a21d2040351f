"""Trains with a user's optimizer: finds out by trial steps which state it keeps, and saves and restores it.

The user's function returns a `torch.optim.Optimizer`, as classes of torch and of other libraries do. Each
parameter has an optimizer of its own. So its numbers, which such classes keep for a group of parameters, are
part of the state as well.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError, TrainingError
from orchestrator.trainer.model.factory_output import is_of_this_machine, may_not_repeat
from orchestrator.trainer.optimizer.kinds import ParamGroups, StateForm
from orchestrator.user_function import described, find_function

_OF_GROUP, _OF_SELF = "group.", "self."  # begin the names of values in `param_groups`, and of attributes
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
        self._built: dict[str, Any] = {}  # the settings of the newest optimizer when it was built

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
        made: Any = self._function(groups, lr=groups[0]["lr"], **self._arguments)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"train.optimizer={self.name} returned {type(made).__name__}; return a torch.optim.Optimizer",
                code="optimizer.not_callable",
            )
        self._built = _settings(made)
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
        """Raises `TrainingError` if the optimizer keeps anything else than in its trial steps."""
        settings, kept = _settings(optimizer), dict(optimizer.state[parameter])
        for form in self._forms_of(state):
            value = kept.pop(form.name, settings.pop(form.name, None))
            target = state[form.name]
            if form.number is not None and isinstance(value, int | float):
                target.fill_(value)
            elif isinstance(value, Tensor) and (value.shape, value.dtype) == (target.shape, target.dtype):
                if value is not target:
                    target.copy_(value)
            else:
                raise self._changed(form.name, value, f"a {target.dtype} of shape {tuple(target.shape)}")
        beside = {**self._built, **self._constants[tuple(state)]}
        for name, value in {**settings, **kept}.items():
            if name not in beside or value != beside[name]:
                raise self._changed(name, value, f"{beside.get(name, 'nothing')!r:.60}")

    @contextmanager
    def naming_errors(self, step: int) -> Iterator[None]:  # noqa: D102
        try:
            yield
        except Exception as error:
            if may_not_repeat(error):
                raise
            raise TrainingError(
                f"train.optimizer={self.name} raised in its step {step}: {described(error)}. Some weights "
                "may be changed already; correct it and start the same command again: it continues from the "
                "newest resume point",
                code=_FAILS,
            ) from error

    def _changed(self, name: str, value: Any, before: str) -> TrainingError:
        return TrainingError(
            f"train.optimizer={self.name} keeps {name}={value!r:.60}, and before {before}; keep tensors and "
            "numbers of one type and shape in `state`, in every step, so that resume points can hold them",
            code=_STATE,
        )

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
        before, states = _settings(optimizer), list[dict[str, Any]]()
        for _ in range(2):
            parameter.grad = torch.full_like(parameter, 0.01)
            optimizer.step()
            states.append({**optimizer.state[parameter], **_settings(optimizer)})
        first, second = states
        forms, constants = [], {}
        for name, value in second.items():
            is_setting = name.startswith((_OF_GROUP, _OF_SELF))
            if is_setting and value == first.get(name) == before.get(name):
                continue
            form = _form(name, value, device)
            is_number = isinstance(form, StateForm) and form.number is not None
            own = name.removeprefix(_OF_GROUP) in ("lr", "weight_decay")
            if is_setting and (own or name.startswith(_OF_SELF) or not is_number):
                raise self._unsaved(f"{name}, which changes in a step and which a resume point does not hold")
            if name not in first or form != _form(name, first[name], device):
                was = f"{first.get(name)!r:.60}"
                raise self._unsaved(f"{name}={value!r:.60} after a step and {was} before it")
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


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns what an optimizer of one parameter has besides `state`.

    These are the values of its group, and its attributes that are numbers or tensors. A tensor counts as
    another one after each write to it.
    """
    group = {_OF_GROUP + name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    own = {
        _OF_SELF + name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    }
    return {
        name: (id(value), value._version) if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in {**group, **own}.items()
    }


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
