"""Direct preference optimization with a frozen reference (Rafailov et al. 2023, arXiv:2305.18290).

`dpo.yaml` beside this file trains with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from orchestrator.objectives import Mean, MicroBatch, StepContext, Terms

NO_LOSS = -100


def dpo(
    model: Any, batch: MicroBatch, context: StepContext, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Terms:
    """Returns the DPO loss summed over the pairs (equation 7 of the paper).

    `beta`: how strongly the model is held to the reference. `label_smoothing`: the share of pairs whose
    answers are assumed to be exchanged (conservative DPO). Rewards are `beta` times the log-ratios to the
    reference. Metrics: the share of pairs whose chosen answer has the higher reward, and the mean rewards.
    """
    if "reference" not in context.frozen:
        raise ValueError("dpo compares with a reference: name one in model.frozen.reference")
    losses = token_losses(model, batch)
    with torch.no_grad():
        reference = token_losses(context.frozen["reference"], batch)
    rewards = beta * (reference - losses).sum(-1)
    chosen, rejected = rewards[0::2], rewards[1::2]
    margins = chosen - rejected
    loss = -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    num_pairs = margins.numel()
    metrics = {
        "accuracy": Mean((margins > 0).sum(), num_pairs),
        "chosen_reward": Mean(chosen.detach().sum(), num_pairs),
        "rejected_reward": Mean(rejected.detach().sum(), num_pairs),
    }
    return Terms(loss.sum(), metrics, losses.detach())


def token_losses(model: Any, batch: MicroBatch) -> Tensor:
    """Returns minus the log-probability of each label (rows, seq_len), 0 where there is none."""
    logits = model(batch.input_ids).logits.float()
    labels = batch.labels.long()
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LOSS, reduction="none")
    return losses.view_as(labels)
