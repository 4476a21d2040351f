"""The records of training: one optimizer step, one evaluation, and the losses before a state.

Also how many rows a sample has. The records are exchanged between processes, and most are written to the
journal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:
    from orchestrator.records.tokens import Int32Array

PREFERENCE = "preference"  # the content of samples with two rows: a chosen and a rejected answer


def rows_per_sample(contents: Iterable[str]) -> int:
    """Returns the rows of each sample, for the contents of a job's sources."""
    return 2 if PREFERENCE in contents else 1


def sample_len_of(flat: Mapping[str, Any]) -> int:
    """Returns `JobConfig.sample_len` of a stored flat configuration, also of an earlier version."""
    contents = (source.get("content", "text") for source in flat["data.sources"])
    length: int = flat["pack.seq_len"]
    return rows_per_sample(contents) * length


# Why a step was skipped (`StepRecord.skipped`).
NONFINITE, SPIKE = "nonfinite", "spike"
SKIP_CAUSES = (NONFINITE, SPIKE)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StateKey:
    """Identity of one training state, ordered: (attempt, generation, step).

    The generation is the one in which its holder last agreed on the state.
    """

    attempt: int
    generation: int
    step: int

    @property
    def point_name(self) -> str:
        """The name of the resume point of this state, e.g. `00000480-a0003-g0007`."""
        return f"{self.step:08d}-a{self.attempt:04d}-g{self.generation:04d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentLoss:
    """The mean loss of a document's targets in one sample of a step.

    `sample` is its index in the run. `document` counts the documents in the sample. `loss` is None if it is
    not finite.
    """

    sample: int
    document: int
    loss: float | None
    targets: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step as stored in the journal.

    Counts are after the step. `loss` is the sum divided by the step's units (`train.objective_units`; by
    default the mean over its target tokens in nats), None for a step without units. `digest` is the sum
    modulo 2^64 of the trained samples' digests (16 hex digits). `ended` is when the step was applied, in
    seconds since 1970 (UTC) by the clock of the rank that reported the record, which is rank 0 unless that
    died. `peak_memory_bytes` is the largest amount that a rank's process had taken by then (`trainer.loop`).
    Both are None in records from before these fields. `metrics` are those of the objective by name, each None
    if it had no value in the step; None if the objective has none. `mfu` is the share of the cards' peak
    that the model's products needed (`trainer.model.model_flops`), None if that is not known. `skipped` is
    one of `SKIP_CAUSES` if the step moved the place in the data and no weight (`planning.loss_policy`). Its
    loss is None if that was not finite. `documents` are those with the highest mean loss, the highest first
    (`monitor.document_losses`). `not_finite` are the metrics that have no value because one was not finite;
    None if there is none. Readers of a whole journal leave both out.
    """

    attempt: int
    generation: int
    step: int
    consumed_samples: int
    consumed_tokens: int
    target_tokens: int
    loss: float | None
    grad_norm: float
    lr: float
    digest: str
    step_s: float
    data_wait_s: float
    save_blocked_s: float
    ended: float | None = None
    peak_memory_bytes: int | None = None
    metrics: Mapping[str, float | None] | None = None
    mfu: float | None = None
    skipped: str | None = None
    documents: tuple[DocumentLoss, ...] | None = None
    not_finite: tuple[str, ...] | None = None

    @property
    def key(self) -> StateKey:
        """The key of the state that this step produced."""
        return StateKey(attempt=self.attempt, generation=self.generation, step=self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """The samples of a step: [first_sample, first_sample + num_samples), with `num_tokens` positions.

    All samples are full except possibly the last one, which is shortened (and padded) if a token budget is
    not a multiple of seq_len. `seq_len` counts the positions of a sample: those of all its rows.
    """

    first_sample: int
    num_samples: int
    num_tokens: int
    seq_len: int

    def __reduce__(self) -> tuple[Callable[..., StepRange], tuple[int, int, int, int]]:
        # Sent by the dozen, and a dataclass with slots would look up its fields again for each one.
        return _step_range, (self.first_sample, self.num_samples, self.num_tokens, self.seq_len)


def _step_range(first_sample: int, num_samples: int, num_tokens: int, seq_len: int) -> StepRange:
    return StepRange(
        first_sample=first_sample, num_samples=num_samples, num_tokens=num_tokens, seq_len=seq_len
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSlice:
    """One rank's share of one step: samples [start, stop) as contiguous token runs, and facts of the whole
    step.

    `seq_len` is that of `step`: a sample has `rows_per_sample` rows for the model, one after the other.

    `step` is what the step really trains: fewer samples than requested at the end of the data (0: there are
    no more).
    """

    step: StepRange
    start: int
    stop: int
    source_numbers: Int32Array  # (stop - start,)
    input_ids: Int32Array  # (stop - start, seq_len)
    labels: Int32Array  # (stop - start, seq_len), -100 = no loss
    document_ids: Int32Array  # (stop - start, seq_len), -1 = padding
    step_targets: int  # target tokens of the whole step
    step_units: float | None = None  # of the whole step, as the function of `train.objective_units` counts
    step_digest: int  # unsigned 64 bit, of the whole step, as computed by the feed
    cursor: Cursor  # after the step
    end_of_data: bool  # nothing follows this step
    rows_per_sample: int = 1

    @property
    def first_index(self) -> int:
        """The index of its first sample: `start` counts only the trained ones."""
        return self.start + self.cursor.skipped_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """The result of evaluating one part after a step.

    `loss` is the objective's loss divided by its units, as in training; None if the part has no units or a
    value was not finite. `perplexity` is e to the mean cross-entropy of the targets; None for plug-ins.
    `per_source` is the mean loss of each source's targets by name; empty if the objective returns no loss per
    token. `metrics` are those of the objective. `seconds` is how long it took. `not_finite` are the values
    that are None because something was not finite: `loss`, `perplexity`, `loss/<source>`, or a metric.
    """

    part: str
    attempt: int
    generation: int
    step: int
    loss: float | None
    perplexity: float | None
    targets: int
    samples: int
    per_source: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    not_finite: tuple[str, ...] = ()

    @property
    def key(self) -> StateKey:
        """The key of the state that was evaluated."""
        return StateKey(attempt=self.attempt, generation=self.generation, step=self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossHistory:
    """A summary of the run's history up to a state. It follows from the records of its steps alone.

    `recent`: (loss, norm of the gradient) of the newest steps that moved the weights and have a loss, oldest
    first. `num_nonfinite`, `num_spikes`: the steps that were skipped for these causes. `is_skipped`: the
    step that led to the state was skipped.
    """

    recent: tuple[tuple[float, float], ...] = ()
    num_nonfinite: int = 0
    num_spikes: int = 0
    is_skipped: bool = False

    def after(self, record: StepRecord, most: int) -> LossHistory:
        """Returns the history after the next step. `most`: how many values `recent` keeps."""
        return self.after_step(record.loss, record.grad_norm, record.skipped, most)

    def after_step(self, loss: float | None, grad_norm: float, skipped: str | None, most: int) -> LossHistory:
        """`after`, for the fields of the record that matter."""
        if skipped is not None:
            return replace(
                self,
                num_nonfinite=self.num_nonfinite + (skipped == NONFINITE),
                num_spikes=self.num_spikes + (skipped == SPIKE),
                is_skipped=True,
            )
        has_value = most > 0 and loss is not None and math.isfinite(loss) and math.isfinite(grad_norm)
        recent = (*self.recent, (loss, grad_norm))[-most:] if has_value and loss is not None else self.recent
        return replace(self, recent=recent, is_skipped=False)
