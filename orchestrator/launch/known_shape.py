"""The transformers configuration by which a job's memory is judged: where it continues pretrained weights,
that of their folder.

It reads one small file, and decides nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig


def with_known_shape(job: JobConfig) -> JobConfig:
    """The job, its `model.config` filled from `config.json` of `model.pretrained`; as it is where there is no
    such folder, or nothing there that can be read: whoever builds the model says so.
    """
    if job.model.config is not None or job.model.pretrained is None:
        return job
    try:
        shape = json.loads((Path(job.model.pretrained) / "config.json").read_bytes())
    except (OSError, ValueError):
        return job
    if not isinstance(shape, dict):
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"config": shape})})
