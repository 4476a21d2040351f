"""A model without attention, so that a worker of a system test need not load transformers."""

from __future__ import annotations

import torch
from torch import nn


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


def build(vocab_size: int = 1000, hidden_size: int = 32) -> TinyModel:
    """For `model.factory`."""
    return TinyModel(vocab_size, hidden_size)
