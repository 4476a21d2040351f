"""Optimizers of tests, as users write them, or as other libraries have them."""

from __future__ import annotations

import math
from typing import Any

import torch


class Momentum(torch.optim.Optimizer):
    """Keeps its number of steps and its momentum in `state`, and a number for its group."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "decay": decay, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["total"] += group["lr"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state |= {"num": 0, "signed": False, "mean": weight.grad.clone()}
                state["num"] += 1
                # another tensor each time, as many write it
                state["mean"] = group["decay"] * state["mean"] + (1 - group["decay"]) * weight.grad
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(state["mean"], alpha=-group["lr"] * (1 + 1 / state["num"]))


class FailsInItsThirdStep(Momentum):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(state.get("num") == 2 for state in self.state.values()):
            raise RuntimeError("not a third time")
        super().step(closure)


class RowsMomentum(Momentum):
    """The same, which states that it works element by element."""

    elementwise = True


class Normed(torch.optim.Optimizer):
    """Steps by the gradient divided by its norm, of which it keeps the mean; takes no weight decay."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                norm = weight.grad.norm()
                if not math.isfinite(norm.item()):  # needs values
                    raise ValueError("the gradient is not finite")
                state = self.state[weight]
                state["norm"] = 0.5 * (state.get("norm", norm) + norm)
                state["columns"] = weight.grad.abs().sum(0, keepdim=True)
                weight.add_(weight.grad / state["norm"].clamp(min=1e-6), alpha=-group["lr"])


class NormedByRows(Normed):
    """States wrongly that it works element by element."""

    elementwise = True


class GlobalNorm(torch.optim.Optimizer):
    """Its parameters depend on each other."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        total = torch.stack([weight.grad.square().sum() for weight in weights]).sum().sqrt()
        for weight in weights:
            weight.add_(weight.grad / total, alpha=-self.param_groups[0]["lr"])


class Hiding(Momentum):
    """Keeps a number where nobody saves it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.num_steps += 1


class Growing(Momentum):
    """Keeps one more tensor after each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state[f"gradient{state['num']}"] = torch.zeros(2)


class HidingTensor(Momentum):
    """Writes to a tensor of its group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["steps"] = torch.zeros(())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["steps"] += 1


class Late(Momentum):
    """Keeps something else from the fourth step on."""

    def __init__(self, params: Any, lr: float, what: str) -> None:
        super().__init__(params, lr)
        self.what = what

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for weight, state in self.state.items():
            if state["num"] > 3:
                if self.what == "tensor":
                    state["late"] = torch.zeros(2)
                elif self.what == "flag":
                    state["signed"] = True
                elif self.what == "type":
                    state["mean"] = state["mean"].double()
                else:
                    self.param_groups[0]["decay"] = 0.5
                assert weight.grad is not None


class Listing(Momentum):
    """Keeps a list."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["all"] = [1, 2]


def adam(params: Any, lr: float, weight_decay: float = 0.0, **named: Any) -> torch.optim.Optimizer:
    """A class of torch."""
    return torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay, foreach=False, **named)


def without_lr(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params)


def raises_an_error(params: Any, lr: float) -> torch.optim.Optimizer:
    raise ValueError("not today")


def returns_none(params: Any, lr: float) -> Any:
    return None
