"""The digest of a sample: what a rank trained, as 64 bits that the journal and the files can be compared by.

It takes arrays and knows neither where they come from nor what a step is. Golden values stand in
tests/data/test_golden.py.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import xxhash

from orchestrator.records import Int32Array

MODULUS = 1 << 64


def sample_digest(
    index: int,
    source_number: int,
    seq_len: int,
    input_ids: Int32Array,
    labels: Int32Array,
    document_ids: Int32Array,
) -> int:
    """xxh3_64 of (index, source_number, seq_len) as uint64 and the three arrays as int32, all little-endian.

    The arrays have shape (seq_len,), padding included. The order of the fields is part of the format.
    """
    digest = xxhash.xxh3_64(struct.pack("<QQQ", index, source_number, seq_len))
    for array in (input_ids, labels, document_ids):
        assert array.shape == (seq_len,), f"an array of {array.shape} in a sample of {seq_len} tokens"
        digest.update(_little_endian(array).data)
    return digest.intdigest()


def batch_digest(
    first_index: int,
    source_numbers: Int32Array,
    input_ids: Int32Array,
    labels: Int32Array,
    document_ids: Int32Array,
) -> int:
    """The sum modulo 2^64 of the digests of consecutive samples; 0 for none. Shapes (num_samples, seq_len).

    A sum does not depend on how the samples were divided among ranks.
    """
    rows = zip(source_numbers.tolist(), input_ids, labels, document_ids, strict=True)
    digests = (
        sample_digest(first_index + i, source, len(ids), ids, targets, documents)
        for i, (source, ids, targets, documents) in enumerate(rows)
    )
    return sum(digests) % MODULUS


def token_hasher(tokens: Int32Array | None = None) -> xxhash.xxh3_64:
    """A running xxh3_64 of tokens as little-endian int32, begun with `tokens`; `add_tokens` goes on."""
    hasher = xxhash.xxh3_64()
    if tokens is not None:
        add_tokens(hasher, tokens)
    return hasher


def add_tokens(hasher: xxhash.xxh3_64, tokens: Int32Array) -> None:
    """Goes on with `tokens`; the digest is that of all tokens so far, however they were divided."""
    hasher.update(_little_endian(tokens).data)


def _little_endian(array: Int32Array) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(array, dtype="<i4")
