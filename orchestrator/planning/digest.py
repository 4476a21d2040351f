"""The digest of a sample: 64 bits by which the journal and the data files can be compared.

Golden values are in tests/data/test_golden.py.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import xxhash

from orchestrator.records.tokens import Int32Array

MODULUS = 1 << 64
# Samples are hashed in groups of about this many bytes, which stay in a processor's cache.
_STRETCH_BYTES = 1 << 19


def sample_digest(
    index: int,
    source_number: int,
    seq_len: int,
    input_ids: Int32Array,
    labels: Int32Array,
    document_ids: Int32Array,
) -> int:
    """Returns the digest of one sample.

    It is the xxh3_64 of (index, source_number, seq_len) as uint64 and the three arrays as int32, all
    little-endian. The arrays have shape (seq_len,), padding included. The order of the fields is part of the
    format.
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
    """Returns the sum modulo 2^64 of the digests of consecutive samples; 0 for none. Shapes (num_samples,
    seq_len).

    A sum does not depend on how the samples were divided among ranks.
    """
    num, seq_len = input_ids.shape
    columns = (input_ids, labels, document_ids)
    assert all(c.shape == (num, seq_len) for c in columns), f"shapes {[c.shape for c in columns]} of samples"
    # each sample's fields side by side, so that one call hashes them
    rows = max(1, min(num, _STRETCH_BYTES // (12 * seq_len + 24)))
    table, total = np.empty((rows, 6 + 3 * seq_len), "<i4"), 0
    for first in range(0, num, rows):
        part = table[: min(rows, num - first)]
        here = slice(first, first + len(part))
        head = np.empty((len(part), 3), "<u8")
        head[:, 0] = np.arange(first_index + first, first_index + first + len(part), dtype=np.uint64)
        head[:, 1], head[:, 2] = source_numbers[here], seq_len
        part[:, :6] = head.view("<i4")
        for number, column in enumerate(columns):
            part[:, 6 + number * seq_len : 6 + (number + 1) * seq_len] = column[here]
        total += sum(map(xxhash.xxh3_64_intdigest, part))
    return total % MODULUS


def token_hasher(tokens: Int32Array | None = None) -> xxhash.xxh3_64:
    """Returns a running xxh3_64 of tokens as little-endian int32.

    It starts with `tokens`; `add_tokens` adds more.
    """
    hasher = xxhash.xxh3_64()
    if tokens is not None:
        add_tokens(hasher, tokens)
    return hasher


def add_tokens(hasher: xxhash.xxh3_64, tokens: Int32Array) -> None:
    """Adds `tokens`. The digest is that of all tokens so far, however they were divided."""
    hasher.update(_little_endian(tokens).data)


def _little_endian(array: Int32Array) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(array, dtype="<i4")
