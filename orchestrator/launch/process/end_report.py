"""The messages at the end of a launch: how it ended, where its results are, and what to try next.

They mention only what still exists.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.schema import JobConfig
from orchestrator.elastic.supervision.background_call import Asked
from orchestrator.errors import OrchestratorError
from orchestrator.history import sentences
from orchestrator.launch.process.progress import Progress
from orchestrator.records.run_status import RunStatus

END_LOOK_S = 5.0  # how long the end waits for a storage that may hang


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What exists at the end of a launch: whether its folder is still the run's, and has the newest resume
    point.
    """

    run: bool
    point: bool


def say_end(progress: Progress, job: JobConfig, status: RunStatus, store: RunStore, run_id: str) -> RunStatus:
    """Reports how the launch ended, where the results are, and what to try next.

    Returns the status, without a point that is missing. Waits at most `END_LOOK_S` for storage.
    """
    step = status.last_step
    how = sentences.ended(status.ended or "failed", status.reason)
    if status.ended == "failed":
        progress.say_at_length(how)
    else:
        ended, colon, why = how.partition(": ")
        progress.say(ended + (f", loss {sentences.loss(step.loss)}" if step else "") + colon + why)
    asked = Asked(partial(_look_at_end, store, run_id, status.newest_point))
    asked.ask()
    try:
        left = asked.answer(END_LOOK_S) or f"storage has not answered for {END_LOOK_S:.0f} s"
    except OrchestratorError as error:
        left = str(error)
    for line in end_lines(job.run.run_uri, status, left):
        progress.say(line)
    return replace(status, newest_point=None) if isinstance(left, Left) and not left.point else status


def _look_at_end(store: RunStore, run_id: str, point: str | None) -> Left:
    run = store.read_run()
    commit = point is not None and store.storage.exists(f"points/{point}/COMMIT")
    return Left(run=run is not None and run.id == run_id, point=commit and (run is None or run.id == run_id))


def end_lines(uri: str, status: RunStatus, left: Left | str) -> list[str]:
    """Where the results are, and what to try next. `left`: what exists, or why that is not known."""
    point = f"{uri}/points/{status.newest_point}"
    if status.newest_point is None:
        where = "no resume point was written"
    elif isinstance(left, str):
        where = f"{point} (whether it is there is not known: {left})"
    else:
        where = point if left.point else f"none, {point} is gone"
    trained = status.last_step is not None or status.newest_point is not None
    there = isinstance(left, Left) and left.run
    return [f"newest resume point: {where}", *next_commands(uri, trained=trained and there)]


def next_commands(uri: str, *, trained: bool) -> list[str]:
    """What to try next; empty if nothing was trained, or nothing is left."""
    if not trained:
        return []
    uri = shlex.quote(uri)
    return [
        "next:",
        f"  orchestrator points {uri}     the resume points, with a digest of the weights of each",
        f"  orchestrator audit {uri}      whether every token was trained exactly once",
        "  orchestrator plan CONFIG train.global_batch_size=24     what another batch size would do",
    ]
