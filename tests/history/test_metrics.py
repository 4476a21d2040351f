"""Metrics: what they are worth, where they go, and that TensorBoard shows the history that counts."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.metrics import metric_log
from orchestrator.history.metrics.declared import METRICS, Meter, Sample
from orchestrator.history.metrics.metric_log import FOLDER, EventFile, MetricLog, TensorBoard, crc32c
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.storage.files import Storage

STEP_TOKENS = 64
NOW = 1_000_000.0
PER_STEP = tuple(name for name, metric in METRICS.items() if metric.per_step)


def formed(attempt: int, generation: int, step: int, world_size: int = 2) -> GenerationStart:
    tokens = STEP_TOKENS * step
    return GenerationStart(
        attempt=attempt,
        generation=generation,
        parent=StateKey(attempt=attempt, generation=generation - 1, step=step) if step else None,
        step=step,
        consumed_samples=step,
        consumed_tokens=tokens,
        target_tokens=tokens,
        world_size=world_size,
        global_batch_size=1,
        seq_len=STEP_TOKENS,
    )


def trained(attempt: int, generation: int, step: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(
        attempt=attempt,
        generation=generation,
        step=step,
        consumed_samples=step,
        consumed_tokens=STEP_TOKENS * step,
        target_tokens=STEP_TOKENS * step,
        loss=loss,
        grad_norm=0.5,
        lr=1e-3,
        digest="0" * 16,
        step_s=0.5,
        data_wait_s=0.1,
        peak_memory_bytes=2048,
        mfu=0.25,
        save_blocked_s=0.0,
    )


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader has: by tag, (consumed tokens, value)."""
    seen = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    seen.Reload()
    tags = seen.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in seen.Scalars(tag)] for tag in tags}


# ------------------------------------------------------------ what they are worth
def test_every_value_of_a_sample_is_a_declared_metric() -> None:
    meter = Meter()
    samples = [
        meter.generation(formed(1, 1, 0)),
        meter.step(trained(1, 1, 1), NOW),
        meter.event(EventKind.POINT_COMMITTED, {"cursor": {"consumed_tokens": 64}}, NOW),
        meter.step(replace(trained(1, 1, 2), skipped="spike"), NOW),
        meter.event(EventKind.GROUP_FORMED, {"wanted": 3, "lost": [1, 2], "step": 4, "step_before": 6}, NOW),
        *(meter.event(kind, {}, NOW) for kind in (EventKind.FAILURE, EventKind.END, EventKind.SAVE_GIVEN_UP)),
        *(meter.event(kind, {}, NOW) for kind in (EventKind.DAMAGED_POINT, EventKind.BAD_DOCUMENT)),
    ]
    values = [dict(sample.values) for sample in samples if sample is not None]
    assert {name for each in values for name in each} == set(METRICS)
    assert values[1] == {
        "loss": 1.0,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens_per_s": 128.0,
        "tokens_per_s_per_worker": 64.0,
        "mfu": 0.25,
        "step_s": 0.5,
        "data_wait_s": 0.1,
        "save_blocked_s": 0.0,
        "peak_memory_bytes": 2048,
        "world_size": 2,
        "step": 1,
        "consumed_tokens": 64,
        "consumed_samples": 1,
        "tokens_at_risk": 64,
        "last_step_time": NOW,
        "steps": 1,
    }
    assert values[2] == {"points_committed": 1, "last_point_time": NOW, "tokens_at_risk": 0}
    assert values[3]["steps_skipped"] == 1
    assert values[4] == {"workers_wanted": 3, "workers_lost": 2, "steps_repeated": 2}


def test_the_metrics_of_an_objective_are_stored_with_the_step() -> None:
    meter = Meter()
    meter.generation(formed(1, 1, 0))
    plain = Meter()
    plain.generation(formed(1, 1, 0))
    own = replace(trained(1, 1, 1), metrics={"z_loss": 0.25, "nothing": None})
    found, before = meter.step(own, NOW), plain.step(trained(1, 1, 1), NOW)
    assert found is not None
    assert before is not None
    assert found.per_step == {**before.per_step, "z_loss": 0.25}
    assert before.per_step.keys() == set(PER_STEP)


def test_an_event_that_changes_nothing_is_no_sample() -> None:
    assert Meter().event(EventKind.CURSOR, {"cursor": {}}, NOW) is None


def test_a_resumed_attempt_has_at_risk_what_comes_after_its_point() -> None:
    meter = Meter(saved_tokens=10 * STEP_TOKENS)
    assert meter.generation(formed(2, 1, 10)).values["tokens_at_risk"] == 0
    sample = meter.step(trained(2, 1, 11), NOW)
    assert sample is not None
    assert sample.values["tokens_at_risk"] == STEP_TOKENS


def test_a_speed_is_known_only_where_the_step_before_is() -> None:
    meter = Meter()
    meter.generation(formed(1, 1, 0))
    sample = meter.step(trained(1, 1, 3), NOW)
    assert sample is not None
    assert "tokens_per_s" not in sample.values


# ------------------------------------------------------------ TensorBoard shows the history
Steps = st.integers(0, 4)
Histories = st.lists(st.tuples(st.booleans(), st.integers(0, 30), Steps, Steps), min_size=1, max_size=6)


@settings(max_examples=40)
@given(histories=Histories)
def test_tensorboard_shows_each_step_of_the_history_once_and_nothing_of_what_was_rewound(
    histories: list[tuple[bool, int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each part: whether a new attempt begins, how many steps its group goes back, how many it trains, and
    how many of the group before it are reported too late.
    """
    folder = tmp_path_factory.mktemp("run")
    attempt, generation, history = 1, 0, list[tuple[int, float]]()
    meter, file, loss = Meter(), TensorBoard(folder, 1), 0.0
    for is_new, back, num_steps, num_late in histories:
        late = [trained(attempt, generation, len(history) + 1 + n, -1.0) for n in range(num_late)]
        if is_new:
            file.flush()
            attempt, generation, meter = attempt + 1, 0, Meter()
            file = TensorBoard(folder, attempt)
        generation += 1
        del history[max(0, len(history) - back) :]
        samples: list[Sample | None] = [meter.generation(formed(attempt, generation, len(history)))]
        samples += [meter.step(record, NOW) for record in late]
        for _ in range(num_steps):
            loss += 1
            history.append(((len(history) + 1) * STEP_TOKENS, loss))
            samples.append(meter.step(trained(attempt, generation, len(history), loss), NOW))
        for sample in samples:
            if sample is not None:
                file.take(sample, NOW)
        file.flush()
    assert shown(folder / FOLDER).get("loss", []) == history


def test_every_metric_of_a_step_is_shown_also_one_that_is_not_finite(tmp_path: Path) -> None:
    file = EventFile(tmp_path / FOLDER, 1)
    values = {name: float(number) for number, name in enumerate(PER_STEP)}
    file.scalars(1 << 50, {**values, "loss": math.nan, "grad_norm": math.inf, "lr": 1e300}, NOW)
    file.close()
    found = shown(tmp_path / FOLDER)
    assert {tag: step for tag, ((step, _),) in found.items()} == dict.fromkeys(PER_STEP, 1 << 50)
    assert math.isnan(found["loss"][0][1])
    assert found["grad_norm"][0][1] == found["lr"][0][1] == math.inf
    assert found["step"] == [(1 << 50, values["step"])]


def test_the_checksum_is_the_standard_one() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


# ------------------------------------------------------------ loggers and the journal
class Kept:
    """A logger that keeps what it takes, until it is to fail."""

    name = "kept"

    def __init__(self, fails_at: int | None = None) -> None:
        self.samples, self._fails_at = list[Sample](), fails_at

    def take(self, sample: Sample, now: float) -> None:
        self.samples.append(sample)
        if len(self.samples) == self._fails_at:
            raise RuntimeError("no connection")

    def flush(self) -> None:
        """Nothing is held back."""


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "run"))


def journalled(storage: Storage, log: MetricLog) -> JournalWriter:
    journal = JournalWriter(storage, 1, listener=log)
    journal.generation(formed(1, 1, 0))
    for step in (1, 2, 2, 3):  # one comes twice
        journal.step(trained(1, 1, step))
    journal.event(EventKind.FAILURE, step=3, reason="a test")
    return journal


def test_what_the_journal_is_told_reaches_every_logger_once(storage: Storage) -> None:
    first, second = Kept(), Kept()
    log = MetricLog(Meter(), [first, second], lambda: NOW)
    journalled(storage, log).close()
    log.close()
    assert first.samples == second.samples
    assert [sample.values.get("step") for sample in first.samples] == [None, 1, 2, 3, None]
    assert log.troubles() == []


def test_a_logger_that_fails_is_said_once_and_the_others_and_the_journal_go_on(storage: Storage) -> None:
    fails, works = Kept(fails_at=2), Kept()
    log = MetricLog(Meter(), [fails, works], lambda: NOW)
    journal = journalled(storage, log)
    assert journal.flush() == StateKey(attempt=1, generation=1, step=3)
    log.close()
    assert (len(fails.samples), len(works.samples)) == (2, 5)
    (said,) = log.troubles()
    assert said.startswith(
        "kept gets no more metrics of this attempt (RuntimeError: no connection); the run "
    )


def test_a_logger_that_hangs_holds_nobody_up_and_is_said(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_log, "HELD", 5)
    monkeypatch.setattr(metric_log, "CLOSE_S", 0.05)
    over, taken = threading.Event(), threading.Event()

    class Hangs(Kept):
        def take(self, sample: Sample, now: float) -> None:
            taken.set()
            over.wait()

    log = MetricLog(Meter(), [Hangs()], lambda: NOW)
    journal = JournalWriter(storage, 1, listener=log)
    journal.generation(formed(1, 1, 0))
    assert taken.wait(60)
    for step in range(1, 20):
        journal.step(trained(1, 1, step))
    (said,) = log.troubles()
    assert "has taken none of the last 5 metrics (kept)" in said
    log.close()
    over.set()


def test_tensorboard_without_a_place_to_write_costs_only_itself(storage: Storage, tmp_path: Path) -> None:
    log = MetricLog(Meter(), [TensorBoard(tmp_path / "gone", 1)])
    journalled(storage, log).close()
    log.close()
    (said,) = log.troubles()
    assert "TensorBoard gets no more metrics of this attempt (FileNotFoundError" in said
    assert not os.path.exists(tmp_path / "gone")


def test_without_loggers_nothing_is_started(storage: Storage) -> None:
    before = set(threading.enumerate())
    log = MetricLog(Meter(), [])
    journalled(storage, log).close()
    assert "metrics" not in {thread.name for thread in set(threading.enumerate()) - before}
    log.close()
