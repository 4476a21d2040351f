"""One optimizer step: the samples that it trains, the resulting state, and its journal record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:
    from orchestrator.records.arrays import Int32Array


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
