"""One evaluation: the loss of a part of the data at a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.records.steps import StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """The result of evaluating one part after a step.

    `loss` is the objective's loss divided by its units, as in training; None if the part has no units or a
    value was not finite. `perplexity` is e to the mean cross-entropy of the targets; None for plug-ins.
    `per_source` is the mean loss of each source's targets by name; empty if the objective returns no loss per
    token. `metrics` are those of the objective. `seconds` is how long it took. `not_finite` are the values
    that are None because something was not finite: `loss`, `perplexity`, `loss/<source>`, or a metric.
    """

    part: str
    attempt: int
    generation: int
    step: int
    loss: float | None
    perplexity: float | None
    targets: int
    samples: int
    per_source: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    not_finite: tuple[str, ...] = ()

    @property
    def key(self) -> StateKey:
        """The key of the state that was evaluated."""
        return StateKey(attempt=self.attempt, generation=self.generation, step=self.step)
