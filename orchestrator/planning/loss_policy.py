"""Decides what happens to a step whose loss or gradient is not finite, or is a spike.

`train.on_nonfinite` and `train.on_spike`. A decision is a pure function of the configuration, of the step's
loss and gradient norm, and of the history before it. So all ranks make the same one, and `audit` and `replay`
make it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.records.steps import NONFINITE, SPIKE, LossHistory

if TYPE_CHECKING:
    from orchestrator.config.sections import NonfinitePolicy, SpikePolicy

STOP, SKIP_STEP, REWIND = "stop", "skip_step", "rewind_and_skip"
REFUSED, BUDGET_SPENT = "training.step_refused", "training.skip_budget"
# The codes with which an attempt ends whose launch is to go back and leave out the samples since.
REWIND_CODES = {NONFINITE: "training.rewind_nonfinite", SPIKE: "training.rewind_spike"}


class HasPolicies(Protocol):
    """The fields of `train` that decide, as in `TrainConfig` and `LossPolicies`."""

    @property
    def nonfinite(self) -> NonfinitePolicy:
        """`train.on_nonfinite`."""

    @property
    def on_spike(self) -> SpikePolicy | None:
        """`train.on_spike`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPolicies:
    """The same fields as plain values."""

    nonfinite: NonfinitePolicy
    on_spike: SpikePolicy | None

    @classmethod
    def of_flat(cls, flat: Mapping[str, Any]) -> LossPolicies:
        """Reads them of a flat configuration. Earlier versions have none, so a step was never skipped."""
        from orchestrator.config.sections import NonfinitePolicy, SpikePolicy

        nonfinite, spike = flat.get("train.on_nonfinite", STOP), flat.get("train.on_spike")
        given = {"action": nonfinite} if isinstance(nonfinite, str) else nonfinite
        return cls(
            nonfinite=NonfinitePolicy.model_validate(given),
            on_spike=None if spike is None else SpikePolicy.model_validate(spike),
        )

    @property
    def window(self) -> int:
        """How many values of the history they need."""
        return window_of(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What happens to a step. `cause`: `NONFINITE` or `SPIKE`. `text` says why. `code` is that of a stop."""

    cause: str
    action: str
    text: str
    code: str = REFUSED


def window_of(train: HasPolicies) -> int:
    """Returns how many values of the history `judge` needs."""
    return train.on_spike.window if train.on_spike is not None else 0


def watches(train: HasPolicies) -> bool:
    """Whether a policy may leave out steps, or needs the history before a step."""
    return train.nonfinite.action != STOP or train.on_spike is not None


def judge(
    train: HasPolicies, history: LossHistory, loss: float | None, grad_norm: float, wrong: str | None
) -> Verdict | None:
    """Decides about a step with this loss (None: without units) and norm of the gradient before clipping.

    `wrong`: why the loss or the gradient is not finite (None: both are). Returns None for a step that is to
    be applied. A policy whose budget is spent on the history stops the run.
    """
    if wrong is not None:
        policy = train.nonfinite
        return _within_budget(
            NONFINITE, policy.action, wrong, history.num_nonfinite, policy.budget, "train.on_nonfinite"
        )
    spike = train.on_spike
    if spike is None or loss is None:
        return None
    text = _spike_text(spike, history.recent[-spike.window :], loss, grad_norm)
    if text is None:
        return None
    return _within_budget(SPIKE, spike.action, text, history.num_spikes, spike.budget, "train.on_spike")


def policy_of(train: HasPolicies, code: str) -> tuple[str, int] | None:
    """Returns the field and the budget of the policy that ended an attempt with one of `REWIND_CODES`.

    None for any other code.
    """
    if code == REWIND_CODES[NONFINITE]:
        return "train.on_nonfinite", train.nonfinite.budget
    if code == REWIND_CODES[SPIKE] and train.on_spike is not None:
        return "train.on_spike", train.on_spike.budget
    return None


def _within_budget(cause: str, action: str, text: str, spent: int, budget: int, field: str) -> Verdict:
    if action == REWIND:  # the launch counts these
        return Verdict(cause=cause, action=action, text=text, code=REWIND_CODES[cause])
    if action == STOP or spent < budget:
        return Verdict(cause=cause, action=action, text=text)
    return Verdict(
        cause=cause,
        action=STOP,
        text=f"{text}. {field} has already left out {spent} steps of this history, and its budget is "
        f"{budget}; look at these steps, or raise {field}.budget",
        code=BUDGET_SPENT,
    )


def _spike_text(
    policy: SpikePolicy, recent: tuple[tuple[float, float], ...], loss: float, grad_norm: float
) -> str | None:
    """Returns why the step is a spike; None if it is not, or the history is too short.

    A value is one if it lies more than `threshold` standard deviations above the mean of the newest `window`
    values, of which there must be half (the rule of OLMo-core's `SkipStepOptimizer`, Ai2 2025).
    """
    if len(recent) < max(2, policy.window // 2):
        return None
    values = ((loss, "loss"), (grad_norm, "norm of the gradient"))
    for (value, name), past in zip(values, zip(*recent, strict=True), strict=True):
        mean = math.fsum(past) / len(past)
        deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in past) / (len(past) - 1))
        if value > mean + policy.threshold * deviation:
            return (
                f"the {name} is {value:.6g}, more than {policy.threshold:g} standard deviations "
                f"({deviation:.3g} each) above the mean of {mean:.6g} of the {len(past)} steps before "
                "(train.on_spike)"
            )
    return None
