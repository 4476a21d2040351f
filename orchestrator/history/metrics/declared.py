"""The metrics of a run, declared once (name, unit, meaning), and their values, computed from the journal's
facts.

Pure. `history.metrics.metric_log` sends them. A dashboard or an alert may use only metrics declared here.
The metrics of a plug-in objective join them under their own names, as gauges of every step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.steps import StateKey, StepRecord

PREFIX = "orchestrator_"  # of the names in Prometheus, after Ray's own `ray_`


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A `gauge` has the newest value; a `counter` only grows while its launch lives.

    `unit` is "" for counts. `per_step`: a gauge of every step, which loggers store with the step.
    """

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    meaning: str
    per_step: bool = False

    @property
    def prometheus(self) -> str:
        """The metric's name in Prometheus, from a Ray node."""
        return f"ray_{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _step(name: str, unit: str, meaning: str) -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, meaning=meaning, per_step=True)


def _gauge(name: str, unit: str, meaning: str) -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, meaning=meaning)


def _counter(name: str, meaning: str) -> Metric:
    return Metric(name=name, kind="counter", unit="", meaning=meaning)


METRICS = {
    metric.name: metric
    for metric in (
        _step("loss", "nats", "Loss of the step, by default a mean over its targets, with a router's loss."),
        _step("grad_norm", "", "Norm of the step's gradient before it is clipped."),
        _step("lr", "", "Learning rate of the step."),
        _step("tokens_per_s", "tokens/s", "Tokens of the step by its seconds."),
        _step("tokens_per_s_per_worker", "tokens/s", "The same for each worker."),
        _step("mfu", "", "Share of the cards' peak that the model's products need; of known cards."),
        _step("step_s", "s", "Time of the step."),
        _step("data_wait_s", "s", "Of it, waiting for the batch: mean of the workers."),
        _step("save_blocked_s", "s", "Of it, blocked by a save: mean of the workers."),
        _step("peak_memory_bytes", "bytes", "The most that a worker had taken: of its GPU, else of memory."),
        _step("world_size", "workers", "Workers that trained the step."),
        _step("step", "", "Label of the newest step."),
        _gauge("consumed_tokens", "tokens", "Tokens trained by the history, up to the newest step."),
        _gauge("consumed_samples", "samples", "Samples trained by the history, up to the newest step."),
        _gauge("tokens_at_risk", "tokens", "Tokens trained since the newest resume point."),
        _gauge("last_step_time", "s since 1970", "When the newest step was reported."),
        _gauge("last_point_time", "s since 1970", "When the newest resume point was committed."),
        _gauge("workers_wanted", "workers", "Workers that the launch aims at."),
        _gauge("attempt", "", "Number of the attempt: launches, and restarts of the coordinator."),
        _gauge("generation", "", "Number of the training group within the attempt."),
        _gauge("ended", "", "1 once the launch has written its end, else 0."),
        _counter("steps", "Steps that were trained, also those that are trained again."),
        _counter("steps_skipped", "Steps that train.on_nonfinite or train.on_spike has left out."),
        _counter("steps_repeated", "Steps whose work was lost, so that they are trained again."),
        _counter("points_committed", "Resume points that were committed."),
        _counter("saves_given_up", "Saves that were given up."),
        _counter("points_damaged", "Resume points that were found damaged."),
        _counter("workers_lost", "Workers that left a training group without being asked to."),
        _counter("groups_formed", "Training groups that were formed."),
        _counter("failures", "Failures that count against cluster.max_failures."),
        _counter("documents_skipped", "Documents that were skipped as bad."),
    )
}

# names that a metric of an objective may not have: of declared metrics, and of the columns of a step
RESERVED = frozenset(METRICS) | {field.name for field in fields(StepRecord)} | {"t", "time", "width", "own"}

_COUNTED = {
    EventKind.POINT_COMMITTED: "points_committed",
    EventKind.SAVE_GIVEN_UP: "saves_given_up",
    EventKind.DAMAGED_POINT: "points_damaged",
    EventKind.FAILURE: "failures",
    EventKind.BAD_DOCUMENT: "documents_skipped",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The changes of metrics: new values of gauges, and increments of counters.

    `tokens` is the end of a step in the history, in consumed tokens, None if there is no step. `rewound_to`:
    a logger's values at later tokens are off the history from now on. `saved_to`: a resume point holds the
    history up to these tokens. `evaluated_at`: the values are those of an evaluation of the state at
    `tokens`, which was recorded then (seconds since 1970).
    """

    values: Mapping[str, float]
    tokens: int | None = None
    rewound_to: int | None = None
    saved_to: int | None = None
    evaluated_at: float | None = None

    @property
    def per_step(self) -> dict[str, float]:
        """The values that loggers store with the step, also those of the objective's own metrics."""
        found = ((name, METRICS.get(name), value) for name, value in self.values.items())
        return {name: value for name, metric, value in found if metric is None or metric.per_step}


# fields of a step's record that are metrics with the same name
_OF_RECORD = (
    *("loss", "grad_norm", "lr", "step_s", "data_wait_s", "save_blocked_s"),
    *("step", "consumed_tokens", "consumed_samples", "mfu"),
)


_NUM_KNOWN = 1000  # steps whose evaluation may still be reported


class Meter:
    """Computes the metrics of one attempt, from the facts of its journal in order.

    Late steps of a generation that has ended do not count.
    """

    def __init__(self, saved_tokens: int = 0) -> None:
        """`saved_tokens`: the consumed tokens of the newest resume point when the attempt begins."""
        self._saved, self._world_size = saved_tokens, 0
        self._generation: tuple[int, int] | None = None
        self._last: tuple[StateKey | None, int] = (None, 0)  # the newest state, and its consumed tokens
        self._tokens: dict[int, int] = {}  # consumed tokens of the newest states of the group, by step

    def generation(self, start: GenerationStart) -> Sample:
        """A group was formed: the history continues from its parent's state."""
        self._generation, self._world_size = start.id, start.world_size
        key = StateKey(attempt=start.attempt, generation=start.generation, step=start.step)
        self._last, self._tokens = (key, start.consumed_tokens), {start.step: start.consumed_tokens}
        values = {
            "attempt": start.attempt,
            "generation": start.generation,
            "world_size": start.world_size,
            "consumed_tokens": start.consumed_tokens,
            "consumed_samples": start.consumed_samples,
            "tokens_at_risk": max(0, start.consumed_tokens - self._saved),
            "ended": 0,
            "groups_formed": 1,
        }
        return Sample(values=values, rewound_to=start.consumed_tokens)

    def step(self, record: StepRecord, now: float) -> Sample | None:
        """The sample of a step. `now`: seconds since 1970. None for a step that does not follow the newest
        state.
        """
        if (record.attempt, record.generation) != self._generation or record.consumed_tokens <= self._last[1]:
            return None
        (before, tokens), self._last = self._last, (record.key, record.consumed_tokens)
        self._tokens[record.step] = record.consumed_tokens
        if len(self._tokens) > _NUM_KNOWN:
            del self._tokens[next(iter(self._tokens))]
        known = {name: getattr(record, name) for name in _OF_RECORD}
        values: dict[str, float] = {name: value for name, value in known.items() if value is not None}
        values["world_size"] = self._world_size
        values |= {name: value for name, value in (record.metrics or {}).items() if value is not None}
        if record.peak_memory_bytes:
            values["peak_memory_bytes"] = record.peak_memory_bytes
        if record.step_s > 0 and before is not None and before.step + 1 == record.step:
            values["tokens_per_s"] = (record.consumed_tokens - tokens) / record.step_s
            if self._world_size:
                values["tokens_per_s_per_worker"] = values["tokens_per_s"] / self._world_size
        at_risk = max(0, record.consumed_tokens - self._saved)
        values |= {"tokens_at_risk": at_risk, "last_step_time": now, "steps": 1}
        if record.skipped is not None:
            values["steps_skipped"] = 1
        return Sample(values=values, tokens=record.consumed_tokens)

    def event(self, kind: EventKind, said: Mapping[str, Any], now: float) -> Sample | None:
        """The sample of an event; None if it changes no metric."""
        if kind == EventKind.EVALUATED:
            return self._evaluated(said, now)
        values: dict[str, float] = {}
        saved_to: int | None = None
        if kind in _COUNTED:
            values[_COUNTED[kind]] = 1
        if kind == EventKind.POINT_COMMITTED:
            saved_to = said["cursor"]["consumed_tokens"]
            self._saved = max(self._saved, saved_to)
            values |= {"last_point_time": now, "tokens_at_risk": max(0, self._last[1] - self._saved)}
        elif kind == EventKind.GROUP_FORMED:
            values["workers_wanted"] = said["wanted"]
            values["workers_lost"] = len(said["lost"])
            values["steps_repeated"] = max(0, said["step_before"] - said["step"])
        elif kind == EventKind.END:
            values["ended"] = 1
        values = {name: value for name, value in values.items() if value or METRICS[name].kind == "gauge"}
        return Sample(values=values, saved_to=saved_to) if values else None


    def _evaluated(self, said: Mapping[str, Any], now: float) -> Sample | None:
        """The sample of an evaluation, `eval_<part>_<name>`. None if its step is no longer known.

        Its report may arrive after those of later steps.
        """
        tokens = self._tokens.get(said["step"])
        if tokens is None:
            return None
        values = eval_values(said)
        return Sample(values=values, tokens=tokens, evaluated_at=now) if values else None


def eval_values(said: Mapping[str, Any]) -> dict[str, float]:
    """The known values of an evaluated part by the names that loggers have, `eval_<part>_<name>`.

    `said` has the fields of `records.steps.EvalRecord`.
    """
    of_sources = {f"{name}_loss": value for name, value in said["per_source"].items()}
    found = {"loss": said["loss"], "perplexity": said["perplexity"], **of_sources, **said["metrics"]}
    return {
        re.sub(r"\W", "_", f"eval_{said['part']}_{name}"): value
        for name, value in found.items()
        if value is not None
    }


def metrics_table() -> str:
    """Every metric as a Markdown table."""
    rows = [
        f"| `{m.name}` | `{m.prometheus}` | {m.kind}{', each step' if m.per_step else ''} | {m.unit} | "
        f"{m.meaning} |"
        for m in METRICS.values()
    ]
    return "\n".join(["| metric | in Prometheus | kind | unit | meaning |", "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    import sys

    sys.stdout.write(metrics_table() + "\n")
