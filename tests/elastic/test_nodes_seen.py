"""What is known of nodes between two looks at them: no group is started where one would only fail."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.elastic.supervision.policy import (
    GroupFacts,
    NodeFacts,
    NodeSnapshot,
    StartGroup,
    SupervisionFacts,
    decide,
)
from tests.elastic.builders import LIMITS, node
from tests.num_examples import examples

HEAD, SPOT = node("head", 4, head=True), node("spot", 4)


def drained(grace_s: float | None) -> NodeFacts:
    return NodeFacts(
        node_id="spot",
        host="host-spot",
        is_head=False,
        cpus=4,
        gpus=0,
        free_cpus=4,
        free_gpus=0,
        grace_s=grace_s,
    )


def started(seen: NodeSnapshot, *groups: str) -> set[str]:
    """The nodes on which groups are started now."""
    facts = SupervisionFacts(
        nodes=seen.nodes,
        unknown=seen.unknown,
        groups=tuple(GroupFacts(node_id=name, num_workers=1) for name in groups),
        below_minimum_s=None,
        has_begun=True,
    )
    return {d.node_id for d in decide(facts, LIMITS) if isinstance(d, StartGroup)}


def test_a_node_whose_drain_is_forgotten_while_it_dies_gets_no_group() -> None:
    seen = NodeSnapshot().looked((HEAD, SPOT), 0.0, 0.1)
    assert started(seen, "head") == {"spot"}
    seen = seen.looked((HEAD, drained(200.0)), 1.0, 1.1)
    assert started(seen, "head") == set()
    seen = seen.looked((HEAD, SPOT), 2.0, 2.1)
    assert started(seen, "head") == set()
    assert [n.grace_s for n in seen.nodes] == [None, 199.0]
    seen = seen.looked((HEAD,), 3.0, 3.1).looked((HEAD, SPOT), 4.0, 4.1)
    assert started(seen, "head") == {"spot"}, "it is another one by then"


def test_where_a_group_has_ended_the_next_one_is_started_after_a_later_look() -> None:
    seen = NodeSnapshot().looked((HEAD, SPOT), 0.0, 0.1).group_ended("spot", 0.4)
    assert started(seen, "head") == set()
    assert started(seen) == {"head"}
    assert started(seen.looked((HEAD, SPOT), 0.3, 0.5), "head") == set(), "it began before the end"
    assert started(seen.looked((HEAD, SPOT), 0.5, 0.6), "head") == {"spot"}


@settings(max_examples=examples(100, chaos=500))
@given(
    st.lists(st.sampled_from(["look", "drain", "forget", "die", "end", "act"]), max_size=30),
    st.floats(0.0, 1.0),
)
def test_on_a_node_that_is_drained_or_gone_at_most_one_group_fails(events: list[str], slow: float) -> None:
    """A look says what was so when it began, and comes later; a group ends at once where its node is dead."""
    seen, now, running = NodeSnapshot().looked((HEAD, SPOT), 0.0, 0.0), 0.0, False
    alive, grace, known_drain, failed_since_look = True, None, False, 0
    for event in events:
        now += 1.0
        if event == "look":
            truth = (HEAD, drained(grace)) if alive else (HEAD,)
            known_drain = alive and (known_drain or grace is not None)
            seen, failed_since_look = seen.looked(truth, now - slow, now), 0
        elif event == "drain" and alive:
            grace = 200.0
        elif event == "forget":
            grace = None
        elif event == "die":
            alive = False
        elif event == "end" and running:
            running, seen = False, seen.group_ended("spot", now)
        elif event == "act" and not running and "spot" in started(seen, "head"):
            assert not known_drain
            if alive:
                running = True
            else:
                failed_since_look += 1
                assert failed_since_look == 1
                seen = seen.group_ended("spot", now)
