"""The names of steps of a run's history: `250`, or `a2:250` if two attempts have the same label (data rule
18).

Only labels are used: of records, or of the keys of steps without records.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from orchestrator.errors import RefusedError
from orchestrator.records.steps import StateKey, StepRecord

Steps = Sequence[StepRecord | StateKey]

_ONE = re.compile(r"\s*(?:a(?P<attempt>[0-9]+):)?(?P<label>[0-9]+)\s*")
_STEP = r"(?:a[0-9]+:)?[0-9]+"
_STEPS = re.compile(rf"\s*(?:(?P<one>{_STEP})|({_STEP})?\s*:\s*({_STEP})?)\s*")


class Labelled(Protocol):
    """A step, or the state after it, with the attempt that counted it."""

    @property
    def attempt(self) -> int:
        """The number of the attempt."""

    @property
    def step(self) -> int:
        """The label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepName:
    """A step as users name it: its label, and the attempt that counted it (None: any attempt)."""

    label: int
    attempt: int | None = None

    @classmethod
    def parse(cls, text: str) -> StepName:
        """Reads `250` or `a2:250`. Raises `RefusedError` for anything else."""
        match = _ONE.fullmatch(text)
        if match is None:
            raise no_step(text)
        attempt = match["attempt"]
        return cls(label=int(match["label"]), attempt=None if attempt is None else int(attempt))

    @classmethod
    def of(cls, step: Labelled) -> StepName:
        """The name of `step` that means no other one."""
        return cls(label=step.step, attempt=step.attempt)

    def means(self, step: Labelled) -> bool:
        """Whether `step` has this name."""
        return step.step == self.label and self.attempt in (None, step.attempt)

    def __str__(self) -> str:
        return str(self.label) if self.attempt is None else f"a{self.attempt}:{self.label}"


def no_step(text: str) -> RefusedError:
    """The error for a text that is not the name of a step."""
    return RefusedError(f"{text!r} names no step; name one, e.g. 250 or a2:250", code="command.step_form")


def ambiguous_step(name: StepName, alike: Sequence[Labelled]) -> RefusedError:
    """The error for a label that several steps have, with the name of each of them."""
    names = " or ".join(str(StepName.of(step)) for step in alike)
    return RefusedError(
        f"step {name} occurs {len(alike)} times in the run's history, because batch size or seq_len changed; "
        f"write {names}",
        code="command.ambiguous_step",
    )


def step_name(records: Sequence[Labelled], index: int) -> str:
    """The name of `records[index]` in the history `records`."""
    return name_among(records[index], records)


def name_among(step: Labelled, records: Sequence[Labelled]) -> str:
    """The shortest name of `step` that no other step of the history `records` has."""
    alike = sum(other.step == step.step for other in records)
    return str(step.step if alike <= 1 else StepName.of(step))


def find_step(records: Steps, text: str) -> int:
    """The index of the step that `text` names. Raises `RefusedError` for none, more than one, and a text that
    is no name.
    """
    name = StepName.parse(text)
    found = [index for index, record in enumerate(records) if name.means(record)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ambiguous_step(name, [records[index] for index in found])
    if not records:
        raise RefusedError(
            f"the run's history has no step {name}: nothing was trained yet", code="run.nothing_trained"
        )
    if name.attempt is None and (between := _left_out(records, name.label)):
        raise RefusedError(between, code="command.unknown_step")
    first, last = step_name(records, 0), step_name(records, len(records) - 1)
    others = sorted({f"a{record.attempt}" for record in records if record.step == name.label})
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
