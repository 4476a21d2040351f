"""The history before any state of a launch is what its records along the parents give."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.coordinator.machine.launch_history import LossTrail
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.records.steps import SKIP_CAUSES, LossHistory, StateKey, StepRecord

RECORD = StepRecord(
    attempt=3,
    generation=1,
    step=1,
    consumed_samples=0,
    consumed_tokens=0,
    target_tokens=0,
    loss=1.0,
    grad_norm=1.0,
    lr=1.0,
    digest="0" * 16,
    step_s=0.0,
    data_wait_s=0.0,
    save_blocked_s=0.0,
)
START = GenerationStart(
    attempt=3,
    generation=1,
    parent=None,
    step=0,
    consumed_samples=0,
    consumed_tokens=0,
    target_tokens=0,
    world_size=1,
    global_batch_size=1,
    seq_len=1,
)
LOSSES = st.one_of(st.none(), st.floats(0, 10))
CAUSES = st.sampled_from([None, None, *SKIP_CAUSES])


def record(key: StateKey, loss: float | None, skipped: str | None) -> StepRecord:
    return replace(
        RECORD,
        attempt=key.attempt,
        generation=key.generation,
        step=key.step,
        loss=loss,
        grad_norm=float(key.step),
        skipped=skipped,
    )


@given(data=st.data(), window=st.integers(0, 5))
def test_every_state_has_the_history_along_its_parents(data: st.DataObject, window: int) -> None:
    """Generations begin at any state of older ones, and records come in any order, also twice."""
    point = StateKey(attempt=2, generation=1, step=4)
    before = [
        record(replace(point, step=step), data.draw(LOSSES), data.draw(CAUSES)) for step in range(1, 5)
    ]
    base = LossHistory()
    for each in before:
        base = base.after(each, window)
    histories, starts, records = {point: base}, [], []
    for attempt, generation in ((3, 1), (3, 2), (4, 1)):
        parent = data.draw(st.sampled_from(sorted(histories)))
        start = replace(START, attempt=attempt, generation=generation, parent=parent, step=parent.step)
        starts.append(start)
        history = histories[parent]
        histories[StateKey(attempt=attempt, generation=generation, step=start.step)] = history
        for step in range(start.step + 1, start.step + 1 + data.draw(st.integers(0, 4))):
            key = StateKey(attempt=attempt, generation=generation, step=step)
            records.append(record(key, data.draw(LOSSES), data.draw(CAUSES)))
            history = history.after(records[-1], window)
            histories[key] = history
    trail = LossTrail(window, 3, before, starts[:1], [])
    for start in starts[1:]:
        trail.begun(start)
    for each in data.draw(st.permutations(records)):
        trail.recorded(each)
        trail.recorded(each)
    for key in data.draw(st.permutations(sorted(histories))):
        assert trail.at(key) == histories[key]
    assert trail.at(None) == base
