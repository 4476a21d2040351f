"""One attempt of a run: look at what is there, claim the next number, choose the parent, write down what is
inherited.

The order of these is what fences (membership rule 6): first the claim, then the list of points, then the
parent file. The driver begins a launch with it, the coordinator continues one after its own restart, and
`plan` uses only the looking.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import __version__
from orchestrator.cluster.machine import Process, this_process
from orchestrator.coordinator.forking import is_folder, point_info, take_over
from orchestrator.coordinator.skipping import draw_skip, moved, skip_here
from orchestrator.coordinator.sources import SourcesHere, after_removed, read_as, sources_here
from orchestrator.elastic.failure_budget import Failure
from orchestrator.elastic.formation import PreviousGeneration
from orchestrator.elastic.storage_trouble import until_storage_works
from orchestrator.errors import (
    DataIdentityError,
    FencedError,
    RefusedError,
    ResumePointError,
    StorageError,
    WantedPointError,
)
from orchestrator.faults import Hook
from orchestrator.history.claim_files import (
    RESTARTED,
    UNREADABLE,
    UnreadableFile,
    unreadable_claim,
)
from orchestrator.history.claims import ORIGIN, Claim, ClaimParent, ForkedFrom, Origin
from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import JournalWriter
from orchestrator.history.journal_reader import Journal, JournalEvent, read_journal, read_outline
from orchestrator.history.lineage import Lineage, effective_chain, effective_history, require_sound
from orchestrator.history.saved_history import SavedHistory, saved_before
from orchestrator.planning.encoders import EncoderSpan, with_encoder
from orchestrator.planning.identity import RunIdentity
from orchestrator.planning.manifests import SourceLists
from orchestrator.planning.restarting import RestartDecision, RestartRequest, SourceChange, undone
from orchestrator.planning.resume_plan import ResumePlan, plan_resume
from orchestrator.planning.schedule import Budgets
from orchestrator.planning.skipping import Skip, SkipDecision, still_due
from orchestrator.records import Cursor, MemberInfo, StateKey, StepRecord, encode
from orchestrator.resume.commit_machine import LOST
from orchestrator.resume.fates import Fates, point_fates
from orchestrator.resume.leftovers import Leftover, remove_leftovers
from orchestrator.resume.points import Damage, Point, parse_point_name
from orchestrator.resume.run_file import RunFile
from orchestrator.resume.store import RunStore

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.data.spec import DataSpec

_HOW_IT_DIED = "its process was killed or crashed, or it did not answer its driver, which killed it"
LOOKS = 5  # at a run that goes on while it is read, until what is read fits together


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """A run as it lies in storage: its journal, its effective history, and the names of the points on it,
    oldest first; `committed` are all that lie there, also off it. `missing` are all points that were
    committed, have no COMMIT, and nobody deleted; `lost` are those on the history. `foreign` are points that
    lie there under a name of it, but belong to another run. `encoders` made it (empty: the run's first
    alone), and `sources` say which lists it read (empty: those of the first start). `unreadable` are the
    attempts' files that could not be used, for the user to hear of. `fork` is the claim with
    whose `origin` the history begins, of a fork; its generation is among the journal's.
    `parents` are all claims' parent files.
    """

    journal: Journal
    lineage: Lineage
    committed: tuple[str, ...]
    points: tuple[str, ...]
    missing: frozenset[str]
    lost: tuple[str, ...]
    foreign: tuple[str, ...]
    fates: Fates
    encoders: tuple[EncoderSpan, ...]
    unreadable: tuple[UnreadableFile, ...]
    fork: ClaimParent | None = None
    sources: tuple[SourceLists, ...] = ()
    parents: tuple[ClaimParent, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A claimed attempt and what it continues. It pickles: the driver hands it to the coordinator.

    `step_label` is the label of the last step done as this launch counts. `previous` is the generation that
    trains on while a restarted coordinator takes over, `members` where its members live, `finished` (member,
    reason, step) those whose part is over; `leftovers` are
    older launches' saves that this one removed; `encoders` say who makes which documents; `ended` is
    (outcome, reason) when the launch had ended before that restart; `failures` and `last_step` are what its
    failure budget counts, `answered` the requests from outside that are; `run_id` is run.json's; `command`
    is the command line that would continue the run, without secrets ("": nobody typed one); `num_blocks` has
    the number of blocks of each source, `weights` its weight in the mixture; `forked_from` is the point of
    another run that it takes over; `losses` are the mean losses of points; `history` counts the histories of
    the run that points held, of which the one that it continues is held up to `history_saved_to` tokens (see
    `history.saved_history`).
    `died` is the process (pid and host; 0: not known) of the coordinator whose place a restarted one takes.
    `verified_s` is how long it took to read back the points down to the one that it continues (None: it was
    not), `lifted` whether that lifted its mark as damaged. `skip` is what the claim leaves out after the
    point, whose cursor stands after it here. `sources` say which lists are read in which epoch: the point's
    cursor stands in them; `restart` asked for a new start of some, and `lists` are what became of the sources
    at the start command.
    """

    number: int
    launch: str
    why: str
    point: Point | None
    inherited: tuple[str, ...]
    step_label: int
    budgets: Budgets
    encoders: tuple[EncoderSpan, ...]
    damages: tuple[Damage, ...] = ()
    verified_s: float | None = None
    lifted: bool = False
    unreadable: tuple[UnreadableFile, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    previous: PreviousGeneration | None = None
    members: tuple[MemberInfo, ...] = ()
    finished: tuple[tuple[str, str, int], ...] = ()
    ended: tuple[str, str] | None = None
    failures: tuple[Failure, ...] = ()
    last_step: StepRecord | None = None
    answered: tuple[int, ...] = ()
    run_id: str = ""
    command: str = ""
    num_blocks: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    forked_from: ForkedFrom | None = None
    losses: Mapping[str, float | None] = field(default_factory=dict)
    history: int = 1
    history_saved_to: int = 0
    died: tuple[int, str] | None = None
    skip: Skip | None = None
    sources: tuple[SourceLists, ...] = ()
    restart: RestartRequest | None = None
    lists: tuple[SourceChange, ...] = ()

    @property
    def parent(self) -> StateKey | None:
        """The key of the point that it continues."""
        return self.point.key if self.point else None


def survey(store: RunStore, with_steps: bool = True) -> Survey:
    """Reads claims, journal and the list of points. Raises `OrchestratorError` if the history contradicts
    itself.

    The run may be written meanwhile: if an attempt was claimed or a generation formed between one look and
    the next, so that they do not fit together, it looks again at all; `StorageError` after
    `LOOKS` such looks.

    Without `with_steps` it takes a fraction of the time: of the step records only the newest of each
    generation is in `journal`, none in `lineage`, and what they alone could contradict is not found.
    """
    unknown = frozenset[str]()
    for _ in range(LOOKS):
        files, before = store.attempt_files(), unknown
        seen = _look(store, with_steps)
        unknown = _of_no_generation(seen)
        # a name that is still unknown to a journal that was read after it stays so: it is an orphan
        if files == store.attempt_files() and unknown <= before:
            require_sound(seen.lineage)
            return seen
    raise moved_on(store)


def moved_on(store: RunStore) -> StorageError:
    """What to say when `LOOKS` looks did not fit together."""
    return StorageError(
        f"{store.storage.root} went on each of the {LOOKS} times that it was read (its newest attempt is "
        f"{max(store.claim_numbers(), default=0)}), so that what was read does not fit together: this says "
        "nothing about the run; run the command again"
    )


def deleted_now(store: RunStore, names: Iterable[str]) -> frozenset[str]:
    """Those of these points, listed before, that the run itself has deleted or is deleting since: the COMMIT
    is gone, and the journal says that it was meant to go. What was found wrong with them is no damage.
    """
    if not (gone := frozenset(names).difference(store.point_names())):
        return gone
    if not (left := gone - store.deletions()):
        return gone
    events = read_outline(store.storage).events
    return gone - left.difference(point_fates(((event.kind, event.fields) for event in events), ()).deleted)


def _look(store: RunStore, with_steps: bool) -> Survey:
    """One look at all, claims before the journal and that before the points, whatever they contradict."""
    claims, (parents, cut_off) = store.claims(), store.parents()
    run_id = _require_own(store, claims)
    unreadable = (*(unreadable_claim(c.number) for c in claims if c.why == UNREADABLE), *cut_off)
    if with_steps:
        journal = read_journal(store.storage, run_id)
        lineage = effective_history(claims, parents, journal.generations, journal.records)
    else:
        outline = read_outline(store.storage, run_id)
        journal = Journal(
            generations=outline.generations,
            records=outline.last_records,
            events=outline.events,
            torn=outline.torn,
        )
        lineage = effective_chain(claims, parents, journal.generations)
    begins = [parent for parent in parents if parent.begins is not None]
    first = lineage.segments[0].start if lineage.segments else None
    journal = replace(journal, generations=(*filter(None, (p.begins for p in begins)), *journal.generations))
    there = store.point_names()
    foreign = tuple(name for name in there if store.is_foreign(name))
    fates = _fates(journal.events, parents)
    pruned = store.deletions()
    fates = Fates(kept=fates.kept - pruned, deleted=fates.deleted | pruned)
    missing = fates.kept.difference(there)
    missing -= deleted_now(store, missing)
    newest = next((parent for parent in parents if parent.attempt == lineage.attempt), None)
    return Survey(
        journal=journal,
        lineage=lineage,
        committed=tuple(there),
        points=_on_lineage(lineage, (name for name in there if name not in foreign)),
        missing=missing,
        lost=_on_lineage(lineage, missing),
        foreign=_on_lineage(lineage, foreign),
        fates=fates,
        encoders=newest.encoders if newest else (),
        sources=newest.sources if newest else (),
        unreadable=unreadable,
        fork=next((parent for parent in begins if parent.begins == first), None),
        parents=tuple(parents),
    )


def _of_no_generation(seen: Survey) -> frozenset[str]:
    """The points whose generation the journal does not have: it was formed when the journal had been read.
    What a fork begins with has none, also where its claim failed before its first step.
    """
    known, own = {start.id for start in seen.journal.generations}, set(seen.committed) - {*seen.foreign}
    keys = {name: parse_point_name(name) for name in own}
    return frozenset(
        name
        for name, key in keys.items()
        if key and key.attempt != ORIGIN and (key.attempt, key.generation) not in known
    )


def _require_own(store: RunStore, claims: Iterable[Claim]) -> str | None:
    """The run's id (None without run.json), which every claim must have. Raises `ResumePointError`."""
    run = store.read_run()
    for claim in claims:
        if run is not None and claim.why != UNREADABLE and claim.run_id != run.id:
            raise ResumePointError(
                f"the claim of attempt {claim.number} belongs to run {claim.run_id or 'without an id'}, "
                f"run.json says {run.id or 'without an id'}: the folder holds pieces of two runs, and "
                "nothing is decided from it; move those of the other one away"
            )
    return run.id if run else None


def _fates(events: Iterable[JournalEvent], parents: Iterable[ClaimParent]) -> Fates:
    inherited = (name for parent in parents for name in parent.inherited)
    return point_fates(((event.kind, event.fields) for event in events), inherited)


def _on_lineage(lineage: Lineage, names: Iterable[str]) -> tuple[str, ...]:
    keys = {name: parse_point_name(name) for name in names}
    return tuple(name for name, key in keys.items() if key is not None and lineage.on_lineage(key))


def mean_losses(seen: Survey) -> dict[str, float | None]:
    """The mean loss of the steps since the point before, of each point on the history."""
    found = {
        event.fields["point"]: event.fields.get("mean_loss")
        for event in seen.journal.events
        if event.kind == EventKind.POINT_COMMITTED
    }
    return {name: found.get(name) for name in seen.points}


def _saved_before(seen: Survey) -> SavedHistory:
    committed = (event for event in seen.journal.events if event.kind == EventKind.POINT_COMMITTED)
    points = (
        (key, event.fields["cursor"]["consumed_tokens"])
        for event in committed
        if (key := parse_point_name(event.fields["point"])) is not None
    )
    return saved_before(seen.journal.generations, points)


def up_to(names: Iterable[str], point: Point | None) -> tuple[str, ...]:
    """Of the points on one history those at or before `point`: what a history that continues it has. A point
    after it is an orphan from then on; it stays, but counts for nothing.
    """
    keys = {name: parse_point_name(name) for name in names}
    return tuple(name for name, key in keys.items() if point and key and key <= point.key)


def require_journals(store: RunStore, seen: Survey) -> None:
    """Raises `ResumePointError` for points of generations that no journal has: each is durable there before
    its first point is saved (rule 2), so that the journal was damaged, and a start would leave out what is in
    these points.
    """
    names = sorted(name for name in _of_no_generation(seen) if not store.is_foreign(name))
    keys = filter(None, map(parse_point_name, names))
    if journals := sorted({f"journal/a{key.attempt:04d}" for key in keys}):
        raise ResumePointError(
            f"{', '.join(journals)}: not as written: the generations of resume points {', '.join(names)} are "
            "not in it, so that nobody can say to which history these belong, and nothing is continued; "
            "restore the journal, or give a new run another name"
        )


def has_its_steps(seen: Survey, point: Point) -> bool:
    """Whether the journal has a record of every step that led to the point; if the journal was read before
    the point was committed, it may not have them.
    """
    starts = {(start.attempt, start.generation): start.step for start in seen.journal.generations}
    begun = starts.get((point.key.attempt, point.key.generation))
    at_begin = point.key.step == begun  # saved before the generation's first step
    return not seen.lineage.gaps and (at_begin or point.key in {r.key for r in seen.journal.records})


def require_frozen(seen: Survey, data: DataSpec) -> None:
    """Raises `DataIdentityError` where something was trained and the data that it was trained on are not
    those that the run has frozen, because these are gone.
    """
    if seen.lineage.records and data.tokenizer_folder is None:
        raise DataIdentityError(
            f"{len(seen.lineage.records)} steps of this run are trained, and its frozen data are gone "
            "(manifest/data.json in the run's folder); restore manifest/ and tokenizer/"
        )


def wanted_point(seen: Survey, config: JobConfig) -> str:
    """`resume.from`, but `latest` if that rewind is done: the newest attempt was begun with the same one, and
    with all else the same that has an influence on what is trained. So the same command continues, whoever
    gives it again (torchrun does by itself); one that would train something else rewinds again.
    """
    from orchestrator.config.schema import field_rules, in_todays_fields

    wanted = config.resume.from_
    if is_folder(wanted):
        return "latest"  # a fork begins so once, and continues then
    begun = [event.fields["config"] for event in seen.journal.events if event.kind == EventKind.ATTEMPT]
    if wanted == "latest" or not begun:
        return wanted
    before, now = in_todays_fields(begun[-1]), config.flat()
    decisive = ["resume.from", *(rule.path for rule in field_rules() if rule.rule != "free")]
    return "latest" if all(before.get(path) == now[path] for path in decisive) else wanted


def kept_point(store: RunStore, seen: Survey, config: JobConfig) -> str:
    """`wanted_point`. Raises `WantedPointError` for a named one that somebody has begun to delete."""
    if (wanted := wanted_point(seen, config)) != "latest":
        store.require_kept(wanted)
    return wanted


def rewind_sentence(seen: Survey, config: JobConfig, point: Point | None) -> str:
    """What `resume.from` means for this start, which continues `point`: what leaves the history, or that it
    was done already; empty if there is nothing to say.
    """
    wanted = config.resume.from_
    if wanted == "latest" or is_folder(wanted) or point is None:
        return ""
    if wanted_point(seen, config) == "latest":
        return (
            f"resume.from={wanted}: the attempt before has done that, with the same configuration; so this "
            "one continues the newest point. It rewinds again if what is trained is to change"
        )
    steps = [record.step for record in seen.lineage.records if record.key > point.key]
    points = [name for name in seen.points if name not in up_to(seen.points, point)]
    return rewind_text(wanted, len(steps), (steps[0], steps[-1]) if steps else (0, 0), points)


def rewind_text(wanted: str, num_steps: int, labels: tuple[int, int], points: Sequence[str]) -> str:
    """What leaves the history with a rewind: so many steps, labelled so from the first to the last, and these
    points, oldest first; empty if nothing does.
    """
    if not num_steps and not points:
        return ""
    left = [f"{num_steps} steps after it, {labels[0]} to {labels[1]}"] if num_steps else []
    if points:
        several = f"{len(points)} resume points, {points[0]} to {points[-1]}"
        left.append(several if len(points) > 1 else f"resume point {points[0]}")
    return (
        f"warning: rewinds to {wanted}: {' and '.join(left)}, leave the run's history; the files stay where "
        "they are, but nothing is continued from there"
    )


def choose_point(
    store: RunStore, seen: Survey, wanted: str, fast: bool = False
) -> tuple[Point | None, tuple[Damage, ...]]:
    """See `choose_among`, of what was seen."""
    return choose_among(store, seen.points, (*seen.lost, *seen.foreign), wanted, fast)


def choose_among(
    store: RunStore, points: Sequence[str], unfit: Sequence[str], wanted: str, fast: bool = False
) -> tuple[Point | None, tuple[Damage, ...]]:
    """The point to resume from: the newest healthy one on the lineage, or the one that `resume.from` names.

    `points` are those on the lineage, oldest first, `unfit` those on it of which it is known that they are
    lost or another run's. A named point must be whole: another one is not taken in its place. `fast` trusts
    sizes (for `plan`).
    """
    if wanted == "latest":
        return store.healthy_newest((*points, *unfit), fast=fast)
    if wanted not in (*points, *unfit):
        listed = ", ".join(points) or "none"
        raise RefusedError(
            f"resume.from={wanted}, but the points on this run's lineage are: {listed}; name one of these, "
            "or latest"
        )
    if damages := store.verify_point(wanted, fast=fast):
        listed = "; ".join(map(str, damages))
        raise WantedPointError(
            f"resume.from={wanted}, which is damaged ({listed}); name another point, or latest"
        )
    return store.read_point(wanted), ()


def decide(
    store: RunStore,
    config: JobConfig,
    point: Point | None,
    identities: tuple[RunIdentity, RunIdentity] | None,
    origin: Origin | None = None,
    data: DataSpec | None = None,
    skip: SkipDecision = SkipDecision(),  # noqa: B008  frozen
    here: SourcesHere | None = None,
) -> ResumePlan:
    """Whether and how `config` continues `point`; see `planning.resume_plan.plan_resume`. `data` are the
    job's, where they are known, as `here` says that they are read; `identities` are run.json's and theirs.
    """
    from orchestrator.config.schema import field_rules
    from orchestrator.data.tokens.encoder import installed_encoders

    rules = {rule.path: rule.rule for rule in field_rules()}
    info, flat = (point_info(store, point, origin), point.config) if point else (None, None)
    at_the_point = info
    if info is not None and here is not None:
        info = replace(info, cursor=here.reading.cursor)
    if identities is not None and data is not None and data.tokenizer_folder is not None:
        identities = data.in_force(identities[0]), identities[1]
    how = partial(
        plan_resume,
        config,
        rules,
        old_flat=flat,
        identities=identities,
        installed=installed_encoders(),
        weights=data.weights if data is not None else None,
        num_blocks={plan.source: plan.num_blocks for plan in data.plans} if data is not None else None,
        skip=skip,
    )
    lists = here.changes(data) if here is not None and data is not None else ()
    restart = here.restart if here is not None else RestartDecision()
    began = {source.name: source.began for source in here.reading.sources} if here is not None else {}
    found = how(info, lists=lists, restart=restart, began=began)
    if not (lists and found.action == "resume" and found.remaining_steps == 0):
        return found
    began = {source.name: source.began for source in here.before} if here is not None else {}
    return how(at_the_point, restart=undone(restart, lists), began=began)


def begin_launch(
    store: RunStore, config: JobConfig, claim: Claim, run: RunFile, data: DataSpec, drawn: Skip | None = None
) -> tuple[Attempt, ResumePlan]:
    """Chooses what a start command's claim continues and writes what it inherits. `run` is the run's
    run.json, `data` the job's data. What is to be skipped is `drawn` if that was drawn at the point which it
    continues; else it is drawn here.

    Raises `RefusedError` if the configuration may not continue the run, or names a point that somebody has
    begun to delete (the claim then stays without descendants and harms nobody; whoever claimed it says its
    end). `latest` takes such a point nevertheless: only where all newer ones are damaged, and to refuse it
    would leave a run that lost power in the middle of a deletion without any.
    """
    from orchestrator.data.preparing import write_lists

    number = claim.number
    seen = survey(store)
    require_frozen(seen, data)
    require_journals(store, seen)
    point: Point | None
    origin, damages, verified_s, lifted = None, tuple[Damage, ...](), None, False
    if run.forked_from is not None and seen.lineage.attempt is None:
        point, origin = take_over(store, run, number)
    else:
        began = time.monotonic()
        point, damages = choose_point(store, seen, kept_point(store, seen, config))
        verified_s = time.monotonic() - began
        lifted = _mark(store, damages, point, f"attempt {number}")
    asked = skip_here(config, point.key if point else None, seen.parents, seen.lineage)
    info = point_info(store, point, origin) if point else None
    here = sources_here(config, Path(store.storage.root), info, seen.parents, seen.lineage)
    data = read_as(config, data, here)
    plan = decide(store, config, point, (run.identity, data.identity()), origin, data, asked, here)
    plan = replace(plan, rewind=rewind_sentence(seen, config, point))
    if plan.action == "refuse":
        raise RefusedError("\n".join(plan.refusals))
    skip = None
    if asked.request is not None and point is not None:
        there = drawn is not None and (drawn.request, drawn.begin) == (asked.request, point.cursor)
        skip = drawn if there else draw_skip(config, data.made_by(plan.encoders), point, asked.request)
        point = moved(point, skip)
    point = here.moved(point)
    if data.unwritten:  # before the claim says that they are read
        write_lists(here.folder, data)
    inherited = up_to(seen.points, point) if origin is None or point is None else (point.name,)
    encoders = plan.encoders
    if plan.encoder is not None and plan.encoder != encoders[-1].encoder:
        begins = data.made_by(encoders).next_documents(point.cursor) if point else {}
        begins |= after_removed(here.reading.sources, point.cursor) if point else {}
        encoders = with_encoder(encoders, plan.encoder, begins)
    store.write_parent(
        ClaimParent(
            attempt=number,
            parent=point.key if point else None,
            inherited=inherited,
            budgets=plan.budgets,
            differences=plan.differences,
            encoders=encoders,
            origin=origin,
            skip=skip,
            sources=here.reading.sources,
            restart=here.restart.request,
        )
    )
    saved = _saved_before(seen)
    attempt = Attempt(
        number=number,
        launch=claim.launch,
        why=claim.why,
        point=point,
        inherited=inherited,
        step_label=plan.step_after,
        budgets=plan.budgets,
        encoders=encoders,
        damages=damages,
        verified_s=verified_s,
        lifted=lifted,
        unreadable=seen.unreadable,
        leftovers=remove_leftovers(store, number, seen.fates),
        run_id=run.id,
        num_blocks={plan.source: plan.num_blocks for plan in data.plans},
        weights=data.weights,
        forked_from=origin.forked_from if origin else None,
        losses=mean_losses(seen),
        history=saved.number,
        history_saved_to=saved.saved_to,
        skip=skip,
        sources=here.reading.sources,
        restart=here.restart.request,
        lists=plan.lists,
    )
    return attempt, plan


def _mark(store: RunStore, damages: Sequence[Damage], chosen: Point | None, by: str) -> bool:
    """Every byte of the chosen point was right, and these damages were found in newer ones; whether that
    lifted the mark of the chosen one.
    """
    for name in dict.fromkeys(damage.point for damage in damages):
        store.note_reading(name, [damage for damage in damages if damage.point == name], by)
    return chosen is not None and store.note_reading(chosen.name, (), by)


def note_beginning(
    journal: JournalWriter, attempt: Attempt, config: Mapping[str, Any], process: Process | None = None
) -> None:
    """Journals that the attempt begins in `process` (default: this one), under this flat configuration, and
    all that its start found and did.
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
    )
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
    if attempt.lists:
        journal.event(
            EventKind.SOURCES_CHANGED,
            changes=[encode(change) for change in attempt.lists],
            text="; ".join(map(str, attempt.lists)),
        )
    if attempt.point is not None and attempt.verified_s is not None:
        journal.event(
            EventKind.POINT_VERIFIED,
            point=attempt.point.name,
            checked="digests",
            healthy=True,
            seconds=attempt.verified_s,
        )
    if attempt.died is not None:
        pid, host = attempt.died
        journal.event(EventKind.COORDINATOR_DIED, pid=pid, host=host, reason=_HOW_IT_DIED)
    for damage in attempt.damages:
        journal.event(EventKind.DAMAGED_POINT, point=damage.point, file=damage.file, reason=damage.reason)
    for file in attempt.unreadable:
        journal.event(EventKind.UNREADABLE_FILE, file=file.path, reason=file.reason)
    for left in attempt.leftovers:
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
    """Journals the end, which `by` caused, and writes the end record. Each is tried again for `limit_s`, and
    the record, from which others see at once that nobody is at work, waits for the journal no longer. `tell`
    hears of what is tried again. Raises `StorageError`.
    """
    journal.event(EventKind.END, outcome=outcome, reason=reason, by=by)
    try:
        until_storage_works(journal.flush, limit_s, "Training is over", tell)
    finally:
        until_storage_works(
            lambda: store.write_end(attempt.number, outcome, reason, attempt.run_id, by),
            limit_s,
            "Training is over",
            tell,
        )


def continue_launch(
    store: RunStore, first: Attempt, host: str, faults: Hook, mine: set[int] | None = None
) -> Attempt:
    """What a coordinator process goes on with: `first` as the driver claimed it, or the next attempt if this
    process is a restarted one.

    It is a restarted one if the launch's newest attempt has a journal: that is the first thing a coordinator
    writes. Leftovers stay until the next start command, for members that live may still be writing into them.
    `mine` are the numbers that this process has claimed, and gets the one that it claims: after a
    `StorageError` it may be called again, and goes on with the claim that it made.
    Raises `FencedError` if another launch has taken the run over.
    """
    mine = set() if mine is None else mine
    newest = store.newest_claim()
    if lost := store.why_not_mine(first.run_id) or ("" if newest else "the claims of this launch are gone"):
        raise FencedError(f"{lost}: {LOST}")
    assert newest is not None, "looked at just before"
    if newest.number == first.number and not store.storage.list(f"journal/a{first.number:04d}"):
        return first
    end = store.read_end(newest.number) if newest.launch == first.launch else None
    if end is not None:
        return replace(first, number=newest.number, why=RESTARTED, ended=(end.outcome, end.reason))
    number = newest.number
    if number not in mine or store.read_parent(number) or store.storage.list(f"journal/a{number:04d}"):
        number = newest.number + 1
        store.claim(number, first.launch, RESTARTED, host, first.run_id)
        mine.add(number)
        faults("claim_made", -1, -1)
    seen = survey(store, with_steps=False)  # its members wait for it
    try:
        point, _ = choose_point(store, seen, "latest", fast=True)
    except ResumePointError:
        point = None  # the members hold a newer state than any point; without them the next start refuses
    if point is None or (first.parent is not None and point.key <= first.parent):
        point = first.point  # its cursor stands after what the launch skips
    skip = still_due(first.skip, first.parent, point.key if point else None)
    store.write_parent(
        ClaimParent(
            attempt=number,
            parent=point.key if point else None,
            inherited=seen.points,
            budgets=first.budgets,
            encoders=first.encoders,
            skip=skip,
            sources=first.sources,
            restart=first.restart if point is None or point.key == first.parent else None,
        )
    )
    saved = _saved_before(seen)
    return replace(
        first,
        number=number,
        why=RESTARTED,
        point=point,
        inherited=seen.points,
        damages=(),
        verified_s=None,
        lifted=False,
        unreadable=tuple(file for file in seen.unreadable if file not in first.unreadable),
        leftovers=(),
        lists=(),
        forked_from=None,
        losses=mean_losses(seen),
        history=saved.number,
        history_saved_to=saved.saved_to,
        died=_process_of(store, seen.journal, number - 1),
        skip=skip,
        **_read_back(seen.journal, first.number),
    )


def _process_of(store: RunStore, journal: Journal, attempt: int) -> tuple[int, str]:
    """The process of an attempt's coordinator, as its journal says; one without knows no pid (0)."""
    for event in journal.events:
        if event.attempt == attempt and event.kind == EventKind.ATTEMPT:
            return event.fields.get("pid", 0), event.fields.get("host", "")
    return 0, store.read_claim(attempt).host


def _read_back(journal: Journal, first: int) -> dict[str, Any]:
    """What the coordinators of a launch, whose first attempt is `first`, have journalled for the next one."""
    mine = [event for event in journal.events if event.attempt >= first]
    last = max((g for g in journal.generations if g.attempt >= first), key=lambda g: g.id, default=None)
    # whose death is known is not waited for, and not counted again
    dead = {event.fields["member"] for event in mine if event.kind == EventKind.MEMBER_DEAD}
    live = tuple(member for member in last.members if member not in dead) if last else ()
    finished = [event.fields for event in mine if event.kind == EventKind.MEMBER_FINISHED]
    failures = [event.fields for event in mine if event.kind == EventKind.FAILURE]
    records = [record for record in journal.records if record.attempt >= first]
    answered = [e.fields["request"] for e in mine if e.kind == EventKind.REQUEST_ANSWERED]
    return {
        "answered": tuple(answered),
        "previous": last
        and PreviousGeneration(
            attempt=last.attempt, generation=last.generation, members=live, ended=live != last.members
        ),
        "members": _where_they_live(journal, live),
        "finished": tuple((f["member"], f["reason"], f["step"]) for f in finished),
        "failures": tuple(Failure(step=f["step"], reason=f["reason"]) for f in failures),
        "last_step": max(records, key=lambda record: record.key, default=None),
    }


def _where_they_live(journal: Journal, members: tuple[str, ...]) -> tuple[MemberInfo, ...]:
    """As they said when they last joined."""
    joins = {e.fields["member"]: e.fields for e in journal.events if e.kind == EventKind.JOIN}
    return tuple(
        MemberInfo(
            member=m,
            actor_id=joins[m]["actor"],
            node_id=joins[m]["node"],
            pid=joins[m]["pid"],
            host=joins[m].get("host", ""),
        )
        for m in members
        if m in joins
    )
