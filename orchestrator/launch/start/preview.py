"""Determines what a start would do, without doing it: what it continues, whether it may, how much is left.

`plan` prints the result. A start calls it first, and claims only what it may begin.

`plan_older_point` continues an older resume point within the same start, if the workers found the newest one
damaged. The driver compares sizes and headers before it claims. The workers compare the digests of what they
load. The damage that they report ends their attempt. The driver then verifies it, marks the point and plans
the next attempt of the same start, as a manual start would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.checkpoint.points.point_files import Each
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.run_file import RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import ReadAtOnce, point_path
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.forking import (
    code_changes,
    fork_to_begin,
    point_info,
    read_parent_point,
)
from orchestrator.coordinator.attempt.launch_attempts import mark_damaged
from orchestrator.coordinator.attempt.resume_point_choice import (
    StartData,
    choose_point,
    decide,
    find_known_epochs,
    kept_point,
    rewind_sentence,
)
from orchestrator.coordinator.attempt.source_resolution import draw_skip, read_as, skip_here, sources_here
from orchestrator.coordinator.attempt.survey import (
    LOOKS,
    LatePointError,
    Survey,
    deleted_now,
    has_its_steps,
    moved_on,
    require_frozen,
    require_journals,
    survey,
)
from orchestrator.errors import (
    ConfigError,
    RefusedError,
    ResumePointError,
    StorageError,
    UnreachableNodeError,
)
from orchestrator.history.claims.claims import ForkedFrom
from orchestrator.history.journal.code_record import functions_of
from orchestrator.history.sentences import count
from orchestrator.launch.process.launch_report import data_have_ended
from orchestrator.launch.start.run_preparation import find_run, prepare, refuse_inside
from orchestrator.planning.resume.identity import OTHER_OPTIMIZER
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.planning.resume.skipping import SkipDecision
from orchestrator.records.points import Damage, damaged_point
from orchestrator.records.run_status import RunStatus
from orchestrator.trainer.weights.weight_files import require_reachable
from orchestrator.user_function import OPTIMIZER_MISSING, require_functions

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec
    from orchestrator.launch.capacity.capacity import KnownMachines
    from orchestrator.planning.state.memory import Machine


_BY_SIZES = (
    "sizes and headers of the point's files are right; the workers compare the digests of what they load"
)

_NAMED = 3  # damaged places of the journal that a plan names


def look_before_start(
    store: RunStore,
    job: JobConfig,
    spec: DataSpec,
    watched: Callable[[], int],
    say: Callable[[str], None] = lambda text: None,
) -> ResumePlan:
    """`look_ahead` for a start.

    A start that would train draws the samples that are to be skipped, so that data that end among them are
    refused here. Its workers compare the digests of what they load. A start that has nothing left to train
    reads all bytes of the point here, because no worker would. It does so only when no launch is active on
    the run any more, as reported by `watched` (of `watching`): a launch that still trains has not reached its
    end.
    """
    plan = with_missing_functions(job, look_ahead(store, job, spec, draw=True))
    if not reached(plan):
        return plan
    watched()
    try:
        each = ReadAtOnce(store.storage, say, "nothing is left to train; the newest resume point")
        return look_ahead(store, job, spec, fast=False, each=each)
    except UnreachableNodeError as error:  # nothing that would access it is started
        return replace(plan, notes=(*plan.notes, f"not verified from here: {error}"))


def with_missing_functions(job: JobConfig, found: ResumePlan) -> ResumePlan:
    """A refused plan, with a function that is new in the job and does not exist as its first refusal.

    A plan that is not refused tries all functions by itself. Imports user code, in another process.
    """
    from orchestrator.data.code_process import call

    fields = tuple(f"{each.field}." for each in found.differences)
    new = {field: path for field, path in functions_of(job).items() if f"{field}.".startswith(fields)}
    if found.action != "refuse" or not new:
        return found
    try:
        call(True, require_functions, new)
    except ConfigError as error:
        # what does not exist is not compared
        compared = OTHER_OPTIMIZER if error.code == OPTIMIZER_MISSING else None
        others = [each for each in zip(found.refusals, found.codes, strict=True) if each[1] != compared]
        texts, codes = zip((f"{job.run.run_uri}: {error}", error.code), *others, strict=True)
        return replace(found, refusals=texts, codes=codes)
    return found


def look_ahead(
    store: RunStore,
    job: JobConfig,
    spec: DataSpec,
    *,
    fast: bool = True,
    draw: bool = False,
    known: Sequence[Damage] = (),
    each: Each | None = None,
) -> ResumePlan:
    """What a start would do now.

    `fast`, `known` and `each` as in `choose_point`. The plan's `damages` are those found by reading all
    bytes, and the known ones. For a new run, the first records are read (see `check_first_records`). With
    `draw` the samples that are to be skipped are read, as the start does: this determines where they end, and
    whether the data have so many.
    """
    from orchestrator.data.code_process import call, needs_code
    from orchestrator.data.first_records import check_first_records

    run = _run_to_look_at(store)
    if (fork := fork_to_begin(store, job, run)) is not None:
        return _look_at_fork(store, job, spec, fork, draw=draw, fast=fast, each=each)
    if run is None:
        call(needs_code(spec), check_first_records, spec)
    choose = partial(choose_point, fast=fast, known=known, each=each)
    seen, spec, point, damages = _point_to_continue(store, job, spec, choose)
    run = run or find_run(store)
    asked = skip_here(job, point.key if point else None, seen.parents, seen.lineage)
    info = point_info(store, point) if point is not None else None
    here = sources_here(job, store.storage, info, seen.parents, seen.lineage)
    spec = read_as(job, spec, here)
    identities = (run.identity, spec.identity()) if run else None
    epochs = find_known_epochs(store, seen.parents, seen.journal.events, job)
    start_data = StartData(identities=identities, spec=spec, sources=here, epochs=epochs)
    found = decide(store, job, point, start_data, asked)
    found = _with_drawn_skip(found, job, spec, point, asked) if draw else found
    changes = code_changes(store, job, point.name if point is not None else None)
    notes = changes + _notes(store, job, seen, point, damages, fast)
    return replace(
        found,
        notes=(*found.notes, *notes),
        code_changed=bool(changes),
        rewind=rewind_sentence(seen, job, point),
        damages=() if fast and not known else damages,
    )


def _point_to_continue(
    store: RunStore,
    job: JobConfig,
    spec: DataSpec,
    choose: Callable[[RunStore, Survey, str], tuple[Point | None, tuple[Damage, ...]]],
) -> tuple[Survey, DataSpec, Point | None, tuple[Damage, ...]]:
    """The survey, the data, the point, and the damages of newer points.

    Handles a run that may continue meanwhile, and delete points.
    """
    for _ in range(LOOKS):
        seen = survey(store)
        if seen.lineage.records and spec.tokenizer_folder is None:
            # a first start may have frozen them since they were read
            spec = prepare(job, store.storage, freeze=False)
        require_frozen(seen, spec)
        require_journals(store, seen)
        wanted = kept_point(store, seen, job)
        try:
            point, damages = choose(store, seen, wanted)
        except LatePointError:
            continue
        except ResumePointError:
            if not deleted_now(store, seen.points):
                raise
        else:
            if not deleted_now(store, (damage.point for damage in damages)):
                return seen, spec, point, damages
    raise moved_on(store)


def _notes(
    store: RunStore,
    job: JobConfig,
    seen: Survey,
    point: Point | None,
    damages: tuple[Damage, ...],
    fast: bool,
) -> list[str]:
    """Further notes on what is continued."""
    notes: list[str] = []
    if point is None and job.model.init_from is not None:
        from orchestrator.checkpoint.export.export_files import weights_sentence

        notes.append(weights_sentence(job.model.init_from))
    notes += [f"warning: {damage}; falling back to an older resume point" for damage in damages]
    if point is not None and fast:
        notes.append(said_of_files(store, point))
    # checked twice: the steps are durable before the point is, but the point may have come after the journal
    # was read
    if point is not None and not has_its_steps(seen, point):
        seen = survey(store)
    if point is not None and not has_its_steps(seen, point):
        notes.append(
            f"warning: the journal lacks records of steps before {point.name}: the run can continue, but "
            "`orchestrator audit` cannot prove what these steps were trained on; restore journal/"
        )
    notes += [f"warning: {damage}; nothing that a start needs is lost" for damage in seen.damages[:_NAMED]]
    return notes


def unreached(job: JobConfig) -> list[str]:
    """Warns of weights beside adapters that this machine does not reach. The workers may reach them."""
    try:
        require_reachable(job.model)
    except StorageError as error:
        return [f"warning: from here {error}"]
    return []


def said_of_files(store: RunStore, point: Point) -> str:
    """The result of a check by sizes that found a point whole.

    For files on the disks of nodes that are not accessible without a cluster, it reports that they were not
    checked.
    """
    for entry in point.commit.files:
        if away := store.storage.away(point_path(point.name, entry.path)):
            return f"not looked at from here: {away}; the start looks, from the cluster"
    return _BY_SIZES


def _run_to_look_at(store: RunStore) -> RunFile | None:
    """Like `find_run`. A new run's folder must not be inside another run."""
    if (run := find_run(store)) is None:
        refuse_inside(store)
    return run


def _look_at_fork(
    store: RunStore,
    job: JobConfig,
    spec: DataSpec,
    fork: ForkedFrom,
    *,
    draw: bool,
    fast: bool,
    each: Each | None,
) -> ResumePlan:
    """What a start would do that begins with a point of another run."""
    other, point = read_parent_point(store, fork, job.run.name, fast, each)
    run = other.read_run()
    assert run is not None, "just read"
    asked = skip_here(job, point.key)
    here = sources_here(job, other.storage, point_info(other, point))
    spec = read_as(job, spec, here)
    start_data = StartData(identities=(run.identity, spec.identity()), spec=spec, sources=here)
    found = decide(other, job, point, start_data, asked)
    found = _with_drawn_skip(found, job, spec, point, asked) if draw else found
    notes = [f"forks {fork.run} at {fork.point}: a run of its own from there on; the point is pinned there"]
    changes = code_changes(store, job, None)
    notes += changes
    if fast:
        notes.append(said_of_files(other, point))
    return replace(found, notes=(*notes, *found.notes), code_changed=bool(changes))


def _with_drawn_skip(
    found: ResumePlan, job: JobConfig, spec: DataSpec, point: Point | None, asked: SkipDecision
) -> ResumePlan:
    if found.skip is None or found.action == "refuse" or point is None or asked.request is None:
        return found
    began = time.monotonic()
    try:
        skip = draw_skip(job, spec.made_by(found.encoders), point, asked.request)
    except RefusedError as error:
        return refused(found, job, [str(error)], error.code)
    seconds = time.monotonic() - began
    drawn = replace(found.skip, tokens=skip.tokens, cursor=skip.end, seconds=seconds)
    return replace(found, skip=drawn, drawn=skip)


def reached(plan: ResumePlan) -> bool:
    """Whether there is nothing left to train: an earlier start has reached the stop."""
    if plan.action == "refuse":
        raise plan.refusal
    return plan.action == "resume" and plan.remaining_steps == 0


def stop_is_reached(job: JobConfig, plan: ResumePlan) -> str:
    """The message if there is nothing left to train."""
    if plan.data_tokens == 0:
        return f"nothing is left to train at {plan.point}: {data_have_ended(job, already=False)}"
    undone = f". Note: {plan.restart_note}" if plan.restart_note else ""
    return (
        f"the stop is reached already: {plan.point} stands at {plan.consumed_tokens:,} tokens; "
        "raise train.max_steps, max_samples or max_tokens to continue (steps count at the batch size and "
        f"seq_len that they are first given with){undone}"
    )


def feed_memory(job: JobConfig, spec: DataSpec) -> str:
    """A plan's note on the memory of the feed's processes."""
    from orchestrator.data.feed.memory import memory_of

    return str(memory_of(job, spec))


def judged_by_memory(job: JobConfig, store: RunStore, found: ResumePlan) -> ResumePlan:
    """A plan with its notes on the workers' memory, refused if the machines known without a cluster cannot
    hold the job.
    """
    from orchestrator.cluster.connection import starts_local_ray
    from orchestrator.launch.capacity.placement_check import known_machines

    known = known_machines(job, store)
    where = _where(job, known.machines) if job.cluster.use_gpu and starts_local_ray(job) else ""
    return replace(with_memory(job, known, found), where=where)


def _where(job: JobConfig, machines: Sequence[Machine]) -> str:
    """Where a job that needs GPUs can start its own Ray; empty if on this machine, `machines`."""
    needed, seen = job.cluster.start_workers, sum(len(machine.gpu_bytes) for machine in machines)
    if seen >= needed:
        return ""
    host = machines[0].host if machines else "this machine"
    return f"on a machine with {count(needed, 'GPU')}: {host}, where this plan is made, has {seen or 'none'}"


def with_memory(job: JobConfig, known: KnownMachines, found: ResumePlan) -> ResumePlan:
    """`judged_by_memory`, with these machines."""
    from orchestrator.launch.capacity.capacity import memory_plan

    notes, problems = memory_plan(job, known)
    return refused(replace(found, notes=(*found.notes, *notes)), job, problems, "cluster.too_small")


def refused(
    found: ResumePlan, job: JobConfig, problems: Sequence[str], code: str | None = None
) -> ResumePlan:
    """The plan, refused if there are problems. `code` is the code of each of them."""
    return found.refused([f"{job.run.run_uri}: {problem}" for problem in problems], code)


def is_damaged_load(status: RunStatus) -> bool:
    """Whether the attempt ended because its workers could not load a damaged point, without a request to
    stop.
    """
    return status.ended == "failed" and bool(status.damages) and not status.stopping


def plan_older_point(
    store: RunStore,
    job: JobConfig,
    spec: DataSpec,
    found: Sequence[Damage],
    known: Sequence[Damage],
    attempt: int,
    say: Callable[[str], None],
) -> ResumePlan:
    """The plan of the next attempt after the workers of `attempt` found these damages.

    `known` are those that this start has found before; the plan's `damages` are all of them. Marks the
    damaged point.

    Raises `StorageError` if this process reads the committed bytes correctly although a worker did not, or
    cannot read them: then nothing is known to be damaged (membership rule 16). Raises `WantedPointError` for
    a point that `resume.from` names, `ResumePointError` if no older point is whole, and `RefusedError` if the
    configuration may not continue the older one.
    """
    before = {damage.point for damage in known}
    if before.issuperset(damage.point for damage in found):
        raise damaged_point(found)  # it should not have been loaded again
    for damage in found:
        say(f"attempt {attempt} ends: its workers cannot load {damage}")
    confirmed = store.confirmed(found, ReadAtOnce(store.storage, say, "reading the damaged file again"))
    if not confirmed:
        listed = "; ".join(map(str, found))
        raise StorageError(
            f"{listed}, as a worker read it; this process reads the bytes that were committed, so that the "
            f"point is not damaged. Check the memory, the disk and the mount of {store.storage.root} on the "
            "worker's machine, then start the same command again",
            code="point.read_differently",
        )
    mark_damaged(store, confirmed, f"attempt {attempt}")
    damages = (*known, *confirmed)
    plan = look_ahead(store, job, spec, draw=True, known=damages)
    if plan.action == "refuse":
        raise plan.refusal
    return replace(plan, damages=damages)
