"""A step of a run trained again by another number of workers, and kept as a resume point of a fork."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import asker
from orchestrator.storage.files import Storage
from tests.system.harness import Job

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "format2"


@pytest.mark.chaos
def test_two_workers_make_a_point_of_any_step_that_one_has_trained_and_it_trains_on(
    job: Job, cluster: Any, tmp_path: Path
) -> None:
    # the rate falls to the end of the run: whoever ended it at the step would train another one
    shape: dict[str, Any] = {"train__max_steps": 8, "train__schedule": "cosine", "cluster__num_workers": 1}
    result = job.train(**shape, monitor__digest_every_steps=3)
    assert (result.outcome, result.step) == ("done", 8), result.reason
    assert min(job.run.steps()["peak_memory_bytes"]) > 50 << 20, "of a process with torch"
    storage = Path(job.run.uri).parent
    there = sorted(storage.iterdir())

    # before the first point; what that made is gone afterwards
    found = job.run.replay(3, overrides=["cluster.num_workers=2"])
    assert (found.from_point, found.point, found.fork) == (None, None, None)
    assert (found.equal, found.steps_compared, found.first_difference) == (True, 3, None)
    assert sorted(storage.iterdir()) == there

    fork = tmp_path / "forks" / "at-6"
    found = job.run.replay(6, to_point=fork, overrides=["cluster.num_workers=2"])
    assert (found.from_point, found.fork) == ("00000004-a0001-g0001", str(fork))
    assert (found.equal, found.steps_compared, found.first_difference) == (True, 2, None)
    assert sorted(storage.iterdir()) == there
    assert [row["name"] for row in job.run.list_points() if row["pin"]] == [found.from_point]
    made = orchestrator.open(fork)
    (row,) = [row for row in made.list_points() if row["name"] == found.point]
    assert (row["step"], row["world_size"], row["weights_digest"]) == (6, 2, found.weights_digest)
    assert made.audit()["exactly_once"] is True
    ends = [e.fields for e in read_journal(Storage(str(fork))).events if e.kind == EventKind.END]
    assert (ends[-1]["outcome"], ends[-1]["by"]) == ("stopped", asker())
    assert job.run.replay(6, to_point=fork).point == found.point, "the fork has that point already"

    result = orchestrator.train(job.config(**shape, run__name=fork.name, run__storage=str(fork.parent)))
    assert (result.outcome, result.step) == ("done", 8), result.reason
    assert made.audit()["exactly_once"] is True
    assert made.list_points()[-1]["weights_digest"] == job.final_digest()


@pytest.mark.chaos
def test_five_random_steps_come_out_on_another_number_of_workers(job: Job, cluster: Any) -> None:
    shape: dict[str, Any] = {"train__max_steps": 24, "train__schedule": "cosine", "cluster__num_workers": 1}
    result = job.train(**shape, monitor__digest_every_steps=1)
    assert (result.outcome, result.step) == ("done", 24), result.reason
    seed = random.randrange(1 << 32)
    drawn = random.Random(seed)
    for step in drawn.sample(range(1, 24), 5):
        workers = drawn.choice((2, 3))
        found = job.run.replay(step, overrides=[f"cluster.num_workers={workers}"])
        assert found.expected_digest, f"seed {seed}: the journal has none of step {step}"
        assert (found.equal, found.first_difference) == (True, None), f"seed {seed}: step {step}, {workers}"
        assert found.weights_digest == found.expected_digest


@pytest.mark.chaos
def test_attempts_of_other_shapes_are_trained_in_turn(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    run = orchestrator.open("example")
    for point in Path("example/points").iterdir():
        (point / "COMMIT").write_text("{}")
    # another CPU than that which trained the example may add in another order: one process here is asked
    alone = run.replay(10)
    found = run.replay(10, to_point="again/example", overrides=["cluster.num_workers=2"])
    assert (found.from_point, found.steps_compared) == (None, 12)
    assert (found.weights_digest, found.first_difference) == (alone.weights_digest, alone.first_difference)
    made = orchestrator.open("again/example")
    assert made.audit()["exactly_once"] is True
    assert [record.step for record in made.records()] == [record.step for record in run.records()]
