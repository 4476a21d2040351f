"""Cuts a rank's samples of a step into micro-batches, and defines the interface of an objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import nn

from orchestrator.objectives import MicroBatch, Terms
from orchestrator.planning import batches
from orchestrator.records.steps import BatchSlice

NO_LOSS = -100  # the label of a position without a target
NO_MODELS: Mapping[str, nn.Module] = MappingProxyType({})
_INT32 = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedMicroBatch:
    """A micro-batch and its place in the step. `number` counts micro-batches within the step.

    `has_padding`: some position is padding. `first_sample` is −1 for an empty micro-batch.
    """

    number: int
    first_sample: int
    has_padding: bool
    batch: MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlace:
    """The number of a step, and the tokens that were trained before it."""

    step: int
    consumed_tokens: int


class Objective(Protocol):
    """Computes the loss and the metrics of a micro-batch. It is the same on every rank.

    `metric_names`: of the metrics that `terms` returns, sorted. They are known after `prepare`.
    """

    metric_names: tuple[str, ...]

    def prepare(self, model: nn.Module) -> None:
        """Learns what depends on the model, before the first step. The model may be without weights.

        Raises `ConfigError` if the model cannot be trained with this objective.
        """

    def check(self, model: nn.Module, micro: NumberedMicroBatch, place: StepPlace) -> None:
        """Checks in some steps that `terms` is a pure function. All ranks call it in every step, with the
        first micro-batch that they are about to train.

        Raises `TrainingError` if it is not.
        """

    def terms(self, model: nn.Module, micro: NumberedMicroBatch, place: StepPlace) -> Terms:
        """Returns the terms of a micro-batch of the step at `place`.

        Seeds torch's random numbers by the micro-batch's first sample. The model is in training mode.
        """

    def empty(self, device: torch.device) -> NumberedMicroBatch:
        """Returns samples without data, for a rank that has no micro-batch left.

        Their terms count as 0. The rank uses them to take part in the collectives.
        """

    def leave(self) -> None:
        """Leaves the generation. Afterwards it holds no tensor of the model that it was called with."""


def cut(
    batch: BatchSlice, micro_batch_size: int, rank: int, world_size: int, device: torch.device
) -> list[NumberedMicroBatch]:
    """Cuts a rank's slice into micro-batches. The concatenation over all ranks is the same for every world
    size.
    """
    step = batch.step
    expected = batches.rank_samples(step.first_sample, step.num_samples, micro_batch_size, rank, world_size)
    assert expected == (batch.start, batch.stop), (
        f"rank {rank} of {world_size} trains {expected}, the slice holds {(batch.start, batch.stop)}"
    )
    micros = batches.micro_batches(step.num_samples, micro_batch_size)
    num = batch.stop - batch.start
    fits = batch.first_index + num <= _INT32
    indices = batch.first_index + np.arange(num, dtype=np.int32 if fits else np.int64)
    columns = (batch.input_ids, batch.labels, batch.document_ids, batch.source_numbers[:, None])
    copies = [column.astype(np.int32) for column in columns]  # the feed's arrays may be read again
    tensors = [_on(device, array).expand(num, step.seq_len) for array in (*copies, indices[:, None])]
    before, row_len = batch.start - step.first_sample, step.seq_len // batch.rows_per_sample

    def micro(number: int) -> NumberedMicroBatch:
        rows = slice(micros[number].start - before, micros[number].stop - before)
        input_ids, labels, document_ids, source_ids, sample_indices = (
            tensor[rows].reshape(-1, row_len) for tensor in tensors
        )
        return NumberedMicroBatch(
            number=number,
            first_sample=step.first_sample + micros[number].start,
            has_padding=bool((batch.document_ids[rows] < 0).any()),
            batch=MicroBatch(
                input_ids=input_ids,
                labels=labels,
                document_ids=document_ids,
                source_ids=source_ids,
                sample_indices=sample_indices,
            ),
        )

    return [micro(number) for number in batches.rank_run(len(micros), rank, world_size)]


def _on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    """Copies an array to a device. The host does not wait for a GPU's copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def empty_micro_batch(device: torch.device, seq_len: int, label: int, rows: int = 1) -> NumberedMicroBatch:
    """Returns one sample of `rows` documents whose tokens are all 0 and whose labels are all `label`."""
    nothing = torch.zeros(rows, seq_len, dtype=torch.int32, device=device)
    documents = nothing + torch.arange(rows, dtype=torch.int32, device=device)[:, None]
    return NumberedMicroBatch(
        number=-1,
        first_sample=-1,
        has_padding=False,
        batch=MicroBatch(
            input_ids=nothing,
            labels=torch.full_like(nothing, label),
            document_ids=documents,
            source_ids=nothing,
            sample_indices=nothing,
        ),
    )
