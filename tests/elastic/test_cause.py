"""Why a generation was formed: one word, from what the roster has heard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.elastic.roster import GenerationCause, Roster, first_cause
from orchestrator.history.claims.claim_files import RESTARTED, RESUME, REWIND, START
from tests.coordinator.builders import JOIN


def of_two(why: str = START) -> Roster:
    """A roster whose first generation was formed of a (on node n1) and b (on n2)."""
    made = Roster(2, why=why)
    come(made, "a", "n1")
    come(made, "b", "n2")
    made.formed(1, 1, ["a", "b"], 0, 0, 1.0)
    return made


def come(made: Roster, member: str, node: str = "n1") -> None:
    made.came(replace(JOIN, member=member, node_id=node), 0.0)


@pytest.mark.parametrize(
    ("why", "cause"),
    [(START, "start"), (RESUME, "resume"), (REWIND, "rewind"), (RESTARTED, "coordinator restarted")],
)
def test_the_first_generation_of_an_attempt_has_the_cause_of_its_claim(why: str, cause: str) -> None:
    assert Roster(2, why=why).cause(["a"]) == first_cause(why) == cause


@pytest.mark.parametrize(
    ("happened", "members", "cause"),
    [
        (lambda made: made.gone("b", "killed"), ["a"], GenerationCause.WORKER_LOST),
        (lambda made: made.gone("b", "frozen", GenerationCause.LEFT_OUT), ["a"], GenerationCause.LEFT_OUT),
        (
            lambda made: made.gone("b", "its node died", GenerationCause.NODE_LOST),
            ["a"],
            GenerationCause.NODE_LOST,
        ),
        (lambda made: (made.gone("b", "killed"), made.node_gone("n2")), ["a"], GenerationCause.NODE_LOST),
        (lambda made: (made.gone("b", "killed"), made.node_gone("n1")), ["a"], GenerationCause.WORKER_LOST),
        (lambda made: (made.gone("b", "killed"), come(made, "c")), ["a", "c"], GenerationCause.WORKER_LOST),
        (lambda made: come(made, "c"), ["a", "b", "c"], GenerationCause.WORKER_JOINED),
        (lambda made: made.storage_failed(True), ["a", "b"], GenerationCause.STORAGE),
        (
            lambda made: (made.storage_failed(True), made.storage_failed(False)),
            ["a", "b"],
            GenerationCause.RE_FORMED,
        ),
        (lambda made: None, ["a", "b"], GenerationCause.RE_FORMED),
    ],
)
def test_a_later_one_says_what_changed(
    happened: Callable[[Roster], object], members: list[str], cause: GenerationCause
) -> None:
    made = of_two()
    happened(made)
    assert made.cause(members) == cause
    made.formed(1, 2, members, 5, 5, 2.0)
    assert made.cause(members) == GenerationCause.RE_FORMED, "what was told is not told again"
