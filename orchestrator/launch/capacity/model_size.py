"""The model configuration used to estimate a job's memory.

It is the job's own, or that of the folder whose weights it continues, or instead of both the measured size of
its model. This reads one small file, or tries the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError
from orchestrator.launch.capacity.resource_estimate import count_parameters, of_measured
from orchestrator.trainer.dry_run.model_dry_run import ModelFacts, is_to_try, try_model

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.planning.resume.resume_plan import ResumePlan
    from orchestrator.planning.state.memory import ParallelChoice


def with_known_shape(job: JobConfig, before: tuple[int, ParallelChoice] | None = None) -> JobConfig:
    """The job, with `model.config` filled from `config.json` of `model.pretrained`.

    If that does not show the size of the model, the size that an earlier attempt recorded is used. Unchanged
    if none is known.
    """
    shape = job.model.config
    if shape is None and job.model.pretrained is not None:
        shape = _read(Path(job.model.pretrained))
    if before is not None and before[1].size.parameters and not count_parameters(shape or {}):
        shape = of_measured(before[1].size)
    return _of_shape(job, shape)


def measured(
    job: JobConfig, plan: ResumePlan | None, before: tuple[int, ParallelChoice] | None
) -> tuple[JobConfig, ModelFacts | None]:
    """`with_known_shape`, or if the model's size is still not known, the facts measured by trying the model.

    `before`: what an attempt of the run recorded (with its number); it applies to the model of the run's
    point. Raises `ConfigError` as `try_model`, but not for the model of a point, nor without a plan.
    """
    is_new = plan is not None and is_to_try(plan)
    known = with_known_shape(job, None if is_new else before)
    if count_parameters(known.model.config or {}):
        return known, None
    try:
        facts = try_model(job)
    except ConfigError:
        if is_new:
            raise
        return known, None
    return (known if facts.size is None else _of_shape(job, of_measured(facts.size))), facts


def _read(folder: Path) -> dict[str, object] | None:
    """The configuration in a folder. None if there is no readable one: the code that builds the model reports
    that.
    """
    try:
        shape = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return shape if isinstance(shape, dict) else None


def _of_shape(job: JobConfig, shape: dict[str, object] | None) -> JobConfig:
    if shape is job.model.config:
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"config": shape})})
