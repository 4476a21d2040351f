"""Reads a run's storage as one consistent survey: journal, effective history, points, and what is missing.

Nothing is written. A start, a restarted coordinator and all readers of a run begin with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from orchestrator.checkpoint.commit.retention import BY_LOSS
from orchestrator.checkpoint.points.points import Point, parse_point_name
from orchestrator.checkpoint.points.store import PointStatus, RunStore, maybe_deleted, point_fates
from orchestrator.errors import DataIdentityError, LaterFormatError, ResumePointError, StorageError
from orchestrator.history.claims.claim_files import (
    UNREADABLE,
    AttemptEnd,
    UnreadableFile,
    read_starts,
    seal_starts,
    sealed_ids,
    unreadable_claim,
)
from orchestrator.history.claims.claims import ORIGIN, Claim, ClaimParent, GenerationId
from orchestrator.history.claims.lineage import Lineage, effective_chain, effective_history, require_sound
from orchestrator.history.claims.segments import journal_folder
from orchestrator.history.journal.journal_lines import DamagedLines, with_cut_off
from orchestrator.history.journal.journal_reader import Journal, JournalEvent, read_journal, read_outline
from orchestrator.history.journal.line_format import DAMAGED, EventKind
from orchestrator.history.metrics.loggers import SavedHistory, saved_before
from orchestrator.json_form import LaterSealError, SealError, unseal
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.planning.resume.source_lists import SourceLists
from orchestrator.records.steps import EvalRecord, StateKey
from orchestrator.storage.files import Storage

if TYPE_CHECKING:
    from orchestrator.config.schema import EvalConfig
    from orchestrator.data.spec import DataSpec

LOOKS = 5  # attempts to read a run that continues meanwhile, until the parts fit together
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """A run as stored.

    `journal`, `lineage`: its journal and its effective history.
    `committed`: all committed points; `points`: the names of those on the history, oldest first.
    `missing`: all points that were committed, have no COMMIT, and were not deleted; `lost`: those of them on
    the history.
    `foreign`: points with a name of the history that belong to another run.
    `encoders`: those that made the history (empty: only the run's first); `sources`: the lists it read
    (empty: those of the first start).
    `unreadable`: the attempts' files that could not be used, for the user. `damages` of the journal are lines
    that are lost, by attempt and number; of a generation that was lost with them the sealed copy counts.
    `fork`: of a fork, the claim with whose `origin` the history begins; its generation is among the
    journal's.
    `parents`: all claims' parent files.
    """

    journal: Journal
    lineage: Lineage
    committed: tuple[str, ...]
    points: tuple[str, ...]
    missing: frozenset[str]
    lost: tuple[str, ...]
    foreign: tuple[str, ...]
    fates: PointStatus
    encoders: tuple[EncoderSpan, ...]
    unreadable: tuple[UnreadableFile, ...]
    fork: ClaimParent | None = None
    sources: tuple[SourceLists, ...] = ()
    parents: tuple[ClaimParent, ...] = ()

    @property
    def damages(self) -> tuple[DamagedLines, ...]:
        """The lines of the journal that are lost."""
        return self.journal.damages

    def require_steps(self, wanted: range) -> None:
        """Raises `StorageError` if the record of a step right before or among these of the history is lost.

        `wanted` are indices of `lineage.records`.
        """
        if any(hole in wanted for hole in self.lineage.holes):
            places = "; ".join(map(str, self.damages)) or "the journal is damaged"
            raise StorageError(
                f"{self.lineage.gaps[0]}: {places}; restore the file from a copy", code=DAMAGED
            )


def survey(store: RunStore, with_steps: bool = True) -> Survey:
    """Reads claims, journal and the list of points.

    Raises `OrchestratorError` if the history contradicts itself, or if a later version wrote some of it.

    The run may be written meanwhile. If an attempt was claimed or a generation formed between two reads, so
    that they do not fit together, everything is read again. Raises `StorageError` after `LOOKS` such
    attempts.

    Without `with_steps` it takes a fraction of the time. `journal` then has only the newest step record of
    each generation, `lineage` has none, and contradictions that only these would show are not found.
    """
    unknown = frozenset[str]()
    for _ in range(LOOKS):
        files, before = store.attempt_files(), unknown
        seen = _look(store, with_steps)
        unknown = _of_no_generation(seen)
        # a name that is still unknown to a journal read after it is an orphan
        if files == store.attempt_files() and unknown <= before:
            require_sound(seen.lineage)
            return seen
    raise moved_on(store)


class LatePointError(StorageError):
    """A point of the history appeared after the survey.

    What was decided from that survey is not consistent with the point.
    """

    code = "point.appeared_late"


def require_listed(seen: Survey, point: Point | None) -> None:
    """Raises `LatePointError` unless the survey lists the point among those of the history.

    A claim inherits what its survey lists, and continues nothing else (membership rule 6).
    """
    if point is not None and point.name not in seen.points:
        raise LatePointError(
            f"resume point {point.name} appeared while the run was read; run the command again"
        )


def decided(store: RunStore, decide: Callable[[Survey], Result], with_steps: bool = True) -> Result:
    """Returns `decide` of a survey of the run. Surveys again if a point appears that the survey does not
    list.

    Raises `StorageError` after `LOOKS` surveys, and as `survey` and `decide`.
    """
    for _ in range(LOOKS):
        seen = survey(store, with_steps)
        try:
            return decide(seen)
        except LatePointError:
            continue
    raise moved_on(store)


def moved_on(store: RunStore) -> StorageError:
    """Builds the error for `LOOKS` reads that did not fit together."""
    return StorageError(
        f"{store.storage.root} changed each of the {LOOKS} times that it was read (its newest attempt is "
        f"{max(store.claim_numbers(), default=0)}), so that what was read is not consistent; run the command "
        "again",
        code="run.changed_while_read",
    )


def deleted_now(store: RunStore, names: Iterable[str]) -> frozenset[str]:
    """Returns those of these points, listed before, that the run itself has deleted or is deleting since.

    Their COMMIT is gone, and the journal has the intention to delete them. Problems found with them are no
    damage.
    """
    listed = frozenset(names)
    if not (gone := listed - store.committed(listed)):
        return gone
    if not (left := gone - store.deletions()):
        return gone
    events = read_outline(store.storage).events
    return gone - left.difference(point_fates(((event.kind, event.fields) for event in events), ()).deleted)


def _look(store: RunStore, with_steps: bool) -> Survey:
    """Reads everything once, the claims before the journal and that before the points. Checks no
    contradictions.
    """
    claims, (parents, cut_off) = store.claims(), store.parents()
    run_id, sealed = _require_own(store, claims), sealed_ids(store.storage)
    newest = max((parent.attempt for parent in parents), default=0)
    least = least_lines(parents, store.read_end(newest) if newest else None)
    unreadable = (*(unreadable_claim(c.number) for c in claims if c.why == UNREADABLE), *cut_off)
    require_known(store.storage, unreadable)
    journal = (read_journal if with_steps else read_outline)(store.storage, run_id)
    journal = replace(journal, damages=with_cut_off(journal.damages, journal.num_lines, least))
    journal = _with_sealed(store.storage, journal, sealed, run_id)
    lost = {damage.attempt for damage in journal.damages}
    if with_steps:
        lineage = effective_history(claims, parents, journal.generations, journal.records, lost)
    else:
        lineage = effective_chain(claims, parents, journal.generations, lost)
    begins = [parent for parent in parents if parent.begins is not None]
    first = lineage.segments[0].start if lineage.segments else None
    journal = replace(journal, generations=(*filter(None, (p.begins for p in begins)), *journal.generations))
    there, foreign = store.names_and_foreign()
    fates = _fates(journal.events, parents).without(store.deletions())
    missing = fates.kept.difference(there)
    committed_at = {
        event.fields["point"]: (event.attempt, event.seq)
        for event in journal.events
        if event.kind == EventKind.POINT_COMMITTED
    }
    missing -= deleted_now(store, missing) | maybe_deleted(missing, committed_at, journal.damages)
    held = next((parent for parent in parents if parent.attempt == lineage.attempt), None)
    return Survey(
        journal=journal,
        lineage=lineage,
        committed=tuple(there),
        points=_on_lineage(lineage, (name for name in there if name not in foreign)),
        missing=missing,
        lost=_on_lineage(lineage, missing),
        foreign=_on_lineage(lineage, foreign),
        fates=fates,
        encoders=held.encoders if held else (),
        sources=held.sources if held else (),
        unreadable=unreadable,
        fork=next((parent for parent in begins if parent.begins == first), None),
        parents=tuple(parents),
    )


def least_lines(parents: Iterable[ClaimParent], end: AttemptEnd | None) -> dict[int, int]:
    """Returns how many lines the journals of attempts have at least, from the parent files and the end of the
    newest attempt. Both must be read before the journal.
    """
    found = {end.attempt: end.lines} if end is not None else {}
    for parent in parents:
        for attempt, lines in parent.journals.items():
            found[int(attempt)] = max(lines, found.get(int(attempt), 0))
    return found


def older_journals(seen: Survey) -> dict[str, int]:
    """Returns `ClaimParent.journals` for a claim that continues this history: those since the last claim."""
    since = seen.lineage.attempt or 0
    return {str(attempt): lines for attempt, lines in seen.journal.num_lines.items() if attempt >= since}


def _with_sealed(
    storage: Storage, journal: Journal, sealed: frozenset[GenerationId], run_id: str | None
) -> Journal:
    """Adds the generations that the journal has lost. `sealed` was listed before it was read."""
    lost = sealed - {start.id for start in journal.generations}
    if not lost:
        return journal
    return replace(
        journal,
        generations=(*journal.generations, *read_starts(storage, lost, run_id)),
        damages=with_lost_generations(journal.damages, lost),
    )


def with_lost_generations(
    damages: Sequence[DamagedLines], lost: Iterable[GenerationId]
) -> tuple[DamagedLines, ...]:
    """Returns `damages`, and for attempts without any that the journal lacks the generations `lost`."""
    named = {damage.attempt for damage in damages}
    lacking = {attempt: generation for attempt, generation in sorted(lost, reverse=True)}
    more = [
        DamagedLines(
            attempt=attempt,
            first=1,
            last=None,
            path=journal_folder(attempt),
            line=0,
            reason=f"its generation {generation} is missing there",
        )
        for attempt, generation in lacking.items()
        if attempt not in named
    ]
    return tuple(sorted((*damages, *more), key=lambda each: (each.attempt, each.first)))


def seal_history(store: RunStore, seen: Survey, run_id: str) -> None:
    """Makes the sealed copies of the generations on the history that have none (membership rule 2).

    A claim does this before it writes what it inherits. Its own generations are sealed with its points.
    Raises `StorageError`.
    """
    seal_starts(store.storage, (segment.start for segment in seen.lineage.segments), run_id)


def _of_no_generation(seen: Survey) -> frozenset[str]:
    """Returns the points whose generation is not in the journal: it was formed after the journal was read.

    A fork's first point has no generation, also if its claim failed before its first step.
    """
    known, own = {start.id for start in seen.journal.generations}, set(seen.committed) - {*seen.foreign}
    keys = {name: parse_point_name(name) for name in own}
    return frozenset(
        name
        for name, key in keys.items()
        if key and key.attempt != ORIGIN and (key.attempt, key.generation) not in known
    )


def _require_own(store: RunStore, claims: Iterable[Claim]) -> str | None:
    """Returns the run's id (None without run.json), which every claim must have. Raises
    `ResumePointError`.
    """
    run = store.read_run()
    for claim in claims:
        if run is not None and claim.why != UNREADABLE and claim.run_id != run.id:
            raise ResumePointError(
                f"the claim of attempt {claim.number} belongs to run {claim.run_id or 'without an id'}, "
                f"run.json says {run.id or 'without an id'}: the folder holds pieces of two runs, so nothing "
                "is decided from it; move the files of the other run away",
                code="run.mixed_files",
            )
    return run.id if run else None


def require_known(storage: Storage, unreadable: Iterable[UnreadableFile]) -> None:
    """Raises `LaterFormatError` if a later version wrote one of these files.

    Such a file is not damaged, and its contents must not be guessed.
    """
    for file in unreadable:
        try:
            unseal(storage.read(file.path))
        except LaterSealError as error:
            raise LaterFormatError(f"{storage.root}/{file.path} {error}") from error
        except (FileNotFoundError, SealError):
            continue


def _fates(events: Iterable[JournalEvent], parents: Iterable[ClaimParent]) -> PointStatus:
    inherited = (name for parent in parents for name in parent.inherited)
    return point_fates(((event.kind, event.fields) for event in events), inherited)


def _on_lineage(lineage: Lineage, names: Iterable[str]) -> tuple[str, ...]:
    keys = {name: parse_point_name(name) for name in names}
    return tuple(name for name, key in keys.items() if key is not None and lineage.on_lineage(key))


def require_journals(store: RunStore, seen: Survey) -> None:
    """Raises `ResumePointError` for points of generations that are in no journal and have no sealed copy.

    Each generation is durable in both before its first point is committed (rule 2). Both must thus have been
    damaged, and a start would lose what is in these points.
    """
    unknown = sorted(_of_no_generation(seen))
    foreign = store.foreign(unknown)
    names = [name for name in unknown if name not in foreign]
    keys = filter(None, map(parse_point_name, names))
    if journals := sorted({f"journal/a{key.attempt:04d}" for key in keys}):
        raise ResumePointError(
            f"{', '.join(journals)}: the journal lacks the generations of resume points {', '.join(names)}, "
            "so their history is not known, and nothing is continued; restore the journal, or give a new run "
            "another name",
            code="journal.lacks_generations",
        )


def require_frozen(seen: Survey, data: DataSpec) -> None:
    """Raises `DataIdentityError` if steps were trained and the run's frozen data are gone."""
    if seen.lineage.records and data.tokenizer_folder is None:
        raise DataIdentityError(
            f"this run has trained {len(seen.lineage.records)} steps, but its frozen data are gone "
            "(manifest/data.json in the run's folder); restore manifest/ and tokenizer/",
            code="data.frozen_gone",
        )


def has_its_steps(seen: Survey, point: Point) -> bool:
    """Whether the journal has a record of every step that led to the point.

    If the journal was read before the point was committed, it may not have them.
    """
    starts = {(start.attempt, start.generation): start.step for start in seen.journal.generations}
    begun = starts.get((point.key.attempt, point.key.generation))
    at_begin = point.key.step == begun  # saved before the generation's first step
    return not seen.lineage.gaps and (at_begin or point.key in {r.key for r in seen.journal.records})


def losses_of_points(seen: Survey, best_by: str) -> dict[str, float | None]:
    """Returns, for each point on the history, the loss of `best_by` (`resume.keep_best_by`)."""
    if best_by != BY_LOSS:
        part = best_by.removeprefix("eval.").removesuffix(".loss")
        first = seen.lineage.first_name
        of_part = {first(each.key): each.loss for each in evaluations(seen) if each.part == part}
        keys = {name: parse_point_name(name) for name in seen.points}
        return {name: of_part.get(first(key)) if key is not None else None for name, key in keys.items()}
    found = {
        event.fields["point"]: event.fields.get("mean_loss")
        for event in seen.journal.events
        if event.kind == EventKind.POINT_COMMITTED
    }
    return {name: found.get(name) for name in seen.points}


def saved_history(seen: Survey) -> SavedHistory:
    """Returns how many histories the points of the run held, and how far the newest is held."""
    committed = (event for event in seen.journal.events if event.kind == EventKind.POINT_COMMITTED)
    points = (
        (key, event.fields["cursor"]["consumed_tokens"])
        for event in committed
        if (key := parse_point_name(event.fields["point"])) is not None
    )
    return saved_before(seen.journal.generations, points)


def evaluations(seen: Survey) -> list[EvalRecord]:
    """Returns the evaluations of the history, in order: the newest of each state and part."""
    found: dict[tuple[StateKey, str], EvalRecord] = {}
    for event in seen.journal.events:
        if event.kind == EventKind.EVALUATED:
            record = EvalRecord(attempt=event.attempt, **event.fields)
            if seen.lineage.has_state(record.key):
                at = seen.lineage.first_name(record.key), record.part
                found.pop(at, None)
                found[at] = record
    return [found[at] for at in sorted(found, key=lambda at: at[0])]


def is_evaluated(seen: Survey, key: StateKey, config: EvalConfig) -> bool:
    """Whether the history has an evaluation of the state `key` for each part of `config`."""
    name = seen.lineage.first_name
    found = {record.part for record in evaluations(seen) if name(record.key) == name(key)}
    return found >= set(config.part_names)
