"""Document order, and decisions about a record, as pure functions of seed, source, epoch and place.

The order is a keyed permutation and a keyed hash of (seed, source, epoch, position). Whether a record is held
out, and the seed of its transforms, come from a keyed hash of its place: a byte offset or row of a file, by
its path in the source's list. Nothing is stored. No library's random generator is used, because their streams
change between versions. Every run has frozen `ORDER_VERSION`: a change of any value of the order must raise
it. A change of a value about a record must raise `RECORD_VERSION`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

ORDER_VERSION = 1

_ROUNDS = 8
# The number of records that are hashed at a time, which limits the memory besides the result.
_STRETCH = 1 << 16
_MASK32 = np.uint64(0xFFFFFFFF)
# XXH3's constants for inputs of 9 to 16 bytes (xxHash 0.8, XXH3_len_9to16_64b and XXH3_avalanche)
_FLIP_LOW = 0x1F67B3B7A4A44072 ^ 0x78E5C0CC4EE679CB
_FLIP_HIGH = 0x2172FFCC7DD05A82 ^ 0x8E2443F7744608B8
_AVALANCHE = np.uint64(0x165667919E3779F9)


def order_key(purpose: str, seed: int, source_name: str, epoch: int) -> int:
    """Returns the 64-bit key of one order.

    Seed and epoch are hashed together, so that seed 42, epoch 1 is not seed 43, epoch 0.
    """
    return xxhash.xxh3_64_intdigest(f"{ORDER_VERSION},{purpose},{seed},{epoch},{source_name}".encode())


def permutation(index: int, n: int, key: int) -> int:
    """Returns the position of `index` in the permutation of range(n) with this key.

    A bijection for every n >= 1, in O(1) time and memory. It is a balanced Feistel network over the next
    power of four, walked along its cycle until it lands in range(n) (Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002). It is a shuffle, not a secure cipher. n is at most 2^126.
    """
    assert 0 <= index < n, f"index {index} of {n}"
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_hash(turn, right, key) & mask)
        index = left << half | right
        if index < n:
            return index


def block_at(seed: int, source_name: str, epoch: int, position: int, num_blocks: int, shuffle: str) -> int:
    """Returns which block of the source is read at `position` of an epoch.

    `shuffle` is `block` or `none` (blocks in file order).
    """
    assert shuffle in ("block", "none"), f"data.shuffle={shuffle} is unknown to the order"
    if shuffle == "none":
        return position
    return permutation(position, num_blocks, order_key("blocks", seed, source_name, epoch))


def record_hash(seed: int, source_name: str, epoch: int, fragment: int, number: int) -> int:
    """Returns the keyed hash by which a record is sorted in its window.

    It is xxh3_64, seeded with the order's key, of (fragment, number) as two little-endian uint64.
    """
    return _hash(fragment, number, order_key("records", seed, source_name, epoch))


def window_order(
    runs: Sequence[tuple[int, int, int]], seed: int, source_name: str, epoch: int, shuffle: str
) -> npt.NDArray[np.int32]:
    """Returns the order of a window's records: indices that sort them, shape (num_records,), fewer than 2^31.

    The records are in (fragment, number) order, each run as (fragment, number of its first record, count).
    They are sorted by `record_hash`, ties by (fragment, number); with `shuffle: none` by (fragment, number)
    alone. Takes 4 bytes per record, and 20 more while it sorts.
    """
    assert shuffle in ("block", "none"), f"data.shuffle={shuffle} is unknown to the order"
    assert all(a[:2] < b[:2] for a, b in pairwise(runs)), f"runs are not in order: {runs}"
    total = sum(num for _, _, num in runs)
    if shuffle == "none":
        return np.arange(total, dtype=np.int32)
    key, hashes, end = order_key("records", seed, source_name, epoch), np.empty(total, np.uint64), 0
    for fragment, first, num in runs:
        for start in range(first, first + num, _STRETCH):
            numbers = np.arange(start, min(start + _STRETCH, first + num), dtype=np.uint64)
            hashes[end : end + len(numbers)] = record_hashes(np.array(fragment, np.uint64), numbers, key)
            end += len(numbers)
    # stable: equal hashes stay in (fragment, number) order
    return np.argsort(hashes, kind="stable").astype(np.int32)


def pack_order(
    num_packs: int, block: int, window: int, seed: int, source_name: str, epoch: int, shuffle: str
) -> npt.NDArray[np.int64]:
    """Returns the order in which a window's packs become samples: shape (num_packs,).

    Packs are sorted by the keyed hash of (block << 32 | window, number of the pack), ties by number; with
    `shuffle: none` by number alone. `block` is a position in the epoch's order. (The order in which packs are
    filled depends on lengths: long documents first.)
    """
    assert shuffle in ("block", "none"), f"data.shuffle={shuffle} is unknown to the order"
    if shuffle == "none":
        return np.arange(num_packs)
    place = np.array(block << 32 | window, np.uint64)
    numbers = np.arange(num_packs, dtype=np.uint64)
    key = order_key("packs", seed, source_name, epoch)
    return np.argsort(record_hashes(place, numbers, key), kind="stable")


def record_hashes(
    fragment: npt.NDArray[np.uint64], number: npt.NDArray[np.uint64], key: int
) -> npt.NDArray[np.uint64]:
    """Returns `record_hash` of many records at once, under the order's `key`; shapes (num_records,)."""
    low = fragment ^ np.uint64((_FLIP_LOW + key) % 2**64)
    high = number ^ np.uint64((_FLIP_HIGH - key) % 2**64)
    mixed = np.uint64(16) + low.byteswap() + high + _multiply_fold(low, high)
    mixed = (mixed ^ (mixed >> np.uint64(37))) * _AVALANCHE
    hashes: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(32))
    return hashes


def _multiply_fold(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns the two halves of the 128-bit product a · b, combined by exclusive or."""
    shift = np.uint64(32)
    a_low, a_high, b_low, b_high = a & _MASK32, a >> shift, b & _MASK32, b >> shift
    cross = (a_low * b_low >> shift) + (a_high * b_low & _MASK32) + a_low * b_high
    upper = (a_high * b_low >> shift) + (cross >> shift) + a_high * b_high
    folded: npt.NDArray[np.uint64] = upper ^ (a * b)
    return folded


def _hash(first: int, second: int, key: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", first, second), key)


RECORD_VERSION = 1

_RECORD_HASHES = 1 << 64


def holdout_key(source_name: str, path: str) -> int:
    """Returns the key of a file's hold-out.

    It contains neither seed nor epoch. Runs in other orders thus hold out the same records, and measurements
    on these are comparable.
    """
    return xxhash.xxh3_64_intdigest(f"{RECORD_VERSION},holdout,{source_name},{path}".encode())


def holdout_bound(share: float) -> int:
    """Returns the bound below which hashes are held out: the written share of all hashes, rounded down."""
    assert 0 <= share < 1, f"a share of {share} is held out"
    return int(Decimal(repr(share)) * _RECORD_HASHES)


def is_held_out(place: int, key: int, bound: int) -> bool:
    """Whether the record at `place` of the file with this `key` is held out."""
    return xxhash.xxh3_64_intdigest(struct.pack("<q", place), key) < bound


def transform_key(seed: int, source_name: str, epoch: int, path: str) -> int:
    """Returns the key of a file's record seeds.

    It contains the epoch, so that a transform draws anew in each epoch.
    """
    place = f"{RECORD_VERSION},transform,{seed},{epoch},{source_name},{path}"
    return xxhash.xxh3_64_intdigest(place.encode())


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
