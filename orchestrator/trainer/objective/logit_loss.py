"""The cross-entropy of logits and the terms that may be added to it.

They are computed from whole logits, or in chunks in the place of a model's linear head, where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from orchestrator.errors import ConfigError
from orchestrator.trainer.model.factory_output import without_weights
from orchestrator.trainer.model.model_call import call_model
from orchestrator.trainer.objective.micro_batches import NO_LOSS

_MIN_POSITIONS = 1024
_MIN_LOGITS = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """The arguments of the built-in objective.

    `z_loss`: the weight of log² Z, which keeps logits small (PaLM, arXiv:2204.02311, section 5).
    `label_smoothing`: the share of each target that is spread over all ids.
    `logit_softcap`: c in c·tanh(logits / c), which is applied to the model's logits (Gemma 2,
    arXiv:2408.00118, section 2); None: the logits are used as they are.
    `teacher_weight`, `temperature`: w and T in (1 − w) · cross-entropy + w · T² · KL, where KL is the
    divergence of softmax(logits / T) from that of a teacher's logits (Hinton et al., arXiv:1503.02531,
    section 2). They count where there is a teacher.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    logit_softcap: float | None = None
    teacher_weight: float = 0.5
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSums:
    """The loss of positions and its parts, in nats, float32.

    `loss`: the sum that is differentiated: cross-entropy with smoothed labels, mixed with the divergence from
    a teacher, and z-loss. `z_loss`, `divergence` (T² · KL, without its weight): their sums, 0 without them.
    `entropies` (positions): the cross-entropy of each target, 0 without a target. Only `loss` has a gradient.
    """

    loss: Tensor
    z_loss: Tensor
    divergence: Tensor
    entropies: Tensor


# Maps a range of positions to a teacher's logits there (positions, vocabulary), float32 and without gradient.
TeacherLogits = Callable[[slice], Tensor]


def loss_of_logits(
    logits: Tensor, targets: Tensor, of: LossTerms, teacher: Tensor | None = None
) -> LossSums:
    """Returns the sums of `logits` (positions, vocabulary, float32) and `targets` (positions, int64).

    `teacher`: the logits of a teacher. A position whose target is −100 adds nothing.
    """
    if of.logit_softcap is not None:
        logits = of.logit_softcap * torch.tanh(logits / of.logit_softcap)
    log_probs = logits.log_softmax(-1)
    loss = nn.functional.nll_loss(log_probs, targets, ignore_index=NO_LOSS, reduction="sum")
    entropies = nn.functional.nll_loss(
        log_probs.detach(), targets, ignore_index=NO_LOSS, reduction="none"
    )
    if of.label_smoothing:  # as in nn.functional.cross_entropy
        spread = torch.where(targets != NO_LOSS, -log_probs.mean(-1), 0.0).sum()
        loss = (1 - of.label_smoothing) * loss + of.label_smoothing * spread
    z_loss = divergence = torch.zeros_like(loss)
    if teacher is not None:
        ours, theirs = ((each / of.temperature).log_softmax(-1) for each in (logits, teacher))
        of_each = nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
        divergence = of.temperature**2 * torch.where(targets != NO_LOSS, of_each, 0.0).sum()
        loss = (1 - of.teacher_weight) * loss + of.teacher_weight * divergence
    if of.z_loss:
        squares = logits.logsumexp(-1) ** 2
        z_loss = of.z_loss * torch.where(targets != NO_LOSS, squares, 0.0).sum()
        loss = loss + z_loss
    return LossSums(
        loss=loss, z_loss=z_loss.detach(), divergence=divergence.detach(), entropies=entropies
    )


# ------------------------------------------------------------------------------------------------- in chunks
def positions_per_chunk(vocabulary: int) -> int:
    """Returns how many positions have their logits computed together.

    A function of the vocabulary alone, so that the bits do not depend on ranks or memory. A chunk is large
    enough for the matrix products to be as fast as for all positions together.
    """
    return max(_MIN_POSITIONS, _MIN_LOGITS // vocabulary)


def product_type(kind: str, weight: Tensor) -> torch.dtype:
    """Returns the type in which a product with `weight` on a device of this kind is computed."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def loss_of_hidden(
    hidden: Tensor,
    head: nn.Linear,
    finish: Callable[[Tensor], Tensor],
    targets: Tensor,
    of: LossTerms,
    size: int,
    teacher: TeacherLogits | None = None,
) -> LossSums:
    """Returns `loss_of_logits(finish(head(hidden)))`, computed for `size` positions at a time.

    `hidden`: (positions, features). `finish` works on each element alone. Logits exist for one chunk only.
    The gradient of each chunk is computed along with its loss, so that nothing is computed twice (as in Liger
    Kernel, arXiv:2410.10989, section 3.2). Products have the type that autocast gives them; the gradient of
    the weight is summed in float32.
    """
    dtype = product_type(hidden.device.type, head.weight)
    with_gradient = torch.is_grad_enabled()
    chunks: Any = _Chunks
    loss, z_loss, divergence, entropies = chunks.apply(
        hidden, head.weight, head.bias, finish, targets, of, size, teacher, dtype, with_gradient
    )
    return LossSums(loss=loss, z_loss=z_loss, divergence=divergence, entropies=entropies)


class _Chunks(torch.autograd.Function):
    """The loss in chunks. Computes the gradients of `hidden`, weight and bias in its forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        finish: Callable[[Tensor], Tensor],
        targets: Tensor,
        of: LossTerms,
        size: int,
        teacher: TeacherLogits | None,
        dtype: torch.dtype,
        with_gradient: bool,
    ) -> tuple[Tensor, ...]:
        inputs, factor = hidden.detach().to(dtype), weight.detach().to(dtype)
        shift = None if bias is None else bias.detach().to(dtype)
        wanted = [with_gradient and needed for needed in ctx.needs_input_grad[:3]]
        exact = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.empty_like(inputs) if wanted[0] else None
        d_weight = torch.zeros_like(factor, dtype=exact) if wanted[1] else None
        d_bias = torch.zeros_like(factor[:, 0], dtype=exact) if wanted[2] else None
        found: list[LossSums] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(targets), size):
                at = slice(first, first + size)
                logits = nn.functional.linear(inputs[at], factor, shift)
                theirs = None if teacher is None else teacher(at)
                with torch.set_grad_enabled(any(wanted)):
                    logits.requires_grad_(any(wanted))
                    found.append(loss_of_logits(finish(logits).float(), targets[at], of, theirs))
                if not any(wanted):
                    continue
                (d_logits,) = torch.autograd.grad(found[-1].loss, logits)
                if d_hidden is not None:
                    torch.mm(d_logits, factor, out=d_hidden[at])
                if d_weight is not None:
                    _add_product(d_weight, d_logits.t(), inputs[at])
                if d_bias is not None:
                    d_bias += d_logits.sum(0, dtype=exact)
        ctx.types = [hidden.dtype, weight.dtype, weight.dtype]
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        entropies = torch.cat([sums.entropies for sums in found])
        z_loss = torch.stack([sums.z_loss for sums in found]).sum()
        divergence = torch.stack([sums.divergence for sums in found]).sum()
        ctx.mark_non_differentiable(z_loss, divergence, entropies)
        return torch.stack([sums.loss.detach() for sums in found]).sum(), z_loss, divergence, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        gradients = [
            None if gradient is None else (gradient * d_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.types, strict=True)
        ]
        return (*gradients, None, None, None, None, None, None, None)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, which may have a type of more bits."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


# ----------------------------------------------------------------------------------- at a model's linear head
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
