"""Multi-token prediction: further heads predict the tokens after the next one (Gloeckle et al. 2024,
arXiv:2404.19737).

Each further head is a residual block before the shared output layer (Medusa, Cai et al. 2024,
arXiv:2401.10774). Generation uses the model without them. `multi_token.yaml` beside this file trains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import ModelOutput

from orchestrator.objectives import Mean, MicroBatch, StepContext, Terms

NO_LOSS = -100


@dataclass
class AheadOutput(ModelOutput):
    """`logits` of the next token, and `ahead`: those of the tokens after it, (samples, seq_len, vocabulary)
    each.
    """

    logits: Tensor | None = None
    ahead: tuple[Tensor, ...] | None = None


class MultiTokenModel(nn.Module):
    """A transformers model with `num_ahead` further heads."""

    def __init__(self, base: Any, num_ahead: int) -> None:
        super().__init__()
        self.base = base
        hidden_size = base.config.get_text_config().hidden_size
        self.ahead = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_ahead))
        for block in self.ahead:
            nn.init.zeros_(block.weight)  # each head begins as the one for the next token
            nn.init.zeros_(block.bias)

    def forward(self, input_ids: Tensor) -> AheadOutput:
        """`input_ids`: (samples, seq_len)."""
        hidden = self.base.model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = self.base.get_output_embeddings()
        further = tuple(head(hidden + silu(block(hidden))) for block in self.ahead)
        return AheadOutput(logits=head(hidden), ahead=further)


def multi_token_model(
    num_ahead: int = 2, pretrained: str | None = None, config: dict[str, Any] | None = None
) -> MultiTokenModel:
    """Builds the model on a `pretrained` folder, or with random weights on a transformers `config`."""
    if config is not None:
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    elif torch.get_default_device().type == "meta":  # a start tries the model without weights
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pretrained))
    else:
        base = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    return MultiTokenModel(base, num_ahead)


def multi_token(model: Any, batch: MicroBatch, context: StepContext, *, weight: float = 1.0) -> Terms:
    """Returns the cross-entropy of the next token, and `weight` times that of each token after it.

    A head predicts a token only within the document of its position. Each further head has a metric
    `ahead_2`, `ahead_3`, …: its mean cross-entropy over its own targets.
    """
    del context
    output = model(batch.input_ids)
    labels, documents = batch.labels.long(), batch.document_ids
    losses = _losses(output.logits, labels)
    loss, metrics = losses.sum(), {}
    for step, logits in enumerate(output.ahead, start=1):
        targets = torch.full_like(labels, NO_LOSS)
        same = documents[:, step:] == documents[:, :-step]
        targets[:, :-step] = labels[:, step:].where(same, NO_LOSS)
        further = _losses(logits, targets).sum()
        metrics[f"ahead_{step + 1}"] = Mean(further.detach(), (targets != NO_LOSS).sum())
        loss = loss + weight * further
    return Terms(loss, metrics, losses.detach())


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    losses = cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LOSS, reduction="none"
    )
    return losses.view_as(labels)
