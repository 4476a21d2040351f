"""The built-in objective: the cross-entropy of the next token, and the terms that may be added to it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from orchestrator.objectives import Mean, Terms
from orchestrator.trainer.model.build_model import seed_micro_batch
from orchestrator.trainer.model.model_call import balancing_loss, call_model, may_balance
from orchestrator.trainer.objective.micro_batches import (
    NO_LOSS,
    NumberedMicroBatch,
    Objective,
    StepPlace,
    empty_micro_batch,
)

_CROSS_ENTROPY, _Z_LOSS, _ROUTER_LOSS = "cross_entropy", "z_loss", "router_loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """The arguments of the built-in objective.

    `z_loss`: the weight of log² Z, which keeps logits small (PaLM, arXiv:2204.02311, section 5).
    `label_smoothing`: the share of each target that is spread over all ids.
    `logit_softcap`: c in c·tanh(logits / c), which is applied to the model's logits (Gemma 2,
    arXiv:2408.00118, section 2); None: the logits are used as they are.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    logit_softcap: float | None = None


class CausalLM(Objective):
    """Cross-entropy (nats) of the labels, and the model's own router loss.

    If there are other terms than the cross-entropy, each is a metric: a mean over the targets, as it is part
    of the loss.
    """

    def __init__(
        self, seed: int, precision: str, by_document: bool, arguments: Mapping[str, float] | None = None
    ) -> None:
        """`by_document`: tokens attend only to their own document. `arguments`: those of `LossTerms`."""
        self._seed, self._precision, self._by_document = seed, precision, by_document
        self._of = LossTerms(**(arguments or {}))
        self.metric_names: tuple[str, ...] = ()

    @override
    def prepare(self, model: nn.Module) -> None:
        others = [_Z_LOSS] if self._of.z_loss else []
        others += [_ROUTER_LOSS] if may_balance(model) else []
        if others or self._of.label_smoothing:
            self.metric_names = tuple(sorted((_CROSS_ENTROPY, *others)))

    @override
    def check(self, model: nn.Module, micro: NumberedMicroBatch, place: StepPlace) -> None:
        """Does nothing: it is pure if the model is."""

    @override
    def terms(self, model: nn.Module, micro: NumberedMicroBatch, place: StepPlace) -> Terms:
        del place
        seed_micro_batch(self._seed, micro.first_sample)
        batch = micro.batch
        documents = batch.document_ids.long() if self._by_document else None
        is_padding = batch.document_ids < 0 if micro.has_padding else None
        input_ids, labels = batch.input_ids.long(), batch.labels.long()
        found = causal_lm_terms(
            model, input_ids, labels, self._precision, documents, is_padding, self._of
        )
        metrics = {name: found.metrics.get(name, Mean(0.0, 0.0)) for name in self.metric_names}
        return Terms(found.loss_sum, metrics)

    @override
    def empty(self, device: torch.device) -> NumberedMicroBatch:
        return empty_micro_batch(device, seq_len=2, label=NO_LOSS)


def causal_lm_terms(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    precision: str,
    document_ids: Tensor | None = None,
    is_padding: Tensor | None = None,
    of: LossTerms = LossTerms(),  # noqa: B008  immutable
) -> Terms:
    """The training loss (nats) summed over the targets of `labels` (samples, seq_len), computed in float32.

    It is 0 if there is no target. It is the cross-entropy. If the model returns a router's balancing loss,
    that loss times the model's coefficient and the number of targets is added (see `balancing_loss`). The
    metrics are its parts, if there are others than the cross-entropy.

    `model(input_ids)` returns logits (samples, seq_len, vocabulary), or an object that has them as `.logits`.
    With `document_ids`, each token attends only to its own document (`completed_inputs`). Labels are
    already shifted. `is_padding` (samples, seq_len), None if no position is padding, affects only the
    router's loss. Under `bf16` the forward pass runs in autocast: products are computed in bfloat16, while
    weights and their gradients stay float32. The cross-entropy is computed outside of autocast.
    """
    kind = input_ids.device.type
    with torch.autocast(kind, torch.bfloat16) if precision == "bf16" else nullcontext():
        output = call_model(model, input_ids, document_ids, is_padding)
    logits = (output if isinstance(output, Tensor) else output.logits).float().flatten(0, 1)
    if of.logit_softcap is not None:
        logits = of.logit_softcap * torch.tanh(logits / of.logit_softcap)
    targets = labels.flatten().long()
    loss = nn.functional.cross_entropy(
        logits, targets, ignore_index=NO_LOSS, reduction="sum", label_smoothing=of.label_smoothing
    )
    balancing = balancing_loss(model, output)
    if balancing is None and not of.z_loss and not of.label_smoothing:
        return Terms(loss)
    num_targets = (targets != NO_LOSS).sum()
    entropy = loss.detach()
    if of.label_smoothing:
        entropy = nn.functional.cross_entropy(
            logits.detach(), targets, ignore_index=NO_LOSS, reduction="sum"
        )
    metrics = {_CROSS_ENTROPY: Mean(entropy, num_targets)}
    if of.z_loss:
        squares = logits.logsumexp(-1) ** 2
        z_loss = of.z_loss * torch.where(targets != NO_LOSS, squares, 0.0).sum()
        metrics[_Z_LOSS] = Mean(z_loss.detach(), num_targets)
        loss = loss + z_loss
    if balancing is not None and int(num_targets):  # for padding alone the balancing loss is 0/0
        router_loss = num_targets * balancing.float()
        metrics[_ROUTER_LOSS] = Mean(router_loss.detach(), num_targets)
        loss = loss + router_loss
    return Terms(loss, metrics)
