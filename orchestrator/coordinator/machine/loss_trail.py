"""The losses of a launch's steps, by generation: what a policy needs of the history before any of its states.

Pure. Members get it with the view of a generation (`GenerationView.losses`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from itertools import takewhile

from orchestrator.history.claims.claims import GenerationId, GenerationStart
from orchestrator.records.steps import SKIP_CAUSES, LossHistory, StateKey, StepRecord

_UNKNOWN = -1  # the code of a step without a record


class LossTrail:
    """The steps of a launch since the point that it continued, 20 bytes each."""

    def __init__(
        self,
        window: int,
        first_attempt: int,
        before: Iterable[StepRecord],
        starts: Iterable[GenerationStart],
        records: Iterable[StepRecord],
    ) -> None:
        """`first_attempt`: of the launch. `before`: the records of the history that it continues.

        `starts` and `records`: those that earlier coordinators of the launch have journalled.
        """
        self._window, self._first = window, first_attempt
        self._before = LossHistory()
        for record in takewhile(lambda each: each.attempt < first_attempt, before):
            self._before = self._before.after(record, window)
        self._starts: dict[GenerationId, GenerationStart] = {}
        self._steps: dict[GenerationId, tuple[array[float], array[float], array[int]]] = {}
        self._at_start: dict[GenerationId, LossHistory] = {}
        for start in starts:
            self.begun(start)
        for record in records:
            self.recorded(record)

    def begun(self, start: GenerationStart) -> None:
        """A generation begins. Those of earlier launches do not count."""
        if start.attempt >= self._first:
            self._starts[start.id] = start
            self._steps.setdefault(start.id, (array("d"), array("d"), array("b")))

    def recorded(self, record: StepRecord) -> None:
        """Takes a step's record, possibly a copy."""
        id_ = (record.attempt, record.generation)
        if id_ not in self._starts:
            return
        losses, norms, codes = self._steps[id_]
        at = record.step - self._starts[id_].step - 1
        while len(codes) <= at:
            losses.append(math.nan)
            norms.append(math.nan)
            codes.append(_UNKNOWN)
        losses[at] = math.nan if record.loss is None else record.loss
        norms[at] = record.grad_norm
        codes[at] = 0 if record.skipped is None else 1 + SKIP_CAUSES.index(record.skipped)

    def at(self, key: StateKey | None) -> LossHistory:
        """Returns the history before the state `key` (None: before anything was trained).

        A step whose record is lost counts for nothing. Every step on the way to a state that a member holds
        has one, unless the journal was damaged.
        """
        ways: list[tuple[GenerationStart, int]] = []
        history = self._before
        while key is not None and key.attempt >= self._first:
            id_ = (key.attempt, key.generation)
            if id_ not in self._starts:
                break
            ways.append((self._starts[id_], key.step))
            if id_ in self._at_start:
                history = self._at_start[id_]
                break
            key = self._starts[id_].parent
        for start, last_step in reversed(ways):
            self._at_start[start.id] = history
            history = self._along(start, last_step, history)
        return history

    def _along(self, start: GenerationStart, last_step: int, history: LossHistory) -> LossHistory:
        num = last_step - start.step
        for loss, norm, code in zip(*(column[:num] for column in self._steps[start.id]), strict=True):
            if code != _UNKNOWN:
                skipped = SKIP_CAUSES[code - 1] if code else None
                history = history.after_step(
                    None if math.isnan(loss) else loss, norm, skipped, self._window
                )
        return history
