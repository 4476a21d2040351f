"""Chooses the objective of a job, and defines the built-in one: the cross-entropy of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from orchestrator.config.sections import BUILT_IN, TrainConfig
from orchestrator.objectives import Mean, Terms
from orchestrator.records.steps import BatchSlice
from orchestrator.trainer.model.build_model import seed_micro_batch
from orchestrator.trainer.model.model_call import balancing_loss, call_model, may_balance
from orchestrator.trainer.objective.logit_loss import (
    Head,
    LossTerms,
    TeacherLogits,
    find_head,
    logits_of,
    loss_at_head,
    loss_in_logits,
    loss_of_logits,
    require_same_vocabulary,
)
from orchestrator.trainer.objective.micro_batches import (
    NO_LOSS,
    NO_MODELS,
    NumberedMicroBatch,
    Objective,
    StepPlace,
    empty_micro_batch,
)
from orchestrator.trainer.objective.plug_in import PlugIn


def objective_of(
    train: TrainConfig,
    by_document: bool,
    seq_len: int,
    frozen: Mapping[str, nn.Module] = NO_MODELS,
    rows_per_sample: int = 1,
) -> Objective:
    """Returns the objective of `train`, not prepared for a model.

    `by_document`: tokens attend only to their own document. `seq_len`: the positions of a row. `frozen`: the
    models of `model.frozen`; the mapping may get other modules in each generation. Raises `ConfigError` if
    the function of a plug-in cannot be called.
    """
    seed, precision, arguments = train.seed, train.precision, train.objective_args
    if train.objective == BUILT_IN:
        num_positions = train.micro_batch_size * seq_len
        return CausalLM(seed, precision, by_document, num_positions, arguments, frozen)
    of_model = (train.objective, arguments, seed, precision, by_document, seq_len)
    return PlugIn(*of_model, frozen, rows_per_sample)


def step_units(train: TrainConfig, batch: BatchSlice) -> float:
    """Returns what the loss of the whole step is divided by (`train.objective_units`)."""
    if train.objective_units == "samples":
        return batch.step.num_samples
    if train.objective_units == "targets":
        return batch.step_targets
    assert batch.step_units is not None, "the feed counts the units of a plug-in"
    return batch.step_units


# ------------------------------------------------------------------------------------- the built-in objective
_CROSS_ENTROPY, _Z_LOSS, _ROUTER_LOSS = "cross_entropy", "z_loss", "router_loss"
_DISTILLATION = "distillation"  # T² · KL, without its weight


class CausalLM(Objective):
    """Cross-entropy (nats) of the labels, and the model's own router loss.

    With a teacher, which is one of the frozen models, the cross-entropy is mixed with the divergence from it.
    If there are other terms than the cross-entropy, each is a metric: a mean over the targets, as it is part
    of the loss.
    """

    def __init__(
        self,
        seed: int,
        precision: str,
        by_document: bool,
        num_positions: int,
        arguments: Mapping[str, Any] | None = None,
        frozen: Mapping[str, nn.Module] = NO_MODELS,
    ) -> None:
        """`by_document`: tokens attend only to their own document. `num_positions`: of the largest
        micro-batch. `arguments`: those of `LossTerms`, and `teacher`, a name of `frozen`.
        """
        self._num_positions = num_positions
        self._seed, self._precision, self._by_document = seed, precision, by_document
        named = dict(arguments or {})
        self._frozen, self._teacher = frozen, named.pop("teacher", None)
        self._of = LossTerms(**named)
        self._head: Head | None = None
        self._teachers_head: Head | None = None
        self.metric_names: tuple[str, ...] = ()

    @override
    def prepare(self, model: nn.Module) -> None:
        self._head = find_head(model, self._num_positions, self._by_document)
        if self._teacher is not None:
            teacher = self._frozen[self._teacher]
            require_same_vocabulary(model, teacher, f"model.frozen.{self._teacher}")
            self._teachers_head = find_head(teacher, self._num_positions, self._by_document)
        others = [_Z_LOSS] if self._of.z_loss else []
        others += [_DISTILLATION] if self._teacher is not None else []
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
        teacher = self._teachers_logits(input_ids, documents, is_padding)
        found = causal_lm_terms(
            model, input_ids, labels, self._precision, documents, is_padding, self._of, self._head, teacher
        )
        metrics = {name: found.metrics.get(name, Mean(0.0, 0.0)) for name in self.metric_names}
        return Terms(found.loss_sum, metrics, found.per_token)

    def _teachers_logits(
        self, input_ids: Tensor, documents: Tensor | None, is_padding: Tensor | None
    ) -> TeacherLogits | None:
        if self._teacher is None:
            return None
        teacher = self._frozen[self._teacher]

        def call() -> Any:
            return call_model(teacher, input_ids, documents, is_padding)

        with torch.no_grad(), products_in(self._precision, input_ids.device.type):
            found = logits_of(teacher, self._teachers_head, call)
            if found is None:
                self._teachers_head = None
                found = logits_of(teacher, None, call)
        return found

    @override
    def leave(self) -> None:
        """Holds nothing."""

    @override
    def empty(self, device: torch.device) -> NumberedMicroBatch:
        return empty_micro_batch(device, seq_len=2, label=NO_LOSS)


def products_in(precision: str, kind: str) -> AbstractContextManager[Any]:
    """Within the block, products on a device of this kind are computed as `train.precision` says."""
    return torch.autocast(kind, torch.bfloat16) if precision == "bf16" else nullcontext()


def causal_lm_terms(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    precision: str,
    document_ids: Tensor | None = None,
    is_padding: Tensor | None = None,
    of: LossTerms = LossTerms(),  # noqa: B008  immutable
    head: Head | None = None,
    teacher: TeacherLogits | None = None,
) -> Terms:
    """The training loss (nats) summed over the targets of `labels` (samples, seq_len), computed in float32.

    It is 0 if there is no target. It is the cross-entropy, with a `teacher` as `LossTerms` says. If the model
    returns a router's balancing loss, that loss times the model's coefficient and the number of targets is
    added (see `balancing_loss`). The metrics are its parts, if there are others than the cross-entropy.
    `per_token` is the cross-entropy.

    `model(input_ids)` returns logits (samples, seq_len, vocabulary), or an object that has them as `.logits`.
    With `document_ids`, each token attends only to its own document (`completed_inputs`). Labels are
    already shifted. `is_padding` (samples, seq_len), None if no position is padding, affects only the
    router's loss. Under `bf16` the forward pass runs in autocast: products are computed in bfloat16, while
    weights and their gradients stay float32. The cross-entropy is computed outside of autocast.

    `head`: the model's linear head, if there is one (`find_head`). Where it is large, the
    logits of only some positions exist at a time.
    """
    targets = labels.flatten().long()
    autocast = products_in(precision, input_ids.device.type)
    with loss_at_head(model, head, targets, of, teacher) as at_head, autocast:
        output = call_model(model, input_ids, document_ids, is_padding)
    logits = output if isinstance(output, Tensor) else output.logits
    if at_head:
        sums, loss = at_head[0], loss_in_logits(logits)
    else:
        theirs = None if teacher is None else teacher(slice(None))
        sums = loss_of_logits(logits.float().flatten(0, 1), targets, of, theirs)
        loss = sums.loss
    per_token = sums.entropies.view_as(labels)
    balancing = balancing_loss(model, output)
    if balancing is None and not of.z_loss and not of.label_smoothing and teacher is None:
        return Terms(loss, per_token=per_token)
    num_targets = (targets != NO_LOSS).sum()
    metrics = {_CROSS_ENTROPY: Mean(sums.entropies.sum(), num_targets)}
    if of.z_loss:
        metrics[_Z_LOSS] = Mean(sums.z_loss, num_targets)
    if teacher is not None:
        metrics[_DISTILLATION] = Mean(sums.divergence, num_targets)
    if balancing is not None and int(num_targets):  # for padding alone the balancing loss is 0/0
        router_loss = num_targets * balancing.float()
        metrics[_ROUTER_LOSS] = Mean(router_loss.detach(), num_targets)
        loss = loss + router_loss
    return Terms(loss, metrics, per_token)
