"""Checks the steps that a policy about losses has skipped, and lists them (`planning.loss_policy`).

The decision about each step is made again, from the records before it and the configuration of its attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from orchestrator.coordinator.attempt.survey import Survey
from orchestrator.history.claims.lineage import skips_of
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.step_names import step_name
from orchestrator.planning.loss_policy import SKIP_STEP, LossPolicies, judge
from orchestrator.records.steps import NONFINITE, LossHistory, StepRecord

_NAMED = 5


def wrong_decision(seen: Survey, wanted: range) -> dict[str, Any] | None:
    """Returns the first of the steps that should have been skipped and was not, or the other way round.

    The form is that of `first_difference` of an audit. Steps behind a hole of the journal are not checked,
    because the losses before them are not known.
    """
    records = seen.lineage.records[: min(wanted.stop, *seen.lineage.holes, len(seen.lineage.records))]
    policies = _policies(seen)
    most = max((each.window for each in policies.values()), default=0)
    history = LossHistory()
    for index, record in enumerate(records):
        if index in wanted and record.attempt in policies:
            expected = _expected(policies[record.attempt], history, record)
            if expected != record.skipped:
                was, should = record.skipped or "applied", expected or "applied"
                reason = (
                    f"the step was {_word(was)}, and train.on_nonfinite and train.on_spike of attempt "
                    f"{record.attempt} say {_word(should)}: its loss is {record.loss}, the norm of its "
                    f"gradient {record.grad_norm}"
                )
                return {"step": step_name(seen.lineage.records, index), "reason": reason}
        history = history.after(record, most)
    return None


def skipped_steps(seen: Survey, wanted: range) -> list[dict[str, Any]]:
    """Returns a row for each of these steps that was skipped, as in `skipped_samples` of an audit."""
    records, skips = seen.lineage.records, skips_of(seen.lineage)
    origin = seen.fork.origin if seen.fork is not None else None
    begin = (origin.cursor.consumed_samples, origin.cursor.consumed_tokens) if origin else (0, 0)
    counts = [begin, *((record.consumed_samples, record.consumed_tokens) for record in records)]
    found = []
    for index, (before, after) in enumerate(pairwise(counts)):
        if index in wanted and records[index].skipped is not None:
            left_out = max((at.skip.end.skipped_samples for at in skips if at.index <= index), default=0)
            found.append(
                {
                    "attempt": records[index].attempt,
                    "point": None,
                    "setting": _setting(records[index]),
                    "first_index": before[0] + left_out,
                    "samples": after[0] - before[0],
                    "tokens": after[1] - before[1],
                }
            )
    return found


def skipped_notes(seen: Survey, wanted: range) -> Iterator[str]:
    """Yields what an audit does not show of skipped steps."""
    rows = skipped_steps(seen, wanted)
    if rows:
        indices = [index for index in wanted if seen.lineage.records[index].skipped is not None]
        names = ", ".join(step_name(seen.lineage.records, index) for index in indices[:_NAMED])
        more = f" and {len(indices) - _NAMED} more" if len(indices) > _NAMED else ""
        samples, tokens = (sum(row[name] for row in rows) for name in ("samples", "tokens"))
        yield (
            f"that every step moved the weights: {samples:,} samples ({tokens:,} tokens) of step {names}"
            f"{more} were skipped on purpose ({', '.join(sorted({row['setting'] for row in rows}))})"
        )


def _policies(seen: Survey) -> dict[int, LossPolicies]:
    return {
        event.attempt: LossPolicies.of_flat(event.fields["config"])
        for event in seen.journal.events
        if event.kind == EventKind.ATTEMPT
    }


def _expected(policies: LossPolicies, history: LossHistory, record: StepRecord) -> str | None:
    """Returns for which cause the step was to be skipped. A loss that was not finite has left no value."""
    is_wrong = record.grad_norm - record.grad_norm != 0 or record.skipped == NONFINITE
    wrong = "it is not finite" if is_wrong else None
    verdict = judge(policies, history, record.loss, record.grad_norm, wrong)
    if verdict is None:
        return None
    return verdict.cause if verdict.action == SKIP_STEP else f"{verdict.cause}: {verdict.action}"


def _setting(record: StepRecord) -> str:
    return f"train.on_{record.skipped}"


def _word(what: str) -> str:
    return what if what == "applied" else f"skipped ({what})"
