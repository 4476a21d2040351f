"""The data that a step takes from a source, and the samples made of them.

A run is either consecutive positions of the source's stream (`concat`), or packs of whole documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.records.arrays import BoolArray, Int32Array, Int64Array

NO_LOSS, PADDING, PAD_TOKEN = -100, -1, 0
Rows = tuple[Int32Array, Int32Array, Int32Array]  # inputs, labels, document ids (num_samples, seq_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive positions of one source, in its own arrays: it may be kept while the packer continues.

    Position p has the input token `tokens[p]` and the label `tokens[p + 1]`.
    """

    tokens: Int32Array  # (num_positions + 1,); empty for a run without positions
    document_starts: Int64Array  # (num,) positions at which a document begins
    loss: BoolArray | None = None  # like tokens: False for a token that is no target; None: all are

    @property
    def num_positions(self) -> int:
        """The number of input tokens."""
        return max(0, len(self.tokens) - 1)

    @property
    def num_targets(self) -> int:
        """Positions whose label is a target."""
        return self.targets_in(self.num_positions)

    def targets_in(self, num_positions: int) -> int:
        """The targets among the labels of the first `num_positions` positions."""
        return num_positions if self.loss is None else int(self.loss[1 : num_positions + 1].sum())

    @property
    def nbytes(self) -> int:
        """The memory of the run, in bytes."""
        loss = 0 if self.loss is None else self.loss.nbytes
        return self.tokens.nbytes + self.document_starts.nbytes + loss

    def cut(self, start: int, stop: int, seq_len: int) -> Run:
        """The run of samples [start, stop): views, with the same rows."""
        first, last = (min(at * seq_len, self.num_positions) for at in (start, stop))
        low, high = self.document_starts.searchsorted([first, last])
        here = slice(first, last + 1 if last > first else first)
        return Run(
            tokens=self.tokens[here],
            document_starts=self.document_starts[low:high] - first,
            loss=None if self.loss is None else self.loss[here],
        )

    def rows(self, start: int, stop: int, seq_len: int) -> Rows:
        """Samples [start, stop). The last is padded if the run does not fill it.

        Inputs and labels may be views of the run. Do not write to them.
        """
        num, first = stop - start, start * seq_len
        full = max(0, min(self.num_positions, stop * seq_len) - first)  # positions that are not padding
        inputs, labels = self.tokens[first : first + full], self.tokens[first + 1 : first + full + 1]
        if self.loss is not None and full:
            labels = np.where(self.loss[first + 1 : first + full + 1], labels, np.int32(NO_LOSS))
        low, high = self.document_starts.searchsorted([first, first + full])
        documents = _document_numbers(self.document_starts[low:high] - first, num, seq_len)
        if full < num * seq_len:
            missing = num * seq_len - full
            inputs = np.concatenate([inputs, np.full(missing, PAD_TOKEN, np.int32)])
            labels = np.concatenate([labels, np.full(missing, NO_LOSS, np.int32)])
            documents[full:] = PADDING
        shape = (num, seq_len)
        return inputs.reshape(shape), labels.reshape(shape), documents.reshape(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRun:
    """Packs of one source, each a sample: documents, or stretches of one, side by side.

    A stretch of n positions has n + 1 tokens: the first n are its inputs, the last n its labels.
    """

    seq_len: int
    tokens: Int32Array  # of all stretches, one after the other
    sizes: Int64Array  # (num_stretches,) positions of each
    firsts: Int64Array  # (num_packs + 1,) number of each pack's first stretch; last: of all
    loss: BoolArray | None = None  # like tokens: False for a token that is no target; None: all are

    @property
    def num_packs(self) -> int:
        """The number of samples."""
        return len(self.firsts) - 1

    @property
    def num_targets(self) -> int:
        """Positions whose label is a target."""
        return self.targets_in(self.num_packs * self.seq_len)

    def targets_in(self, num_positions: int) -> int:
        """The targets among the labels of the samples that `num_positions` positions count for."""
        stop = int(self.firsts[-(-num_positions // self.seq_len)])
        if self.loss is None:
            return int(self.sizes[:stop].sum())
        token, within = _spread(self.sizes[:stop])
        return int(self.loss[token + within + 1].sum())

    @property
    def nbytes(self) -> int:
        """The memory of the run, in bytes."""
        loss = 0 if self.loss is None else self.loss.nbytes
        return self.tokens.nbytes + self.sizes.nbytes + self.firsts.nbytes + loss

    def cut(self, start: int, stop: int, seq_len: int) -> PackedRun:
        """The run of samples [start, stop): views, with the same rows."""
        assert seq_len == self.seq_len, f"packs of {self.seq_len} positions as samples of {seq_len}"
        firsts = self.firsts[start : stop + 1]
        low, high = int(firsts[0]), int(firsts[-1])
        begin = int((self.sizes[:low] + 1).sum())
        here = slice(begin, begin + int((self.sizes[low:high] + 1).sum()))
        return PackedRun(
            seq_len=seq_len,
            tokens=self.tokens[here],
            sizes=self.sizes[low:high],
            firsts=firsts - low,
            loss=None if self.loss is None else self.loss[here],
        )

    def rows(self, start: int, stop: int, seq_len: int) -> Rows:
        """Samples [start, stop), padded after their last stretch."""
        assert seq_len == self.seq_len, f"packs of {self.seq_len} positions as samples of {seq_len}"
        num, firsts = stop - start, self.firsts[start : stop + 1]
        low, high = int(firsts[0]), int(firsts[-1])
        sizes = self.sizes[low:high]
        per_pack = np.diff(firsts)
        number = np.arange(high - low) - np.repeat(firsts[:-1] - low, per_pack)  # of a stretch in its pack
        before = np.cumsum(sizes) - sizes  # positions of the stretches before it
        pack = np.repeat(np.arange(num), per_pack)
        in_pack = before - before[firsts[:-1] - low][pack] if num else before
        token, within = _spread(sizes)
        source = int((self.sizes[:low] + 1).sum()) + token + within
        target = np.repeat(pack * seq_len + in_pack, sizes) + within
        inputs = np.full(num * seq_len, PAD_TOKEN, np.int32)
        labels = np.full(num * seq_len, NO_LOSS, np.int32)
        documents = np.full(num * seq_len, PADDING, np.int32)
        inputs[target] = self.tokens[source]
        labels[target] = self.tokens[source + 1]
        documents[target] = np.repeat(number, sizes)
        if self.loss is not None:
            labels[target[~self.loss[source + 1]]] = NO_LOSS
        shape = (num, seq_len)
        return inputs.reshape(shape), labels.reshape(shape), documents.reshape(shape)


def joined(runs: Sequence[PackedRun], seq_len: int) -> PackedRun:
    """All runs as one."""
    if len(runs) == 1:
        return runs[0]
    if not runs:
        none = np.empty(0, np.int64)
        return PackedRun(
            seq_len=seq_len, tokens=np.empty(0, np.int32), sizes=none, firsts=np.zeros(1, np.int64)
        )
    masked = any(run.loss is not None for run in runs)
    every = [np.ones(len(run.tokens), np.bool_) if run.loss is None else run.loss for run in runs]
    return PackedRun(
        seq_len=seq_len,
        tokens=np.concatenate([run.tokens for run in runs]),
        sizes=np.concatenate([run.sizes for run in runs]),
        firsts=np.cumsum([0, *np.concatenate([np.diff(run.firsts) for run in runs])]),
        loss=np.concatenate(every) if masked else None,
    )


def _document_numbers(starts: Int64Array, num_samples: int, seq_len: int) -> Int32Array:
    """The number of each position's document within its sample, (num_samples * seq_len,).

    A sample begins with document 0, at any place in it. `starts` are positions at which the next document
    begins.
    """
    begins = np.arange(0, num_samples * seq_len, seq_len)
    borders = np.unique(np.concatenate([begins, starts]))
    numbers = np.arange(len(borders)) - borders.searchsorted(begins)[borders // seq_len]
    return np.repeat(numbers.astype(np.int32), np.diff(borders, append=num_samples * seq_len))


def _spread(sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
    """For every position of stretches of these sizes: the index of its stretch's first token, and its own
    index within the stretch.
    """
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(np.cumsum(sizes + 1) - sizes - 1, sizes), within
