"""Trains the steps of a history again in this process, on one worker, and compares each with its record.

`replay_history` determines where to begin, and what each step was trained with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.survey import require_frozen
from orchestrator.errors import ResumePointError, TrainingError
from orchestrator.history.sentences import count
from orchestrator.launch.replay.replay_history import History
from orchestrator.planning import batches
from orchestrator.planning.schedule import learning_rate
from orchestrator.records.batches import BatchSlice, StepRange
from orchestrator.records.steps import StepRecord

if TYPE_CHECKING:
    import torch

    from orchestrator.data.feed.local_feed import InProcessFeed
    from orchestrator.trainer.gradient.gradient_invariant import InvariantGradient
    from orchestrator.trainer.state.train_state import TrainState


# the fields of a step's record that must be reproduced exactly
COMPARED = ("consumed_samples", "consumed_tokens", "target_tokens", "digest", "loss", "grad_norm", "lr")
SAY_EVERY_S = 10.0


@contextmanager
def retrained(history: History, say: Callable[[str], None]) -> Iterator[Retraining]:
    """A worker that has trained up to the target. Restores torch's settings afterwards."""
    import torch

    from orchestrator.trainer.model.build_model import set_determinism

    regime = history.first_regime()
    device = torch.device("cuda" if regime.config.cluster.use_gpu and torch.cuda.is_available() else "cpu")
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    set_determinism(True, device)
    try:
        begin = history.begin.name if history.begin else "the first weights"
        steps = count(len(history.records), "step")
        say(f"training {steps} again, from {begin} to step {history.target.step:,}")
        walk = Retraining(history, device)
        try:
            walk.go(say)
            yield walk
        finally:
            walk.close()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


class Retraining:
    """One worker that trains the steps of a history again."""

    def __init__(self, history: History, device: torch.device) -> None:
        from orchestrator.checkpoint.points.rank_files import CommittedFiles
        from orchestrator.trainer.loading.loading import load

        self._history, self._device = history, device
        begin, self.notes = history.begin, list[str]()
        self.steps_compared = 0
        self.first_difference: dict[str, Any] | None = None
        self._regime = history.first_regime()
        self._feed: InProcessFeed | None = None
        self._enter()
        if begin is None:
            self.state.initialise()
        else:
            load(self.state.items(), begin.name, CommittedFiles(history.store.storage))
            self.state.filled()
            self.state.cursor = begin.cursor

    def go(self, say: Callable[[str], None]) -> None:
        """Trains up to the target. Reports its progress at most every `SAY_EVERY_S`."""
        records, target, said = self._history.records, self._history.target.step, time.monotonic()
        for done, record in enumerate(records, 1):
            self._change_to(record.attempt)
            self.state.cursor = self._history.carried(self.state.cursor, self._regime.sources)
            self._step(record)
            if done < len(records) and time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                say(f"step {record.step:,} of {target:,}, {count(done, 'step')} trained again so far")

    def digest(self) -> str:
        """The digest of the current weights."""
        from orchestrator.trainer.loading.loading import digest_of

        return digest_of(self.state.items())

    def next_batch(self) -> BatchSlice | None:
        """The whole batch of the next step."""
        self._change_to(self._history.next_attempt())
        here = self.state.cursor
        self.state.cursor = self._history.carried(here, self._regime.sources)
        step = self._range()
        batch = None if step is None else self._get(step)
        self.state.cursor = here
        return batch if batch is not None and batch.step.num_samples else None

    def close(self) -> None:
        """Closes the feed."""
        if self._feed is not None:
            self._feed.close()

    # ------------------------------------------------------------------------------------------------ inside
    def _change_to(self, attempt: int) -> None:
        regime, old = self._history.regime(attempt), self._regime
        if regime.trains_as(old):
            return
        before, self._regime = self.state, regime
        self._enter()
        for mine, theirs in zip(self.state.items(), before.items(), strict=True):
            mine.tensor.copy_(theirs.tensor)
        self.state.filled()
        self.state.cursor = before.cursor

    def _enter(self) -> None:
        """A state, a gradient and a feed for the regime."""
        from orchestrator.data.dataset import prepare_trained
        from orchestrator.data.feed.local_feed import InProcessFeed
        from orchestrator.trainer.gradient.gradient_invariant import InvariantGradient
        from orchestrator.trainer.state.train_state import TrainState

        config, history = self._regime.config, self._history
        if not self.notes:
            self.notes += notes_on(config)
        self.state: TrainState = TrainState(config.model, config.train, self._device, True)
        self._gradient: InvariantGradient = InvariantGradient(
            self.state.model, config.train.seed, config.train.precision
        )
        self._gradient.enter(0, 1)
        spec = prepare_trained(config, history.store.storage, self._regime.sources)
        require_frozen(history.seen, spec)
        self.close()
        self._feed = InProcessFeed(spec.made_by(history.seen.encoders), config.data.replay_bytes)

    def _range(self) -> StepRange | None:
        config, cursor = self._regime.config, self.state.cursor
        return batches.next_range(
            cursor.consumed_samples,
            cursor.consumed_tokens,
            config.train.global_batch_size,
            config.pack.seq_len,
            self._regime.budgets.stop_tokens,
            self._regime.budgets.stop_samples,
        )

    def _get(self, step: StepRange) -> BatchSlice:
        assert self._feed is not None, "a walk has a feed"
        return self._feed.get(step, 0, 1, self._regime.config.train.micro_batch_size, self.state.cursor)

    def _step(self, record: StepRecord) -> None:
        from orchestrator.planning.digest import batch_digest
        from orchestrator.trainer.gradient.micro_batches import cut
        from orchestrator.trainer.interfaces.step_summary import RankContribution, StepSummary
        from orchestrator.trainer.model.build_model import NO_LOSS

        train, step = self._regime.config.train, self._range()
        batch = None if step is None else self._get(step)
        if batch is None or batch.cursor.consumed_tokens != record.consumed_tokens:
            there = batch.cursor.consumed_tokens if batch is not None else self.state.cursor.consumed_tokens
            raise ResumePointError(
                f"step {record.step} ended at {record.consumed_tokens:,} tokens, its attempt's configuration "
                f"gives {there:,}: the journal lacks steps before it, or was altered; `orchestrator audit` "
                "reports which",
                code="journal.lacks_steps",
            )
        by_document = self._regime.config.pack.attends_by_document
        micros = cut(batch, train.micro_batch_size, 0, 1, self._device, by_document)
        num_micro = batches.num_micro_batches(batch.step.num_samples, train.micro_batch_size)
        loss = self._gradient.reduce(micros, num_micro, batch.step_targets)
        norm = self._gradient.clip(train.max_grad_norm)
        contribution = RankContribution(
            loss=loss,
            targets=int((batch.labels != NO_LOSS).sum()),
            samples=batch.stop - batch.start,
            digest=batch_digest(
                batch.first_index, batch.source_numbers, batch.input_ids, batch.labels, batch.document_ids
            ),
            data_wait_s=0.0,
            save_blocked_s=0.0,
            grad_norm=norm,
        )
        summary = StepSummary.unpack(contribution.pack(0, 1))
        if problem := summary.problem(1, batch):
            raise TrainingError(
                f"step {record.step} cannot be replayed: {problem}", code="training.step_refused"
            )
        lr = learning_rate(train, self._regime.budgets, batch.cursor.consumed_tokens)
        self.state.apply(lr, batch.step_targets)
        self.state.cursor = batch.cursor
        self._compare(record, summary.record(record.key, batch.cursor, lr, 0.0))

    def _compare(self, recorded: StepRecord, replayed: StepRecord) -> None:
        self.steps_compared += 1
        self.first_difference = self.first_difference or difference(recorded, replayed)


def difference(recorded: StepRecord, replayed: StepRecord) -> dict[str, Any] | None:
    """The first of `COMPARED` that was not reproduced, as `Replayed.first_difference`; None: all were."""
    for field in COMPARED:
        was, is_now = getattr(recorded, field), getattr(replayed, field)
        if repr(was) != repr(is_now):
            return {"step": recorded.step, "reason": f"{field} was {was!r}, replayed it is {is_now!r}"}
    return None


def notes_on(config: JobConfig) -> list[str]:
    """Why a replay of steps with this configuration need not be equal."""
    if not config.train.is_fast(config.cluster.use_gpu) and not config.cluster.use_gpu:
        return []
    return [
        "the run was trained with fast numerics, in shards or on GPUs: other orders of additions give other "
        "last bits, so that digests and losses need not be equal"
    ]
