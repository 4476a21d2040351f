"""Journals the beginning and the end of an attempt."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator import __version__
from orchestrator.checkpoint.commit.store_actions import note_committed
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.machine import Process, this_process
from orchestrator.coordinator.attempt.attempt import Attempt, StartFindings
from orchestrator.elastic.failure import until_storage_works
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.json_form import encode
from orchestrator.records.cursor import Cursor

_HOW_IT_DIED = "its process was killed or crashed, or it did not answer its driver, which killed it"


def note_beginning(
    journal: JournalWriter, attempt: Attempt, config: Mapping[str, Any], process: Process | None = None
) -> None:
    """Journals that the attempt begins in `process` (default: this one), with this flat configuration.

    Also journals everything that its start found and did.
    """
    by = process or this_process()
    journal.event(
        EventKind.ATTEMPT,
        launch=attempt.launch,
        why=attempt.why,
        command=attempt.command,
        host=socket.gethostname(),
        version=__version__,
        pid=by.pid,
        machine=by.machine,
        pid_start=by.start,
        config=dict(config),
        forked_from=encode(attempt.forked_from) if attempt.forked_from else None,
        parallel=encode(attempt.parallel) if attempt.parallel else None,
        code={field: encode(code) for field, code in attempt.code.items()} or None,
    )
    for record in attempt.found.brought:
        journal.step(record)
    if attempt.found.completed is not None:
        note_committed(journal, attempt.found.completed)
    _note_sources(journal, attempt)
    _note_point(journal, attempt)
    if attempt.earlier.died is not None:
        pid, host = attempt.earlier.died
        journal.event(EventKind.COORDINATOR_DIED, pid=pid, host=host, reason=_HOW_IT_DIED)
    _note_what_was_wrong(journal, attempt.found)


def _note_sources(journal: JournalWriter, attempt: Attempt) -> None:
    """Journals what was drawn from each source before, what is skipped now, and how their files changed."""
    if attempt.num_blocks:
        drawn = (attempt.point.cursor if attempt.point else Cursor()).drawn_from(tuple(attempt.num_blocks))
        journal.event(
            EventKind.SOURCES,
            counts={name: samples for name, (samples, _) in drawn.items()},
            tokens={name: tokens for name, (_, tokens) in drawn.items()},
            num_blocks=dict(attempt.num_blocks),
            weights=dict(attempt.weights),
        )
    if attempt.point is not None and attempt.skip is not None:
        journal.event(
            EventKind.SAMPLES_SKIPPED,
            point=attempt.point.name,
            samples=attempt.skip.samples,
            tokens=attempt.skip.tokens,
            first_index=attempt.skip.begin.drawn_samples,
            setting=str(attempt.skip.request),
        )
    if attempt.found.lists:
        journal.event(
            EventKind.SOURCES_CHANGED,
            changes=[encode(change) for change in attempt.found.lists],
            text="; ".join(map(str, attempt.found.lists)),
        )


def _note_point(journal: JournalWriter, attempt: Attempt) -> None:
    if attempt.point is not None and attempt.found.verified_s is not None:
        journal.event(
            EventKind.POINT_VERIFIED,
            point=attempt.point.name,
            checked="digests",
            healthy=True,
            seconds=attempt.found.verified_s,
        )


def note_loaded(journal: JournalWriter, point: str, seconds: float) -> None:
    """Journals that the workers have loaded a point and verified all its digests.

    `seconds`: from the formation of their generation to the record of its first step.
    """
    journal.event(EventKind.POINT_VERIFIED, point=point, checked="digests", healthy=True, seconds=seconds)


def _note_what_was_wrong(journal: JournalWriter, found: StartFindings) -> None:
    for damage in found.damages:
        journal.event(EventKind.DAMAGED_POINT, point=damage.point, file=damage.file, reason=damage.reason)
    for file in found.unreadable:
        journal.event(EventKind.UNREADABLE_FILE, file=file.path, reason=file.reason)
    for left in found.leftovers:
        if left.kept:
            journal.event(EventKind.LEFTOVER_KEPT, point=left.point, reason=left.kept)
        else:
            journal.event(EventKind.LEFTOVER_REMOVED, point=left.point)


def write_down_end(
    store: RunStore,
    journal: JournalWriter,
    attempt: Attempt,
    outcome: str,
    reason: str,
    by: str,
    limit_s: float,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Journals the end, which `by` caused, and writes the end record.

    Each is retried for `limit_s`. The record does not wait longer than that for the journal, because others
    learn from it that the launch has ended. `tell` is called about retries. Raises `StorageError`.
    """
    journal.event(EventKind.END, outcome=outcome, reason=reason, by=by)
    try:
        until_storage_works(journal.flush, limit_s, "Training is over", tell)
    finally:
        until_storage_works(
            lambda: store.write_end(
                attempt.number, outcome, reason, attempt.run_id, by, journal.num_durable
            ),
            limit_s,
            "Training is over",
            tell,
        )
