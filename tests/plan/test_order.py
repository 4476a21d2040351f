"""The order: a bijection, keyed by everything it should be, and the same for ever."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan import order

KEYS = st.integers(0, 2**64 - 1)


def check_is_a_permutation(permute, n, key):
    assert sorted(permute(i, n, key) for i in range(n)) == list(range(n))


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 1023, 1025])
def test_every_block_comes_once_whatever_their_number(n):
    check_is_a_permutation(order.permutation, n, key=n * 7919)


@given(n=st.integers(1, 400), key=KEYS)
def test_every_block_comes_once_whatever_the_key(n, key):
    check_is_a_permutation(order.permutation, n, key)


def test_a_hash_modulo_n_is_caught_as_no_permutation():
    def hashed(index, n, key):
        return xxhash.xxh3_64_intdigest(index.to_bytes(8, "little"), key) % n

    with pytest.raises(AssertionError):
        check_is_a_permutation(hashed, 50, key=1)


@given(n=st.integers(2**40, 2**126), key=KEYS, data=st.data())
def test_huge_numbers_of_blocks_need_no_memory_and_do_not_collide(n, key, data):
    some = data.draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=8))
    images = {order.permutation(i, n, key) for i in some}
    assert len(images) == len(some)
    assert all(0 <= image < n for image in images)


def test_every_place_is_about_equally_likely():
    n, tries = 10, 4000
    counts = np.zeros((n, n), dtype=int)
    for key in range(tries):
        for i in range(n):
            counts[i, order.permutation(i, n, key)] += 1
    # five standard deviations of a binomial count
    spread = 5 * (tries / n * (1 - 1 / n)) ** 0.5
    assert np.abs(counts - tries / n).max() < spread


def test_blocks_depend_on_seed_source_and_epoch_and_not_on_their_sum():
    def blocks(seed, source, epoch):
        return [order.block_at(seed, source, epoch, i, 40, "block") for i in range(40)]

    variants = [(42, "a", 0), (42, "a", 1), (43, "a", 0), (42, "b", 0), (43, "b", 1)]
    assert len({tuple(blocks(*variant)) for variant in variants}) == len(variants)
    assert blocks(42, "a", 0) == blocks(42, "a", 0)


def test_without_shuffle_blocks_and_records_stay_in_file_order():
    assert [order.block_at(1, "a", 3, i, 5, "none") for i in range(5)] == [0, 1, 2, 3, 4]
    fragments, numbers = [7, 6, 6, 7], [0, 1, 0, 5]
    assert order.record_order(fragments, numbers, 1, "a", 0, "none").tolist() == [2, 1, 0, 3]


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), max_size=30), st.integers(0, 2**62))
def test_the_vectorised_order_is_that_of_the_scalar_hash(records, seed):
    fragments, numbers = [f for f, _ in records], [n for _, n in records]
    expected = sorted(
        range(len(records)),
        key=lambda i: (order.record_hash(seed, "s", 2, *records[i]), *records[i], i),
    )
    assert order.record_order(fragments, numbers, seed, "s", 2, "block").tolist() == expected


@given(st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=20), KEYS)
def test_the_vectorised_hash_is_the_librarys_xxh3(pairs, key):
    fragments, numbers = (np.array(column, dtype=np.uint64) for column in zip(*pairs, strict=True))
    packed = [f.to_bytes(8, "little") + n.to_bytes(8, "little") for f, n in pairs]
    expected = [xxhash.xxh3_64_intdigest(item, key) for item in packed]
    assert order.record_hashes(fragments, numbers, key).tolist() == expected


def test_the_order_of_records_does_not_depend_on_how_they_were_listed():
    records = [(f, n) for f in range(3) for n in range(20)]
    shuffled = records[::-1]

    def ordered(listed):
        places = order.record_order([f for f, _ in listed], [n for _, n in listed], 5, "s", 1, "block")
        return [listed[i] for i in places]

    assert ordered(records) == ordered(shuffled)
    assert ordered(records) != records


def test_golden_order_of_version_1():
    assert order.ORDER_VERSION == 1
    assert [order.block_at(0, "stdlib", 0, i, 10, "block") for i in range(10)] == GOLDEN_BLOCKS
    assert (
        order.record_order([0] * 6 + [1] * 6, [*range(6)] * 2, 0, "stdlib", 0, "block").tolist()
        == GOLDEN_RECORDS
    )
    assert order.record_hash(0, "stdlib", 0, 1, 2) == GOLDEN_HASH


GOLDEN_BLOCKS = [3, 8, 0, 7, 4, 6, 5, 1, 9, 2]
GOLDEN_RECORDS = [4, 10, 2, 5, 0, 8, 3, 9, 6, 7, 1, 11]
GOLDEN_HASH = 9225906048254104192
