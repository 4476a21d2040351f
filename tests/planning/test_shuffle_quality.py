"""What benchmarks/shuffle.py measures of the order is what it says."""

from __future__ import annotations

import numpy as np

from benchmarks.shuffle import DOCUMENT_BYTES, quality, stream_order

MIB = 1 << 20


def test_the_order_that_is_measured_has_each_document_once() -> None:
    for window in (4 * MIB, 16 * MIB, 100 * MIB):
        order = stream_order(50 * MIB, window)
        assert np.array_equal(np.sort(order), np.arange(50 * MIB // DOCUMENT_BYTES))


def test_a_full_permutation_is_the_measure_and_the_files_order_the_worst() -> None:
    num = 50 * MIB // DOCUMENT_BYTES
    full = quality(np.random.default_rng(2).permutation(num), MIB)
    assert abs(full["neighbour_distance"] - 1) < 0.05
    assert full["run_length"] < 1.05
    assert abs(full["files_in_batch_524288"] - 1) < 0.1
    unshuffled = quality(np.arange(num), MIB)
    assert unshuffled["run_length"] == MIB // DOCUMENT_BYTES
    assert unshuffled["neighbour_distance"] < 0.001


def test_a_larger_window_brings_more_of_small_files_into_a_batch_and_fewer_blocks_of_large_ones() -> None:
    small = [quality(stream_order(1024 * MIB, w * MIB), MIB)["files_in_batch_131072"] for w in (4, 64, 512)]
    assert small == sorted(small)
    large = [quality(stream_order(1024 * MIB, w * MIB), 64 * MIB)["files_in_batch_4194304"] for w in (4, 64)]
    assert large[0] > large[1]
