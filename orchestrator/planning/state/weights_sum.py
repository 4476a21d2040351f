"""A digest of the weights that does not depend on which rank holds which rows.

Each rank sums its own rows, and these sums add up to the digest of the whole. Golden values are in
tests/planning/test_weights_sum.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

VERSION = "s1"
MODULUS = 1 << 128


def row_seed(group: str, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the seed of row 0 of a tensor; row r has this plus r. `shape` is that of the whole tensor.

    It is the upper 63 bits of the xxh3_64 of `group/name dtype (shape)`, so that no row's seed passes 2^64. A
    tensor of another name, dtype or shape has other seeds for all its rows.
    """
    return xxhash.xxh3_64_intdigest(f"{group}/{name} {dtype} {list(shape)}".encode()) >> 1


def rows_sum(rows: npt.NDArray[np.uint8], seed: int, first_row: int) -> int:
    """Returns the sum modulo 2^128 of the seeded xxh3_128 of each row; 0 for none.

    `rows` has shape (num_rows, row_bytes), row-major: rows [first_row, first_row + num_rows) of the tensor as
    in a safetensors file (little-endian); a scalar is one row. `seed` is the tensor's `row_seed`. A Python
    loop over rows, without a copy: about 10 GB per CPU second in rows of 3 KiB and 20 in rows of 12 KiB, but
    8 million rows per second however short they are (one core of a server CPU). It is not for a thread beside
    training, which would wait for the interpreter's lock.
    """
    contiguous = rows.ndim == 2 and rows.flags.c_contiguous
    assert contiguous, f"rows of shape {rows.shape}, strides {rows.strides} do not lie one after the other"
    first = seed + first_row
    return sum(map(xxhash.xxh3_128_intdigest, rows, range(first, first + len(rows)))) % MODULUS


def weights_sum(sums: Iterable[int]) -> str:
    """Returns `s1:` and 32 hex digits: the digest of a state from the sums of its parts, in any order.

    Every row of every tensor must be included exactly once: replicas and tensors that are on all ranks are
    added by the rank that writes them (`state_layout.written_rows`). Two states with equal digests have the
    same rows at the same places, up to accident (2^-128). The digest does not protect against deliberate
    collisions; the blake3 digests of files do. A tensor without rows adds nothing: names, dtypes and shapes
    are compared separately.
    """
    return f"{VERSION}:{sum(sums) % MODULUS:032x}"
