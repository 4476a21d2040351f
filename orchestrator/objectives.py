"""What a training objective is given and what it returns.

An objective is a pure function of the model and a micro-batch. `train.objective: pkg.module:name` trains with
it (docs/howto/objectives.md):

    def objective(model, batch: MicroBatch, context: StepContext) -> Terms: ...

Keyword arguments besides these come from `train.objective_args`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from orchestrator.records.tokens import Int32Array, Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples that pass through the model together.

    All tensors have the shape (samples, seq_len) and the type int32, on the device that trains. A sample of
    `content: preference` has two rows: sample i has its chosen answer in row 2i and its rejected answer in
    row 2i + 1, so that the shape is (2 · samples, seq_len).

    `labels`: the token after each token, -100 where nothing is to be predicted. They are already shifted.
    `document_ids`: the number of each token's document within its sample, -1 for padding.
    `source_ids`: the number of each sample's source, in the order of `data.sources`.
    `sample_indices`: the number of each sample in the run (int64 from 2^31 on).
    """

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor
    source_ids: Tensor
    sample_indices: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBatch:
    """One sample as `train.objective_units` gets it: the arrays of `MicroBatch` in NumPy, (1, seq_len).

    A sample of `content: preference` has the shape (2, seq_len).
    """

    input_ids: Int32Array
    labels: Int32Array
    document_ids: Int32Array
    source_ids: Int32Array
    sample_indices: Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """The place of a micro-batch in the run, and what an objective may use besides the model.

    `step`: the number of the step. `consumed_tokens`: the tokens that were trained before it. `generator`:
    random numbers on the device that trains, seeded by the first sample of the micro-batch. They do not
    depend on ranks. `frozen`: models that are not trained, by the names in `model.frozen`.
    """

    step: int
    consumed_tokens: int
    generator: torch.Generator
    frozen: Mapping[str, nn.Module] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric as a sum and the count that it is divided by, each a scalar tensor or a number.

    Both are summed over all micro-batches and ranks of a step, in fixed point with 24 fraction bits, and then
    divided. The result has the same bits for every number of ranks. A metric whose count is 0 or whose sum is
    not finite has no value in that step.
    """

    sum: Tensor | float
    count: Tensor | float = 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss and the metrics of a micro-batch.

    `loss_sum`: a scalar tensor, the loss summed over the micro-batch. It is divided by the units of the whole
    step (`train.objective_units`) before the gradient is computed, so it must not be a mean.
    `metrics`: the same names in every step.
    `per_token`: the loss of each token (samples, seq_len), or None.
    """

    loss_sum: Tensor
    metrics: Mapping[str, Mean] = field(default_factory=dict)
    per_token: Tensor | None = None
