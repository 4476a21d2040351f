"""What is decided of a record by a keyed hash of where it lies: whether it is held out, and the seed that its
transforms are given. Nothing is stored.

A record lies at a place (byte offset or row) of a file (its path in the source's list). No library's random
generator is used; whoever changes a value that this module computes must raise `VERSION`.
"""

from __future__ import annotations

import struct
from decimal import Decimal

import xxhash

VERSION = 1

_HASHES = 1 << 64


def holdout_key(source_name: str, path: str) -> int:
    """The key of a file's hold-out. Neither seed nor epoch is in it: runs in other orders hold out the same
    records, so that what is measured on these can be compared.
    """
    return xxhash.xxh3_64_intdigest(f"{VERSION},holdout,{source_name},{path}".encode())


def holdout_bound(share: float) -> int:
    """Records with a hash below it are held out: the share, as it is written, of all hashes, rounded down."""
    assert 0 <= share < 1, f"a share of {share} is held out"
    return int(Decimal(repr(share)) * _HASHES)


def is_held_out(place: int, key: int, bound: int) -> bool:
    """Whether the record at `place` of the file with this `key` is held out."""
    return xxhash.xxh3_64_intdigest(struct.pack("<q", place), key) < bound


def transform_key(seed: int, source_name: str, epoch: int, path: str) -> int:
    """The key of a file's record seeds. The epoch is in it: what a transform draws by its seed, it draws anew
    in each epoch.
    """
    return xxhash.xxh3_64_intdigest(f"{VERSION},transform,{seed},{epoch},{source_name},{path}".encode())


def record_seed(place: int, key: int) -> int:
    """The seed of the record at `place` of the file with this `key`, from 0 to 2^64 - 1."""
    return xxhash.xxh3_64_intdigest(struct.pack("<q", place), key)


def document_seed(seed: int, transform: int, document: int) -> int:
    """The seed for the call of a record's transform number `transform` with its document number `document`:
    that of the record for the first call, and for each other one of its own, so that draws are independent.
    """
    if transform == document == 0:
        return seed
    return xxhash.xxh3_64_intdigest(struct.pack("<qq", transform, document), seed)
