"""Readers divide what all of them need: everything once, in runs of neighbours, evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning.state import state_layout
from orchestrator.planning.state.state_layout import even_runs, readers_with

SIZES = st.lists(st.integers(0, 60), max_size=40)


def check(sizes: list[int], num_runs: int) -> None:
    runs = state_layout.even_runs(sizes, num_runs)
    assert len(runs) == num_runs
    assert [number for run in runs for number in run] == list(range(len(sizes))), "all of it, once, in order"
    for run in runs:
        assert sum(sizes[number] for number in run) <= sum(sizes) / num_runs + max(sizes, default=0)


@given(SIZES, st.integers(1, 12))
def test_each_reader_has_a_run_that_is_no_longer_than_its_part_and_one_piece(
    sizes: list[int], num_runs: int
) -> None:
    check(sizes, num_runs)


def test_equal_pieces_are_divided_exactly() -> None:
    assert even_runs([5] * 12, 4) == (range(3), range(3, 6), range(6, 9), range(9, 12))
    assert even_runs([], 2) == (range(0), range(0))
    assert even_runs([7], 3) == (range(0), range(1), range(1, 1))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_readers_divide_into_groups_of_one_on_each_machine(machines: list[int], data: st.DataObject) -> None:
    needy = data.draw(st.lists(st.sampled_from(range(len(machines))), unique=True, min_size=1))
    groups = {rank: readers_with(rank, needy, machines) for rank in needy}
    for rank, group in groups.items():
        assert rank in group
        assert all(groups[other] == group for other in group), "all of a group mean the same group"
        assert len({machines[other] for other in group}) == len(group)
    on_one = max(sum(machines[rank] == m for rank in needy) for m in set(machines))
    assert len({tuple(group) for group in groups.values()}) == on_one, "as few groups as there can be"


def by_number(sizes: list[int], num_runs: int) -> tuple[range, ...]:
    """Planted: as many pieces to each, whatever they weigh."""
    each = -(-len(sizes) // num_runs)
    return tuple(range(min(n * each, len(sizes)), min((n + 1) * each, len(sizes))) for n in range(num_runs))


def by_their_begin(sizes: list[int], num_runs: int) -> tuple[range, ...]:
    """Planted: the last ones are forgotten where a reader has nothing."""
    return tuple(run for run in even_runs(sizes, num_runs) if run)


@pytest.mark.parametrize(
    ("wrong", "sizes", "num_runs"), [(by_number, [60] * 4 + [1] * 20, 2), (by_their_begin, [1, 60], 5)]
)
def test_wrong_divisions_are_caught(wrong, sizes, num_runs, monkeypatch) -> None:
    monkeypatch.setattr(state_layout, "even_runs", wrong)
    with pytest.raises(AssertionError):
        check(sizes, num_runs)
