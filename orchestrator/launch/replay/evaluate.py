"""Evaluates a resume point in this process, with the numbers that its run had, or on other data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.points.model_folders import as_read, names_weights, without_folder
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import CommittedFiles, RunStore
from orchestrator.config.between_fields import NOTHING_HELD_OUT
from orchestrator.config.field_rules import in_todays_fields, nested
from orchestrator.config.loading import parse_config
from orchestrator.config.sections import SourceConfig
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.coordinator.journal_notes import of_objective
from orchestrator.data.dataset import eval_specs, prepare_trained, with_parts
from orchestrator.data.frozen import later_versions
from orchestrator.errors import ConfigError, RefusedError, ResumePointError
from orchestrator.history import sentences
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.launch.branch.point_query import LATEST, PointQuery, find
from orchestrator.planning.resume.identity import CONTENT_SETTINGS
from orchestrator.planning.resume.source_lists import SourceLists
from orchestrator.planning.state.state_layout import Layout

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.records.steps import EvalRecord

# Fields of a source that say how its records are read, besides `format`.
_SAME_FIELDS = {"text_field", "transforms", "transform_fields", *chain(*CONTENT_SETTINGS.values())}
_ALLOWED = (
    *("eval.", "cluster.use_gpu", "train.micro_batch_size"),
    *("train.kernels", "train.compile", "model.attn_implementation"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The evaluation of one part at the resume point `point`. The other fields are those of `EvalRecord`."""

    part: str
    point: str
    step: int
    loss: float | None
    perplexity: float | None
    targets: int
    samples: int
    per_source: dict[str, float | None]
    metrics: dict[str, float | None]

    @classmethod
    def of(cls, record: EvalRecord, point: str) -> Evaluated:
        """Builds it from the record of the evaluation."""
        return cls(
            part=record.part,
            point=point,
            step=record.step,
            loss=record.loss,
            perplexity=record.perplexity,
            targets=record.targets,
            samples=record.samples,
            per_source=dict(record.per_source),
            metrics=dict(record.metrics),
        )


def evaluate(
    store: RunStore,
    point: str = LATEST,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> list[Evaluated]:
    """Evaluates a point's weights with the point's configuration; `overrides` may change `eval.*`, and where
    weights are that the point does not hold.

    Reads the run and changes nothing. With the run's parts and on the same kind of device, the numbers of
    runs with invariant numerics are equal to the bit. Raises `RefusedError` for other overrides, and as
    `data.dataset.prepare_trained` and `TrainState`.
    """
    if wrong := [e for e in overrides if not e.strip().startswith(_ALLOWED) and not names_weights(e)]:
        raise RefusedError(
            f"{wrong[0]}: an evaluation of a point takes its configuration from the point; only eval.*, "
            "cluster.use_gpu, train.micro_batch_size, train.kernels, train.compile, "
            "model.attn_implementation and the places of weights (model.pretrained, "
            "model.frozen.NAME.pretrained) can be given",
            code="command.override_not_allowed",
        )
    seen = survey(store)
    found = find(store, seen, PointQuery(point=point)).point
    flat = {**in_todays_fields(found.config), "resume.from": "latest", "eval.at_end": True}
    job = _job(store, point, flat, overrides)
    attempt = found.key.attempt
    model = without_folder(as_read(store, attempt, flat, job.model, overrides), store.storage, attempt)
    job = job.model_copy(update={"model": model})
    spec = prepare_trained(job, store.storage, _lists(store, found)).made_by(seen.encoders)
    specs = eval_specs(job, with_parts(job, store.storage, spec))
    say(f"evaluating {found.name} on {', '.join(specs)}")
    return _evaluated(store, job, found, specs, say)


def _job(store: RunStore, point: str, flat: Mapping[str, Any], overrides: Sequence[str]) -> JobConfig:
    """Returns the configuration of the evaluation. Raises `RefusedError` if it has no data to evaluate."""
    try:
        return parse_config(nested(flat), overrides)
    except ConfigError as error:
        if error.code != NOTHING_HELD_OUT:
            raise
    first = flat["data.sources"][0]
    bare = SourceConfig(name="mine", path="PATH", format=first["format"]).model_dump(mode="json")
    own = {name: first[name] for name in bare if name in _SAME_FIELDS and first[name] != bare[name]}
    source = {"name": "mine", "path": "PATH", "format": first["format"], **own}
    override = f"eval.parts.mine.sources={json.dumps([source])}"
    run = shlex.quote(store.storage.root) + ("" if point == LATEST else f" --point {shlex.quote(point)}")
    raise RefusedError(
        f"{store.storage.root}: no records are held out of its data (data.holdout=0), and only a new run can "
        "hold some out; give other data, with the path of the files in place of PATH: orchestrator evaluate "
        f"{run} {shlex.quote(override)}",
        code="data.no_holdout",
    )


def _lists(store: RunStore, point: Point) -> tuple[SourceLists, ...]:
    """Returns the lists of files by which the point's attempt read its sources."""
    parent = store.read_parent(point.key.attempt)
    if isinstance(parent, ClaimParent):
        return parent.sources
    run = store.read_run()
    is_fork = run is not None and run.forked_from is not None and point.key.attempt == 0
    if is_fork and not later_versions(store.storage):
        return ()  # a fork that has not trained yet: each source has only its first list
    raise ResumePointError(
        f"{store.storage.root}: the parent file of attempt {point.key.attempt} is missing, which names the "
        "lists of files that it read; restore it, or start the fork first",
        code="history.attempt_incomplete",
    )


def _evaluated(
    store: RunStore, job: JobConfig, point: Point, specs: dict[str, Any], say: Callable[[str], None]
) -> list[Evaluated]:
    import torch

    from orchestrator.launch.member.eval_feeds import open_parts
    from orchestrator.trainer.evaluation import Evaluator, alone
    from orchestrator.trainer.gradient.invariant import InvariantGradient
    from orchestrator.trainer.model.build_model import bare_model, first_model, pick_device, set_determinism
    from orchestrator.trainer.objective.objective import objective_of
    from orchestrator.trainer.state.frozen_weights import AdapterBase, FrozenModels
    from orchestrator.trainer.weights.state_tensors import Continues, load, whole_items

    device = pick_device("cuda" if job.cluster.use_gpu and torch.cuda.is_available() else "cpu")
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    set_determinism(True, device)
    try:
        asked = (job.model, job.train.precision, job.train.seed, device)
        adapters = job.model.lora is not None  # the point lacks what they are trained beside
        model = first_model(*asked, invariant=False) if adapters else bare_model(*asked)
        frozen = FrozenModels(job.model, job.train, device, invariant=True)
        base = AdapterBase(job.model, job.train.precision, job.train.seed, model)
        items, fixed = base.split(whole_items(model))
        base.hold(fixed, Layout(num_shards=1, num_replicas=1), 0, are_filled=True)
        # the optimizer's state stays unread
        how = Continues(reset_optimizer=True, fixed={**frozen.digests(), **base.digests()})
        load(items, point.name, CommittedFiles(store.storage), how)
        by_document, rows = job.pack.attends_by_document, job.data.rows_per_sample
        objective = objective_of(job.train, by_document, job.pack.seq_len, frozen.models, rows)
        objective.prepare(model)
        evaluator = Evaluator(
            train=job.train,
            seq_len=job.sample_len,
            gradient=InvariantGradient(model, objective),
            device=device,
            rank=0,
            world_size=1,
        )
        tokens, most = point.cursor.consumed_tokens, job.eval.max_samples
        records = [evaluator.evaluate(part, point.key, tokens, most, alone) for part in open_parts(specs)]
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
    for record in records:
        if record.not_finite:
            of = record.not_finite, record.step, record.part
            say(f"warning: {sentences.not_finite(*of, of_objective(job.flat()))}")
    return [Evaluated.of(record, point.name) for record in records]

