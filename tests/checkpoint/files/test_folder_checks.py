"""Which nodes may get workers while their node folders are asked for."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checkpoint.node_local.node_folder import ASK_AGAIN_S, FolderChecks

NODES = ("a", "b")
EVENTS = st.tuples(
    st.sampled_from(["ask", "right", "wrong", "other wrong", "silent"]),
    st.sampled_from(NODES),
    st.floats(0, 2 * ASK_AGAIN_S),
)


@given(st.sets(st.sampled_from(NODES)), st.lists(EVENTS, max_size=30))
def test_a_node_gets_workers_from_its_first_good_answer_on_and_is_asked_until_then(
    made: set[str], events: list[tuple[str, str, float]]
) -> None:
    checks, now = FolderChecks(made), 0.0
    right, open_, told = set(made), set[str](), list[tuple[str, str]]()
    wrong_at = dict[str, float]()
    for what, node, seconds in events:
        now += seconds
        if what == "ask":
            due = checks.to_ask(NODES, now)
            expected = [
                n
                for n in NODES
                if n not in right | open_ and now >= wrong_at.get(n, -ASK_AGAIN_S) + ASK_AGAIN_S
            ]
            assert due == expected
            open_ |= {*due}
        elif node in open_:  # only who was asked answers
            open_.remove(node)
            wrong_at.pop(node, None)
            if what == "right":
                checks.is_right(node)
                right.add(node)
            elif what == "silent":
                checks.is_silent(node)
            else:
                wrong_at[node] = now
                if checks.is_wrong(node, what, now):
                    told.append((node, what))
        assert checks.held_back(NODES) == {*NODES} - right
    for node in NODES:
        reasons = [reason for who, reason in told if who == node]
        assert all(first != second for first, second in pairwise(reasons)), "each is told once"


def test_a_reason_is_told_once_and_another_one_again() -> None:
    checks = FolderChecks()
    answers = ["no such disk", "no such disk", "read-only"]
    assert [checks.is_wrong("a", reason, 0.0) for reason in answers] == [True, False, True]
