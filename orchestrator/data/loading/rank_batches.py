"""A rank's share of a step as batches of arrays or tensors. Loads torch only for tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from orchestrator.data.packing.sample_spans import NO_LOSS, PAD_TOKEN, PADDING
from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.planning.batches import micro_batches_per_rank, num_micro_batches, rank_samples
from orchestrator.records.arrays import Int32Array

Tensors = Literal["numpy", "torch"]
Batch = dict[str, Any]
_NAMES = ("input_ids", "labels", "document_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which samples of each step a rank receives (`planning.batches.rank_samples`), and in which batches:
    single micro-batches (`micro_batches`), or all of them as one batch.
    """

    global_batch_size: int  # samples of a step, over all ranks
    micro_batch_size: int  # samples; ranks receive whole micro-batches
    seq_len: int
    rank: int
    world_size: int
    micro_batches: bool


def rank_batches(drawn: StepSamples, share: Share, tensors: Tensors) -> list[Batch]:
    """The batches of this rank in a step. Every rank has the same number, so that collectives match.

    Each has `input_ids`, `labels` (the next token of each position, -100: no loss) and `document_ids` (-1:
    padding), all (num_samples, seq_len), int32 as arrays, int64 as tensors. `step_targets` is the number of
    target tokens of the whole step over all ranks. `first_index` is the index of the batch's first sample in
    the stream. A rank without samples in the step gets one row of padding.
    """
    step, micro = drawn.step, share.micro_batch_size
    first, stop = rank_samples(0, step.num_samples, micro, share.rank, share.world_size)
    _, *tables = drawn.arrays(first, stop)
    num = micro_batches_per_rank(num_micro_batches(step.num_samples, micro), share.world_size)
    size = micro if share.micro_batches else max(1, num * micro)
    return [
        _batch([table[at : at + size] for table in tables], drawn, first + min(at, stop - first), tensors)
        for at in range(0, num * micro, size)
    ]


def _batch(tables: list[Int32Array], drawn: StepSamples, first: int, tensors: Tensors) -> Batch:
    if not len(tables[0]):
        fillers = (PAD_TOKEN, NO_LOSS, PADDING)
        tables = [np.full((1, drawn.step.seq_len), filler, np.int32) for filler in fillers]
    batch: Batch = dict(zip(_NAMES, tables, strict=True))
    if tensors == "torch":
        import torch

        batch = {name: torch.from_numpy(table).long() for name, table in batch.items()}
    return {**batch, "step_targets": drawn.targets, "first_index": drawn.first_index + first}
