"""The built-in loss of a micro-batch alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from orchestrator.trainer.objective.objective import causal_lm_terms


def loss_sum(*arguments: Any, **more: Any) -> Tensor:
    """`causal_lm_terms` without its metrics."""
    return causal_lm_terms(*arguments, **more).loss_sum
