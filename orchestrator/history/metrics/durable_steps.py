"""Selects the steps for a logger that cannot delete, and the names of their series.

They are the steps that a resume point holds, which no failure can undo. Pure. Only a rewind, or a damaged
point, removes such steps. Training from there on is another history, with its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.errors import RefusedError
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.metrics.declared import PER_STEP, Sample
from orchestrator.records.steps import StateKey

HELD = 100_000  # steps, some 100 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStep:
    """A step that a resume point holds.

    `tokens` is its end in consumed tokens, `time` the time of its report in seconds since 1970, `values` its
    metrics by the name of their series.
    """

    tokens: int
    time: float
    values: Mapping[str, float]


class SavedHistory:
    """Holds steps until a point has them.

    `number` counts the run's histories from 1. It increases whenever a history begins before the end of the
    saved one. The series of history 1 have the names of their metrics, those of history 2
    `history2/<metric>`. Each series only grows, and where a later history has begun, the later one counts.
    """

    def __init__(self, number: int = 1, saved_to: int = 0, most: int = HELD) -> None:
        """The current history, the tokens up to which points hold it, and the maximum number of held
        steps.
        """
        self.number, self.saved_to, self._most = number, saved_to, most
        self._held: list[SavedStep] = []

    def take(self, sample: Sample) -> list[SavedStep]:
        """The steps that are saved now, oldest first, each once.

        Raises `RefusedError` if more than `most` would be held.
        """
        if sample.rewound_to is not None:
            self._rewound(sample.rewound_to)
        if sample.tokens is not None:
            prefix = "" if self.number == 1 else f"history{self.number}/"
            values = {prefix + name: sample.values[name] for name in PER_STEP if name in sample.values}
            time = sample.values["last_step_time"]
            self._held.append(SavedStep(tokens=sample.tokens, time=time, values=values))
        if sample.saved_to is None:
            if len(self._held) > self._most:
                raise RefusedError(
                    f"no resume point has been committed for {self._most:,} steps",
                    code="metrics.too_many_unsaved",
                )
            return []
        self.saved_to = max(self.saved_to, sample.saved_to)
        saved = [step for step in self._held if step.tokens <= sample.saved_to]
        self._held = self._held[len(saved) :]
        return saved

    def _rewound(self, tokens: int) -> None:
        self._held = [step for step in self._held if step.tokens <= tokens]
        if tokens < self.saved_to:
            self.number, self.saved_to = self.number + 1, tokens


def saved_before(
    generations: Iterable[GenerationStart], points: Iterable[tuple[StateKey, int]]
) -> SavedHistory:
    """The saved history when an attempt begins.

    `generations` and the committed `points` (with their consumed tokens) are those of the attempts before it.
    """
    tokens_of: dict[tuple[int, int], list[int]] = {}
    for key, tokens in points:
        tokens_of.setdefault((key.attempt, key.generation), []).append(tokens)
    history = SavedHistory()
    for start in sorted(generations, key=lambda each: each.id):
        history.take(Sample(values={}, rewound_to=start.consumed_tokens))
        for tokens in tokens_of.get(start.id, ()):
            history.take(Sample(values={}, saved_to=tokens))
    return history
