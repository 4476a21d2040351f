"""The cross-entropy of logits and the terms that may be added to it.

They are computed from whole logits, or in chunks from the input of a model's linear head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
