"""A model without attention, so that a worker of a system test need not load transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import ray
import torch
from torch import Tensor, nn

from orchestrator.objectives import Mean, MicroBatch, StepContext, Terms


class TinyModel(nn.Module):
    """Next-token logits from the token alone; about 40,000 parameters."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.between = nn.Sequential(
            nn.Linear(hidden_size, 2 * hidden_size), nn.ReLU(), nn.Linear(2 * hidden_size, hidden_size)
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(batch, seq_len) token ids to (batch, seq_len, vocab_size) logits."""
        hidden = self.embedding(input_ids)
        return (hidden + self.between(hidden)) @ self.embedding.weight.T


class TinyDocumentModel(TinyModel):
    """Next-token logits from the mean over the token's document so far. It cannot be called without
    document ids.
    """

    def forward(  # type: ignore[override]  # the trainer must give them
        self, input_ids: torch.Tensor, document_ids: torch.Tensor
    ) -> torch.Tensor:
        """(batch, seq_len) token ids and document ids to (batch, seq_len, vocab_size) logits."""
        sees = (document_ids[:, :, None] == document_ids[:, None, :]).float().tril()
        hidden = sees / sees.sum(-1, keepdim=True) @ self.embedding(input_ids)
        return (hidden + self.between(hidden)) @ self.embedding.weight.T


class PoisonedModel(TinyModel):
    """A `TinyModel` whose logits are NaN for the sample that begins with these tokens."""

    def __init__(self, first_ids: Sequence[int], vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size)
        self.first_ids = tuple(first_ids)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(batch, seq_len) token ids to (batch, seq_len, vocab_size) logits."""
        begins = input_ids[:, : len(self.first_ids)]
        is_bad = (begins == torch.tensor(self.first_ids, device=input_ids.device)).all(1)
        return super().forward(input_ids) * torch.where(is_bad[:, None, None], float("nan"), 1.0)


def build_poisoned(first_ids: Sequence[int], vocab_size: int = 1000, hidden_size: int = 32) -> PoisonedModel:
    """For `model.factory`."""
    return PoisonedModel(first_ids, vocab_size, hidden_size)


def build_document_model(vocab_size: int = 1000, hidden_size: int = 32) -> TinyDocumentModel:
    """For `model.factory`."""
    return TinyDocumentModel(vocab_size, hidden_size)


def build(vocab_size: int = 1000, hidden_size: int = 32) -> TinyModel:
    """For `model.factory`."""
    return TinyModel(vocab_size, hidden_size)


def build_but_on_one(mark: str, vocab_size: int = 1000, hidden_size: int = 32) -> TinyModel:
    """For `model.factory`: the first worker that builds it lacks a module, and creates the folder `mark`."""
    if ray.get_runtime_context().get_actor_id() is not None:
        with suppress(FileExistsError):
            os.mkdir(mark)
            raise ModuleNotFoundError("No module named 'only_elsewhere'")
    return TinyModel(vocab_size, hidden_size)


def near_reference(model: nn.Module, batch: MicroBatch, context: StepContext) -> Terms:
    """For `train.objective`: the cross-entropy, and the distance from a frozen model's."""
    labels = batch.labels.flatten().long()

    def losses(each: nn.Module) -> Tensor:
        logits: Tensor = each(batch.input_ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none", ignore_index=-100)

    mine, theirs = losses(model), losses(context.frozen["reference"])
    distance = ((mine - theirs) ** 2).sum()
    drawn = torch.rand((), generator=context.generator)
    metrics = {"distance": Mean(distance.detach(), (labels >= 0).sum()), "drawn": Mean(drawn)}
    return Terms(mine.sum() + 0.1 * distance, metrics, mine.view_as(batch.labels))
