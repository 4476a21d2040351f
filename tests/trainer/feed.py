"""A feed without data: token p of the only source is a formula, so any sample of any shape is known at
once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.planning.batches import ceil_div, rank_samples
from orchestrator.planning.digest import sample_digest
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.membership import GenerationView
from orchestrator.records.steps import BatchSlice, StepRange

POISON = 63  # never made by the formula: see `poisoned_sample`
VOCABULARY = 64


def token_at(positions: np.ndarray) -> np.ndarray:
    """The tokens (int32) at these positions of the stream: never POISON, no short period."""
    mixed = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return (mixed % np.uint64(POISON)).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class FormulaFeed:
    """Serves the first `total_tokens` inputs (None: endless), packed as docs/data.md says; may lie in stated
    ways."""

    total_tokens: int | None = None
    wrong_digest_at_sample: int | None = None
    wrong_targets_at_sample: int | None = None
    poisoned_sample: int | None = None
    silent_samples: range = range(0)  # without targets

    def open(self, view: GenerationView, cursor: Cursor) -> None:
        """Nothing to prepare."""

    def prefetch(self, steps: Sequence[StepRange], rank: int, world_size: int, micro_batch_size: int) -> None:
        """Nothing to fetch."""

    def get(
        self, step: StepRange, rank: int, world_size: int, micro_batch_size: int, cursor: Cursor
    ) -> BatchSlice:
        """The rank's slice, cut out of the whole step."""
        assert step.first_sample == cursor.consumed_samples
        first_token = cursor.consumed_tokens
        left = step.num_tokens if self.total_tokens is None else self.total_tokens - first_token
        num_tokens = min(step.num_tokens, left)
        ids, labels, documents = self._arrays(first_token, num_tokens, step)
        real = StepRange(
            first_sample=step.first_sample, num_samples=len(ids), num_tokens=num_tokens, seq_len=step.seq_len
        )
        digest = sum(
            sample_digest(step.first_sample + i, 0, step.seq_len, ids[i], labels[i], documents[i])
            for i in range(len(ids))
        ) % (1 << 64)
        start, stop = rank_samples(step.first_sample, len(ids), micro_batch_size, rank, world_size)
        mine = slice(start - step.first_sample, stop - step.first_sample)
        consumed = first_token + num_tokens
        return BatchSlice(
            step=real,
            start=start,
            stop=stop,
            source_numbers=np.zeros(stop - start, np.int32),
            input_ids=ids[mine],
            labels=labels[mine],
            document_ids=documents[mine],
            step_targets=num_tokens
            - self._silent(first_token, consumed, step)
            + self._in(real, self.wrong_targets_at_sample),
            step_digest=(digest + self._in(real, self.wrong_digest_at_sample)) % (1 << 64),
            cursor=Cursor(
                consumed_samples=step.first_sample + len(ids),
                consumed_tokens=consumed,
                target_tokens=consumed - self._silent(0, consumed, step),
                sources={"formula": SourceCursor(token=consumed)},
            ),
            end_of_data=consumed == self.total_tokens,
        )

    def _silent(self, first_token: int, consumed: int, step: StepRange) -> int:
        """Tokens in [first_token, consumed) that are no targets."""
        first, last = (self.silent_samples.start * step.seq_len, self.silent_samples.stop * step.seq_len)
        return max(0, min(consumed, last) - max(first_token, first))

    def _arrays(
        self, first: int, num_tokens: int, step: StepRange
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        num, shape = ceil_div(num_tokens, step.seq_len), (ceil_div(num_tokens, step.seq_len), step.seq_len)
        places = np.arange(num * step.seq_len)
        ids = token_at(first + places).reshape(shape)
        labels = (
            np.where(places < num_tokens, token_at(first + places + 1), -100).astype(np.int32).reshape(shape)
        )
        documents = np.where(places < num_tokens, 0, -1).astype(np.int32).reshape(shape)
        if self.poisoned_sample is not None and 0 <= self.poisoned_sample - step.first_sample < num:
            ids[self.poisoned_sample - step.first_sample, 0] = POISON
        for sample in range(num):
            if step.first_sample + sample in self.silent_samples:
                labels[sample] = -100
        return ids, labels, documents

    @staticmethod
    def _in(step: StepRange, sample: int | None) -> int:
        return int(sample is not None and 0 <= sample - step.first_sample < step.num_samples)
