"""Finds the recorded code of the user's functions that trained the state which a start continues.

An attempt of the run recorded it, or an attempt of the run that it was forked from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.forking import fork_to_begin
from orchestrator.data.common.user_code import is_reading_only
from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.claims import ORIGIN, ForkedFrom
from orchestrator.history.journal.code_record import (
    Recorded,
    changes,
    functions_of,
    newest_record,
    recorded_in,
)
from orchestrator.history.journal.journal_reader import beginning_of

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

_MAX_FORKS = 20  # forks of forks; ends circles of run.json files that name each other
_WAIT_S = 10.0  # for another run's bucket


def code_changes(store: RunStore, job: JobConfig, point: str | None) -> list[str]:
    """Returns how the code of `job` differs from the code that trained the state at `point`, for people.

    A start would continue that point (None: the run has none). It is another run's if the start begins a
    fork. Returns nothing while only reading is allowed, because finding code imports the packages around it.
    Raises `StorageError` for the run itself. Another run that cannot be read counts as one without a record.
    """
    if is_reading_only() or not functions_of(job):
        return []
    fork = fork_to_begin(store, job, store.read_run())
    return changes(_trained_fork(store, fork) if fork is not None else trained_code(store, point), job)


def trained_code(store: RunStore, point: str | None, num_forks: int = _MAX_FORKS) -> Recorded | None:
    """Returns the code that trained the state at a point of the run.

    Without a point it is the code of the newest attempt. Returns None if nothing is recorded. Raises
    `StorageError`.
    """
    key = parse_point_name(point) if point is not None else None
    if key is not None and key.attempt == ORIGIN:
        recorded = _copied_by(store, key.generation)
    else:
        attempts = [number for number in store.claim_numbers() if key is None or number <= key.attempt]
        recorded = newest_record(store.storage, attempts)
    run = store.read_run() if recorded is None else None
    if run is None or run.forked_from is None or not num_forks:
        return recorded
    return _trained_fork(store, run.forked_from, num_forks - 1)


# ---------------------------------------------------------------------------------------------------- inside
def _trained_fork(store: RunStore, fork: ForkedFrom, num_forks: int = _MAX_FORKS) -> Recorded | None:
    """Returns the code that trained the point with which a fork begins, as the other run recorded it."""
    try:
        other = RunStore(store.storage.beside(fork.run).within(_WAIT_S))
        run = other.read_run()
        if run is None or run.id != fork.run_id:
            return None
        recorded = trained_code(other, fork.point, num_forks)
    except OrchestratorError:  # only a warning is lost: the run needs nothing of the other one
        return None
    trained_by = f"run {fork.run} trained {fork.point} with"
    return replace(recorded, trained_by=trained_by) if recorded is not None else None


def _copied_by(store: RunStore, attempt: int) -> Recorded | None:
    """Returns what the attempt that took over a fork's first point copied from the other run.

    An attempt that trained afterwards recorded its own code.
    """
    fields = beginning_of(store.storage, attempt) or {}
    code = recorded_in(fields) if fields.get("parallel") is None else {}
    run = store.read_run()
    if not code or run is None or run.forked_from is None:
        return None
    origin = run.forked_from
    return Recorded(trained_by=f"run {origin.run} trained {origin.point} with", code=code)
