"""A run's state after any step, trained once more from the newest resume point at or before it: in this
process, on one worker, with the configuration that each step was trained with. The run is only read.

With invariant numerics the result is what the run held then, to the last bit, whatever number of workers it
had; the journal and the points say whether it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.config.stored import in_todays_fields, nested
from orchestrator.coordinator.survey import Survey, require_frozen, survey
from orchestrator.errors import ResumePointError, TrainingError
from orchestrator.history.claims import ClaimParent
from orchestrator.history.event_kinds import EventKind
from orchestrator.history.skips import skips_of
from orchestrator.launch.which_point import Position, Wanted, count, place, wanted_place
from orchestrator.planning import batches
from orchestrator.planning.manifests import SourceLists, moved
from orchestrator.planning.schedule import Budgets, learning_rate
from orchestrator.planning.weights_digest import is_of_format_1
from orchestrator.records.batches import BatchSlice, StepRange
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRecord
from orchestrator.resume.points import Point
from orchestrator.resume.store import RunStore

if TYPE_CHECKING:
    import torch
    from torch import nn

    from orchestrator.data.feed.local_feed import InProcessFeed
    from orchestrator.trainer.gradient_invariant import InvariantGradient
    from orchestrator.trainer.state import TrainState

# what of a step's record must come out again, to the last bit
COMPARED = ("consumed_samples", "consumed_tokens", "target_tokens", "digest", "loss", "grad_norm", "lr")
SAY_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What a replay found. `from_point` is null where it began with the first weights. `point` is the resume
    point that it made, in the run `fork`; null without `--to-point`.

    `expected_digest` is what the run recorded at that step (null: nothing), `equal` whether the weights have
    it (null: unknown). `first_difference` is the first of the `steps_compared` whose record differs: `step`,
    `reason`.
    """

    run: str
    step: int
    from_point: str | None
    point: str | None
    weights_digest: str
    expected_digest: str | None
    equal: bool | None
    steps_compared: int
    first_difference: dict[str, Any] | None
    notes: tuple[str, ...]
    fork: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The document of `replay --json`."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateAt:
    """A run's state after a step, to look into it. `model` is in training mode; `optimizer_state` has
    `steps`, and AdamW's `exp_avg` and `exp_avg_sq` by the names of their weights. `batch` is the whole batch
    of the next step (`input_ids`, `labels`: numpy int32, (samples, seq_len)), None where nothing follows.
    """

    step: int
    model: nn.Module
    optimizer_state: dict[str, Any]
    batch: BatchSlice | None
    cursor: Cursor
    weights_digest: str
    from_point: str | None

    def __repr__(self) -> str:
        """Without the tensors themselves."""
        moments = [each for each in self.optimizer_state.values() if isinstance(each, dict)]
        tensors = len(self.model.state_dict()) + sum(map(len, moments))
        return (
            f"StateAt(step={self.step:,}, tokens={self.cursor.consumed_tokens:,}, "
            f"weights_digest={self.weights_digest!r}, from_point={self.from_point!r}, {tensors} tensors)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """What the steps of an attempt are trained with."""

    config: JobConfig
    budgets: Budgets
    sources: tuple[SourceLists, ...]  # which lists it reads

    def trains_as(self, other: Regime) -> bool:
        """Whether the same steps come out of both."""
        sections = ("data", "pack", "model", "train")
        same = all(getattr(self.config, each) == getattr(other.config, each) for each in sections)
        return same and (self.budgets, self.sources) == (other.budgets, other.sources)


def replay(
    store: RunStore,
    wanted: Wanted,
    run: str = "",
    say: Callable[[str], None] = lambda text: None,
    overrides: Sequence[str] = (),
) -> Replayed:
    """Trains up to the wanted step (or the last one that ends within so many tokens) once more and compares.
    `overrides` are of `monitor` alone, which means nothing here; they are only read. Raises `ConfigError` for
    these, `RefusedError` for a step that the history does not have or has twice, `ResumePointError` where it
    cannot begin anywhere or the journal has gaps, `DataIdentityError` if files have changed.
    """
    history = History(store, wanted)
    if overrides:
        parse_config(history.first_regime().config.to_json(), overrides)
    expected = history.expected_digest()
    with _walked(history, say) as walk:
        digest = walk.digest(like=expected)
    return Replayed(
        run=run or store.storage.root,
        step=history.target.step,
        from_point=history.begin.name if history.begin else None,
        point=None,
        weights_digest=digest,
        expected_digest=expected,
        equal=None if expected is None else expected == digest,
        steps_compared=walk.steps_compared,
        first_difference=walk.first_difference,
        notes=tuple(walk.notes),
    )


def state_at(store: RunStore, wanted: Wanted, say: Callable[[str], None] = lambda text: None) -> StateAt:
    """The state after the wanted step, and the batch of the next one. Raises as `replay`."""
    history = History(store, wanted)
    with _walked(history, say) as walk:
        return StateAt(
            step=history.target.step,
            model=walk.state.model,
            optimizer_state=_optimizer_state(walk.state),
            batch=walk.next_batch(),
            cursor=walk.state.cursor,
            weights_digest=walk.digest(like=history.expected_digest()),
            from_point=history.begin.name if history.begin else None,
        )


class History:
    """A run's history around a step: where to begin, the steps from there, and with what each was trained."""

    def __init__(self, store: RunStore, wanted: Wanted) -> None:
        self.store, self.seen = store, survey(store)
        points = _readable(store, self.seen)
        self.target = _target(self.seen, wanted, points)
        self._at_target = [p for p in points if place(p).tokens == self.target.tokens]
        self.begin = self._begin(points)
        tokens = place(self.begin).tokens if self.begin else 0
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
        """Where the step after `cursor` begins: behind what the history skips there, in the lists that its
        attempt reads.
        """
        for at in self._skips:
            cursor = at.skip.carry(cursor)
        return moved(sources, cursor)

    def regime(self, attempt: int) -> Regime:
        """Of an attempt that has trained. Raises `ResumePointError` where its files are gone."""
        if attempt not in self._regimes:
            parent, config = self.store.read_parent(attempt), self._configs.get(attempt)
            if not isinstance(parent, ClaimParent) or config is None:
                raise ResumePointError(
                    f"{self.store.storage.root}: attempt {attempt} cannot be replayed, its parent file or "
                    "the begin of "
                    "its journal is gone; restore them"
                )
            flat = {**in_todays_fields(config), "resume.from": "latest"}
            self._regimes[attempt] = Regime(
                config=parse_config(nested(flat)),
                budgets=parent.budgets or Budgets(),
                sources=parent.sources,
            )
        return self._regimes[attempt]

    def first_regime(self) -> Regime:
        """Of the first step to train, or, where there is none, of the one after the target."""
        return self.regime(self.records[0].attempt if self.records else self.next_attempt())

    def next_attempt(self) -> int:
        """That which trained the step after the target, or would."""
        after = [r for r in self.seen.lineage.records if r.consumed_tokens > self.target.tokens]
        return after[0].attempt if after else max(self._configs)

    def expected_digest(self) -> str | None:
        """What the run recorded of the weights at the target."""
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
            listed = "; ".join(map(str, damages)) or "there is none"
            raise ResumePointError(
                f"step {self.target.step}: no whole resume point of this fork lies at or before it: {listed}"
            )
        return None


class _Walk:
    """One worker that trains the steps of a history again."""

    def __init__(self, history: History, device: torch.device) -> None:
        from orchestrator.resume.committed import CommittedFiles
        from orchestrator.trainer.loading import load

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
        """Trains up to the target; says how far it is, at most every `SAY_EVERY_S`."""
        records, target, said = self._history.records, self._history.target.step, time.monotonic()
        for done, record in enumerate(records, 1):
            self._change_to(record.attempt)
            self.state.cursor = self._history.carried(self.state.cursor, self._regime.sources)
            self._step(record)
            if done < len(records) and time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                say(f"step {record.step:,} of {target:,}, {count(done, 'step')} trained again so far")

    def digest(self, like: str | None = None) -> str:
        """Of the weights now, of the kind that `like` is: runs of format 1 noted another one."""
        from orchestrator.trainer.loading import digest_of, digest_of_format_1

        of_format_1 = like is not None and is_of_format_1(like)
        return (digest_of_format_1 if of_format_1 else digest_of)(self.state.items())

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
        """Ends the feed."""
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
        from orchestrator.data.feed.local_feed import InProcessFeed
        from orchestrator.data.preparing import prepare_trained
        from orchestrator.trainer.gradient_invariant import InvariantGradient
        from orchestrator.trainer.state import TrainState

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
        from orchestrator.trainer.gradient import cut
        from orchestrator.trainer.model import NO_LOSS
        from orchestrator.trainer.step_summary import RankContribution, StepSummary

        train, step = self._regime.config.train, self._range()
        batch = None if step is None else self._get(step)
        if batch is None or batch.cursor.consumed_tokens != record.consumed_tokens:
            there = batch.cursor.consumed_tokens if batch is not None else self.state.cursor.consumed_tokens
            raise ResumePointError(
                f"step {record.step} ended at {record.consumed_tokens:,} tokens, its attempt's configuration "
                "gives "
                f"{there:,}: the journal lacks steps before it, or was altered; `orchestrator audit` says "
                "which"
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
            raise TrainingError(f"step {record.step} cannot be replayed: {problem}")
        lr = learning_rate(train, self._regime.budgets, batch.cursor.consumed_tokens)
        self.state.apply(lr)
        self.state.cursor = batch.cursor
        self._compare(record, summary.record(record.key, batch.cursor, lr, 0.0))

    def _compare(self, recorded: StepRecord, replayed: StepRecord) -> None:
        self.steps_compared += 1
        self.first_difference = self.first_difference or difference(recorded, replayed)


def difference(recorded: StepRecord, replayed: StepRecord) -> dict[str, Any] | None:
    """The first of `COMPARED` that did not come out again, as `Replayed.first_difference`; None: all did."""
    for field in COMPARED:
        was, is_now = getattr(recorded, field), getattr(replayed, field)
        if repr(was) != repr(is_now):
            return {"step": recorded.step, "reason": f"{field} was {was!r}, replayed it is {is_now!r}"}
    return None


def notes_on(config: JobConfig) -> list[str]:
    """Why a replay of steps that were trained so need not come out equal."""
    if not config.train.is_fast(config.cluster.use_gpu) and not config.cluster.use_gpu:
        return []
    return [
        "the run was trained with fast numerics, in shards or on GPUs: other orders of additions give other "
        "last bits, so that digests and losses need not be equal"
    ]


@contextmanager
def _walked(history: History, say: Callable[[str], None]) -> Iterator[_Walk]:
    """A worker that has trained up to the target; torch is set as it was afterwards."""
    import torch

    from orchestrator.trainer.model import set_determinism

    regime = history.first_regime()
    device = torch.device("cuda" if regime.config.cluster.use_gpu and torch.cuda.is_available() else "cpu")
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    set_determinism(True, device)
    try:
        begin = history.begin.name if history.begin else "the first weights"
        steps = count(len(history.records), "step")
        say(f"training {steps} again, from {begin} to step {history.target.step:,}")
        walk = _Walk(history, device)
        try:
            walk.go(say)
            yield walk
        finally:
            walk.close()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


def _readable(store: RunStore, seen: Survey) -> list[Point]:
    """The points of the history whose documents can be read; the others serve no replay."""
    found = []
    for name in seen.points:
        with suppress(ResumePointError):
            found.append(store.read_point(name))
    return found


def _target(seen: Survey, wanted: Wanted, points: Sequence[Point]) -> Position:
    if wanted.step == 0 and not any(point.key.step == 0 for point in points):
        return Position(step=0, samples=0, tokens=0)
    found = wanted_place(wanted, seen.lineage.records, points)
    assert found is not None, "no point is named"
    return found


def _optimizer_state(state: TrainState) -> dict[str, Any]:
    moments: dict[str, dict[str, Any]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for item in state.items():
        moment, _, name = item.name.partition(".")
        if item.group == "optimizer" and moment in moments:
            moments[moment][name] = item.tensor
    return {"steps": state.optimizer_steps, **moments}
