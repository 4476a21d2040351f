"""What a step's losses per token show besides its loss: the loss of each source, and of the worst documents.

It needs an objective that returns `Terms.per_token`. All of it is computed without a gradient.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from orchestrator.errors import TrainingError
from orchestrator.objectives import Mean, Terms
from orchestrator.records.steps import DocumentLoss
from orchestrator.trainer.objective.micro_batches import NO_LOSS, NumberedMicroBatch

_FIELDS = 4  # of a document, as integers for a collective
_NONE = -1  # the sample of a document that is none


def losses_of_sources(terms: Terms, micro: NumberedMicroBatch, numbers: Iterable[int]) -> list[Mean]:
    """Returns the loss per token of each of these sources in a micro-batch, summed in float64.

    A source without targets, and each of an objective without losses per token, has the count 0.
    """
    per_token, batch = terms.per_token, micro.batch
    if per_token is None:
        return [Mean(0.0, 0.0) for _ in numbers]
    losses, is_target = per_token.detach().double(), batch.labels != NO_LOSS
    of_each = (is_target & (batch.source_ids == number) for number in numbers)
    return [Mean(torch.where(at, losses, 0.0).sum(), at.sum()) for at in of_each]


class TokenLosses:
    """Collects the losses per token of one rank's micro-batches. It waits for the device only in `worst`."""

    def __init__(self, sources: Mapping[int, str], num_documents: int) -> None:
        """`sources`: names by number; of a single one there are no metrics, because its loss is the step's.

        `num_documents`: how many of a step's documents are kept (0: none).
        """
        self._sources = {} if len(sources) < 2 else dict(sorted(sources.items()))
        self._num_documents = num_documents
        # (documents, 4) of each micro-batch: sample, number, mean loss, targets
        self._documents: list[Tensor] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics that `metrics` returns."""
        return tuple(f"loss/{name}" for name in self._sources.values())

    def begin(self) -> None:
        """Forgets the documents of the step before."""
        self._documents.clear()

    def metrics(self, terms: Terms, micro: NumberedMicroBatch) -> dict[str, Mean]:
        """Returns the loss of each source in a micro-batch, and keeps its worst documents.

        A source without targets, and each of an objective without losses per token, has the count 0. Raises
        `TrainingError` if documents are to be kept and the objective returns no losses per token.
        """
        per_token, batch = terms.per_token, micro.batch
        if self._num_documents:
            if per_token is None:
                raise TrainingError(
                    f"monitor.document_losses={self._num_documents}, and the objective returns no "
                    "`per_token`; return the loss of each token, or set monitor.document_losses=null",
                    code="objective.no_per_token",
                )
            losses, is_target = per_token.detach().double(), batch.labels != NO_LOSS
            self._keep_worst(losses, is_target, batch.document_ids, batch.sample_indices[:, 0])
        found = losses_of_sources(terms, micro, self._sources)
        return dict(zip(self.names, found, strict=True))

    def _keep_worst(self, losses: Tensor, is_target: Tensor, documents: Tensor, samples: Tensor) -> None:
        """Keeps the documents of a micro-batch with the highest mean loss. Padding (−1) is none."""
        num = max(2, losses.shape[1])  # a row has lower document numbers: the second of a sample has 1
        first = torch.arange(len(losses), device=losses.device)[:, None] * num
        at = (first + documents.long().clamp(min=0)).flatten()
        counted = is_target & (documents >= 0)
        sums, counts = (
            losses.new_zeros(len(losses) * num).index_add_(0, at, values.flatten())
            for values in (torch.where(counted, losses, 0.0), counted.double())
        )
        means = sums / counts
        # one that is not finite comes before all others, and what has no target is none
        order = torch.where(means.isfinite(), means, math.inf).masked_fill(counts == 0, -math.inf)
        best = order.topk(min(self._num_documents, len(order))).indices
        rows = (samples[best // num], best % num, means[best], counts[best])
        self._documents.append(torch.stack([row.double() for row in rows], dim=1))

    def worst(self) -> list[DocumentLoss]:
        """Returns this rank's documents with the highest mean loss, the highest first."""
        found = [
            DocumentLoss(sample=int(sample), document=int(document), loss=mean, targets=int(count))
            for rows in self._documents
            for sample, document, mean, count in rows.tolist()
            if count
        ]
        return highest(found, self._num_documents)

    def packed(self) -> list[int]:
        """Returns `worst` as integers, equally many on every rank."""
        rows = [
            (each.sample, each.document, struct.unpack("<q", struct.pack("<d", each.loss))[0], each.targets)
            for each in self.worst()
        ]
        rows += [(_NONE, 0, 0, 0)] * (self._num_documents - len(rows))
        return [value for row in rows for value in row]

    def of_step(self, ranks: Sequence[Sequence[int]]) -> tuple[DocumentLoss, ...]:
        """Returns the documents of the whole step with the highest loss, from `packed` of every rank."""
        found = []
        for values in ranks:
            for at in range(0, len(values), _FIELDS):
                sample, document, bits, targets = values[at : at + _FIELDS]
                if sample != _NONE:
                    (loss,) = struct.unpack("<d", struct.pack("<q", bits))
                    found.append(
                        DocumentLoss(sample=sample, document=document, loss=loss, targets=targets)
                    )
        best = highest(found, self._num_documents)
        return tuple(
            DocumentLoss(
                sample=each.sample,
                document=each.document,
                loss=each.loss if each.loss is not None and math.isfinite(each.loss) else None,
                targets=each.targets,
            )
            for each in best
        )


def highest(documents: Sequence[DocumentLoss], most: int) -> list[DocumentLoss]:
    """Returns the `most` documents with the highest loss, one that is not finite before all others."""

    def order(each: DocumentLoss) -> tuple[float, int, int]:
        is_finite = each.loss is not None and math.isfinite(each.loss)
        return (-each.loss if is_finite and each.loss is not None else -math.inf, each.sample, each.document)

    return sorted(documents, key=order)[:most]
