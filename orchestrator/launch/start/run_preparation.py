"""The common parts of every start, with Ray or without: the run's folder, its frozen data, and digests.

Members compare the digests. A new run inside another run's folder, or around one, is refused: a run's next
start deletes files in its folder that are not its own. Imports neither ray nor torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from orchestrator.checkpoint.node_local.node_folder import Nodes, NodesHere
from orchestrator.checkpoint.node_local.node_storage import NodeStorage
from orchestrator.checkpoint.node_local.node_storage import run_storage as storage_of_run
from orchestrator.checkpoint.points.model_folders import located, without_folder
from orchestrator.checkpoint.points.points import Point, newest_first, parse_point_name, random_numbers
from orchestrator.checkpoint.points.run_file import RUN_FILE, RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.ray_inventory import JOB_COPIES
from orchestrator.config.field_rules import field_rules
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.attempt.forking import (
    fork_to_begin,
    is_folder,
    other_run,
    point_info,
    read_parent_point,
)
from orchestrator.coordinator.attempt.resume_point_choice import choose_point, kept_point
from orchestrator.coordinator.attempt.source_resolution import (
    SourceResolution,
    first_of,
    has_lists,
    plain_reading,
    sources_here,
)
from orchestrator.coordinator.attempt.survey import Survey, decided
from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.elastic.formation import GroupSize
from orchestrator.errors import ConfigError, RefusedError, StorageError
from orchestrator.planning.loss_policy import watches, window_of
from orchestrator.planning.resume.source_lists import SourceReading
from orchestrator.records.cursor import Cursor
from orchestrator.storage.buckets import is_uri
from orchestrator.storage.files import Storage
from orchestrator.storage.open import above, check_bucket, is_bucket, join, open_storage

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec


def run_storage(job: JobConfig) -> NodeStorage:
    """The run's storage: a folder, or a prefix of a bucket, with this machine's disk of the nodes' own disks.

    Raises `ConfigError` for a URI of another kind, also of what the run begins with, and for a folder that
    Ray would delete.
    """
    _require_locations(job)
    try:
        storage = storage_of_run(job.run.run_uri, NodesHere(job.resume.node_folder))
    except ConfigError as error:
        raise ConfigError(f"run.storage: {error}", code=error.code) from error
    if (folder := storage.folder) is not None and JOB_COPIES in folder.parts:
        raise ConfigError(
            f"run.storage={job.run.storage}: the run would lie in {folder}, a Ray job's copy of its working "
            "directory, which Ray deletes; give an absolute path that all nodes see, e.g. "
            "run.storage=$PWD/runs where you submit",
            code="storage.in_job_copy",
        )
    return storage


def _require_locations(job: JobConfig) -> None:
    """Checks the locations before another message repeats such a URI, which may contain a secret."""
    named = {
        "data.tokenizer": job.data.tokenizer,
        "model.pretrained": job.model.pretrained,
        "model.init_from": job.model.init_from,
    }
    for name, model in job.model.frozen.items():
        named[f"model.frozen.{name}.pretrained"] = model.pretrained
        named[f"model.frozen.{name}.init_from"] = model.init_from
    for field, location in named.items():
        try:
            if location is not None and is_uri(location):
                open_storage(location)
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}", code=error.code) from error


def check_writable(storage: Storage) -> str:
    """Raises `StorageError` if the run's folder can neither be made nor written.

    A bucket is tested; see `check_bucket`, also for the result.
    """
    if storage.folder is None:
        return check_bucket(storage)
    folder = parent = storage.folder
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(
            f"run.storage: {folder} cannot be written, because {parent} is not a writable folder; "
            "correct its rights, or take another run.storage",
            code="storage.not_writable",
        )
    return ""


def find_run(store: RunStore) -> RunFile | None:
    """run.json; None for a new run.

    Raises `RefusedError` if parts of a run exist without it: a start would mix two histories.
    """
    run = store.read_run()
    if run is None and (pieces := store.pieces()):
        run = store.read_run()  # another start may just have made both
        if run is None:
            raise RefusedError(missing_run(store, pieces), code="run.no_run_file")
    return run


def missing_run(store: RunStore, pieces: Sequence[str]) -> str:
    """The error text for parts of a run without its run.json."""
    return (
        f"{store.storage.root} has no run.json, but {', '.join(pieces)} of a run: it was deleted while a "
        "launch wrote into it, or run.json is lost; a new run beside them would mix two histories. Restore "
        "run.json, or move the folder away, or take another run.name"
    )


def prepare(job: JobConfig, storage: Storage, *, freeze: bool) -> DataSpec:
    """The job's data, as the run has frozen them. If it has not, they are frozen only with `freeze`.

    Raises as `data.dataset.prepare_data`, and `ConfigError` for a model whose vocabulary is too small.
    """
    from orchestrator.data.code_process import call, names_code
    from orchestrator.data.dataset import prepare_data, with_parts

    here = _here_before(job, storage)
    if here is None:
        spec = call(names_code(job), prepare_data, job, storage if freeze else None)
    else:
        spec = call(names_code(job), prepare_data, job, here.storage, here.reading)
    return require_vocabulary(job, with_parts(job, storage, spec))


def _here_before(job: JobConfig, storage: Storage) -> SourceResolution | None:
    """What a start would read, before the run is examined closely; None if nothing is frozen.

    It reads the run's history only if the choice of the continued point may make a difference.
    """
    from orchestrator.data.frozen import frozen_sources

    store, other = RunStore(storage), None
    if frozen_sources(storage) is None:
        if not is_folder(job.resume.from_):
            return None
        other = storage.beside(
            other_run(job.resume.from_)[0]
        )  # a fork has the data of the run that it begins with
        if frozen_sources(other) is None:
            return None
    if (fork := fork_to_begin(store, job, find_run(store))) is not None:
        elsewhere, point = read_parent_point(store, fork, job.run.name, fast=True)
        return sources_here(job, other or storage, point_info(elsewhere, point))
    parents, _ = store.parents()
    if plain_reading(job, (parents[-1].sources if parents else ()) or first_of(storage)):
        return sources_here(job, storage, None)

    def choose(seen: Survey) -> tuple[Survey, Point | None]:
        return seen, choose_point(store, seen, kept_point(store, seen, job), fast=True)[0]

    seen, newest = decided(store, choose, with_steps=False)
    info = point_info(store, newest) if newest is not None else None
    return sources_here(job, storage, info, seen.parents, seen.lineage)


def require_vocabulary(job: JobConfig, spec: DataSpec) -> DataSpec:
    """Returns `spec`. Raises `ConfigError` for a model whose vocabulary is too small for it."""
    vocab = (job.model.config or {}).get("vocab_size")
    if vocab is not None and vocab < spec.vocab_size:
        raise ConfigError(
            f"model.config.vocab_size={vocab}, but the tokenizer {job.data.tokenizer} has {spec.vocab_size} "
            f"ids; set model.config.vocab_size to {spec.vocab_size} or more",
            code="model.vocabulary",
        )
    return spec


def freeze(job: JobConfig, storage: Storage, looked_at: DataSpec, attempt: Attempt) -> DataSpec:
    """The data of a claimed attempt, by the lists of the claim.

    They are those that `prepare` read before the claim, frozen in the run's storage if they are not yet (see
    `data.dataset.freeze_data`).
    """
    from orchestrator.data.dataset import freeze_data, with_frozen_parts
    from orchestrator.data.frozen import TOKENIZER_FOLDER

    looked_at = with_frozen_parts(job, storage, looked_at)
    if looked_at.tokenizer_folder is None:
        frozen = freeze_data(job, storage, looked_at).made_by(attempt.encoders)
        return replace(frozen, evaluated=looked_at.evaluated)
    reading = reading_of(attempt)
    if not _is_as_frozen(looked_at, join(storage.root, TOKENIZER_FOLDER), reading):
        looked_at = read_frozen_data(job, storage, reading)
    return looked_at.made_by(attempt.encoders)


def _is_as_frozen(looked_at: DataSpec, tokenizer_folder: str, reading: SourceReading) -> bool:
    """Whether the data read before a claim are those that the run has frozen now.

    They must be from its own folder (for a fork they were from the original run's), with the lists that are
    read.
    """
    here = looked_at.tokenizer_folder == tokenizer_folder
    return here and not looked_at.unwritten and has_lists(looked_at, reading)


def reading_of(attempt: Attempt) -> SourceReading:
    """The lists that an attempt reads, and from where on."""
    return SourceReading(
        sources=attempt.sources, cursor=attempt.point.cursor if attempt.point is not None else Cursor()
    )


def read_frozen_data(job: JobConfig, storage: Storage, reading: SourceReading) -> DataSpec:
    """The data of a claimed attempt, in another process than the one that claimed it. Raises as `prepare`."""
    from orchestrator.data.code_process import call, names_code
    from orchestrator.data.dataset import prepare_data, with_parts

    spec = call(names_code(job), prepare_data, job, storage, reading)
    return require_vocabulary(job, with_parts(job, storage, spec))


def config_digest(job: JobConfig) -> str:
    """blake3 of everything that influences training. Members compare it when a generation forms."""
    rules = {rule.path: rule.rule for rule in field_rules()}
    decisive = {name: value for name, value in job.flat().items() if rules.get(name) != "free"}
    return blake3(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def reading_job(job: JobConfig, store: RunStore, point: str | None = None) -> JobConfig:
    """Returns the job with the paths at which its weights are read from the current folder.

    It is for building the model, and is never recorded: the run keeps the paths as they were written. `point`
    is the one that is continued; without a name the newest one. Raises as `model_folders.located` and
    `without_folder`.
    """
    model = located(job.model, store)
    newest = newest_first((point,) if point is not None else store.point_names())[:1]
    key = parse_point_name(newest[0]) if newest else None
    if key is not None:
        model = without_folder(model, store.storage, key.attempt)
    return job if model == job.model else job.model_copy(update={"model": model})


def coordinator_start(
    job: JobConfig,
    attempt: Attempt,
    storage: str,
    size: GroupSize,
    fault_plan: str = "",
    stop_by: str = "",
    nodes: Nodes | None = None,
    fixed: bool = False,
) -> CoordinatorStart:
    """What the coordinator of `attempt` needs. The last arguments are those of `CoordinatorStart`."""
    return CoordinatorStart(
        attempt=attempt,
        storage=storage,
        size=size,
        max_failures=job.cluster.max_failures,
        keep_latest=job.resume.keep_latest,
        keep_every=job.resume.keep_every,
        keep_best=job.resume.keep_best,
        run=job.run.name,
        global_batch_size=job.train.global_batch_size,
        seq_len=job.sample_len,
        flat_config=job.flat(),
        rng=rng_document(job),
        fault_plan=fault_plan,
        stop_by=stop_by,
        sharded=num_shards(attempt) != 1,
        nodes=nodes,
        fixed=fixed,
        loss_window=window_of(job.train) if watches(job.train) else None,
    )


def num_shards(attempt: Attempt) -> int | None:
    """The number of shards of the attempt's state, in the form for `TrainJob`."""
    return attempt.parallel.num_shards if attempt.parallel is not None else 1


def rng_document(job: JobConfig) -> dict[str, Any]:
    """Everything about random numbers that a resume needs; stored in every point."""
    return random_numbers(job.train.seed)


def refuse_inside(store: RunStore) -> None:
    """Raises `RefusedError` if the new run of `store` would be in a run's folder, at any depth.

    Symbolic links are resolved. A run's folder has a run.json, or (if that is lost) claims or resume points.
    """
    folder = store.storage.root
    real = folder if is_bucket(folder) else os.path.realpath(folder)
    for outer in dict.fromkeys((*above(folder), *above(real))):
        other = RunStore(store.storage.beside(outer))
        if other.storage.exists(RUN_FILE) or other.claim_numbers() or other.point_names():
            raise RefusedError(
                f"the new run's folder {folder} would lie inside the run {outer}: a start of that run "
                "deletes files in its folder that are not its own; nothing is written. Give a folder outside "
                "of all runs (for a start: another run.storage or run.name)",
                code="run.inside_run",
            )


def refuse_around(store: RunStore, known: str) -> None:
    """Raises `RefusedError` if the new run's folder would contain a run.

    That is the run in the folder `known`, at any depth, or one directly in the new folder.
    """
    folder = store.storage.root
    inner = [known] if folder in above(known) else []
    names = store.storage.list("")
    inner += [f"{folder}/{name}" for name in names if store.storage.exists(f"{name}/{RUN_FILE}")]
    if inner:
        raise RefusedError(
            f"the new run's folder {folder} would contain the run {inner[0]}: the files of both would mix; "
            "nothing is written. Give a folder of its own, e.g. one beside that run",
            code="run.around_run",
        )
