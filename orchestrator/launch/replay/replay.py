"""A run's state after any step, trained again from the newest resume point at or before it.

`replay` trains in this process, on one worker, with the configuration that each step was trained with. With
invariant numerics the result is bitwise that of the run, whatever number of workers it had; the journal and
the points verify it. `replay_as_run` trains in a launch, on any number of workers. The launch is a fork that
stops at the wanted step and stays (a resume point of any step), or a fork in its own folder that is removed
afterwards.
The run is only read, except for the pin on the point of a fork that stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.points.model_folders import located, names_weights
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.field_rules import nested
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.survey import Survey, survey
from orchestrator.data.frozen import copy_frozen
from orchestrator.errors import RefusedError, ResumePointError, TrainingError
from orchestrator.history.numbered_files import asker
from orchestrator.launch.api import plan, train_until
from orchestrator.launch.branch.fork import fork
from orchestrator.launch.branch.point_query import PointQuery, place
from orchestrator.launch.branch.temporary_runs import remove_left, scratch
from orchestrator.launch.replay.step_replay import Regime, ReplayHistory, difference, notes_on, retrained
from orchestrator.launch.start import attempt_claim
from orchestrator.launch.start import run_preparation as starting
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import BatchSlice
from orchestrator.storage.open import absolute, split

if TYPE_CHECKING:
    from torch import nn

    from orchestrator.trainer.state.train_state import TrainState

@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The result of a replay.

    `step` is the label, `name` the name that only this step has (`105` or `a2:105`).
    `from_point` is null if it began with the first weights. `point` is the resume point that it made, in the
    run `fork`; null without `--to-point`. `expected_digest` is what the run recorded at that step (null:
    nothing), `equal` whether the weights have it (null: unknown). `first_difference` is the first of the
    `steps_compared` whose record differs: `step`, `reason`.
    """

    run: str
    step: int
    name: str
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
    """A run's state after a step, for inspection.

    `model` is in training mode. `optimizer_state` has `steps`, and the optimizer's tensors (AdamW's `exp_avg`
    and `exp_avg_sq`) by the names of their weights. `batch` is the whole batch of the next step (`input_ids`,
    `labels`: numpy int32, (samples, seq_len)), None if no step follows.
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


def replay(
    store: RunStore,
    wanted: PointQuery,
    run: str = "",
    say: Callable[[str], None] = lambda text: None,
    overrides: Sequence[str] = (),
) -> Replayed:
    """Trains again up to the wanted step (or the last one that ends within that many tokens) and compares.

    `overrides` say where weights are now, or are of `monitor`, which has no effect here. Raises `ConfigError`
    for these, `RefusedError` for a step that the history does not have or has twice, `ResumePointError` if
    there is no place to begin or the journal has gaps, `DataIdentityError` if files have changed.
    """
    history = ReplayHistory(store, wanted, list(filter(names_weights, overrides)))
    if overrides:
        parse_config(history.first_regime().config.to_json(), overrides)
    expected = history.expected_digest()
    with retrained(history, say) as walk:
        digest = walk.digest()
    return Replayed(
        run=run or store.storage.root,
        step=history.target.step,
        name=history.target_name,
        from_point=history.begin.name if history.begin else None,
        point=None,
        weights_digest=digest,
        expected_digest=expected,
        equal=None if expected is None else expected == digest,
        steps_compared=walk.steps_compared,
        first_difference=walk.first_difference,
        notes=tuple(walk.notes),
    )


def state_at(store: RunStore, wanted: PointQuery, say: Callable[[str], None] = lambda text: None) -> StateAt:
    """The state after the wanted step, and the batch of the next one. Raises as `replay`."""
    history = ReplayHistory(store, wanted)
    with retrained(history, say) as walk:
        return StateAt(
            step=history.target.step,
            model=walk.state.model,
            optimizer_state=_optimizer_state(walk.state),
            batch=walk.next_batch(),
            cursor=walk.state.cursor,
            weights_digest=walk.digest(),
            from_point=history.begin.name if history.begin else None,
        )


def _optimizer_state(state: TrainState) -> dict[str, Any]:
    return {"steps": state.optimizer_steps, **state.optimizer_state()}


# a launch of the replay saves only at its end, and serves nothing beside it
_QUIET = {
    "resume.from": "latest",
    "resume.every_steps": None,
    "resume.every_minutes": None,
    "resume.export_every": None,
    "monitor.dashboard": False,
}


def needs_a_launch(overrides: Sequence[str]) -> bool:
    """Whether some of the overrides affect only a launch.

    Raises `RefusedError` for one that may change what is trained, with its field's name.
    """
    keys = [override.partition("=")[0].strip() for override in overrides]
    for key in keys:
        why = "it affects what is trained, or which run this is"
        if names_weights(f"{key}="):
            continue
        if key == "cluster.use_gpu":
            why = "GPUs add in another order than CPUs, so that the last bits differ"
        elif key == "data.num_tokenizers" or key.startswith(("cluster.", "monitor.")):
            continue
        raise RefusedError(
            f"a replay cannot change {key}: {why}. It accepts cluster.* (without use_gpu), monitor.*, "
            "data.num_tokenizers and the places of weights (model.pretrained, "
            "model.frozen.NAME.pretrained); to continue with another value, fork the run",
            code="command.override_not_allowed",
        )
    return any(not key.startswith("monitor.") and not names_weights(f"{key}=") for key in keys)


def replay_as_run(
    store: RunStore,
    wanted: PointQuery,
    overrides: Sequence[str] = (),
    to_point: str | None = None,
    run: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Replayed:
    """Trains again up to the wanted step, with the run's own configuration of those steps and the overrides.

    Compares the result. `to_point` is the run that is made and keeps the point. An existing fork there is
    continued, so that the same command may be repeated. Raises as `replay` and `train`. Also raises
    `RefusedError` for overrides that change what is trained and for another run at `to_point`, and
    `TrainingError` if a launch ended before the step (`KeyboardInterrupt` if it was stopped).
    """
    needs_a_launch(overrides)
    history = ReplayHistory(store, wanted)
    if history.begin is None and not history.records:
        raise RefusedError(
            "step 0 without a resume point has nothing to train: any new run of the same configuration "
            "begins with these weights",
            code="command.nothing_to_train",
        )
    remove_left(store, say)
    if to_point is None:
        with scratch(store, say) as folder:
            return _replayed(history, folder, overrides, run, say, stays=None)
    return _replayed(history, absolute(to_point), overrides, run, say, stays=to_point)


def _replayed(
    history: ReplayHistory,
    folder: str,
    overrides: Sequence[str],
    run: str,
    say: Callable[[str], None],
    stays: str | None,
) -> Replayed:
    store, target, begin = history.store, history.target, history.begin
    new = RunStore(store.storage.beside(folder))
    segments = _segments(history)
    jobs = [(_job(history, regime, folder, overrides), regime, until) for regime, until in segments]
    _begin(history, new, jobs[0][0] if jobs else None, say, stays is not None)
    for job, regime, until in jobs:
        if _newest(new) < until:
            _train(job, regime, until, target.step)
    seen = survey(new)
    point = _point_at(new, seen, target.tokens)
    start = place(begin).tokens if begin else 0
    trained = [r for r in seen.lineage.records if start < r.consumed_tokens <= target.tokens]
    pairs = list(zip(history.records, trained, strict=False))
    if history.seen.lineage.holes:  # the records of some steps are lost
        known = {record.consumed_tokens: record for record in history.records}
        pairs = [(known[r.consumed_tokens], r) for r in trained if r.consumed_tokens in known]
    differences = [found for pair in pairs if (found := difference(*pair)) is not None]
    expected = history.expected_digest()
    digest = point.commit.weights_digest
    return Replayed(
        run=run or store.storage.root,
        step=target.step,
        name=history.target_name,
        from_point=begin.name if begin else None,
        point=point.name if stays else None,
        fork=stays,
        weights_digest=digest,
        expected_digest=expected,
        equal=None if expected is None else expected == digest,
        steps_compared=len(pairs),
        first_difference=differences[0] if differences else None,
        notes=tuple(dict.fromkeys(note for regime, _ in segments for note in notes_on(regime.config))),
    )


def _segments(history: ReplayHistory) -> list[tuple[Regime, int]]:
    """The regimes of the steps, in order, each with its end in tokens."""
    found: list[tuple[Regime, int]] = []
    for record in history.records:
        regime = history.regime(record.attempt)
        if found and found[-1][0].trains_as(regime):
            found.pop()
        found.append((regime, record.consumed_tokens))
    return found


def _job(history: ReplayHistory, regime: Regime, folder: str, overrides: Sequence[str]) -> JobConfig:
    storage, name = split(folder)
    flat = {**regime.config.flat(), **_QUIET, "run.name": name, "run.storage": storage}
    job = parse_config(nested(flat), overrides)
    if history.begin is not None:  # a fork finds the weights by what its run has recorded
        return job
    return job.model_copy(update={"model": located(job.model, history.store, recorded_first=True)})


def _begin(
    history: ReplayHistory, new: RunStore, job: JobConfig | None, say: Callable[[str], None], stays: bool
) -> None:
    """Begins the fork; from the first weights, a separate run with the same frozen data, for the first `job`.

    Only a fork that stays pins its point. A removed one would have to remove the pin, which others may need
    by then.
    """
    store, folder = history.store, new.storage.root
    if history.begin is not None:
        fork(
            store, folder, PointQuery(point=history.begin.name), asker(), lambda plan: True, say, pinned=stays
        )
        return
    if starting.find_run(new) is not None:
        raise RefusedError(
            f"{folder} is a run already, but step {history.target.step} is trained from the first weights, "
            "by a new run; take another name",
            code="run.exists",
        )
    run = store.read_run()
    assert run is not None, "its history was read"
    assert job is not None, "from the first weights there is something to train"
    if run.first_weights != attempt_claim.first_weights_of(new, job, say):
        raise RefusedError(
            f"{store.storage.root} began with the weights {run.first_weights or 'that the seed gives'}, and "
            f"model.init_from={job.model.init_from} holds other weights now; put the files back",
            code="weights.changed",
        )
    copy_frozen(store.storage, new.storage)
    new.create_run(job.run.name, run.identity, run.first_weights, weights_by_name=run.weights_by_name)


def _train(job: JobConfig, regime: Regime, until: int, step: int) -> None:
    found = plan(job)
    if found.action == "refuse":
        raise found.refusal
    if found.budgets != regime.budgets:
        raise RefusedError(
            f"a launch cannot train step {step} again: the run's budgets were {regime.budgets}, and would be "
            f"{found.budgets} now, which gives other steps and learning rates; a replay without --to-point "
            "and cluster.* uses the recorded budgets",
            code="resume.budgets_differ",
        )
    result = train_until(job, until)
    if result.outcome == "stopped" and result.consumed_tokens != until:
        raise KeyboardInterrupt(f"interrupted: the replay was stopped before step {step} ({result.reason})")
    if result.outcome == "failed" or result.consumed_tokens != until:
        raise TrainingError(
            f"the replay ended at {result.consumed_tokens:,} of {until:,} tokens, before step {step}: "
            f"{result.outcome}, {result.reason}",
            code=result.code or "training.replay_ended_early",
        )


def _newest(new: RunStore) -> int:
    """The tokens of the newest point."""
    seen = survey(new)
    return place(new.read_point(seen.points[-1])).tokens if seen.points else 0


def _point_at(new: RunStore, seen: Survey, tokens: int) -> Point:
    points = [new.read_point(name) for name in reversed(seen.points)]
    for point in points:
        if place(point).tokens == tokens:
            return point
    there = ", ".join(f"{point.name} ({place(point).tokens:,} tokens)" for point in points) or "none"
    raise ResumePointError(
        f"{new.storage.root} has no resume point at {tokens:,} tokens; it has: {there}. This run was trained "
        "beyond that before; take another name",
        code="run.trained_beyond",
    )
