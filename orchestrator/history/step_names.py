"""The names of steps of a run's history: `250`, or `a2:250` if two attempts have the same label (data rule
18).

Only labels are used: of records, or of the keys of steps without records.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from orchestrator.errors import RefusedError
from orchestrator.records.steps import StateKey, StepRecord

Steps = Sequence[StepRecord | StateKey]

_STEP = r"(?:a[0-9]+:)?[0-9]+"
_STEPS = re.compile(rf"\s*(?:(?P<one>{_STEP})|({_STEP})?\s*:\s*({_STEP})?)\s*")


def step_name(records: Steps, index: int) -> str:
    """The name of `records[index]` in the history `records`."""
    record = records[index]
    alike = sum(other.step == record.step for other in records)
    return str(record.step) if alike == 1 else f"a{record.attempt}:{record.step}"


def find_step(records: Steps, name: str) -> int:
    """The index of the step that `name` means. Raises `RefusedError` if there is none, or more than one."""
    attempt, _, label = name.rpartition(":")
    found = [
        index
        for index, record in enumerate(records)
        if record.step == int(label) and (not attempt or record.attempt == int(attempt[1:]))
    ]
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(f"a{records[index].attempt}:{label}" for index in found)
        raise RefusedError(
            f"step {name} occurs {len(found)} times in the run's history; write {names}",
            code="command.ambiguous_step",
        )
    if not records:
        raise RefusedError(
            f"the run's history has no step {name}: nothing was trained yet", code="run.nothing_trained"
        )
    if not attempt and (between := _left_out(records, int(label))):
        raise RefusedError(between, code="command.unknown_step")
    first, last = step_name(records, 0), step_name(records, len(records) - 1)
    others = sorted({f"a{record.attempt}" for record in records if record.step == int(label)})
    known = f"; it has that of {', '.join(others)}" if others else ""
    raise RefusedError(
        f"the run's history has no step {name}; it goes from step {first} to step {last}{known}",
        code="command.unknown_step",
    )


def numbering_note(records: Steps, index: int) -> str | None:
    """A note for a step whose label belongs to an older numbering than the newest steps.

    Labels are counted anew when the batch size or seq_len changes. None for any other step.
    """
    anew = [i for i in range(index + 1, len(records)) if records[i].step != records[i - 1].step + 1]
    if not anew:
        return None
    before, after = records[anew[0] - 1], records[anew[0]]
    return (
        f"step {records[index].step} is counted as attempt {records[index].attempt} did; after its step "
        f"{before.step} steps are counted anew, because batch size or seq_len changed: the next one is "
        f"{after.step}, of attempt {after.attempt}"
    )


def _left_out(records: Steps, label: int) -> str | None:
    """Why no step has this label: its record is lost, or counting anew skipped it."""
    for before, after in pairwise(records):
        same = (before.attempt, before.generation) == (after.attempt, after.generation)
        if before.step < label < after.step and same:
            return (
                f"the record of step {label} is lost: the journal is damaged, and `orchestrator audit` names "
                "the place"
            )
        if before.step < label < after.step:
            return (
                f"no step of the run's history has number {label}: step {before.step} (attempt "
                f"{before.attempt}) is followed by step {after.step} (attempt {after.attempt}), because "
                "steps are counted anew where batch size or seq_len changes; name "
                f"{before.step}, {after.step} or another one"
            )
    return None


def names_steps(text: str) -> bool:
    """Whether `text` has the form of `find_steps`."""
    return _STEPS.fullmatch(text) is not None


def find_steps(records: Steps, text: str) -> range:
    """The indices of `A:B`, both included; without A from the first step, without B to the last; or of one
    step `A`.

    Raises `RefusedError` as `find_step`, for anything that is not `A:B`, and if B comes before A.
    """
    match = _STEPS.fullmatch(text)
    if match is None:
        raise RefusedError(
            f"{text!r} is no range of steps; write A:B, e.g. 100:250, 100:, or a2:100:a3:250",
            code="command.step_range",
        )
    one, first, last = match.groups()
    if one:
        index = find_step(records, one)
        return range(index, index + 1)
    start = find_step(records, first) if first else 0
    stop = find_step(records, last) + 1 if last else len(records)
    if start >= stop and first and last:
        raise RefusedError(
            f"steps {text}: {last} comes before {first}; write the earlier step first",
            code="command.empty_range",
        )
    return range(start, stop)
