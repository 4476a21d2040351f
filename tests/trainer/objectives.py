"""Objectives of tests, as users write them."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.objectives import Mean, MicroBatch, StepContext, Terms


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    found = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten().long(), ignore_index=-100, reduction="none"
    )
    return found.view_as(labels)


def cross_entropy(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    """What is built in, computed by a user."""
    del context
    logits = model(batch.input_ids).logits
    loss = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.labels.flatten().long(), ignore_index=-100, reduction="sum"
    )
    return Terms(loss)


def with_z_loss(model: nn.Module, batch: MicroBatch, context: StepContext, *, weight: float = 1e-2) -> Terms:
    """Cross-entropy and z-loss (PaLM, 2022), their parts and the generator's numbers as metrics."""
    logits = model(batch.input_ids).logits.float()
    at = batch.labels != -100
    squares = (logits.logsumexp(-1) ** 2 * at).sum()
    losses = _losses(logits, batch.labels)
    drawn = torch.rand((), generator=context.generator)
    metrics = {
        "z_loss": Mean(squares.detach(), at.sum()),
        "cross_entropy": Mean(losses.sum(), at.sum()),
        "drawn": Mean(drawn),
        "first_sample": Mean(batch.sample_indices[0, 0]),
        "source": Mean(batch.source_ids.sum(), batch.source_ids.numel()),
        "number": Mean(context.step),
        "tokens_before": Mean(context.consumed_tokens),
        "never": Mean(1.0, 0.0),
    }
    return Terms(losses.sum() + weight * squares, metrics, losses)


def two_calls(model: Any, batch: MicroBatch, context: StepContext) -> Terms:
    """Calls the model's parts by themselves, one of them twice."""
    del context
    hidden = model.model(batch.input_ids).last_hidden_state
    logits = model.lm_head(hidden)
    ahead = model.lm_head(hidden[:, :-1])
    return Terms(_losses(logits, batch.labels).sum() + 0.1 * _losses(ahead, batch.labels[:, 1:]).sum())


def returns_a_tensor(model: nn.Module, batch: MicroBatch, context: StepContext) -> Any:
    return cross_entropy(model, batch, context).loss_sum


def returns_a_vector(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    del context
    return Terms(_losses(model(batch.input_ids).logits, batch.labels))


def returns_a_constant(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    del model, context
    return Terms(batch.labels.float().sum())


def has_a_metric_of_no_number(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    return Terms(cross_entropy(model, batch, context).loss_sum, {"it": torch.ones(2)})  # type: ignore[dict-item]


def has_the_metric_loss(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    return Terms(cross_entropy(model, batch, context).loss_sum, {"loss": Mean(1.0)})


def has_per_token_of_another_shape(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    losses = _losses(model(batch.input_ids).logits, batch.labels)
    return Terms(losses.sum(), {}, losses[:, :-1])


def changes_its_metrics(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    loss = cross_entropy(model, batch, context).loss_sum
    return Terms(loss, {"odd" if context.step % 2 else "even": Mean(1.0)})


def raises(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    del model, batch, context
    raise ValueError("not today")


def raises_in_step_3(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    if context.step == 3:
        raise ValueError("not in this step")
    return cross_entropy(model, batch, context)


def raises_for_sample_30(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    """Only the rank that has the sample fails, in step 3."""
    return _raises_for(30, model, batch, context)


def raises_for_sample_3(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    return _raises_for(3, model, batch, context)


def _raises_for(sample: int, model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    if (batch.sample_indices == sample).any():
        raise ValueError(f"not sample {sample}")
    return cross_entropy(model, batch, context)


def raises_without_a_gradient(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    if not torch.is_grad_enabled():
        raise ValueError("not in an evaluation")
    return cross_entropy(model, batch, context)


def exits_in_step_3(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    if context.step == 3:
        sys.exit(0)
    return cross_entropy(model, batch, context)


def sums_each_row(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    del context
    return Terms(_losses(model(batch.input_ids).logits, batch.labels).sum(-1))


def has_a_negative_count(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    return Terms(cross_entropy(model, batch, context).loss_sum, {"it": Mean(1.0, -1)})


def calls_the_model_with_parts_of_rows(model: Any, batch: MicroBatch, context: StepContext) -> Terms:
    del context
    half = batch.input_ids.shape[1] // 2
    return Terms(_losses(model(batch.input_ids[:, :half]).logits, batch.labels[:, :half]).sum())


_calls: list[int] = []


def counts_its_calls(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    """Not pure: it keeps a state."""
    _calls.append(1)
    terms = cross_entropy(model, batch, context)
    return Terms(terms.loss_sum * (1 + 1e-6 * len(_calls)))


def nearly_pure(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    """As with kernels that are not bit-stable."""
    return counts_its_calls(model, batch, context)


nearly_pure.tolerance = 1e-3  # type: ignore[attr-defined]


def writes_a_weight(model: Any, batch: MicroBatch, context: StepContext) -> Terms:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.0)
    return cross_entropy(model, batch, context)


def sums_over_ranks(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    terms = cross_entropy(model, batch, context)
    if dist.is_initialized():
        total = terms.loss_sum.detach().clone()
        dist.all_reduce(total)
        return Terms(terms.loss_sum, {"total": Mean(total)})
    return Terms(terms.loss_sum, {"total": Mean(0.0)})


def nearer_to_reference(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    """Cross-entropy, and the square of its distance from that of the frozen model `reference`."""
    ours = _losses(model(batch.input_ids).logits, batch.labels)
    theirs = _losses(context.frozen["reference"](batch.input_ids).logits, batch.labels)
    loss = ours.sum() + ((ours - theirs) ** 2).sum()
    return Terms(loss, {"reference": Mean(theirs.sum(), (batch.labels != -100).sum())})


def changes_reference(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    """Trains the frozen model, too."""
    reference: Any = context.frozen["reference"]
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.5)
    return nearer_to_reference(model, batch, context)


def has_metrics_without_values(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    """From step 3 on `nan` and `inf` are what they are called. `never` has no count, and is no fault."""
    wrong = context.step >= 3
    metrics = {
        "nan": Mean(torch.tensor(float("nan" if wrong else 1))),
        "inf": Mean(float("-inf" if wrong else 1)),
        "never": Mean(0.0, 0.0),
        "right": Mean(2.0),
    }
    return Terms(cross_entropy(model, batch, context).loss_sum, metrics)


def has_no_loss_without_a_gradient(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    """An evaluation of it has no finite loss."""
    terms = cross_entropy(model, batch, context)
    return terms if torch.is_grad_enabled() else Terms(terms.loss_sum * math.nan)


def writes_a_weight_in_step_3(model: Any, batch: MicroBatch, context: StepContext) -> Terms:
    if context.step == 3:
        with torch.no_grad():
            model.lm_head.weight.mul_(1.0)
    return cross_entropy(model, batch, context)


def writes_a_weight_without_a_gradient(model: Any, batch: MicroBatch, context: StepContext) -> Terms:
    """It changes weights in evaluations alone."""
    if not torch.is_grad_enabled():
        model.model.norm.weight.mul_(1.0)
    return cross_entropy(model, batch, context)
