"""Joins the stages: what `train`, `plan` and the reading commands do, from configuration to result.

The driver's side only. Importing it loads neither Ray nor torch; they are imported where a cluster is really
used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import as_data_job, as_job
from orchestrator.config.redaction import command_line
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.forking import code_changes
from orchestrator.errors import (
    ConfigError,
    DataIdentityError,
    NoConditionalCreateError,
    RefusedError,
    StorageError,
)
from orchestrator.history.journal.code_record import functions_of
from orchestrator.history.journal.journal_reader import newest_choice
from orchestrator.history.metrics.loggers import require_loggers
from orchestrator.launch.branch.rewind import is_rewind, rewound
from orchestrator.launch.capacity import placement_check
from orchestrator.launch.capacity.placement_check import with_known_shape
from orchestrator.launch.process.launch_report import say_done_before
from orchestrator.launch.process.progress import Progress, dashboard_beside
from orchestrator.launch.process.stop_signals import ended_by_signals
from orchestrator.launch.start import attempt_claim, preview
from orchestrator.launch.start import run_preparation as starting
from orchestrator.launch.start.attempt_claim import LaunchContext
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.records.cursor import Cursor
from orchestrator.records.run_status import RunStatus
from orchestrator.storage.files import Storage
from orchestrator.text import html_facts, html_page
from orchestrator.trainer.dry_run.model_dry_run import is_to_try, require_model

if TYPE_CHECKING:
    from orchestrator.data.loading.sample_stream import SampleStream
    from orchestrator.data.spec import DataSpec
    from orchestrator.elastic.supervision.policy import LaunchLimits
    from orchestrator.launch.on_ray.node_disks import NodeDisks
    from orchestrator.trainer.dry_run.model_dry_run import ModelFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a launch ended. `outcome` is done (budget or data exhausted), stopped (on request, after saving) or
    failed (`reason`, and `code`: of the error that it is).
    """

    outcome: str
    reason: str
    code: str | None = None
    run_uri: str
    attempt: int
    step: int | None
    consumed_samples: int
    consumed_tokens: int
    loss: float | None
    point: str | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """For notebooks: how it ended, and where the run stands."""
        return html_page(f"{self.run_uri}: {self.outcome}", html_facts(asdict(self).items()))


def train(
    config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = (), *, fault_plan: str = ""
) -> RunResult:
    """Starts the run, or continues it at exactly the next unread token; returns when it is done, stopped or
    has failed.

    Raises `ConfigError`, `RefusedError`, `BusyError` or `ResourceError` within seconds, before anything is
    written, when it cannot begin. SIGTERM and Ctrl-C save and stop (a second one stops at once, and so does
    the first where no worker trains yet); afterwards the same call continues. SIGUSR1 saves, and training
    continues. `fault_plan` is for tests.
    """
    with ended_by_signals():
        return _launch(config, overrides, fault_plan, None)


def train_until(job: JobConfig, tokens: int) -> RunResult:
    """`train`, but the launch saves and stops after the step that reaches so many tokens, although the run is
    longer: budgets and learning rate are those of the whole run.
    """
    with ended_by_signals():
        return _launch(job, (), "", tokens)


def _launch(
    config: JobConfig | Mapping[str, Any] | str | Path,
    overrides: Sequence[str],
    fault_plan: str,
    until_tokens: int | None,
) -> RunResult:
    job = as_job(config, overrides)
    began = time.monotonic()
    storage = starting.run_storage(job)
    store = RunStore(storage)
    lacks = starting.check_writable(storage)
    require_loggers(job.monitor.loggers)
    with (
        Progress.shown(job.monitor.progress_s) as progress,
        attempt_claim.watching(store, progress.say) as watched,
    ):
        if lacks:
            progress.say(f"note: {lacks}")
        spec = starting.prepare(job, storage, freeze=False)
        plan = preview.look_before_start(store, job, spec, watched, progress.say)
        if preview.reached(plan):
            return _already_done(job, plan, time.monotonic() - began, progress)
        context = LaunchContext(
            job=job,
            storage=storage,
            store=store,
            spec=spec,
            plan=plan,
            progress=progress,
            command=_command(config, overrides),
            fault_plan=fault_plan,
            until_tokens=until_tokens,
        )
        status = _on_cluster(context, watched)
    return _result(job, status, time.monotonic() - began)


def _on_cluster(at: LaunchContext, watched: Callable[[], int]) -> RunStatus:
    """Connects, looks whether the job fits, and trains. `watched` is the newest attempt, on which nobody is
    at work.
    """
    from orchestrator.cluster.connection import ClusterConnection, starts_local_ray
    from orchestrator.data.feed.memory import memory_of
    from orchestrator.launch.capacity.resource_estimate import needs_of
    from orchestrator.launch.on_ray.node_disks import NodeDisks

    job, storage, progress = at.job, at.storage, at.progress
    memory_of(job, at.spec)  # raises where too little is asked for
    limits = placement_check.limits_of(job)
    reading = starting.reading_job(job, at.store, at.plan.point)
    sized, facts = _measured(reading, storage, at.plan)
    here = placement_check.divided_here(sized, limits)
    for note in (
        *require_model(reading, at.plan, at.spec.vocab_size, facts, starts_local_ray(job)),
        *code_changes(at.store, job, at.plan.point),
    ):
        progress.say(note)
    cpus = limits.max_workers * limits.cpus_per_worker + limits.num_tokenizers
    heard = partial(progress.foreign, "Ray")
    with ClusterConnection(job, cpus, needs_of(job).object_store_bytes, heard, progress.say):
        newest = watched()
        disks = NodeDisks(job.resume.node_folder, say=progress.say)
        disks.reached_by(storage)
        parallel, limits = placement_check.fitting(sized, limits, storage, here, disks)
        at = replace(at, parallel=parallel)
        num_rewinds = 0
        while True:
            status = _claimed(at, newest, limits, disks)
            newest = status.attempt
            if is_rewind(at.job, status):
                at, num_rewinds = rewound(at, status, num_rewinds), num_rewinds + 1
                continue
            if not preview.is_damaged_load(status):
                return status
            plan = preview.plan_older_point(
                at.store, at.job, at.spec, status.damages, at.plan.damages, newest, progress.say
            )
            at = replace(at, plan=plan)


def _claimed(at: LaunchContext, newest: int, limits: LaunchLimits, disks: NodeDisks) -> RunStatus:
    """Claims the attempt after `newest` and trains it, with what runs beside a launch."""
    from orchestrator.launch.on_ray.exports import exporting
    from orchestrator.launch.on_ray.on_cluster import supervise

    with at.claimed(newest) as (attempt, plan):
        spec = starting.freeze(at.job, at.storage, at.spec, attempt)
        at.say_beginning(attempt, plan, spec, limits.max_workers)
        with (
            dashboard_beside(at.job, at.storage.root, at.progress),
            exporting(at.store, attempt.number, at.job.resume.export_every, at.progress.say),
        ):
            return supervise(at, attempt, spec, limits, disks)


def plan(config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> ResumePlan:
    """What `train` would do with this configuration, or why it would refuse; reads storage and files, starts
    nothing, writes nothing.

    Memory is judged by the machines that are known without a cluster: this one, where a start would start a
    Ray on it, else those that the newest attempt on the same cluster found; the start on the cluster decides.
    Sizes and headers of the newest point are compared here; under `train` the workers compare the digests of
    what they load. A run that may be read and not written can be planned, too: a note says so. The model of a
    new run is built on torch's meta device and called once, in a process of its own where that takes torch or
    a factory.
    """
    return plan_job(as_job(config, overrides), runs_code=True)


def plan_job(job: JobConfig, *, runs_code: bool) -> ResumePlan:
    """`plan`. Without `runs_code` nothing that the configuration names is imported, because it is that of a
    run's folder and nobody has read it: data that are made by code are taken to be the run's, and functions
    for the model and the objective are not called. Notes say so.
    """
    from orchestrator.cluster.connection import starts_local_ray

    storage = starting.run_storage(job)
    found, spec = _look_ahead(job, storage) if runs_code else _look_without_code(job, storage)
    sized, facts = job, None
    functions = functions_of(job)
    runs_code = runs_code or not functions
    if not runs_code:
        found = replace(found, notes=(*found.notes, *preview.unreached(job)))
        sized = with_known_shape(job, newest_choice(storage, RunStore(storage).claim_numbers()))
    if runs_code:
        found = preview.with_missing_functions(job, found)
    if runs_code and spec is not None and found.action != "refuse":
        try:
            reading = starting.reading_job(job, RunStore(storage), found.point)
            sized, facts = _measured(reading, storage, found)
            notes = require_model(reading, found, spec.vocab_size, facts, starts_local_ray(job))
            found = replace(found, notes=(*found.notes, *notes))
        except ConfigError as error:
            found = preview.refused(found, job, [str(error)], error.code)
    if spec is not None:
        found = preview.judged_by_memory(sized, RunStore(storage), found)
    try:
        lacks = starting.check_writable(storage)
    except NoConditionalCreateError:
        raise
    except StorageError as error:
        lacks = f"warning: a start would fail: {error}"
    found = replace(found, notes=(*found.notes, *filter(None, [lacks])))
    if runs_code or found.action == "refuse" or not is_to_try(found):
        return found
    uncalled = (
        f"{field}={path} is not called: that happens when the plan is executed"
        for field, path in functions.items()
    )
    return replace(found, notes=(*found.notes, *uncalled))


def dry_run(config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> ResumePlan:
    """`plan`, and what `train` looks at without a cluster: the model without its weights, the run's folder,
    the disk, and where it would start a Ray here, this machine's memory.

    Raises what would refuse the start. It starts nothing, writes nothing and does not watch for another
    launch; what a cluster has is looked at by `train` alone.
    """
    from orchestrator.cluster.connection import starts_local_ray

    job = as_job(config, overrides)
    storage = starting.run_storage(job)
    lacks = starting.check_writable(storage)
    require_loggers(job.monitor.loggers)
    found, spec = _look_ahead(job, storage)
    found = replace(found, notes=(*found.notes, *filter(None, [lacks])))
    if found.action == "refuse" or spec is None:
        return preview.with_missing_functions(job, found)
    reading = starting.reading_job(job, RunStore(storage), found.point)
    sized, facts = _measured(reading, storage, found)
    local = placement_check.divided_here(sized, placement_check.limits_of(job)) is not None
    found = preview.judged_by_memory(sized, RunStore(storage), found)
    if found.action == "refuse":
        return found
    placement_check.require_disk(sized, storage)
    untried = require_model(reading, found, spec.vocab_size, facts, starts_local_ray(job))
    unseen = () if local else ("what the cluster has is not looked at: memory, CPUs, GPUs, object store",)
    return replace(found, notes=(*found.notes, *untried, *unseen))


def _measured(job: JobConfig, storage: Storage, found: ResumePlan) -> tuple[JobConfig, ModelFacts | None]:
    """The job as its memory is judged, and what trying its model has found, if that was needed for it."""
    from orchestrator.launch.capacity.placement_check import measured

    return measured(job, found, newest_choice(storage, RunStore(storage).claim_numbers()))


def _look_ahead(job: JobConfig, storage: Storage) -> tuple[ResumePlan, DataSpec | None]:
    """What a start would do, and the data. Without data where they are not those of the run: a refusal."""
    from orchestrator.coordinator.attempt.resume_point_choice import choose_point, decide, wanted_point
    from orchestrator.coordinator.attempt.survey import decided

    store = RunStore(storage)
    try:
        spec = starting.prepare(job, storage, freeze=False)
        found = preview.look_ahead(store, job, spec, draw=True)
    except DataIdentityError as error:
        point, _ = decided(store, lambda seen: choose_point(store, seen, wanted_point(seen, job), fast=True))
        return decide(store, job, point).refused([str(error)], error.code), None
    return replace(found, notes=(*found.notes, *spec.notes, preview.feed_memory(job, spec))), spec


def _look_without_code(job: JobConfig, storage: Storage) -> tuple[ResumePlan, DataSpec | None]:
    """`_look_ahead` at a run; without its data where they cannot be looked at without running code. Raises
    `RefusedError` for a new run.
    """
    from orchestrator.coordinator.attempt.resume_point_choice import (
        StartData,
        choose_point,
        decide,
        wanted_point,
    )
    from orchestrator.coordinator.attempt.survey import survey
    from orchestrator.data.code_process import reads_without_code
    from orchestrator.data.common.user_code import reading_only

    store = RunStore(storage)
    run = starting.find_run(store)
    if run is None:
        raise RefusedError(
            f"{job.run.run_uri}: there is no such run; plan a new one with `orchestrator plan`",
            code="run.unknown",
        )
    if reads_without_code(job, storage):
        with reading_only():
            return _look_ahead(job, storage)
    seen = survey(store)
    point, damages = choose_point(store, seen, wanted_point(seen, job), fast=True)
    found = decide(store, job, point, StartData(identities=(run.identity, run.identity)))
    notes = [f"warning: {damage}; falling back to an older resume point" for damage in damages]
    notes.append("the data are not looked at, because that may run code; executing the plan looks at them")
    return replace(found, notes=(*found.notes, *notes)), None


def open_stream(
    config: JobConfig | Mapping[str, Any] | str | Path,
    cursor: Cursor | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    rank: int = 0,
    world_size: int = 1,
    part: Literal["train", "holdout"] = "train",
    frozen_dir: str | Path | None = None,
) -> SampleStream:
    """The canonical samples of a configuration from `cursor` (default: the first) on, read and tokenized in
    this process, no cluster; or, for a training loop of your own, a rank's batches of them.

    An iterator of samples with `index, source, input_ids, labels, document_ids, cursor`: numpy int32 arrays
    of shape (seq_len,), label -100 where there is no loss, and the cursor after the sample. The same samples,
    in this order, are what a run trains. Its `batches()` is a loader of the share that rank `rank` of
    `world_size` gets of each step, made ahead in a thread. Both have `state_dict()` and `load_state_dict()`;
    a state may be given as `cursor`, too, and opens under any world size, batch size and seq_len.

    `part="holdout"`: instead of what is trained the records of `data.holdout`, each once, for an evaluation.

    `frozen_dir`: a folder of this training alone, which every rank sees, in which the lists of the sources'
    files are kept as a run keeps them: files that come later are not read, those that are gone are named, and
    `data.refresh` has a list for each epoch. Without one the files must be those of the state.

    The configuration may lack what data do not need: `run`, `model`, `train.lr`. The stops in `train` are
    ignored: the stream continues to the end of the data. Raises `ConfigError`, `DataIdentityError` for a
    cursor or a state of other data, `RefusedError` for a rank or a hold-out that does not exist.
    """
    from orchestrator.data.loading.sample_stream import SampleStream

    return SampleStream(as_data_job(config, overrides), cursor, rank, world_size, part, frozen_dir)


def _command(config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> str:
    """What continues the run in a shell; empty for a configuration that lies in no file."""
    if isinstance(config, JobConfig | Mapping):
        return ""
    return command_line(["orchestrator", "train"], config, overrides)


# ------------------------------------------------------------ how it ended
def _already_done(job: JobConfig, plan: ResumePlan, seconds: float, progress: Progress) -> RunResult:
    """A stop that was reached before is no failure, and nothing is started for it."""
    assert plan.point is not None, "a resume has a point"
    reason = preview.stop_is_reached(job, plan)
    say_done_before(progress.say, job, reason)
    return RunResult(
        outcome="done",
        reason=reason,
        run_uri=job.run.run_uri,
        attempt=_attempt_of(plan.point),
        step=plan.step_before,
        consumed_samples=plan.consumed_samples,
        consumed_tokens=plan.consumed_tokens,
        loss=None,
        point=plan.point,
        seconds=seconds,
    )


def _result(job: JobConfig, status: RunStatus, seconds: float) -> RunResult:
    step = status.last_step
    at = step or status.committed
    return RunResult(
        outcome=status.ended or "failed",
        reason=status.reason,
        code=status.code,
        run_uri=job.run.run_uri,
        attempt=status.attempt,
        step=step.step if step else None,
        consumed_samples=at.consumed_samples,
        consumed_tokens=at.consumed_tokens,
        loss=step.loss if step else None,
        point=status.newest_point,
        seconds=seconds,
    )


def _attempt_of(point: str) -> int:
    key = parse_point_name(point)
    assert key is not None, f"{point} is a point's name"
    return key.attempt
