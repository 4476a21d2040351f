"""A reward model: a transformers model whose head gives each token a number, trained on pairs of answers.

`reward_model.yaml` beside this file trains it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from orchestrator.objectives import Mean, MicroBatch, StepContext, Terms


class RewardModel(nn.Module):
    """Returns the reward of the text up to each token, (rows, seq_len, 1)."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        hidden_size = backbone.config.get_text_config().hidden_size
        self.score = nn.Linear(hidden_size, 1, bias=False)
        nn.init.normal_(self.score.weight, std=1 / (hidden_size + 1) ** 0.5)  # Stiennon et al. 2020

    def forward(self, input_ids: Tensor) -> Tensor:
        """`input_ids`: (rows, seq_len)."""
        hidden = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        rewards: Tensor = self.score(hidden)
        return rewards


def reward_model(pretrained: str | None = None, config: dict[str, Any] | None = None) -> RewardModel:
    """Builds the model on a `pretrained` folder, or with random weights on a transformers `config`."""
    from transformers import AutoConfig, AutoModel

    if config is not None:
        return RewardModel(AutoModel.from_config(AutoConfig.for_model(**config)))
    if torch.get_default_device().type == "meta":  # a start tries the model without weights
        return RewardModel(AutoModel.from_config(AutoConfig.from_pretrained(pretrained)))
    return RewardModel(AutoModel.from_pretrained(pretrained, dtype=torch.float32))


def bradley_terry(model: Any, batch: MicroBatch, context: StepContext) -> Terms:
    """Returns -log σ(r_chosen - r_rejected) summed over the pairs (Ouyang et al. 2022, arXiv:2203.02155).

    The reward of an answer is that of the last token before its end. Metrics: the share of pairs whose chosen
    answer has the higher reward, and the mean difference.
    """
    del context
    rewards = model(batch.input_ids).squeeze(-1).float()
    last = (batch.document_ids >= 0).sum(-1, keepdim=True) - 1
    of_answers = rewards.gather(1, last).squeeze(-1)
    margins = of_answers[0::2] - of_answers[1::2]
    num_pairs = margins.numel()
    metrics = {
        "accuracy": Mean((margins > 0).sum(), num_pairs),
        "margin": Mean(margins.detach().sum(), num_pairs),
    }
    return Terms(-logsigmoid(margins).sum(), metrics)
