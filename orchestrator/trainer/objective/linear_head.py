"""Finds the linear head of a model, and computes the loss in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from typing_extensions import override

from orchestrator.errors import ConfigError
from orchestrator.trainer.model.factory_output import without_weights
from orchestrator.trainer.model.model_call import call_model
from orchestrator.trainer.objective.logit_loss import (
    LossSums,
    LossTerms,
    TeacherLogits,
    loss_of_hidden,
    positions_per_chunk,
    product_type,
)

_NUM_TOKENS = 2
# Operations on each logit alone: models scale logits, cap them, and cast them.
_ELEMENTWISE = {"__mul__", "__rmul__", "mul", "__truediv__", "div", "tanh", "float", "to", "contiguous"}


@dataclass(frozen=True, slots=True)
class Head:
    """The `nn.Linear` `name` of a model, and what the model does to each of its outputs to get logits."""

    name: str
    finish: Callable[[Tensor], Tensor]


def find_head(model: nn.Module, num_positions: int, by_document: bool) -> Head | None:
    """Returns the `nn.Linear` whose outputs are the model's logits, after operations on each element alone.

    None if there is none: the model uses the outputs otherwise, or does not run without weights. None also if
    the logits of `num_positions` fit into one chunk. The weights are not used, so that all ranks find the
    same.
    """
    large = {
        name: each
        for name, each in model.named_modules()
        if _is_linear(each) and num_positions > positions_per_chunk(each.out_features)
    }
    if not large:
        return None
    logits = _trial(model, by_document)
    try:
        name = _last_called(large, logits)
        return None if name is None else _tried(name, large[name], logits)
    except Exception:  # noqa: BLE001  user code, or an operation that the meta device does not support
        return None


def require_same_vocabulary(model: nn.Module, teacher: nn.Module, field: str) -> None:
    """Raises `ConfigError` if the logits of model and teacher are not of the same number of ids.

    `field` names the teacher. A model that does not run without weights is not checked.
    """
    sizes = [_logits_without_weights(each) for each in (model, teacher)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(
            f"{field} gives logits of {sizes[1]:,} ids, the model of {sizes[0]:,}; take a teacher with the "
            "same vocabulary",
            code="objective.teacher_vocabulary",
        )


def _logits_without_weights(model: nn.Module) -> int | None:
    try:
        return int(_trial(model, by_document=False)().shape[-1])
    except Exception:  # noqa: BLE001  user code, or an operation that the meta device does not support
        return None


def _trial(model: nn.Module, by_document: bool) -> Callable[[], Any]:
    """Returns a function that calls the model without its weights, and returns logits."""
    tensors = {
        name: torch.empty_like(parameter, device="meta").requires_grad_(parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    tensors |= {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if buffer.is_cuda}

    def logits() -> Any:
        ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        with without_weights():
            called = torch.func.functional_call(_Called(model), named, (ids, ids if by_document else None))
        return _logits_in(called)

    return logits


def _last_called(modules: Mapping[str, nn.Module], logits: Callable[[], Any]) -> str | None:
    called: list[str] = []
    handles = [
        each.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, each in modules.items()
    ]
    try:
        logits()
    finally:
        for handle in handles:
            handle.remove()
    return called[-1] if called else None


def _tried(name: str, linear: nn.Module, logits: Callable[[], Any]) -> Head | None:
    """Calls the model with a linear layer whose outputs record what is done to them."""
    given: list[Tensor] = []

    def recorded(hidden: Tensor) -> Tensor:
        given.append(hidden)
        return _Logits.of(hidden.new_empty(()), record=[])

    with _forward_replaced(linear, recorded):
        found = logits()
    if not isinstance(found, _Logits) or [each.shape[:-1] for each in given] != [(1, _NUM_TOKENS)]:
        return None
    record = found.record or []

    def finish(outputs: Tensor) -> Tensor:
        for function, more, named in record:
            outputs = function(outputs, *more, **named)
        return outputs

    return Head(name, finish)


@contextmanager
def loss_at_head(
    model: nn.Module,
    head: Head | None,
    targets: Tensor,
    of: LossTerms,
    teacher: TeacherLogits | None = None,
) -> Iterator[list[LossSums]]:
    """Within the block, the head computes the loss of `targets` (positions) instead of logits.

    The list then holds the sums, and the model returns its loss as logits (`loss_in_logits`). The list stays
    empty if all positions fit into one chunk, or if there is no head: the model returns logits as usual. The
    head's module is called in both cases, so that its hooks run (FSDP2 gathers weights in them).
    """
    found: list[LossSums] = []
    if head is None:
        yield found
        return
    linear: Any = model.get_submodule(head.name)
    size = positions_per_chunk(linear.out_features)

    def forward(hidden: Tensor) -> Tensor:
        if len(targets) <= size:
            return nn.functional.linear(hidden, linear.weight, linear.bias)
        sums = loss_of_hidden(hidden.flatten(0, -2), linear, head.finish, targets, of, size, teacher)
        found.append(sums)
        return _Logits.of(sums.loss)

    with _forward_replaced(linear, forward):
        yield found


def logits_of(model: nn.Module, head: Head | None, call: Callable[[], Any]) -> TeacherLogits | None:
    """Returns the logits of the model, which `call` calls without gradients, for ranges of its positions.

    With a head they are computed for a range when they are asked for; the whole logits never exist. None if
    the weights of the head are gone after the call, because FSDP2 gathers them apart from the others.
    """
    if head is None:
        logits = _logits_in(call()).flatten(0, 1)
        return lambda at: logits[at].float()
    linear: Any = model.get_submodule(head.name)
    given: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def forward(hidden: Tensor) -> Tensor:
        dtype = product_type(hidden.device.type, linear.weight)
        bias = None if linear.bias is None else linear.bias.to(dtype)
        given.append((hidden.flatten(0, -2).to(dtype), linear.weight.to(dtype), bias))
        return _Logits.of(hidden.new_empty(()))

    with _forward_replaced(linear, forward):
        call()
    hidden, weight, bias = given[-1]
    if not weight.untyped_storage().size():
        return None
    return lambda at: head.finish(nn.functional.linear(hidden[at], weight, bias)).float()


def _logits_in(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def loss_in_logits(logits: Tensor) -> Tensor:
    """Returns the loss that the model returned as its logits.

    Its gradient passes through the hooks that were set on the model's output.
    """
    assert isinstance(logits, _Logits), "the model applies elementwise operations to its logits"
    return logits.as_subclass(Tensor)


class _Logits(Tensor):
    """Stands for logits in a model. Elementwise operations return it unchanged, and are recorded.

    With a record, all other operations raise `_UsedError`.
    """

    record: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] | None

    @classmethod
    def of(
        cls, value: Tensor, record: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] | None = None
    ) -> _Logits:
        made = value.as_subclass(cls)
        made.record = record
        return made

    @classmethod
    @override
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, more, named = args[0], args[1:], kwargs or {}
        tensors = [each for each in (*more, *named.values()) if isinstance(each, Tensor)]
        name = getattr(function, "__name__", "")
        if isinstance(first, _Logits) and name in _ELEMENTWISE and not tensors:
            if first.record is not None:
                first.record.append((function, more, named))
            return first
        if isinstance(first, _Logits) and first.record is not None:
            raise _UsedError(f"{function} of logits")
        plain: Any = super().__torch_function__
        return plain(function, types, args, named)


class _UsedError(Exception):
    """A model uses the outputs of its head."""


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


class _Called(nn.Module):
    """`call_model` as a module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, ids: Tensor, documents: Tensor | None) -> Any:
        return call_model(self.model, ids, documents, None)


@contextmanager
def _forward_replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    held = vars(module)
    before = held.get("forward")
    held["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del held["forward"]
        else:
            held["forward"] = before
