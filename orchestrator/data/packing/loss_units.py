"""Counts the units that a step's loss is divided by, with a user's function (`train.objective_units`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from orchestrator.errors import DataError
from orchestrator.objectives import HostBatch
from orchestrator.records.tokens import Int32Array
from orchestrator.user_function import find_function

_FRACTION_BITS = 24
_LIMIT = 1 << 61  # of a sample's units in fixed point
_UNITS = "objective.units"
NOT_CALLABLE = "objective.not_callable"


def loss_units(
    path: str,
    first_index: int,
    numbers: Int32Array,
    input_ids: Int32Array,
    labels: Int32Array,
    document_ids: Int32Array,
    rows_per_sample: int = 1,
) -> float:
    """Returns the units of all samples, as the function `path` counts them sample by sample.

    The arrays are those of `StepSamples.rows`. The sum is exact in fixed point, so it does not depend on how
    a step is divided. Raises `ConfigError` if there is no such function. Raises `DataError` if the function
    raises, or does not return a finite number of at least 0.
    """
    function, total = _function(path), 0
    for at, number in enumerate(numbers):
        ids, targets, documents = (
            column[at].reshape(rows_per_sample, -1) for column in (input_ids, labels, document_ids)
        )
        sample = HostBatch(
            input_ids=ids,
            labels=targets,
            document_ids=documents,
            source_ids=np.full_like(ids, number),
            sample_indices=np.full(ids.shape, first_index + at),
        )
        total += _of_sample(path, function, sample, first_index + at)
    return total / (1 << _FRACTION_BITS)


@cache
def _function(path: str) -> Callable[[HostBatch], Any]:
    return find_function("train.objective_units", path, NOT_CALLABLE, num_positional=1)


def _of_sample(path: str, function: Callable[[HostBatch], Any], sample: HostBatch, index: int) -> int:
    try:
        units = float(np.asarray(function(sample), dtype=np.float64).reshape(()))
    except Exception as error:
        raise DataError(
            f"train.objective_units={path} fails for sample {index:,}: {type(error).__name__}: {error}; it "
            "must return one number",
            code=_UNITS,
        ) from error
    if not (math.isfinite(units) and 0 <= units < _LIMIT >> _FRACTION_BITS):
        raise DataError(
            f"train.objective_units={path} returned {units} for sample {index:,}; return a finite number of "
            "at least 0",
            code=_UNITS,
        )
    return round(units * (1 << _FRACTION_BITS))
