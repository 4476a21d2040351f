"""One attempt of a run: what was claimed, what it continues, and how its beginning and end are journaled.

A start command makes the first attempt of a launch (`begin_launch`). A coordinator makes the next one after
its own restart (`continue_launch`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator import __version__
from orchestrator.checkpoint.commit.retention import BY_LOSS
from orchestrator.checkpoint.commit.store_actions import note_committed
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import Leftover, RunStore
from orchestrator.cluster.machine import Process, this_process
from orchestrator.coordinator.machine.launch_history import EarlierCoordinator
from orchestrator.elastic.failure import until_storage_works
from orchestrator.history.claims.claim_files import UnreadableFile
from orchestrator.history.claims.claims import Claim, ClaimParent, ForkedFrom
from orchestrator.history.journal.code_record import Code
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import encode
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.planning.resume.skipping import Skip
from orchestrator.planning.resume.source_lists import RestartRequest, SourceChange, SourceLists
from orchestrator.planning.schedule import Budgets
from orchestrator.planning.state.memory import ParallelChoice
from orchestrator.planning.state.state_layout import Layout, layout_of
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Damage
from orchestrator.records.steps import StateKey, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFindings:
    """What a start found and did in storage, for the journal and the user.

    `damages`: those of newer points than the continued one.
    `verified_s`: how long it took to read back the points down to that one (None: they were not read).
    `lifted`: whether that removed its mark as damaged.
    `unreadable`: files of attempts that could not be used.
    `leftovers`: saves of older launches that were removed.
    `lists`: what happened to the sources at the start command.
    `brought`: step records before the continued point that are in no journal, from the votes of the save that
    a start `completed` (None: the point's commit is in the journal).
    `parallel`: the result of `train.parallel` in an earlier attempt, with its number (None: none recorded).
    """

    damages: tuple[Damage, ...] = ()
    verified_s: float | None = None
    lifted: bool = False
    unreadable: tuple[UnreadableFile, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    lists: tuple[SourceChange, ...] = ()
    parallel: tuple[int, ParallelChoice] | None = None
    brought: tuple[StepRecord, ...] = ()
    completed: Point | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A claimed attempt and what it continues. It can be pickled: the driver passes it to the coordinator.

    `step_label`: the label of the last finished step as this launch counts.
    `encoders`: which encoder makes which documents.
    `run_id`, `weights_by_name`: as in run.json.
    `command`: the command line that would continue the run, without secrets ("": there was none).
    `num_blocks`: the number of blocks of each source; `weights`: its weight in the mixture.
    `forked_from`: the point of another run that it takes over.
    `losses`: the losses of points by `best_by` (`resume.keep_best_by`).
    `evaluated`: `step_label`, if all parts were evaluated at the point, else −1.
    `history`: the number of histories of the run that points held; the one that it continues is held up to
    `history_saved_to` tokens (see `history.metrics.loggers`).
    `skip`: what the claim leaves out after the point; the point's cursor is already after it.
    `sources`: which lists are read in which epoch, and thus the meaning of the point's cursor; `restart`: the
    request for a new start of some.
    `parallel`: how the state is divided (None: nothing is trained, or it is unknown).
    `code`: the files of the configuration's functions; for `orchestrator fork`, which trains nothing, those
    that its point was trained with (empty: not recorded).
    `places`: the folders to which the relative paths of weights lead.
    `found` is for the process that begins the attempt, `earlier` for a restarted coordinator.
    """

    number: int
    launch: str
    why: str
    point: Point | None
    inherited: tuple[str, ...]
    step_label: int
    budgets: Budgets
    encoders: tuple[EncoderSpan, ...]
    run_id: str = ""
    weights_by_name: bool = True
    command: str = ""
    num_blocks: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    forked_from: ForkedFrom | None = None
    losses: Mapping[str, float | None] = field(default_factory=dict)
    best_by: str = BY_LOSS
    evaluated: int = -1
    history: int = 1
    history_saved_to: int = 0
    skip: Skip | None = None
    sources: tuple[SourceLists, ...] = ()
    restart: RestartRequest | None = None
    parallel: ParallelChoice | None = None
    code: Mapping[str, Code] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    found: StartFindings = StartFindings()
    earlier: EarlierCoordinator = EarlierCoordinator()

    @classmethod
    def claimed(
        cls, claim: Claim, parent: ClaimParent, point: Point | None, step_label: int, run_id: str
    ) -> Attempt:
        """Builds the attempt of a claim with this parent file, which therefore continues `point`."""
        assert parent.budgets is not None, "a start command's claim says what may be trained"
        return cls(
            number=claim.number,
            launch=claim.launch,
            why=claim.why,
            point=point,
            inherited=parent.inherited,
            step_label=step_label,
            budgets=parent.budgets,
            encoders=parent.encoders,
            run_id=run_id,
            forked_from=parent.origin.forked_from if parent.origin else None,
            skip=parent.skip,
            sources=parent.sources,
            restart=parent.restart,
        )

    def layout(self, world_size: int) -> Layout:
        """Returns the layout of the state on a group of `world_size` members; replicate if unknown."""
        return layout_of(world_size, self.parallel.num_shards if self.parallel is not None else 1)

    @property
    def parent(self) -> StateKey | None:
        """The key of the point that it continues."""
        return self.point.key if self.point else None


# ------------------------------------------------------------------------------------------------ its journal
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
        places=dict(attempt.places) or None,
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
