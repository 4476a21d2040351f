"""Who keeps whose copy, against every other choice there is."""

from __future__ import annotations

from functools import cache
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning.state import copy_placement as under_test


@cache
def all_choices(world: int) -> list[tuple[int, ...]]:
    """Every way in which each rank keeps exactly one copy and none its own."""
    return [p for p in permutations(range(world)) if all(at != to for at, to in enumerate(p))]


def on_one_node(nodes, keepers):
    return sum(nodes[rank] == nodes[keeper] for rank, keeper in enumerate(keepers))


def check(nodes, neighbours=under_test.neighbours):
    keepers = neighbours(nodes)
    assert keepers in all_choices(len(nodes)), f"{keepers} are not one copy each"
    least = min(on_one_node(nodes, choice) for choice in all_choices(len(nodes)))
    assert on_one_node(nodes, keepers) == least, (
        f"{keepers} on {nodes}: {least} copies on the own node are enough"
    )


def test_as_few_copies_as_can_be_lie_on_the_node_of_their_giver():
    for world in range(2, 7):
        for nodes in product("abc", repeat=world):
            check(nodes)


@given(st.lists(st.sampled_from("abcdefg"), min_size=2, max_size=64))
def test_no_copy_is_on_its_givers_node_if_no_node_has_more_than_half(nodes):
    keepers = under_test.neighbours(nodes)
    assert sorted(keepers) == list(range(len(nodes)))
    most = max(map(nodes.count, nodes))
    assert on_one_node(nodes, keepers) == max(0, 2 * most - len(nodes))


def test_a_world_of_one_has_no_neighbour():
    assert under_test.neighbours(["a"]) == ()


def next_rank(nodes):
    """Planted: the next rank, wherever it is."""
    return tuple((rank + 1) % len(nodes) for rank in range(len(nodes)))


def next_node(nodes):
    """Planted: the first rank of another node, which then keeps many."""
    return tuple(next((i for i, n in enumerate(nodes) if n != node), 0) for node in nodes)


@pytest.mark.parametrize("wrong", [next_rank, next_node])
def test_worse_neighbours_are_caught(wrong):
    with pytest.raises(AssertionError):
        check(("a", "a", "b", "b"), wrong)
