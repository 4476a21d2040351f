"""A run's state after any step, trained again from the newest resume point at or before it.

It runs in this process, on one worker, with the configuration that each step was trained with. The run is
only read. With invariant numerics the result is bitwise that of the run, whatever number of workers it had;
the journal and the points verify it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.launch.branch.point_query import PointQuery
from orchestrator.launch.replay.step_replay import ReplayHistory, retrained
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import BatchSlice

if TYPE_CHECKING:
    from torch import nn

    from orchestrator.trainer.state.train_state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The result of a replay.

    `from_point` is null if it began with the first weights. `point` is the resume point that it made, in the
    run `fork`; null without `--to-point`. `expected_digest` is what the run recorded at that step (null:
    nothing), `equal` whether the weights have it (null: unknown). `first_difference` is the first of the
    `steps_compared` whose record differs: `step`, `reason`.
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
    """A run's state after a step, for inspection.

    `model` is in training mode. `optimizer_state` has `steps`, and AdamW's `exp_avg` and `exp_avg_sq` by the
    names of their weights. `batch` is the whole batch of the next step (`input_ids`, `labels`: numpy int32,
    (samples, seq_len)), None if no step follows.
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

    `overrides` are of `monitor` only, which has no effect here; they are only parsed. Raises `ConfigError`
    for these, `RefusedError` for a step that the history does not have or has twice, `ResumePointError` if
    there is no place to begin or the journal has gaps, `DataIdentityError` if files have changed.
    """
    history = ReplayHistory(store, wanted)
    if overrides:
        parse_config(history.first_regime().config.to_json(), overrides)
    expected = history.expected_digest()
    with retrained(history, say) as walk:
        digest = walk.digest()
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
    moments: dict[str, dict[str, Any]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for item in state.items():
        moment, _, name = item.name.partition(".")
        if item.group == "optimizer" and moment in moments:
            moments[moment][name] = item.tensor
    return {"steps": state.optimizer_steps, **moments}
