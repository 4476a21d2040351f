"""The digest that no division of rows changes, and that sees every change of a value or a place."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning.state import state_layout as under_test
from orchestrator.planning.state.state_layout import shard_rows, written_rows
from tests.planning.states import LAYOUTS, tensors

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}


def as_rows(array):
    """The bytes of a little-endian array, shape (num_rows, row_bytes)."""
    rows = array.reshape(array.shape[0] if array.ndim else 1, -1)
    return np.ascontiguousarray(rows).view(np.uint8)


def digest(state, rows_sum=under_test.rows_sum, row_seed=under_test.row_seed):
    """Of whole arrays by name, all of group `model`."""
    return under_test.weights_sum(
        rows_sum(as_rows(a), row_seed("model", name, str(a.dtype), a.shape), 0) for name, a in state.items()
    )


def ramp():
    return {
        "embed.weight": np.arange(12, dtype="<f4").reshape(4, 3),
        "norm.weight": np.ones(3, "<f4"),
        "steps": np.array(7, "<i8"),
    }


# ---- what it is
def test_golden_values():
    """The formula is stored: a change of one of these needs another `SUM_VERSION`."""
    assert under_test.row_seed("model", "embed.weight", "float32", (4, 3)) == SEED
    assert digest(ramp()) == DIGEST
    assert under_test.weights_sum([]) == "s1:" + 32 * "0"


SEED = 729904287810633636
DIGEST = "s1:6a082ae559742872ee81410f8e286e83"


def test_it_is_the_sum_of_seeded_hashes_of_the_rows():
    total = 0
    for name, array in ramp().items():
        seed = xxhash.xxh3_64(f"model/{name} {array.dtype} {list(array.shape)}".encode()).intdigest() // 2
        data = array.tobytes()
        num = array.shape[0] if array.shape else 1
        for row in range(num):
            one = data[len(data) // num * row : len(data) // num * (row + 1)]
            total += int(xxhash.xxh3_128(one, seed=seed + row).hexdigest(), 16)
    assert digest(ramp()) == f"s1:{total % 2**128:032x}"


@given(tensors(), LAYOUTS, LAYOUTS)
def test_two_layouts_have_equal_digests(state, one, other):
    rng = np.random.default_rng(0)
    whole = [rng.integers(0, 256, (t.num_rows, t.row_bytes), np.uint8) for t in state]

    def added_up(layout):
        sums = []
        for rank in range(layout.world_size):
            for tensor, data, rows in zip(state, whole, written_rows(state, layout, rank), strict=True):
                seed = under_test.row_seed(tensor.group, tensor.name, DTYPES[tensor.itemsize], tensor.shape)
                sums.append(under_test.rows_sum(data[rows.start : rows.stop], seed, rows.start))
        return under_test.weights_sum(sums)

    assert added_up(one) == added_up(other)


def test_rows_without_bytes_count_by_their_number_and_place():
    none, rows = np.zeros((0, 4), np.uint8), np.zeros((3, 0), np.uint8)
    assert under_test.rows_sum(none, 5, 0) == 0
    parts = [under_test.rows_sum(rows[i : i + 1], 5, i) for i in range(3)]
    assert sum(parts) % 2**128 == under_test.rows_sum(rows, 5, 0)


def test_rows_that_do_not_lie_one_after_the_other_are_refused():
    with pytest.raises(AssertionError, match="strides"):
        under_test.rows_sum(np.zeros((4, 8), np.uint8)[:, ::2], 0, 0)


# ---- what it sees
def check_small_rows(rows_sum=under_test.rows_sum):
    """Short rows are where xxh3 mixes least: all one-byte values in three rows, at neighbouring seeds."""
    values = [0, 1, 2, 127, 128, 255]
    found = {}
    for content in product(values, repeat=3):
        total = rows_sum(np.array(content, np.uint8).reshape(3, 1), 12345, 0)
        assert found.setdefault(total, content) == content, f"{content} and {found[total]} have one digest"


def check_damage(rows_sum=under_test.rows_sum, row_seed=under_test.row_seed):
    """Every single bit, every swap of two rows, of two tensors, of names, and every lost row of a small
    state.
    """
    rng = np.random.default_rng(0)
    state = {name: rng.normal(size=(5, 2)).astype("<f4") for name in ("a", "b", "c")}
    seen = {digest(state, rows_sum, row_seed): "nothing"}

    def sees(what, changed):
        found = digest(changed, rows_sum, row_seed)
        assert found not in seen, f"{what} looks like {seen[found]}"
        seen[found] = what

    for name, array in state.items():
        for bit in range(8 * array.nbytes):
            data = bytearray(array.tobytes())
            data[bit // 8] ^= 1 << bit % 8
            sees(f"bit {bit} of {name}", {**state, name: np.frombuffer(data, "<f4").reshape(array.shape)})
        for i, j in combinations(range(len(array)), 2):
            swapped = array.copy()
            swapped[[i, j]] = array[[j, i]]
            sees(f"rows {i} and {j} of {name} swapped", {**state, name: swapped})
        sees(f"last row of {name} lost", {**state, name: array[:-1]})
        sees(f"{name} in another shape", {**state, name: array.reshape(5, 2, 1)})
        sees(f"{name} as another type", {**state, name: array.view("<i4")})
        sees(f"{name} lost", {other: a for other, a in state.items() if other != name})
    for one, other in combinations(state, 2):
        sees(f"{one} and {other} swapped", {**state, one: state[other], other: state[one]})
        for row in range(5):
            first, second = state[one].copy(), state[other].copy()
            first[row], second[row] = state[other][row], state[one][row]
            sees(f"row {row} of {one} and {other} swapped", {**state, one: first, other: second})
    # two sign bits of high words, which a sum of products modulo 2^64 does not see
    flipped = state["a"].copy()
    flipped[2] *= -1
    sees("two signs in one row", {**state, "a": flipped})


def test_no_two_contents_of_short_rows_have_one_digest():
    check_small_rows()


def test_flips_swaps_and_losses_are_seen():
    check_damage()


@given(st.binary(min_size=2, max_size=40).filter(lambda b: len(b) % 2 == 0), st.data())
def test_any_two_different_rows_that_change_places_are_seen(content, data):
    width = data.draw(st.sampled_from([w for w in (1, 2, 4, 8) if len(content) % (2 * w) == 0]))
    rows = np.frombuffer(content, np.uint8).reshape(-1, width)
    i, j = data.draw(st.tuples(*[st.integers(0, len(rows) - 1)] * 2))
    swapped = rows.copy()
    swapped[[i, j]] = rows[[j, i]]
    equal = under_test.rows_sum(rows, 99, 0) == under_test.rows_sum(swapped, 99, 0)
    assert equal == (rows == swapped).all()


def without_places(rows, seed, first_row):
    """Planted: all rows of a tensor have one seed."""
    del first_row
    return sum(xxhash.xxh3_128_intdigest(row, seed) for row in rows) % 2**128


def products(rows, seed, first_row):
    """Planted: 64-bit words times odd keys modulo 2^64, the row's sum times its number."""
    words = rows.view("<u8").astype(object)
    keys = [2 * ((seed + 7 * k) % 2**62) + 1 for k in range(words.shape[1])]
    return sum(int(sum(w * keys)) * (2 * (first_row + n) + 1) + n for n, w in enumerate(words)) % 2**64


def without_names(group, name, dtype, shape):
    """Planted: tensors of one type and shape have equal seeds."""
    return under_test.row_seed(group, "", dtype, shape)


def without_form(group, name, dtype, shape):
    """Planted: only the name counts."""
    del dtype, shape
    return under_test.row_seed(group, name, "", ())


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows_sum": without_places},
        {"rows_sum": products},
        {"row_seed": without_names},
        {"row_seed": without_form},
    ],
    ids=lambda wrong: next(iter(wrong.values())).__name__,
)
def test_digests_that_miss_something_are_caught(wrong):
    with pytest.raises(AssertionError, match="looks like"):
        check_damage(**wrong)


def test_sums_of_ranks_pass_two_to_the_128_without_harm():
    assert under_test.weights_sum([2**128 - 1, 2]) == "s1:" + 31 * "0" + "1"
    rows = np.arange(64, dtype=np.uint8).reshape(16, 4)
    halves = [
        under_test.rows_sum(rows[r.start : r.stop], 2**63 - 1, r.start)
        for r in (shard_rows(16, 2, s) for s in (0, 1))
    ]
    assert sum(halves) % 2**128 == under_test.rows_sum(rows, 2**63 - 1, 0)
