"""Units that a user's function counts: exact sums in the feeder, for every sample once, and refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from orchestrator.data.packing.step_samples import loss_units
from orchestrator.errors import ConfigError, DataError
from orchestrator.objectives import HostBatch
from tests.raising import raises

HERE = "tests.data.test_loss_units"
ROWS = np.arange(24, dtype=np.int32).reshape(3, 8)


def documents(batch: HostBatch) -> int:
    return len(np.unique(batch.document_ids[batch.document_ids >= 0]))


def tenths(batch: HostBatch) -> Any:
    return 0.1 * (batch.sample_indices[0, :1] + batch.source_ids[0, :1])


def shape_and_types(batch: HostBatch) -> float:
    arrays = (batch.input_ids, batch.labels, batch.document_ids, batch.source_ids, batch.sample_indices)
    assert {array.shape for array in arrays} == {(1, 8)}
    assert all(np.issubdtype(array.dtype, np.integer) for array in arrays)
    return 1.0


def is_negative(batch: HostBatch) -> float:
    return -1.0


def is_not_a_number(batch: HostBatch) -> float:
    return math.nan


def is_per_token(batch: HostBatch) -> Any:
    return batch.labels


def raises_an_error(batch: HostBatch) -> float:
    raise KeyError("weight")


def units(name: str, first_index: int = 10) -> float:
    documents = np.array([[0] * 8, [0, 0, 1, 1, 2, 2, -1, -1], [0, 0, 0, 0, 0, 0, 0, -1]], np.int32)
    numbers = np.array([0, 1, 1], np.int32)
    return loss_units(f"{HERE}:{name}", first_index, numbers, ROWS, ROWS, documents)


def test_the_units_of_all_samples_are_summed() -> None:
    assert units("documents") == 1 + 3 + 1
    assert units("shape_and_types") == 3.0
    fixed = [round(0.1 * n * 2**24) for n in (10 + 0, 11 + 1, 12 + 1)]
    assert units("tenths") == sum(fixed) / 2**24


@pytest.mark.parametrize("name", ["is_negative", "is_not_a_number", "is_per_token", "raises_an_error"])
def test_what_is_no_number_of_units_is_refused_with_its_sample(name: str) -> None:
    with raises(DataError, "objective.units", "sample 10"):
        units(name)


@pytest.mark.parametrize("path", [f"{HERE}:nothing", "no_such_module:it", "tests.data.test_loss_units:HERE"])
def test_what_is_no_function_is_refused(path: str) -> None:
    with raises(ConfigError, "objective.not_callable", path):
        loss_units(path, 0, ROWS[:, 0], ROWS, ROWS, ROWS)
