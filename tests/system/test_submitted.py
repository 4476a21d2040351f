"""A run that is submitted from Python, as in a notebook: it returns at once, and is waited for, interrupted,
submitted again.
"""

from __future__ import annotations

import _thread
from typing import Any

import pytest

import orchestrator
from orchestrator.inspect.submitted import SubmittedRun
from tests.system.harness import LIMIT_S, Job, assert_exactly_once, when_step

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]


@pytest.mark.chaos
def test_an_interrupted_cell_saves_and_stops_and_the_next_goes_on(
    job: Job, cluster: Any, unbroken: tuple[str, list[float]]
) -> None:
    config = job.config(cluster__address=cluster.address)
    run = orchestrator.submit(config, ["train.max_steps=100000", "data.num_epochs=100"])
    try:
        watch = when_step(job, 3, _thread.interrupt_main)
        stopped = run.wait(LIMIT_S)
        watch.join()
    finally:
        end(run)
    assert (stopped.state, stopped.newest_point) == ("stopped", job.run.list_points()[-1]["name"])
    last = max(16, stopped.step + 2)  # where steps are quick, the stop comes late
    again = orchestrator.submit(config, [f"train.max_steps={last}"])
    try:
        done = again.wait(LIMIT_S)
    finally:
        end(again)
    assert (done.state, done.step) == ("done", last)
    assert [each.uri for each in orchestrator.runs(config.run.storage)] == [job.run.uri]
    assert_exactly_once(job)
    digest, losses = unbroken
    assert job.losses()[:16] == losses
    assert last > 16 or job.final_digest() == digest


def end(run: SubmittedRun) -> None:
    """Whatever happens, no process is left."""
    while run.launch.is_alive():
        run.launch.interrupt()
        run.launch.wait(1.0)
