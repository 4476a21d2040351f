"""A start with `model.init_from`: the plan says what the first weights are, the run keeps which they were."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.config.loading import parse_config
from orchestrator.errors import ConfigError, RefusedError
from orchestrator.launch.api import dry_run
from orchestrator.resume.init_weights import weights_identity
from orchestrator.resume.points import Point
from tests.launch.test_start import Runner
from tests.resume.exports import commit, state_of, store_at


@pytest.fixture
def other(tiny_config: Any, tmp_path: Path) -> Point:
    """A point of another run, in the folder `other`."""
    config = parse_config(tiny_config())
    return commit(store_at(tmp_path / "other"), config, state_of(config))


def test_the_first_weights_are_said_and_kept_and_a_resume_needs_them_no_more(
    tiny_config: Any, tmp_path: Path, other: Point
) -> None:
    where = tmp_path / "other" / "points" / other.name
    runner = Runner(tiny_config({"train.max_steps": 1000, "model.init_from": str(where)}))
    said = (
        f"the first weights are those of resume point {where}, weights digest {other.commit.weights_digest}"
    )
    plan = dry_run(runner.config())
    assert plan.action == "start"
    assert said in plan.notes
    runner.launch()
    run = runner.store.read_run()
    assert run is not None
    assert run.first_weights == other.commit.weights_digest == weights_identity(str(where))
    shutil.rmtree(tmp_path / "other")
    plan = runner.plan()
    assert plan.action == "resume"
    assert not any("first weights" in note for note in plan.notes)
    runner.launch()
    assert [row["attempt"] for row in orchestrator.open(runner.folder).list_points()] == [1, 2]


def test_a_run_without_a_point_starts_from_the_weights_that_it_was_started_with_or_not_at_all(
    tiny_config: Any, tmp_path: Path, other: Point
) -> None:
    where = tmp_path / "other" / "points" / other.name
    runner = Runner(tiny_config({"model.init_from": str(where)}))
    runner.begin()
    runner.begin()
    config = parse_config(tiny_config())
    shutil.rmtree(tmp_path / "other")
    again = commit(store_at(tmp_path / "other"), config, state_of(config, steps=2))
    with pytest.raises(
        RefusedError, match=f"was started with the weights {other.commit.weights_digest}, and"
    ) as no:
        runner.begin()
    assert f"holds {again.commit.weights_digest} now" in str(no.value)
    assert runner.store.claim_numbers() == [1, 2]


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    tiny_config: Any, tmp_path: Path, other: Point
) -> None:
    where = tmp_path / "other" / "points" / other.name
    model = {**tiny_config()["model"]["config"], "num_hidden_layers": 1}
    job = parse_config(tiny_config({"model.config": model, "model.init_from": str(where)}))
    with pytest.raises(ConfigError, match=r"unexpected: model.layers.1.mlp.up_proj.weight \[64, 32\]"):
        dry_run(job)
    (where / "COMMIT").unlink()
    with pytest.raises(ConfigError, match=r"COMMIT is missing; restore the file, or take another point"):
        orchestrator.plan(job)
    assert list(Path(job.run.storage).iterdir()) == []


def test_a_resume_with_other_first_weights_is_refused(tiny_config: Any, other: Point, tmp_path: Path) -> None:
    mapping = tiny_config({"train.max_steps": 1000})
    runner = Runner(mapping)
    runner.launch()
    where = str(tmp_path / "other" / "points" / other.name)
    changed = Runner({**mapping, "model": {**mapping["model"], "init_from": where}})
    (refusal,) = changed.plan().refusals
    assert f"was made with model.init_from=null, the job asks for {where}" in refusal
