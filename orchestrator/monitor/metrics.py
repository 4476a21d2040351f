"""The metrics of a run: name, unit and meaning of each, declared once for the journal, the live display and
whatever shows them later.

It computes none of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One number that a run reports. `kind` is `gauge` (a value of the moment) or `counter` (it only grows
    along the lineage).

    `in_step_record` says whether it is a field of `records.StepRecord`; the others are computed from those
    for display.
    """

    name: str
    unit: str
    kind: str
    meaning: str
    in_step_record: bool = True


METRICS = (
    Metric(
        name="consumed_samples",
        unit="samples",
        kind="counter",
        meaning="samples trained, each with the seq_len of its time",
    ),
    Metric(
        name="consumed_tokens",
        unit="tokens",
        kind="counter",
        meaning="positions trained; schedules and budgets count these",
    ),
    Metric(name="target_tokens", unit="tokens", kind="counter", meaning="labels that gave a loss"),
    Metric(
        name="loss",
        unit="nats",
        kind="gauge",
        meaning="mean cross-entropy over the step's target tokens, before the step's update",
    ),
    Metric(
        name="grad_norm",
        unit="1",
        kind="gauge",
        meaning="L2 norm of the global batch's gradient before clipping",
    ),
    Metric(name="lr", unit="1", kind="gauge", meaning="learning rate that the step's update used"),
    Metric(
        name="step_s",
        unit="s",
        kind="gauge",
        meaning="from the end of the step before to the end of this one, on the reporting rank",
    ),
    Metric(
        name="data_wait_s",
        unit="s",
        kind="gauge",
        meaning="part of step_s that the reporting rank waited for its slice of the batch",
    ),
    Metric(
        name="save_blocked_s",
        unit="s",
        kind="gauge",
        meaning="part of step_s that the reporting rank could not train because of a save",
    ),
    Metric(
        name="tokens_per_s",
        unit="tokens/s",
        kind="gauge",
        meaning="growth of consumed_tokens over the sum of step_s, over the steps shown",
        in_step_record=False,
    ),
    Metric(
        name="data_wait_share",
        unit="1",
        kind="gauge",
        meaning="sum of data_wait_s over the sum of step_s, over the steps shown",
        in_step_record=False,
    ),
    Metric(
        name="world_size",
        unit="ranks",
        kind="gauge",
        meaning="members of the generation that trained the step",
        in_step_record=False,
    ),
)


_BY_NAME = {metric.name: metric for metric in METRICS}


def metric(name: str) -> Metric:
    """The declaration of a metric. Raises `KeyError` for a name that is not declared."""
    return _BY_NAME[name]
