"""Decisions about a record from a keyed hash of its place: whether it is held out, and its transforms' seed.

Nothing is stored. A record is at a place (byte offset or row) of a file (its path in the source's list). No
library's random generator is used. A change of any value that this module computes must raise `VERSION`.
"""

from __future__ import annotations

import struct
from decimal import Decimal

import xxhash

VERSION = 1

_HASHES = 1 << 64


def holdout_key(source_name: str, path: str) -> int:
    """Returns the key of a file's hold-out.

    It contains neither seed nor epoch. Runs in other orders thus hold out the same records, and measurements
    on these are comparable.
    """
    return xxhash.xxh3_64_intdigest(f"{VERSION},holdout,{source_name},{path}".encode())


def holdout_bound(share: float) -> int:
    """Returns the bound below which hashes are held out: the written share of all hashes, rounded down."""
    assert 0 <= share < 1, f"a share of {share} is held out"
    return int(Decimal(repr(share)) * _HASHES)


def is_held_out(place: int, key: int, bound: int) -> bool:
    """Whether the record at `place` of the file with this `key` is held out."""
    return xxhash.xxh3_64_intdigest(struct.pack("<q", place), key) < bound


def transform_key(seed: int, source_name: str, epoch: int, path: str) -> int:
    """Returns the key of a file's record seeds.

    It contains the epoch, so that a transform draws anew in each epoch.
    """
    return xxhash.xxh3_64_intdigest(f"{VERSION},transform,{seed},{epoch},{source_name},{path}".encode())


def record_seed(place: int, key: int) -> int:
    """Returns the seed of the record at `place` of the file with this `key`, from 0 to 2^64 - 1."""
    return xxhash.xxh3_64_intdigest(struct.pack("<q", place), key)


def document_seed(seed: int, transform: int, document: int) -> int:
    """Returns the seed for the call of a record's transform number `transform` with its document `document`.

    The first call gets the record's seed. Each other call gets a seed of its own, so that draws are
    independent.
    """
    if transform == document == 0:
        return seed
    return xxhash.xxh3_64_intdigest(struct.pack("<qq", transform, document), seed)
