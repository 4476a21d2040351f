"""Joins the stages: what `train`, `plan` and the reading commands do, from configuration to result.

The driver's side only. Importing it loads neither Ray nor torch; they are imported where a cluster is really
used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestrator import html_text
from orchestrator.config.redaction import command_line
from orchestrator.config.schema import JobConfig, as_data_job, as_job
from orchestrator.errors import DataIdentityError, ResourceError, StorageError
from orchestrator.history.loggers import require_loggers
from orchestrator.launch import busy_watch, claiming, looking_ahead
from orchestrator.launch import start as starting
from orchestrator.launch.progress import Progress
from orchestrator.planning.resume_plan import ResumePlan
from orchestrator.records import Cursor, RunStatus
from orchestrator.resume.points import parse_point_name
from orchestrator.resume.store import RunStore
from orchestrator.storage.files import Storage
from orchestrator.trainer.trial import is_to_try, require_model

if TYPE_CHECKING:
    from orchestrator.data.loading.sample_stream import SampleStream
    from orchestrator.data.spec import DataSpec
    from orchestrator.elastic.policy import Limits, NodeFacts
    from orchestrator.launch.needs import Needs
    from orchestrator.planning.parallel_choice import Machine, ParallelChoice

_FREED_S = 10.0  # how long a start waits for resources that a launch before it held


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a launch ended. `outcome` is done (budget or data exhausted), stopped (on request, after saving) or
    failed (`reason`).
    """

    outcome: str
    reason: str
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
        return html_text.page(f"{self.run_uri}: {self.outcome}", html_text.facts(asdict(self).items()))


def train(
    config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = (), *, fault_plan: str = ""
) -> RunResult:
    """Starts the run, or continues it at exactly the next unread token; returns when it is done, stopped or
    has failed.

    Raises `ConfigError`, `RefusedError`, `BusyError` or `ResourceError` within seconds, before anything is
    written, when it cannot begin. SIGTERM and Ctrl-C save and stop (a second one stops at once); afterwards
    the same call continues. `fault_plan` is for tests.
    """
    return _launch(config, overrides, fault_plan, None)


def train_until(job: JobConfig, tokens: int) -> RunResult:
    """`train`, but the launch saves and stops after the step that reaches so many tokens, although the run is
    longer: budgets and learning rate are those of the whole run.
    """
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
        busy_watch.watching(store, progress.say) as watched,
    ):
        if lacks:
            progress.say(f"note: {lacks}")
        spec = starting.prepare(job, storage, freeze=False)
        plan = looking_ahead.look_before_start(store, job, spec, watched)
        if looking_ahead.reached(plan):
            return _already_done(job, plan, time.monotonic() - began, progress)
        from orchestrator.cluster.connection import ClusterConnection, address_of, starts_local_ray
        from orchestrator.data.feed.memory import memory_of
        from orchestrator.launch.machine_facts import machines_here, machines_of_cluster
        from orchestrator.launch.needs import needs_of
        from orchestrator.launch.node_disks import NodeDisks

        memory_of(job, spec)  # raises where too little is asked for
        limits, local = _limits(job), starts_local_ray(job)
        if local:
            parallel, problems = _divide(job, limits, machines_here(job.cluster.use_gpu), "")
            _refuse(problems)
        for note in require_model(job, plan, spec.vocab_size):
            progress.say(note)
        cpus = limits.max_workers * limits.cpus_per_worker + limits.num_tokenizers
        heard = partial(progress.foreign, "Ray")
        with ClusterConnection(job, cpus, needs_of(job).object_store_bytes, heard, progress.say):
            newest = watched()
            disks = NodeDisks(job.resume.node_folder, say=progress.say)
            disks.reached_by(storage)
            starting.require_run_id(store.read_run(), job)
            if not local:
                machines = machines_of_cluster(job.cluster.use_gpu)
                parallel, problems = _divide(job, limits, machines, address_of(job))
            needs = needs_of(job, parallel.num_shards, limits.start_workers)
            limits = _preflight(job, needs, limits, storage, problems)
            disks.require_room(_kept_points(job) * needs.point_bytes)
            from orchestrator.launch.dashboard_beside import dashboard_beside
            from orchestrator.launch.exports import exporting
            from orchestrator.launch.on_cluster import supervise

            command = _command(config, overrides)
            with claiming.claimed(
                store, job, spec, newest, fault_plan, command=command, drawn=plan.drawn, parallel=parallel
            ) as (attempt, plan):
                spec = starting.freeze(job, storage, spec, attempt)
                with (
                    dashboard_beside(job, storage.root, progress),
                    exporting(store, attempt.number, job.resume.export_every, progress.say),
                ):
                    status = supervise(
                        job,
                        attempt,
                        plan,
                        spec,
                        storage,
                        limits,
                        fault_plan,
                        progress,
                        until_tokens,
                        disks,
                    )
    return _result(job, status, time.monotonic() - began)


def plan(config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> ResumePlan:
    """What `train` would do with this configuration, or why it would refuse; reads storage and files, starts
    nothing, writes nothing.

    Memory is judged by the machines that are known without a cluster: this one, where a start would start a
    Ray on it, else those that the newest attempt on the same cluster found; the start on the cluster decides.
    The newest point is trusted by sizes here; `train` verifies every digest before it uses one. A run that
    may be read and not written can be planned, too: a note says so.
    """
    job = as_job(config, overrides)
    storage = starting.run_storage(job)
    found, spec = _look_ahead(job, storage)
    if spec is not None:
        found = looking_ahead.judged_by_memory(job, RunStore(storage), found)
    try:
        lacks = starting.check_writable(storage)
    except StorageError as error:
        lacks = f"warning: a start would fail: {error}"
    found = replace(found, notes=(*found.notes, *filter(None, [lacks])))
    if found.action == "refuse" or not is_to_try(found):
        return found
    return replace(found, notes=(*found.notes, "the model is not tried: `orchestrator train --dry-run` does"))


def dry_run(config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> ResumePlan:
    """`plan`, and what `train` looks at without a cluster: the model without its weights, the run's folder,
    the disk, and where it would start a Ray here, this machine's memory.

    Raises what would refuse the start. It starts nothing, writes nothing and does not watch for another
    launch; what a cluster has is looked at by `train` alone.
    """
    job = as_job(config, overrides)
    storage = starting.run_storage(job)
    lacks = starting.check_writable(storage)
    require_loggers(job.monitor.loggers)
    found, spec = _look_ahead(job, storage)
    found = replace(found, notes=(*found.notes, *filter(None, [lacks])))
    if found.action == "refuse" or spec is None:
        return found
    from orchestrator.cluster.connection import starts_local_ray
    from orchestrator.elastic.policy import disk_problems
    from orchestrator.launch.machine_facts import machines_here
    from orchestrator.launch.needs import needs_of

    if local := starts_local_ray(job):
        _refuse(_divide(job, _limits(job), machines_here(job.cluster.use_gpu), "")[1])
    found = looking_ahead.judged_by_memory(job, RunStore(storage), found)
    if found.action == "refuse":
        return found
    _refuse(disk_problems(*_disk_bytes(job, needs_of(job), storage)))
    untried = require_model(job, found, spec.vocab_size)
    unseen = () if local else ("what the cluster has is not looked at: memory, CPUs, GPUs, object store",)
    return replace(found, notes=(*found.notes, *untried, *unseen))


def _look_ahead(job: JobConfig, storage: Storage) -> tuple[ResumePlan, DataSpec | None]:
    """What a start would do, and the data. Without data where they are not those of the run: a refusal."""
    from orchestrator.coordinator.choosing import choose_point, decide, wanted_point
    from orchestrator.coordinator.survey import survey

    store = RunStore(storage)
    try:
        spec = starting.prepare(job, storage, freeze=False)
        found = looking_ahead.look_ahead(store, job, spec, draw=True)
    except DataIdentityError as error:
        seen = survey(store)
        point, _ = choose_point(store, seen, wanted_point(seen, job), fast=True)
        found = decide(store, job, point, None)
        return replace(found, action="refuse", refusals=(*found.refusals, str(error))), None
    return replace(found, notes=(*found.notes, *spec.notes, looking_ahead.feed_memory(job, spec))), spec


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

    The configuration may lack what data do not need: `run`, `model`, `train.lr`. The stops in `train` are not
    looked at: it goes on to the end of the data. Raises `ConfigError`, `DataIdentityError` for a cursor or a
    state of other data, `RefusedError` for a rank or a hold-out that there is not.
    """
    from orchestrator.data.loading.sample_stream import SampleStream

    return SampleStream(as_data_job(config, overrides), cursor, rank, world_size, part, frozen_dir)


def _command(config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> str:
    """What continues the run in a shell; empty for a configuration that lies in no file."""
    if isinstance(config, JobConfig | Mapping):
        return ""
    return command_line(["orchestrator", "train"], config, overrides)


# ------------------------------------------------------------ before anything starts
def _limits(job: JobConfig) -> Limits:
    from orchestrator.elastic.policy import Limits

    cluster = job.cluster
    return Limits(
        start_workers=cluster.start_workers,
        min_workers=cluster.min_workers,
        max_workers=cluster.max_workers,
        cpus_per_worker=float(cluster.cpus_per_worker),
        gpus_per_worker=1.0 if cluster.use_gpu else 0.0,
        num_tokenizers=job.data.num_tokenizers,
        wait_s=cluster.wait_s,
        max_failures=cluster.max_failures,
    )


def _divide(
    job: JobConfig, limits: Limits, machines: Sequence[Machine], cluster: str
) -> tuple[ParallelChoice, list[str]]:
    """How the state is divided on these machines, of the Ray at the address `cluster`, and why it does not
    fit there: what others hold now is not subtracted, for they may end.
    """
    from orchestrator.launch.capacity import Workers, capacity_problems, choose_parallel

    workers = Workers(num_workers=limits.start_workers)
    choice = choose_parallel(job, workers, machines, cluster)
    return choice, capacity_problems(job, choice.num_shards, workers, machines)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ResourceError("the job does not fit:\n" + "\n".join(f"  {problem}" for problem in problems))


def _preflight(
    job: JobConfig, needs: Needs, limits: Limits, storage: Storage, memory: Sequence[str]
) -> Limits:
    """The limits with which the job fits: with a CPU for each tokenizer, else without. Raises `ResourceError`
    with all that is missing; of `memory` that was found before.
    """
    from orchestrator.elastic.policy import preflight, without_tokenizer_cpus
    from orchestrator.launch.node_facts import node_facts

    def look(nodes: tuple[NodeFacts, ...], limits: Limits) -> list[str]:
        free, needed = _disk_bytes(job, needs, storage)
        return [*memory] + preflight(
            nodes,
            limits,
            disk_free_bytes=free,
            disk_needed_bytes=needed,
            object_store_needed_bytes=needs.object_store_bytes,
        )

    problems: list[str] = []
    for asked in (limits, without_tokenizer_cpus(limits)):
        # A killed launch's processes keep their CPUs until Ray has noticed: what would fit is waited for.
        deadline = time.monotonic() + _FREED_S
        while problems := look(nodes := node_facts(), asked):
            empty = tuple(replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in nodes)
            if look(empty, asked) or time.monotonic() > deadline:
                break
            time.sleep(0.25)
        if not problems:
            return asked
    _refuse(problems)
    return limits


def _disk_bytes(job: JobConfig, needs: Needs, storage: Storage) -> tuple[int | None, int]:
    """Free where the run lies (None: nobody knows, in a bucket, or its parts of points lie elsewhere), and
    needed for the points that it keeps and one more.
    """
    from orchestrator.cluster.machine import free_disk_bytes

    elsewhere = storage.folder is None or job.resume.node_folder is not None
    free = None if elsewhere else free_disk_bytes(str(storage.folder))
    return free, _kept_points(job) * needs.point_bytes


def _kept_points(job: JobConfig) -> int:
    return job.resume.keep_latest + job.resume.keep_best + 1


# ------------------------------------------------------------ how it ended
def _already_done(job: JobConfig, plan: ResumePlan, seconds: float, progress: Progress) -> RunResult:
    """A stop that was reached before is no failure, and nothing is started for it."""
    assert plan.point is not None, "a resume has a point"
    reason = looking_ahead.stop_is_reached(job, plan)
    progress.say(f"done: {reason}")
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
