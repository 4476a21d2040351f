"""A fork's history begins with the state that its first claim took over, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.history.claims.claims import ORIGIN, ClaimParent, ForkedFrom, Origin
from orchestrator.history.claims.lineage import Lineage, effective_chain, effective_history
from orchestrator.json_form import decode, encode
from orchestrator.planning.schedule import Budgets
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey
from tests.history.histories import claim, record, start

CURSOR = Cursor(consumed_samples=40, consumed_tokens=400, target_tokens=400)
FROM = ForkedFrom(run="/runs/other", run_id="abc", point="00000005-a0003-g0002", weights_digest="d")


def origin() -> Origin:
    return Origin(
        forked_from=FROM,
        step=5,
        cursor=CURSOR,
        world_size=2,
        global_batch_size=8,
        seq_len=10,
        budgets=Budgets(),
    )


BEGIN = StateKey(attempt=ORIGIN, generation=1, step=5)
FIRST = ClaimParent(attempt=1, parent=BEGIN, inherited=(BEGIN.point_name,), origin=origin())


def forked(attempt: int = 1, **counts: int) -> Lineage:
    """The history of a fork whose attempt `attempt` trained steps 6 to 8."""
    at = {"consumed_samples": 40, "consumed_tokens": 400, "target_tokens": 400, **counts}
    begun = replace(start(attempt, 1, BEGIN, 5), **at)
    records = [
        replace(record(attempt, 1, step), consumed_samples=8 * step, consumed_tokens=80 * step)
        for step in (6, 7, 8)
    ]
    later = [ClaimParent(attempt=2, parent=BEGIN, inherited=(BEGIN.point_name,))] if attempt == 2 else []
    claims = [claim(number) for number in range(1, attempt + 1)]
    return effective_history(claims, [FIRST, *later], [begun], records)


def test_its_steps_follow_the_state_that_was_taken_over() -> None:
    for attempt in (1, 2):  # the one that took it over may have trained nothing
        lineage = forked(attempt)
        assert (lineage.errors, lineage.gaps, lineage.orphans) == ((), (), 0)
        assert [each.step for each in lineage.records] == [6, 7, 8]
        assert lineage.segments[0].start.id == (ORIGIN, 1)
        assert lineage.on_lineage(BEGIN)
        assert not lineage.on_lineage(replace(BEGIN, generation=2)), "what another claim copied is an orphan"


def test_before_it_has_trained_the_taken_over_state_is_all_of_it() -> None:
    lineage = effective_chain([claim(1)], [FIRST], [])
    assert (lineage.errors, [segment.start for segment in lineage.segments]) == ((), [FIRST.begins])
    assert lineage.on_lineage(BEGIN)


def test_a_history_that_begins_elsewhere_is_a_contradiction() -> None:
    assert any("its parent stood at" in error for error in forked(consumed_tokens=401).errors)
    without = replace(FIRST, origin=None)
    (error,) = effective_chain([claim(1)], [without], []).errors
    assert "its generation has no start record" in error
    journalled = start(ORIGIN, 1, None, 5)
    assert effective_chain([claim(1)], [without], [journalled]).errors, "only a claim can take a state over"


def test_a_parent_file_of_before_there_were_forks_is_read() -> None:
    old = {name: value for name, value in encode(replace(FIRST, origin=None)).items() if name != "origin"}
    assert decode(ClaimParent, old, "0001.parent.json") == replace(FIRST, origin=None)
    assert decode(ClaimParent, encode(FIRST), "0001.parent.json") == FIRST
