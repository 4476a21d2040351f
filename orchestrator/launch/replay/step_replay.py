"""Trains the steps of a run's history again in this process, and compares each with its record.

`ReplayHistory` determines the point to begin at, the steps from there, and what each step was trained with.
The run is only read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.points.model_folders import as_read, without_folder
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.field_rules import in_todays_fields, nested
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.survey import Survey, require_frozen, survey
from orchestrator.errors import OtherFormatError, ResumePointError, TrainingError
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.claims.lineage import skips_of
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.sentences import count
from orchestrator.history.step_names import StepName, name_among
from orchestrator.launch.branch.point_query import PointQuery, Position, place, wanted_place
from orchestrator.planning import batches
from orchestrator.planning.loss_policy import REFUSED, judge, window_of
from orchestrator.planning.resume.source_lists import SourceLists, moved
from orchestrator.planning.schedule import Budgets, learning_rate
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import BatchSlice, LossHistory, StepRange, StepRecord
from orchestrator.storage.parallel import at_once

if TYPE_CHECKING:
    import torch

    from orchestrator.config.sections import ModelConfig
    from orchestrator.data.feed.local_feed import InProcessFeed
    from orchestrator.trainer.gradient.invariant import InvariantGradient
    from orchestrator.trainer.state.train_state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """What the steps of an attempt are trained with."""

    attempt: int
    config: JobConfig
    budgets: Budgets
    sources: tuple[SourceLists, ...]  # the lists that it reads

    @property
    def resets_optimizer(self) -> bool:
        """Whether the state of another optimizer begins anew."""
        return self.config.resume.optimizer == "reset"

    def trains_as(self, other: Regime) -> bool:
        """Whether both give the same steps."""
        sections = ("data", "pack", "model", "train")
        same = all(getattr(self.config, each) == getattr(other.config, each) for each in sections)
        return same and (self.budgets, self.sources) == (other.budgets, other.sources)


class ReplayHistory:
    """A run's history around a step: where to begin, the steps from there, and the regime of each."""

    def __init__(self, store: RunStore, wanted: PointQuery, overrides: Sequence[str] = ()) -> None:
        """`overrides` say where weights are now (`model_folders.names_weights`)."""
        self.store, self.seen, self._overrides = store, survey(store), overrides
        points = _readable(store, self.seen)
        self.target = _target(self.seen, wanted, points)
        self.target_name = name_among(self.target, self.seen.lineage.records)
        self._at_target = [p for p in points if place(p).tokens == self.target.tokens]
        self.begin = self._begin(points)
        tokens = place(self.begin).tokens if self.begin else 0
        self.before = [r for r in self.seen.lineage.records if r.consumed_tokens <= tokens]
        self.records = [
            r for r in self.seen.lineage.records if tokens < r.consumed_tokens <= self.target.tokens
        ]
        self._skips = skips_of(self.seen.lineage)
        self._regimes: dict[int, Regime] = {}
        self._configs = {
            event.attempt: event.fields["config"]
            for event in self.seen.journal.events
            if event.kind == EventKind.ATTEMPT
        }

    def carried(self, cursor: Cursor, sources: tuple[SourceLists, ...]) -> Cursor:
        """Where the step after `cursor` begins: after the samples that the history skips there, in the lists
        of its attempt.
        """
        for at in self._skips:
            cursor = at.skip.carry(cursor)
        return moved(sources, cursor)

    def regime(self, attempt: int) -> Regime:
        """The regime of an attempt that has trained. Raises `ResumePointError` if its files are missing."""
        if attempt not in self._regimes:
            parent, config = self.store.read_parent(attempt), self._configs.get(attempt)
            if not isinstance(parent, ClaimParent) or config is None:
                raise ResumePointError(
                    f"{self.store.storage.root}: attempt {attempt} cannot be replayed, because its parent "
                    "file or the beginning of its journal is gone; restore them",
                    code="history.attempt_incomplete",
                )
            flat = {**in_todays_fields(config), "resume.from": "latest"}
            self._regimes[attempt] = Regime(
                attempt=attempt,
                config=parse_config(nested(flat), self._overrides),
                budgets=parent.budgets or Budgets(),
                sources=parent.sources,
            )
        return self._regimes[attempt]

    def model_of(self, regime: Regime) -> ModelConfig:
        """The model of a regime, with paths at which its weights are read from here.

        Raises `RefusedError` as `model_folders.as_read`.
        """
        flat = in_todays_fields(self._configs[regime.attempt])
        model = as_read(self.store, regime.attempt, flat, regime.config.model, self._overrides)
        return model if self.begin is None else without_folder(model, self.store.storage, regime.attempt)

    def first_regime(self) -> Regime:
        """The regime of the first step to train, or, if there is none, of the one after the target."""
        return self.regime(self.records[0].attempt if self.records else self.next_attempt())

    def regimes(self) -> list[Regime]:
        """The regimes of all steps to train."""
        attempts = sorted({record.attempt for record in self.records})
        return [self.first_regime(), *map(self.regime, attempts)]

    def next_attempt(self) -> int:
        """The attempt that trained the step after the target, or would."""
        after = [r for r in self.seen.lineage.records if r.consumed_tokens > self.target.tokens]
        return after[0].attempt if after else max(self._configs)

    def expected_digest(self) -> str | None:
        """The digest that the run recorded of the weights at the target."""
        if self._at_target:
            return self._at_target[-1].commit.weights_digest
        keys = {
            (r.attempt, r.generation, r.step)
            for r in self.seen.lineage.records
            if r.consumed_tokens == self.target.tokens
        }
        for event in self.seen.journal.events:
            found = event.fields
            if (
                event.kind == EventKind.STATE_DIGEST
                and (event.attempt, found["generation"], found["step"]) in keys
            ):
                return str(found["weights_digest"])
        return None

    def _begin(self, points: Sequence[Point]) -> Point | None:
        """The newest whole point at or before the target; None: the first weights."""
        damages = []
        for point in sorted(points, key=lambda each: place(each).tokens, reverse=True):
            if place(point).tokens > self.target.tokens:
                continue
            if not (found := self.store.verify_point(point.name)):
                return point
            damages += found
        run = self.store.read_run()
        if run is not None and run.forked_from is not None:
            listed = "; ".join(map(str, damages)) or "it has none there"
            raise ResumePointError(
                f"step {self.target.step}: no resume point of this fork at or before it is whole: {listed}",
                code="point.none_healthy",
            )
        return None


def _readable(store: RunStore, seen: Survey) -> list[Point]:
    """The points of the history whose documents can be read. The others cannot be used for a replay."""

    def read(name: str) -> Point | None:
        try:
            return store.read_point(name)
        except OtherFormatError:
            raise  # it is whole
        except ResumePointError:
            return None

    return [point for point in at_once(store.storage, read, seen.points) if point is not None]


def _target(seen: Survey, wanted: PointQuery, points: Sequence[Point]) -> Position:
    if wanted.named_step == StepName(label=0) and not any(point.key.step == 0 for point in points):
        return Position(attempt=0, step=0, samples=0, tokens=0)
    found = wanted_place(wanted, seen.lineage.records, points)
    assert found is not None, "no point is named"
    return found


# the fields of a step's record that must be reproduced exactly
COMPARED = (
    *("consumed_samples", "consumed_tokens", "target_tokens", "digest", "loss", "grad_norm", "lr"),
    *("metrics", "skipped"),
)
SAY_EVERY_S = 10.0


@contextmanager
def retrained(history: ReplayHistory, say: Callable[[str], None]) -> Iterator[StepReplayer]:
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
        say(f"training {steps} again, from {begin} to step {history.target_name}")
        walk = StepReplayer(history, device)
        try:
            walk.go(say)
            yield walk
        finally:
            walk.close()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


class StepReplayer:
    """One worker that trains the steps of a history again."""

    def __init__(self, history: ReplayHistory, device: torch.device) -> None:
        from orchestrator.checkpoint.points.store import CommittedFiles
        from orchestrator.trainer.weights.state_tensors import Continues, load

        self._history, self._device = history, device
        begin, self.notes = history.begin, list[str]()
        self.steps_compared = 0
        self.first_difference: dict[str, Any] | None = None
        self._regime = history.first_regime()
        self._window = max(window_of(regime.config.train) for regime in history.regimes())
        self._losses = LossHistory()
        for record in history.before:
            self._losses = self._losses.after(record, self._window)
        self._feed: InProcessFeed | None = None
        self._enter()
        if begin is None:
            self.state.initialise()
        else:
            how = Continues(reset_optimizer=self._regime.resets_optimizer, fixed=self.state.fixed_digests())
            load(self.state.items(), begin.name, CommittedFiles(history.store.storage), how)
            self.state.filled()
            self.state.cursor = begin.cursor

    def go(self, say: Callable[[str], None]) -> None:
        """Trains up to the target. Reports its progress at most every `SAY_EVERY_S`."""
        records, target, said = self._history.records, self._history.target_name, time.monotonic()
        every_record = self._history.seen.lineage.records
        for done, record in enumerate(records, 1):
            self._change_to(record.attempt)
            self.state.cursor = self._history.carried(self.state.cursor, self._regime.sources)
            self._step(record)
            if done < len(records) and time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                name = name_among(record, every_record)
                say(f"step {name} of {target}, {count(done, 'step')} trained again so far")

    def digest(self) -> str:
        """The digest of the current weights."""
        from orchestrator.trainer.weights.state_tensors import digest_of

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
        from orchestrator.trainer.weights.state_tensors import copy_items

        regime, old = self._history.regime(attempt), self._regime
        if regime.trains_as(old):
            return
        before, self._regime = self.state, regime
        self._enter()
        copy_items(before.items(), self.state.items(), regime.resets_optimizer)
        self.state.filled()
        self.state.cursor = before.cursor

    def _enter(self) -> None:
        """A state, a gradient and a feed for the regime."""
        from orchestrator.data.dataset import prepare_trained
        from orchestrator.data.feed.local_feed import InProcessFeed
        from orchestrator.trainer.gradient.invariant import InvariantGradient
        from orchestrator.trainer.objective.objective import objective_of
        from orchestrator.trainer.objective.token_losses import TokenLosses
        from orchestrator.trainer.state.train_state import TrainState

        config, history = self._regime.config, self._history
        if not self.notes:
            self.notes += notes_on(config)
        run, model = history.store.read_run(), history.model_of(self._regime)
        by_name = run is not None and run.weights_by_name
        self.state: TrainState = TrainState(model, config.train, self._device, True, by_name)
        by_document, rows = config.pack.attends_by_document, config.data.rows_per_sample
        frozen = self.state.frozen.models
        self._objective = objective_of(config.train, by_document, config.pack.seq_len, frozen, rows)
        self._objective.prepare(self.state.model)
        self._gradient: InvariantGradient = InvariantGradient(self.state.model, self._objective)
        self._gradient.enter(0, 1)
        spec = prepare_trained(config, history.store.storage, self._regime.sources)
        sources = {each.number: each.name for each in spec.sources}
        self._gradient.token_losses = TokenLosses(sources, 0)
        require_frozen(history.seen, spec)
        self.close()
        self._feed = InProcessFeed(spec.made_by(history.seen.encoders), config.data.replay_bytes)

    def _range(self) -> StepRange | None:
        config, cursor = self._regime.config, self.state.cursor
        return batches.next_range(
            cursor.consumed_samples,
            cursor.consumed_tokens,
            config.train.global_batch_size,
            config.sample_len,
            self._regime.budgets.stop_tokens,
            self._regime.budgets.stop_samples,
        )

    def _get(self, step: StepRange) -> BatchSlice:
        assert self._feed is not None, "a walk has a feed"
        return self._feed.get(step, 0, 1, self._regime.config.train.micro_batch_size, self.state.cursor)

    def _step(self, record: StepRecord) -> None:
        from orchestrator.planning.digest import batch_digest
        from orchestrator.trainer.interfaces.step_summary import RankContribution, StepSummary
        from orchestrator.trainer.objective.micro_batches import NO_LOSS, StepPlace, cut
        from orchestrator.trainer.objective.objective import step_units

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
        micros, units = cut(batch, train.micro_batch_size, 0, 1, self._device), step_units(train, batch)
        num_micro = batches.num_micro_batches(batch.step.num_samples, train.micro_batch_size)
        place = StepPlace(step=record.step, consumed_tokens=self.state.cursor.consumed_tokens)
        sums = self._gradient.reduce(micros, num_micro, units, place)
        norm = self._gradient.clip(train.max_grad_norm)
        contribution = RankContribution(
            terms=sums.total(),
            targets=int((batch.labels != NO_LOSS).sum()),
            samples=batch.stop - batch.start,
            digest=batch_digest(
                batch.first_index, batch.source_numbers, batch.input_ids, batch.labels, batch.document_ids
            ),
            data_wait_s=0.0,
            save_blocked_s=0.0,
            grad_norm=norm,
        )
        summary = StepSummary.unpack(contribution.pack(0, 1), self._gradient.metric_names)
        wrong = summary.not_finite_text()
        problem = summary.mismatch(1, batch) or (wrong if record.skipped is None else None)
        if problem:
            raise TrainingError(f"step {record.step} cannot be replayed: {problem}", code=REFUSED)
        loss = summary.loss_per_unit(units)
        verdict = judge(train, self._losses, loss, summary.grad_norm, wrong)
        lr = learning_rate(train, self._regime.budgets, batch.cursor.consumed_tokens)
        self.state.apply(lr, 0 if record.skipped is not None else units)  # as the run did
        self.state.cursor = batch.cursor
        skipped = verdict.cause if verdict is not None else None
        self._losses = self._losses.after(record, self._window)
        self._compare(record, summary.record(record.key, batch.cursor, units, lr, 0.0, skipped=skipped))

    def _compare(self, recorded: StepRecord, replayed: StepRecord) -> None:
        self.steps_compared += 1
        self.first_difference = self.first_difference or difference(recorded, replayed)


def difference(recorded: StepRecord, replayed: StepRecord) -> dict[str, Any] | None:
    """The first of `COMPARED` that was not reproduced, as `Replayed.first_difference`; None: all were."""
    for field in COMPARED:
        was, is_now = getattr(recorded, field), getattr(replayed, field)
        if field == "metrics":  # an earlier version recorded fewer
            is_now = {name: (is_now or {}).get(name) for name in was} if was else was
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
