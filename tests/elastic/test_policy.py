"""The supervisor's policy: facts in, decisions out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.elastic.supervision.policy import (
    EndLaunch,
    ExpectWorkers,
    GroupFacts,
    LeaveNode,
    NodeFacts,
    StartGroup,
    StopGroup,
    SupervisionFacts,
    decide,
    placement,
    preflight,
    tokenizer_node,
    without_tokenizer_cpus,
)
from tests.elastic.builders import LIMITS, node


def group(name: str, workers: int) -> GroupFacts:
    return GroupFacts(node_id=name, num_workers=workers)


def facts(
    nodes: tuple[NodeFacts, ...], groups: tuple[GroupFacts, ...] = (), **other: object
) -> SupervisionFacts:
    return replace(
        SupervisionFacts(nodes=nodes, groups=groups, below_minimum_s=None),
        **other,  # type: ignore[arg-type]
    )


PLACES = {
    "one node keeps two CPUs for the tokenizers": ((node("a", 8),), (), 3, {"a": 3}),
    "one node that is just large enough": ((node("a", 5),), (), 3, {"a": 3}),
    "one node that is too small for all": ((node("a", 4),), (), 3, {"a": 2}),
    "the roomiest first, the tokenizers' CPUs on the others": ((node("a", 2), node("b", 3)), (), 3, {"b": 3}),
    "over all nodes": ((node("a", 2), node("b", 2), node("c", 2)), (), 3, {"b": 2, "c": 1}),
    "the head before an equal one": ((node("a", 5), node("b", 5, head=True)), (), 3, {"b": 3}),
    "a node that came": ((node("a", 3, free=0), node("b", 2)), (group("a", 2),), 1, {"b": 1}),
    "no room": ((node("a", 3, free=0), node("b", 2, free=0.5)), (group("a", 2),), 1, {}),
    "nothing is missing": ((node("a", 9), node("b", 9)), (group("a", 3),), 0, {}),
    "a hair less than a CPU is a CPU": ((node("a", 3, free=0.9999999),), (group("b", 2),), 1, {"a": 1}),
}


@pytest.mark.parametrize("case", PLACES)
def test_workers_are_placed_where_there_is_room(case: str):
    nodes, groups, missing, expected = PLACES[case]
    made = placement(nodes, groups, LIMITS, missing)
    assert {d.node_id: d.num_workers for d in made} == expected
    assert placement(nodes[::-1], groups, LIMITS, missing) == made, "the order of the facts must not matter"


def test_tokenizers_without_a_cpu_of_their_own_take_no_workers_place():
    beside = without_tokenizer_cpus(LIMITS)
    made = placement((node("a", 2), node("b", 1)), (), beside, 3)
    assert {d.node_id: d.num_workers for d in made} == {"a": 2, "b": 1}
    assert tokenizer_node((node("a", 2), node("b", 1, head=True)), beside) == "b"


def test_workers_that_need_a_gpu_go_where_gpus_are():
    limits = replace(LIMITS, gpus_per_worker=1.0)
    made = placement((node("a", 64), node("b", 8, gpus=2)), (), limits, 3)
    assert made == (StartGroup(node_id="b", num_workers=2),)


def test_a_start_expects_all_that_it_starts():
    assert decide(facts((node("a", 8),)), LIMITS) == (
        StartGroup(node_id="a", num_workers=3),
        ExpectWorkers(num_workers=3),
    )


def test_a_group_that_ended_comes_back_as_large_beside_tokenizers_that_hold_their_cpus():
    """Two of the five CPUs are the tokenizers'; with fewer than three workers nobody trains."""
    limits = replace(LIMITS, min_workers=3)
    again = facts((node("a", 5, free=3),), has_begun=True)
    assert decide(again, limits)[0] == StartGroup(node_id="a", num_workers=3)
    # the feeder died, too, and its tokenizers come back
    assert decide(facts((node("a", 5),), has_begun=True), limits)[0] == StartGroup(node_id="a", num_workers=3)
    tight = facts((node("a", 4),), has_begun=True)
    assert decide(tight, limits) == (), "theirs is kept free"


def test_the_tokenizers_cpus_are_kept_free_on_the_node_where_they_were_told_to_run():
    """It may be another one than would be chosen now: when it was, the head's CPUs were held."""
    nodes = (node("a", 2, head=True), node("b", 5), node("c", 3))
    made = decide(facts(nodes, tokenizer_node="b"), replace(LIMITS, max_workers=5))
    assert made[:2] == (
        StartGroup(node_id="b", num_workers=3),
        StartGroup(node_id="c", num_workers=2),
    )


def test_the_tokenizers_cpu_is_no_workers_before_they_have_it_also_when_the_first_groups_exist():
    """The look after the one that started the first groups, before Ray has given anybody a CPU."""
    limits = replace(LIMITS, start_workers=2, min_workers=2, num_tokenizers=1)
    nodes = (node("head", 1, head=True), node("a", 1), node("b", 1))
    first = decide(facts(nodes, tokenizer_node="head"), limits)
    assert [d.node_id for d in first if isinstance(d, StartGroup)] == ["a", "b"]
    both = (group("a", 1), group("b", 1))
    next_look = decide(facts(nodes, both, has_begun=True, tokenizer_node="head"), limits)
    assert next_look == (ExpectWorkers(num_workers=2),)
    # nor when the workers have theirs; and a node that comes is for a worker all the while
    nodes = (node("head", 1, head=True), node("a", 1, free=0), node("b", 1, free=0), node("c", 1))
    came = decide(facts(nodes, both, has_begun=True, tokenizer_node="head"), limits)
    assert [d.node_id for d in came if isinstance(d, StartGroup)] == ["c"]
    # when they have it, what else is free on their node is for workers
    nodes = (node("head", 2, free=1, head=True), node("a", 1, free=0), node("b", 1, free=0))
    roomy = decide(facts(nodes, both, has_begun=True, tokenizer_node="head"), limits)
    assert [d.node_id for d in roomy if isinstance(d, StartGroup)] == ["head"]


def test_too_few_to_train_are_not_started_for_a_group_never_grows():
    limits = replace(LIMITS, min_workers=3)
    assert decide(facts((node("a", 5, free=2),), has_begun=True), limits) == ()
    short = facts((node("a", 3, free=0), node("b", 1)), (group("a", 1),))
    assert decide(short, limits) == (ExpectWorkers(num_workers=1),)


def test_a_dead_nodes_group_is_stopped_and_its_workers_started_elsewhere():
    nodes, groups = (node("a", 2, free=0), node("c", 4)), (group("a", 2), group("b", 1))
    assert decide(facts(nodes, groups), LIMITS) == (
        StopGroup(node_id="b", reason="its node is gone"),
        StartGroup(node_id="c", num_workers=1),
        ExpectWorkers(num_workers=3),
    )


def test_without_room_the_others_go_on_and_are_what_is_expected():
    assert decide(facts((node("a", 2, free=0),), (group("a", 2), group("b", 1))), LIMITS) == (
        StopGroup(node_id="b", reason="its node is gone"),
        ExpectWorkers(num_workers=2),
    )


def test_the_maximum_is_never_exceeded():
    nodes = tuple(node(f"n{i}", 16) for i in range(9))
    groups = (group("n0", 2),)
    started = [d for d in decide(facts(nodes, groups), LIMITS) if isinstance(d, StartGroup)]
    assert sum(d.num_workers for d in started) == 1


@pytest.mark.parametrize(("below", "stops"), [(None, False), (599.0, False), (601.0, True)])
def test_below_the_minimum_the_run_waits_and_then_stops_with_a_reason(below: float | None, *, stops: bool):
    made = decide(facts((node("a", 8),), (group("a", 3),), below_minimum_s=below), LIMITS)
    assert [d.code for d in made if isinstance(d, EndLaunch)] == ["cluster.too_few_workers"] * stops


FITS = {"disk_free_bytes": 10, "disk_needed_bytes": 5, "object_store_needed_bytes": 5}
PROBLEMS = {
    "it fits": ((node("a", 5),), LIMITS, FITS, []),
    "it fits on two nodes": ((node("a", 3), node("b", 2)), LIMITS, FITS, []),
    "too few CPUs": ((node("a", 4),), LIMITS, FITS, ["5 logical CPUs are needed", "4 of 4 are free"]),
    "none left for tokenizers": ((node("a", 3),), without_tokenizer_cpus(LIMITS), FITS, []),
    "too few CPUs for workers alone": (
        (node("a", 2),),
        without_tokenizer_cpus(LIMITS),
        FITS,
        ["3 logical CPUs are needed (3 workers × 1), 2 of 2 are free"],
    ),
    "CPUs that others hold": ((node("a", 8, free=2),), LIMITS, FITS, ["2 of 8 are free"]),
    "CPUs in pieces": (
        (node("a", 3), node("b", 3), node("c", 3), node("d", 3)),
        replace(LIMITS, cpus_per_worker=3.2),
        FITS,
        ["3 workers of 3.2 CPUs", "host-a: 3"],
    ),
    "too few GPUs": (
        (node("a", 9, gpus=1),),
        replace(LIMITS, gpus_per_worker=1.0),
        FITS,
        ["3 GPUs are needed", "1 are free"],
    ),
    "too little disk": (
        (node("a", 5),),
        LIMITS,
        {**FITS, "disk_needed_bytes": 2**21},
        ["2 MiB of disk", "0 MiB are free"],
    ),
    "a small object store": (
        (replace(node("a", 5), object_store_bytes=2**20),),
        LIMITS,
        {**FITS, "object_store_needed_bytes": 2**22},
        ["4 MiB of Ray's object store", "has 1 MiB"],
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_does_not_fit_is_named_with_both_values(case: str):
    nodes, limits, resources, expected = PROBLEMS[case]
    found = preflight(nodes, limits, **resources)
    assert bool(found) == bool(expected)
    for text in expected:
        assert text in "\n".join(found)


def test_all_problems_are_named_at_once():
    limits = replace(LIMITS, gpus_per_worker=1.0)
    assert len(preflight((node("a", 1),), limits, **{**FITS, "disk_free_bytes": 1})) == 3


def test_a_node_that_is_about_to_go_gets_no_workers_and_others_are_started_for_those_it_has():
    going = replace(node("a", 4, free=2), grace_s=30.0)
    decided = decide(facts((going, node("b", 4)), (group("a", 2), group("b", 1))), LIMITS)
    assert decided == (LeaveNode(node_id="a", host="host-a", grace_s=30.0), ExpectWorkers(num_workers=1))
    decided = decide(facts((going, node("b", 4), node("c", 4)), (group("a", 2), group("b", 1))), LIMITS)
    assert decided[1:] == (StartGroup(node_id="c", num_workers=2), ExpectWorkers(num_workers=3))
    assert decide(facts((going,)), LIMITS) == (LeaveNode(node_id="a", host="host-a", grace_s=30.0),)
