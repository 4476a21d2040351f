"""Which optimizer, learning rate and weight decay each parameter of a model has, and the built-in optimizers.

torch computes all of the built-in ones but Lion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from orchestrator.config.optimizer_fields import ADAFACTOR, ADAMW, LION, MUON, SGD
from orchestrator.errors import ConfigError
from orchestrator.trainer.optimizer.kinds import Kind, ParamGroups, Setting, StateForm
from orchestrator.trainer.optimizer.plug_in import PlugIn
from orchestrator.trainer.weights.state_tensors import is_trained, own_tensors

if TYPE_CHECKING:
    from orchestrator.config.sections import ParamGroupConfig, TrainConfig

_NAMED = 5


def settings_of(model: nn.Module, train: TrainConfig) -> dict[str, Setting]:
    """Returns how each trained parameter of `model` is trained, by the name that it has in points.

    Tied parameters are one, under the first of their names; an entry of `train.param_groups` matches it if it
    matches any of them. Raises `ConfigError` for an entry that matches none, a parameter that two entries
    match, a parameter that its optimizer cannot train, and a plug-in that cannot be called.
    """
    held = dict(model.state_dict(keep_vars=True))
    trained = {name: tensor for name, tensor in own_tensors(held) if is_trained(tensor)}
    groups = _groups(train.param_groups, _aliases(held, trained))
    bodies = {id(each) for each in muon_matrices(model)} if train.optimizer == MUON else set()
    kinds: dict[str, Kind] = {}
    found = {}
    for name, tensor in trained.items():
        group = groups.get(name)
        chosen = None if group is None else group.optimizer
        if chosen is None:
            chosen = ADAMW if train.optimizer == MUON and id(tensor) not in bodies else train.optimizer
        if chosen not in kinds:
            kinds[chosen] = kind_of(chosen, train)
        kinds[chosen].require_fit(name, tensor)
        decay = train.weight_decay if tensor.ndim >= 2 else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        if not kinds[chosen].has_weight_decay:
            _require_no_decay(kinds[chosen], train, group)
            decay = 0.0
        found[name] = Setting(kinds[chosen], 1.0 if group is None else group.lr_scale, decay)
    return found


def _require_no_decay(kind: Kind, train: TrainConfig, group: ParamGroupConfig | None) -> None:
    """Raises `ConfigError` if a weight decay is set for a plug-in that takes none."""
    asked, field = train.weight_decay, "train.weight_decay"
    if group is not None and group.weight_decay is not None:
        asked, field = group.weight_decay, f"weight_decay in train.param_groups for {group.match!r}"
    elif asked == type(train).model_fields["weight_decay"].default:
        return
    if asked:
        raise ConfigError(
            f"{field} is {asked}, and train.optimizer={kind.name} takes no argument weight_decay; leave it "
            "out",
            code="optimizer.no_weight_decay",
        )


def muon_matrices(model: nn.Module) -> Iterator[Tensor]:
    """Yields the parameters that Muon trains: the matrices of the model's blocks but for embeddings.

    The blocks are the `nn.ModuleList` with the most parameters, so that embeddings and a head beside it are
    left out. A model without one has all its matrices trained, but for those of `nn.Embedding` and of its
    output embeddings.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    body = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=model)
    left_out = {
        id(parameter)
        for module in (*_embeddings(model), *_heads(model))
        for parameter in module.parameters(recurse=False)
    }
    beside = {id(parameter) for parameter in _outside(model, body)} if body is not model else set()
    for parameter in body.parameters():
        if parameter.ndim == 2 and id(parameter) not in left_out | beside:
            yield parameter


def group_notes(model: nn.Module, train: TrainConfig) -> tuple[str, ...]:
    """Describes which parameters have which optimizer and which entry of `train.param_groups`, for `plan`.

    Nothing where all have the same and there are no entries. Raises as `settings_of`.
    """
    settings = settings_of(model, train)
    by_kind: dict[str, list[str]] = {}
    for name, setting in settings.items():
        by_kind.setdefault(setting.kind.name, []).append(name)
    notes = [_state_note(model, settings)] if train.optimizer != ADAMW or train.param_groups else []
    if len(by_kind) > 1:
        notes += [f"train.optimizer: {kind} trains {_listed(names)}" for kind, names in by_kind.items()]
    if not train.param_groups:
        return tuple(notes)
    held = dict(model.state_dict(keep_vars=True))
    aliases = _aliases(held, settings)
    matched: set[str] = set()
    for number, group in enumerate(train.param_groups):
        names = [name for name in settings if _matches(group, aliases[name])]
        matched |= set(names)
        notes.append(f"train.param_groups.{number} ({_values(group)}) matches {_listed(names)}")
    rest = [name for name in settings if name not in matched]
    notes.append(f"train.param_groups: no entry matches {_listed(rest)}")
    return tuple(notes)


def _state_note(model: nn.Module, settings: Mapping[str, Setting]) -> str:
    held = model.state_dict(keep_vars=True)
    num_bytes = sum(
        math.prod(form.shape) * form.dtype.itemsize
        for name, setting in settings.items()
        for form in setting.kind.forms(tuple(held[name].shape), held[name].dtype)
    )
    kinds = " and ".join(dict.fromkeys(setting.kind.name for setting in settings.values()))
    num = sum(held[name].numel() for name in settings)
    verb = "keep" if " and " in kinds else "keeps"
    return f"train.optimizer: {kinds} {verb} {num_bytes:,} bytes of state for {num:,} trained elements in all"


def _values(group: ParamGroupConfig) -> str:
    values = group.model_dump(exclude_defaults=True)
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _groups(
    groups: Sequence[ParamGroupConfig], aliases: Mapping[str, Sequence[str]]
) -> dict[str, ParamGroupConfig]:
    """Returns the entry of each parameter that one matches."""
    found: dict[str, ParamGroupConfig] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for group in groups:
        names = [name for name in aliases if _matches(group, aliases[name])]
        if not names:
            raise ConfigError(
                f"train.param_groups has an entry match={group.match!r}, and no trained parameter has such a "
                f"name; the model has {_listed(list(aliases))}",
                code="optimizer.no_match",
            )
        for name in names:
            if name in found:
                twice.setdefault((found[name].match, group.match), []).append(name)
            found[name] = group
    for (first, second), names in twice.items():
        raise ConfigError(
            f"train.param_groups has the entries match={first!r} and match={second!r}, and both match "
            f"{_listed(names)}; let each parameter match one entry",
            code="optimizer.two_matches",
        )
    return found


def _matches(group: ParamGroupConfig, names: Sequence[str]) -> bool:
    return any(re.search(group.match, name) for name in names)


def _aliases(held: Mapping[str, Tensor], trained: Mapping[str, object]) -> dict[str, list[str]]:
    """Returns all names of each trained parameter, by the first of them."""
    first = {id(held[name]): name for name in trained}
    found: dict[str, list[str]] = {name: [] for name in trained}
    for name, tensor in held.items():
        if id(tensor) in first:
            found[first[id(tensor)]].append(name)
    return found


def _embeddings(model: nn.Module) -> Iterator[nn.Module]:
    yield from (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    yield from _returned(model, "get_input_embeddings")


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    yield from _returned(model, "get_output_embeddings")


def _returned(model: nn.Module, method: str) -> Iterator[nn.Module]:
    """Yields what a transformers model returns of its own parts, where it does."""
    try:
        module = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return
    if isinstance(module, nn.Module):
        yield module


def _outside(model: nn.Module, body: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of modules that are not in `body`, also those that `body` shares."""
    inside = {id(module) for module in body.modules()}
    for module in model.modules():
        if id(module) not in inside:
            yield from module.parameters(recurse=False)


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "no parameter"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    word = "parameter" if len(names) == 1 else "parameters"
    return f"{len(names)} {word} ({', '.join(names[:_NAMED])}{more})"


# -------------------------------------------------------------------------------------------------- built in
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


# ------------------------------------------------------------------------------------------------------- Lion
class Lion(torch.optim.Optimizer):
    """`exp_avg` is its only state, of the parameter's shape and type. Works element by element.

    With gradient g, momentum m and weight w: w -= lr · (sign(β1·m + (1 - β1)·g) + weight_decay · w), then
    m = β2·m + (1 - β2)·g.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    @override
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Runs one step with the gradients in `.grad`."""
        assert closure is None, "the gradients are already computed"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._step(weights, group["lr"], group["betas"], group["weight_decay"])

    def _step(
        self, weights: list[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        gradients: Any = [weight.grad for weight in weights]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["exp_avg"] = torch.zeros_like(weight)
        momenta: Any = [self.state[weight]["exp_avg"] for weight in weights]
        signs = torch._foreach_lerp(momenta, gradients, 1 - betas[0])
        torch._foreach_sign_(signs)
        if weight_decay:
            torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, signs, alpha=-lr)
        torch._foreach_lerp_(momenta, gradients, 1 - betas[1])
