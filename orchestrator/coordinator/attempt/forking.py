"""Forks: runs that begin with another run's resume point.

Finds that point, takes it over, and provides what a resume decision needs of a point. The point's files get a
second name in the fork's folder (copies, where the file system has no hard links). From then on the fork
needs nothing of the other run. The other run keeps its point nevertheless, because it is pinned first.

`trained_code` follows forks back to the recorded code of the user's functions that trained a point.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.checkpoint.points.model_folders import copy_configuration
from orchestrator.checkpoint.points.pins import Hold
from orchestrator.checkpoint.points.point_files import Each
from orchestrator.checkpoint.points.points import Point, parse_point_name
from orchestrator.checkpoint.points.run_file import RUN_FILE, RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import POINTS
from orchestrator.data.common.user_code import is_reading_only
from orchestrator.errors import (
    Format1Error,
    OrchestratorError,
    RefusedError,
    ResumePointError,
    WantedPointError,
)
from orchestrator.history.claims.claims import ORIGIN, ClaimParent, ForkedFrom, Origin
from orchestrator.history.journal.code_record import (
    Recorded,
    changes,
    functions_of,
    newest_record,
    recorded_in,
)
from orchestrator.history.journal.journal_reader import beginning_of
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.planning.resume.resume_plan import PointInfo
from orchestrator.planning.resume.source_lists import SourceLists
from orchestrator.planning.schedule import Budgets
from orchestrator.records.steps import sample_len_of
from orchestrator.storage.open import absolute, join, split

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

PARENT_OF_FORK = "parent of fork "  # prefix of a pin's reason; the fork's folder follows


def point_info(store: RunStore, point: Point, origin: Origin | None = None) -> PointInfo:
    """Returns what a resume decision needs of a point.

    Budgets and encoders are in the parent file of its attempt, or in the `origin` with which a fork begins,
    which may not be written yet.
    """
    budgets, encoders, sources = Budgets(), tuple[EncoderSpan, ...](), tuple[SourceLists, ...]()
    key = point.key
    taken_over = key.attempt == ORIGIN
    claim = store.read_parent(key.generation if taken_over else key.attempt)
    if isinstance(claim, ClaimParent):
        budgets, encoders, sources = claim.budgets or budgets, claim.encoders, claim.sources
        origin = origin or claim.origin
    if taken_over and origin is not None:
        budgets, encoders, sources = origin.budgets, origin.encoders, origin.sources
    return PointInfo(
        name=point.name,
        key=key,
        cursor=point.cursor,
        global_batch_size=point.config["train.global_batch_size"],
        seq_len=sample_len_of(point.config),
        world_size=point.commit.world_size,
        optimizer_steps=point.commit.optimizer_steps,
        budgets=budgets,
        encoders=encoders,
        sources=sources,
    )


def is_folder(wanted: str) -> bool:
    """Whether a `resume.from` names a point of another run by its folder."""
    return "/" in wanted


def other_run(wanted: str) -> tuple[str, str]:
    """Returns the run's folder (absolute, or its URI) and the point's name, of `<run>/points/<point>`.

    Raises `RefusedError`.
    """
    folder, name = split(absolute(wanted))
    run, points = split(folder)
    if parse_point_name(name) is None or points != POINTS:
        raise RefusedError(
            f"resume.from={wanted} is not the folder of a resume point; give <run>/{POINTS}/<point>, e.g. "
            f"runs/other/{POINTS}/00000480-a0003-g0007, or the name of a point of this run",
            code="point.bad_location",
        )
    return run, name


def fork_to_begin(store: RunStore, config: JobConfig, run: RunFile | None) -> ForkedFrom | None:
    """Returns the point of another run with which this start begins; None if it does not begin a fork.

    Raises `RefusedError` if `resume.from` names another run's point and the run exists with another history,
    and as `describe`.
    """
    wanted = config.resume.from_
    if is_folder(wanted):
        folder, name = other_run(wanted)
        there = run.forked_from if run is not None else None
        if run is not None and (there is None or (there.run, there.point) != (folder, name)):
            began = f"with {there.point} of {there.run}" if there else "by itself"
            raise RefusedError(
                f"resume.from={wanted} begins a new run with a point of another one, but the run "
                f"{store.storage.root} exists already, and began {began}: one run has one history. Give a "
                "new run.name, or go back in this run by the name of one of its own points",
                code="run.exists",
            )
        if run is None:
            return describe(RunStore(store.storage.beside(folder)), name)
    if run is None or run.forked_from is None or store.parents()[0]:
        return None
    return run.forked_from


def describe(other: RunStore, name: str) -> ForkedFrom:
    """Describes a run's point as a fork names it.

    Raises `RefusedError` if there is no such run, and `WantedPointError` for a point that is gone or damaged.
    """
    run = other.read_run()
    if run is None:
        raise RefusedError(
            f"{other.storage.root}: there is no run to fork (no {RUN_FILE})", code="run.unknown"
        )
    try:
        point = other.read_point(name)
    except Format1Error:
        raise
    except ResumePointError as error:
        raise WantedPointError(str(error), code=error.code) from error
    return ForkedFrom(
        run=other.storage.root, run_id=run.id, point=name, weights_digest=point.commit.weights_digest
    )


def read_parent_point(
    store: RunStore, fork: ForkedFrom, name: str, fast: bool, each: Each | None = None
) -> tuple[RunStore, Point]:
    """Returns the other run, and its point as the fork `name` in `store` will have it.

    Raises `WantedPointError` if the point is gone or damaged, because a fork without a point of its own needs
    it.
    """
    other = RunStore(store.storage.beside(fork.run))
    run, root = other.read_run(), store.storage.root
    what = f"{root} begins with resume point {fork.point} of {fork.run}"
    advice = f"restore it there, or delete {root} and fork from another point"
    if run is None or run.id != fork.run_id:
        found = "has no run any more" if run is None else f"has run {run.id} now"
        raise WantedPointError(
            f"{what}, which was run {fork.run_id}, but that folder {found}; {advice}",
            code="point.parent_run_gone",
        )
    if damages := other.verify_point(fork.point, fast=fast, each=each):
        listed = "; ".join(f"{damage.file} {damage.reason}" for damage in damages)
        raise WantedPointError(
            f"{what}, which is gone or damaged ({listed}); {advice}", code="point.damaged"
        )
    point = other.read_point(fork.point)
    if point.commit.weights_digest != fork.weights_digest:
        raise WantedPointError(
            f"{what}, whose weights had digest {fork.weights_digest} and now have "
            f"{point.commit.weights_digest}; {advice}",
            code="point.parent_differs",
        )
    return other, _as_its_own(point, store, name)


def _as_its_own(point: Point, store: RunStore, name: str) -> Point:
    """Puts the fork's name and storage into the point's configuration, which otherwise stays unchanged."""
    storage, was = split(store.storage.root)[0], point.config.get("run.storage", "")
    if was and absolute(was) == storage:
        storage = point.config["run.storage"]  # as it was written
    config = {**point.config, "run.name": name, "run.storage": storage}
    return replace(point, config=config)


def found_run(store: RunStore, name: str, fork: ForkedFrom, by: str, pinned: bool = True) -> RunFile:
    """Creates the fork's run.json, as the last step.

    Before, its point is pinned in the other run, and that run's frozen data are copied. From then on any
    start of the fork begins with the point. After a kill before that it may be called again. Raises
    `BusyError` if there is a run.

    Without `pinned` the other run may delete its point before it is taken over (`take_over` then raises).
    This is for a fork that can be made again and should not leave a pin.
    """
    from orchestrator.data.frozen import copy_frozen

    other, _ = read_parent_point(store, fork, name, fast=True)
    run = other.read_run()
    assert run is not None, "just read"
    if pinned:
        other.pin(fork.point, by, f"{PARENT_OF_FORK}{store.storage.root}", run.id)
    copy_frozen(other.storage, store.storage)
    key = parse_point_name(fork.point)
    assert key is not None, "its name was read"
    copy_configuration(other.storage, key.attempt, store.storage)
    return store.create_run(name, run.identity, run.first_weights, fork, run.weights_by_name)


def forks_beside(store: RunStore, run_id: str) -> dict[str, list[str]]:
    """Returns the folders of the forks beside this run, by the point with which they begin.

    Forks whose run.json cannot be read are left out.
    """
    storage, found = split(store.storage.root)[0], dict[str, list[str]]()
    for name in store.storage.beside(storage).list(""):
        folder = join(storage, name)
        with suppress(OrchestratorError):
            run = RunStore(store.storage.beside(folder)).read_run()
            if run is not None and run.forked_from is not None and run.forked_from.run_id == run_id:
                found.setdefault(run.forked_from.point, []).append(folder)
    return found


def without_its_pin(store: RunStore, pin: Hold) -> str:
    """Describes what the removal of a pin on a point of this run means for forks; empty if there are none.

    It checks the fork for which the pin was made, and the forks beside the run, which may have found the
    point already pinned and rely on that.
    """
    storage, named = split(store.storage.root)[0], ""
    if pin.reason.startswith(PARENT_OF_FORK):
        named = pin.reason.removeprefix(PARENT_OF_FORK)
    beside = [join(storage, name) for name in store.storage.beside(storage).list("")]
    told = []
    for folder in dict.fromkeys((named, *beside) if named else beside):
        fork = RunStore(store.storage.beside(folder))
        try:
            if not _began_with(fork, pin):
                continue
            if not fork.point_names():
                told.append(
                    f"it is the parent of fork {folder}, which has no resume point of its own yet: once it "
                    "is deleted that fork cannot begin; pin it again, or start the fork first"
                )
            elif folder == named:
                told.append(
                    f"it was the parent of fork {folder}, which has resume points of its own and does not "
                    "need it"
                )
        except OrchestratorError as error:
            if folder == named:
                told.append(f"it was the parent of fork {folder}, which cannot be read ({error})")
    return "; ".join(told)


def _began_with(fork: RunStore, pin: Hold) -> bool:
    run = fork.read_run()
    begins = run.forked_from if run is not None else None
    return begins is not None and (begins.run_id, begins.point) == (pin.run_id, pin.point)


def take_over(store: RunStore, run: RunFile, number: int) -> tuple[Point, Origin]:
    """Makes the other run's point the first one of the fork, for claim `number`.

    Sizes and headers of its files are compared before. Raises as `read_parent_point`.
    """
    fork = run.forked_from
    assert fork is not None, "asked for a fork alone"
    other, point = read_parent_point(store, fork, run.name, fast=True)
    info = point_info(other, point)
    origin = Origin(
        forked_from=fork,
        step=point.key.step,
        cursor=point.cursor,
        world_size=info.world_size,
        global_batch_size=info.global_batch_size,
        seq_len=info.seq_len,
        budgets=info.budgets,
        encoders=info.encoders,
        sources=info.sources,
    )
    start = origin.start(number)
    key = replace(point.key, attempt=start.attempt, generation=start.generation)
    return store.take_point(other, point, key, run.id), origin


# -------------------------------------------------------------------------------------------- the user's code
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
