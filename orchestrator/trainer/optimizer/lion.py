"""Lion: the sign of an interpolated momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms",
2023, algorithm 2). torch has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


class Lion(torch.optim.Optimizer):
    """`exp_avg` is its only state, of the parameter's shape and type. Works element by element.

    With gradient g, momentum m and weight w: w -= lr · (sign(β1·m + (1 - β1)·g) + weight_decay · w), then
    m = β2·m + (1 - β2)·g.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    @override
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Runs one step with the gradients in `.grad`."""
        assert closure is None, "the gradients are already computed"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._step(weights, group["lr"], group["betas"], group["weight_decay"])

    def _step(
        self, weights: list[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        gradients: Any = [weight.grad for weight in weights]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["exp_avg"] = torch.zeros_like(weight)
        momenta: Any = [self.state[weight]["exp_avg"] for weight in weights]
        signs = torch._foreach_lerp(momenta, gradients, 1 - betas[0])
        torch._foreach_sign_(signs)
        if weight_decay:
            torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, signs, alpha=-lr)
        torch._foreach_lerp_(momenta, gradients, 1 - betas[1])
