"""An objective on pairs of answers, as a user writes it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from orchestrator.objectives import Mean, MicroBatch, StepContext, Terms


def _losses(model: nn.Module, batch: MicroBatch) -> Tensor:
    logits = model(batch.input_ids.long()).logits.float()
    found = cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten().long(), ignore_index=-100, reduction="none"
    )
    return found.view_as(batch.labels)


def margin(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    """The chosen answer shall be likelier than the rejected one (DPO without a reference, summed over pairs).

    Each pair must be whole and in order.
    """
    del context
    assert (batch.sample_indices[0::2] == batch.sample_indices[1::2]).all(), "a pair is torn"
    assert (batch.source_ids[0::2] == batch.source_ids[1::2]).all(), "a pair is of two sources"
    if int(batch.sample_indices[-1, 0]) > 0:  # not the sample without data of a rank that has none
        assert set(batch.document_ids[0::2].unique().tolist()) <= {0, -1}, "a row is not the chosen one"
        assert set(batch.document_ids[1::2].unique().tolist()) <= {1, -1}, "a row is not the rejected one"
    losses = _losses(model, batch)
    chosen, rejected = (-losses[row::2].sum(-1) for row in (0, 1))
    loss = -logsigmoid(0.1 * (chosen - rejected))
    wins = (chosen > rejected).float()
    return Terms(loss.sum(), {"accuracy": Mean(wins.sum(), wins.numel())}, losses.detach())
