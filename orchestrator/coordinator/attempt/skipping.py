"""A start's skip: decides whether it is due at the continued point, and draws its samples.

The decision is made in `planning.resume.skipping`. This module provides the history and reads the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.points.points import Point
from orchestrator.coordinator.attempt.forking import is_folder
from orchestrator.errors import RefusedError
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.claims.lineage import Lineage, skip_claims
from orchestrator.planning.resume.skipping import Skip, SkipDecision, SkipRequest, decide_skip, skip_request
from orchestrator.records.steps import StateKey
from orchestrator.storage.open import absolute

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.data.spec import DataSpec


def skip_here(
    config: JobConfig,
    point: StateKey | None,
    parents: Iterable[ClaimParent] = (),
    lineage: Lineage | None = None,
) -> SkipDecision:
    """Decides whether a start of `config` that continues `point` skips.

    `parents` are the run's parent files; a fork that begins has none.
    """
    where = config.resume.from_
    if is_folder(where):
        where = absolute(where)
    path = {claim.attempt for claim in lineage.attempts} if lineage is not None else set[int]()
    return decide_skip(skip_request(config, where), point, skip_claims(parents), path)


def draw_skip(config: JobConfig, data: DataSpec, point: Point, request: SkipRequest) -> Skip:
    """Draws what is to be skipped after `point`, with the point's batch size, seq_len and weights.

    How far the data go (`num_epochs`, `max_epochs`, `on_end`) is the job's setting. `data` must be encoded by
    the encoders that encoded until now.

    Raises `RefusedError` if the data end before anything is left to train, and what reading them raises.
    """
    from orchestrator.data.code_process import call, needs_code
    from orchestrator.data.packing.samples import draw_past

    batch, seq_len = point.config["train.global_batch_size"], point.config["pack.seq_len"]
    num_samples, job = request.num_samples(batch), _mixed_as(config, point.config)
    passed = call(needs_code(data), draw_past, data.mixed_as(job), point.cursor, num_samples, seq_len)
    if passed.samples < num_samples or passed.ends:
        raise RefusedError(
            f"{request}: skipping {num_samples:,} samples of {seq_len} tokens after {point.name} leaves "
            f"nothing to train, because the data have {passed.samples:,} from there on "
            f"(data.num_epochs={config.data.num_epochs}); skip fewer, or raise data.num_epochs",
            code="resume.skip_past_end",
        )
    return Skip(
        request=request,
        samples=passed.samples,
        tokens=passed.tokens,
        global_batch_size=batch,
        seq_len=seq_len,
        begin=point.cursor,
        end=passed.cursor,
        settings=_settings(job) if len(data.plans) > 1 or point.cursor.mixture else {},
    )


def moved(point: Point | None, skip: Skip | None) -> Point | None:
    """Returns the point as the attempt continues it, with the cursor after the skip."""
    return point if point is None or skip is None else replace(point, cursor=skip.end)


def _mixed_as(config: JobConfig, before: Mapping[str, Any]) -> JobConfig:
    """Returns the job with the weights that the point was made with."""
    from orchestrator.config.field_rules import in_todays_fields, nested
    from orchestrator.config.loading import parse_config

    then, now = in_todays_fields(before), config.flat()
    weights = {source["name"]: source.get("weight") for source in then["data.sources"]}
    sources = [{**source, "weight": weights.get(source["name"])} for source in now["data.sources"]]
    weight_by = then.get("data.weight_by", "tokens")
    return parse_config(nested({**now, "data.sources": sources, "data.weight_by": weight_by}))


def _settings(job: JobConfig) -> dict[str, Any]:
    """Returns the settings with which an audit can draw the same samples."""
    flat = job.flat()
    names = ("name", "weight", "max_epochs")
    sources = [{name: source[name] for name in names} for source in flat["data.sources"]]
    fields = ("data.on_end", "data.weight_by", "data.num_epochs")
    return {"data.sources": sources, **{name: flat[name] for name in fields}}
