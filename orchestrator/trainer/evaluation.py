"""Evaluates a state on parts of the data: the objective's loss without gradients, divided over the ranks.

An evaluation reads each part from its beginning, in batches of the training's batch size, cut into the
training's micro-batches. All sums are in fixed point, so the result does not depend on the number of ranks.
It changes neither the state nor the position in the training data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from orchestrator.config.schema import EvalConfig
from orchestrator.config.sections import BUILT_IN, TrainConfig
from orchestrator.errors import TrainingError
from orchestrator.objectives import Mean, Terms
from orchestrator.planning import batches
from orchestrator.planning.digest import batch_digest
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import BatchSlice, EvalRecord, StateKey, StepRange
from orchestrator.trainer.gradient.invariant import Gradient
from orchestrator.trainer.interfaces.loop_interface import Feed
from orchestrator.trainer.interfaces.step_summary import (
    MetricSum,
    RankContribution,
    StepSummary,
    TermSums,
)
from orchestrator.trainer.objective.micro_batches import NO_LOSS, NumberedMicroBatch, StepPlace, cut
from orchestrator.trainer.objective.objective import step_units
from orchestrator.trainer.objective.token_losses import losses_of_sources

# The sums of an evaluation besides those of the objective. No metric has such a name.
_ENTROPY, _SOURCE = "/cross-entropy", "/source/"
_MAX_EXPONENT = 700.0  # of a perplexity that a float can hold

# Sums a contribution over all ranks. It ends the evaluation by an exception.
Exchange = Callable[[RankContribution], StepSummary]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPart:
    """A part of the data: its name, where its samples come from, and the names of its sources by number."""

    name: str
    feed: Feed
    sources: Mapping[int, str]


def is_due(config: EvalConfig, step: int, consumed_tokens: int, step_tokens: int) -> bool:
    """Whether the state after `step` is to be evaluated.

    `consumed_tokens`: after it. `step_tokens`: the tokens of a whole step. With `every_tokens`, a state is
    due that has reached a multiple of it with its last step.
    """
    if step == 0:
        return False
    if config.every_steps is not None:
        return step % config.every_steps == 0
    return config.every_tokens is not None and consumed_tokens % config.every_tokens < step_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Evaluates parts on one rank of a group.

    `exchange` is called after each batch, by all ranks equally often.
    """

    train: TrainConfig
    seq_len: int
    gradient: Gradient
    device: torch.device
    rank: int
    world_size: int

    def evaluate(
        self,
        part: EvalPart,
        key: StateKey,
        consumed_tokens: int,
        max_samples: int | None,
        exchange: Callable[[Sequence[str], RankContribution], StepSummary],
    ) -> EvalRecord:
        """Returns the part's loss in the state `key`. All ranks call it.

        Raises `TrainingError` if the ranks evaluated other samples than the feed announced. Errors of feed,
        model and `exchange` propagate.
        """
        began = time.monotonic()
        names = (*self.gradient.objective.metric_names, *self._own_names(part))
        place = StepPlace(step=key.step, consumed_tokens=consumed_tokens)
        total, loss, units, targets, is_finite = dict[str, MetricSum](), 0.0, 0.0, 0, True
        cursor = Cursor()
        while True:
            batch = self._next(part, cursor, max_samples)
            if batch is None:
                break
            contribution = self._contribution(part, batch, place, names)
            summary = exchange(names, contribution)
            problem = summary.mismatch(self.world_size, batch)
            if problem is not None:
                raise TrainingError(
                    f"the evaluation of {part.name} after step {key.step} is wrong: {problem}",
                    code="evaluation.samples_differ",
                )
            is_finite &= not summary.not_finite
            loss += summary.loss
            units += step_units(self.train, batch)
            targets += summary.targets
            for name, found in summary.metric_sums.items():
                total[name] = found if name not in total else total[name] + found
            cursor = batch.cursor
            if batch.end_of_data:
                break
        means = {name: found.mean for name, found in total.items()}
        entropy = means.get(_ENTROPY)
        sources = {name: means.get(f"{_SOURCE}{number}") for number, name in part.sources.items()}
        return EvalRecord(
            part=part.name,
            attempt=key.attempt,
            generation=key.generation,
            step=key.step,
            loss=loss / units if units and is_finite else None,
            perplexity=None if entropy is None or entropy > _MAX_EXPONENT else math.exp(entropy),
            targets=targets,
            samples=cursor.consumed_samples,
            per_source={name: value for name, value in sources.items() if value is not None},
            metrics={name: means.get(name) for name in self.gradient.objective.metric_names},
            seconds=time.monotonic() - began,
            not_finite=self._not_finite(part, total, is_finite),
        )

    def _not_finite(
        self, part: EvalPart, total: Mapping[str, MetricSum], is_finite: bool
    ) -> tuple[str, ...]:
        """Returns the names of the record's values that are not finite. `is_finite`: the loss is."""
        shown = {f"{_SOURCE}{number}": f"loss/{name}" for number, name in part.sources.items()}
        found: tuple[str, ...] = () if is_finite else ("loss",)
        entropy = total.get(_ENTROPY)
        if entropy is not None and (entropy.not_finite or (entropy.mean or 0.0) > _MAX_EXPONENT):
            found += ("perplexity",)
        names = (name for name, of in total.items() if of.not_finite and name != _ENTROPY)
        return (*found, *(shown.get(name, name) for name in names))

    def _own_names(self, part: EvalPart) -> list[str]:
        built_in = [_ENTROPY] if self.train.objective == BUILT_IN else []
        return [*built_in, *(f"{_SOURCE}{number}" for number in part.sources)]

    def _next(self, part: EvalPart, cursor: Cursor, max_samples: int | None) -> BatchSlice | None:
        first, size = cursor.consumed_samples, self.train.global_batch_size
        num = size if max_samples is None else min(size, max_samples - first)
        if num <= 0:
            return None
        step = StepRange(
            first_sample=first, num_samples=num, num_tokens=num * self.seq_len, seq_len=self.seq_len
        )
        micro = self.train.micro_batch_size
        batch = part.feed.get(step, self.rank, self.world_size, micro, cursor)
        return batch if batch.step.num_samples else None

    def _contribution(
        self, part: EvalPart, batch: BatchSlice, place: StepPlace, names: Sequence[str]
    ) -> RankContribution:
        micro_size = self.train.micro_batch_size
        micros = cut(batch, micro_size, self.rank, self.world_size, self.device)
        num_micro = batches.num_micro_batches(batch.step.num_samples, micro_size)
        sums = TermSums(names)
        of_each = self.gradient.evaluate(micros, num_micro, place)
        for micro, terms in zip(micros, of_each, strict=True):
            sums.add(self._with_own(terms, micro, part.sources))
        return RankContribution(
            terms=sums.total(),
            targets=int((batch.labels != NO_LOSS).sum()),
            samples=batch.stop - batch.start,
            digest=batch_digest(
                batch.first_index, batch.source_numbers, batch.input_ids, batch.labels, batch.document_ids
            ),
            data_wait_s=0.0,
            save_blocked_s=0.0,
        )

    def _with_own(self, terms: Terms, micro: NumberedMicroBatch, sources: Collection[int]) -> Terms:
        """Adds the sums of the evaluation to the objective's metrics."""
        metrics = dict(terms.metrics)
        if self.train.objective == BUILT_IN:
            assert terms.per_token is not None, "the built-in objective returns it"
            num_targets = (micro.batch.labels != NO_LOSS).sum()
            metrics[_ENTROPY] = Mean(terms.per_token.sum(), num_targets)
        names = (f"{_SOURCE}{number}" for number in sources)
        metrics.update(zip(names, losses_of_sources(terms, micro, sources), strict=True))
        return replace(terms, metrics=metrics)


def alone(names: Sequence[str], contribution: RankContribution) -> StepSummary:
    """The exchange of a process without others."""
    return StepSummary.unpack(contribution.pack(0, 1), names)
