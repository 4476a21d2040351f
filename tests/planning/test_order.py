"""The order: a bijection, keyed by everything it should be, and the same for ever."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning import order

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
    assert order.window_order([(6, 1, 2), (7, 0, 1), (7, 5, 1)], 1, "a", 0, "none").tolist() == [0, 1, 2, 3]


RUNS = st.lists(
    st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 9)),
    max_size=9,
    unique_by=lambda r: r[0],
).map(sorted)


@given(RUNS, st.integers(0, 2**62), st.integers(1, 5))
def test_the_vectorised_order_is_that_of_the_scalar_hash(runs, seed, stretch):
    records = [(fragment, first + i) for fragment, first, num in runs for i in range(num)]
    expected = sorted(
        range(len(records)),
        key=lambda i: (order.record_hash(seed, "s", 2, *records[i]), *records[i]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_STRETCH", stretch)
        assert order.window_order(runs, seed, "s", 2, "block").tolist() == expected


def test_equal_hashes_stay_in_file_order(monkeypatch):
    monkeypatch.setattr(order, "record_hashes", lambda fragment, number, key: number % np.uint64(2))
    assert order.window_order([(3, 1, 4), (5, 0, 3)], 0, "s", 0, "block").tolist() == [1, 3, 4, 6, 0, 2, 5]


@given(st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=20), KEYS)
def test_the_vectorised_hash_is_the_librarys_xxh3(pairs, key):
    fragments, numbers = (np.array(column, dtype=np.uint64) for column in zip(*pairs, strict=True))
    packed = [f.to_bytes(8, "little") + n.to_bytes(8, "little") for f, n in pairs]
    expected = [xxhash.xxh3_64_intdigest(item, key) for item in packed]
    assert order.record_hashes(fragments, numbers, key).tolist() == expected


def test_the_order_of_records_does_not_depend_on_how_they_were_cut():
    whole = order.window_order([(f, 0, 20) for f in range(3)], 5, "s", 1, "block").tolist()
    cut = order.window_order([(f, n, 5) for f in range(3) for n in range(0, 20, 5)], 5, "s", 1, "block")
    assert cut.tolist() == whole
    assert sorted(whole) == list(range(60)) != whole


def test_golden_order_of_version_1():
    assert order.ORDER_VERSION == 1
    assert [order.block_at(0, "stdlib", 0, i, 10, "block") for i in range(10)] == GOLDEN_BLOCKS
    assert order.window_order([(0, 0, 6), (1, 0, 6)], 0, "stdlib", 0, "block").tolist() == GOLDEN_RECORDS
    assert order.record_hash(0, "stdlib", 0, 1, 2) == GOLDEN_HASH


GOLDEN_BLOCKS = [3, 8, 0, 7, 4, 6, 5, 1, 9, 2]
GOLDEN_RECORDS = [4, 10, 2, 5, 0, 8, 3, 9, 6, 7, 1, 11]
GOLDEN_HASH = 9225906048254104192
