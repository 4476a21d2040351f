"""Which nodes a point needs, against every way in which a few nodes can hold its parts and be lost."""

from __future__ import annotations

from itertools import chain, combinations, product

import pytest

from orchestrator.planning.state.copy_placement import gathered, keeper, missing, missing_text, places_of
from orchestrator.records.points import NodePlace

NODES = [
    NodePlace(id=f"{n:032x}", host=f"gpu-{n}", address=f"10.0.0.{n}", folder="/nvme/run") for n in (1, 2, 3)
]
# of one rank: its own node, and perhaps another one that keeps the copy
CHOICES = [(own,) for own in NODES] + [(own, copy) for own in NODES for copy in NODES if own != copy]
SUBSETS = [set(some) for n in range(len(NODES) + 1) for some in combinations(NODES, n)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_point_is_whole_exactly_if_each_part_is_reached_in_one_of_its_places(world_size: int) -> None:
    for each in product(CHOICES, repeat=world_size):
        places = dict(enumerate(each))
        parts = gathered(places)
        assert {rank: places_of(parts, rank) for rank in places} == places
        for up in SUBSETS:
            found = missing(parts, {node.id for node in up})
            lost = [rank for rank, where in places.items() if not up & {*where}]
            assert sorted(chain.from_iterable(m.ranks for m in found)) == lost
            for one in product(*(m.nodes for m in found)):  # any node of each that is named brings all back
                assert not missing(parts, {node.id for node in {*up, *one}})
            for number in range(len(found)):  # and nothing that is named can be left away
                others = {node for n, m in enumerate(found) for node in m.nodes if n != number}
                rest = {node for node in NODES if node in up or node in others} - {*found[number].nodes}
                assert missing(parts, {node.id for node in rest})


def test_each_node_keeps_one_others_copies_and_never_its_own() -> None:
    ids = [f"{n}" for n in range(6)]
    for number in range(len(ids) + 1):
        for nodes in combinations(ids, number):
            kept = {own: keeper(own, nodes) for own in nodes}
            if number < 2:
                assert set(kept.values()) <= {None}
                continue
            assert sorted(filter(None, kept.values())) == sorted(nodes)
            assert all(own != copy for own, copy in kept.items())
    assert keeper("0", ["1"]) == "1", "also of a node that is not among them"


def test_the_text_names_the_node_and_its_files() -> None:
    lost, kept, other = NODES
    parts = gathered({0: (kept,), 3: (lost,), 4: (lost,), 5: (lost, kept), 6: (lost, other)})
    assert missing_text("p", missing(parts, {kept.id, other.id})) == (
        "resume point p needs node gpu-1 (10.0.0.1): files 3 and 4 lie only on gpu-1 (10.0.0.1) in /nvme/run"
    )
    assert missing_text("p", missing(parts, {kept.id})) == (
        "resume point p needs nodes gpu-1 (10.0.0.1) and gpu-3 (10.0.0.3): files 3 and 4 lie only on gpu-1 "
        "(10.0.0.1) in /nvme/run; file 6 lies only on gpu-1 (10.0.0.1) in /nvme/run and gpu-3 (10.0.0.3) in "
        "/nvme/run (either is enough)"
    )
