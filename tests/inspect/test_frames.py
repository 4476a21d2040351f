"""A run as DataFrames and figures, read from the run that is kept in the repository."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.errors import RefusedError
from orchestrator.inspect import frames
from orchestrator.inspect.run import Run
from orchestrator.records.steps import EvalRecord
from tests.raising import raises

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/format2"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """The job names its data from the folder it was started in."""
    with contextlib.chdir(EXAMPLE):
        yield orchestrator.open("example")


def table_of(run: Run, name: str) -> Any:
    """A table of the run; `samples` are those of a step."""
    return run.samples("3") if name == "samples" else getattr(run, name)()


def test_every_table_has_the_columns_that_it_declares(run: Run) -> None:
    for name, table in frames.TABLES.items():
        frame = table_of(run, name)
        assert list(frame.columns) == list(table), name
        assert len(frame) > 0 or name == "evals", name  # the run evaluates nothing
        for column, (unit, _) in table.items():
            if unit == "UTC":
                assert str(frame[column].dtype).endswith("UTC]"), f"{name}.{column}"


def test_the_steps_are_the_records_of_the_history(run: Run) -> None:
    steps, records = run.steps(), run.records()
    for name in frames.STEPS:
        if name != "time":
            expected = [getattr(record, name) for record in records]
            none = "" if name == "skipped" else -1
            assert steps[name].fillna(none).tolist() == [none if each is None else each for each in expected]
    assert steps["time"].is_monotonic_increasing


def test_the_points_are_the_listed_ones_with_their_pins(run: Run) -> None:
    rows = run.list_points()
    assert run.points()["name"].tolist() == [row["name"] for row in rows]
    pinned = [{**rows[0], "pin": {"by": "ann@desk"}}, {**rows[0], "pin": None}]
    assert [row["pinned_by"] for row in frames.with_pins(pinned)] == ["ann@desk", ""]


def test_whole_numbers_stay_whole_where_a_value_is_missing(run: Run) -> None:
    rows = [{"attempt": 1, "first_step": 1, "last_step": 8}, {"attempt": 2}]
    attempts = frames.frame(frames.ATTEMPTS, rows)
    assert str(attempts.loc[0, "last_step"]) == "8"
    assert attempts["first_step"].isna().tolist() == [False, True]
    for name, table in frames.TABLES.items():
        types = table_of(run, name).dtypes
        assert {str(types[column]) for column in table if column in frames.WHOLE} == {"Int64"}, name


def test_goodput_adds_up(run: Run) -> None:
    goodput = run.goodput()
    assert sum(goodput["parts"].values()) == pytest.approx(goodput["wall_s"])


def test_a_plot_has_a_panel_for_each_metric_with_its_unit(run: Run) -> None:
    figure = run.plot("loss", "step_s", x="tokens")
    assert [panel.get_ylabel() for panel in figure.axes] == ["loss (nats per target token)", "step_s (s)"]
    assert figure.axes[-1].get_xlabel() == "consumed_tokens (tokens)"
    assert len(figure.axes[0].lines[0].get_xdata()) == len(run.records())
    with raises(RefusedError, "metrics.unknown", "los;", "attempt, generation, step"):
        run.plot("los")
    with raises(RefusedError, "command.unknown_axis", "x='epoch'", "step, tokens, time"):
        run.plot(x="epoch")


def test_evaluations_are_plotted_at_the_position_of_their_steps(run: Run) -> None:
    steps, records = run.steps(), run.records()
    trained = [records[1].key, records[1].key, records[3].key]
    values = [("holdout", 3.0), ("my-code", 2.0), ("holdout", 2.5)]
    evaluated = [
        EvalRecord(
            part=part, attempt=key.attempt, generation=key.generation, step=key.step, loss=loss,
            perplexity=None, targets=8, samples=4, per_source={"a": loss + 1},
        )
        for key, (part, loss) in zip(trained, values, strict=True)
    ]  # fmt: skip
    evals = frames.evals_at_steps(evaluated, trained, steps)
    figure = frames.plot(steps, evals, ("loss", "eval_holdout_loss", "eval_my_code_a_loss"), "tokens", "r")
    dots = [panel.lines[0] for panel in figure.axes]
    positions = [record.consumed_tokens for record in (records[1], records[3])]
    assert list(dots[1].get_xdata()) == positions
    assert list(dots[1].get_ydata()) == [3.0, 2.5]
    assert (list(dots[2].get_xdata()), list(dots[2].get_ydata())) == (positions[:1], [3.0])
    with raises(RefusedError, "metrics.unknown", "eval_x;", "loss, ", "eval_holdout_loss"):
        frames.plot(steps, evals, ("eval_x",), "step", "r")
    with raises(RefusedError, "metrics.unknown", "eval_holdout_loss;"):
        run.plot("eval_holdout_loss")  # the run evaluates nothing
