"""What a member says of its phases, looked at in any rhythm."""

from __future__ import annotations

from traceback import FrameSummary

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.launch.member.coordinator_calls import AGAIN_S, LONG_PHASE_S, PhaseReports, doing
from orchestrator.records.run_status import CODE, DATA, EVALUATES, PEERS, Doing
from orchestrator.trainer import loop
from orchestrator.trainer.comm import interruptible
from orchestrator.trainer.interfaces.loop_interface import (
    ENDING,
    EVAL,
    FEED_WAIT,
    FORMING,
    LOAD,
    PHASE_LIMITS_S,
    SAVE_WAIT,
    STEP,
)

STEP_LIMIT_S = 77.0
PHASES = (STEP, FORMING, LOAD, FEED_WAIT, SAVE_WAIT, EVAL, ENDING)
Looks = list[tuple[str, float]]  # the phase that begins, and when the member looks after that


def told(
    looks: Looks, kind: type[PhaseReports] = PhaseReports
) -> list[tuple[float, str, float, float | None]]:
    """Each look: when, in which phase, since when, and what was told."""
    now, phase, since = 100.0, STEP, 100.0
    reports, found = kind(told_at=now), list[tuple[float, str, float, float | None]]()
    for begins, after_s in looks:
        if begins != phase:
            phase, since = begins, now
        now += after_s
        limit_s = reports.due_s(phase, since, STEP_LIMIT_S, now)
        if limit_s is not None:
            reports = kind(told=phase, told_at=now)
        found.append((now, phase, since, limit_s))
    return found


def holds(seen: list[tuple[float, str, float, float | None]]) -> bool:
    """What the coordinator believes is true of every phase that lasts, and it is not told the same twice."""
    believed, at = STEP, 100.0
    for now, phase, since, limit_s in seen:
        if limit_s is not None:
            if limit_s != (STEP_LIMIT_S if phase == ENDING else PHASE_LIMITS_S[phase]):
                return False
            if phase == believed and (phase != FEED_WAIT or now - at <= AGAIN_S):
                return False
            believed, at = phase, now
        if believed != phase and (phase == STEP or now - since > LONG_PHASE_S):
            return False
        if phase == FEED_WAIT and believed == FEED_WAIT and now - at > AGAIN_S:
            return False
    return True


LOOKS = st.lists(st.tuples(st.sampled_from(PHASES), st.sampled_from((0.3, 0.5, 0.9, 2.0, 40.0))), max_size=30)


@given(LOOKS)
def test_every_phase_that_lasts_is_told_once_and_every_step_at_once(looks: Looks) -> None:
    assert holds(told(looks))


class StepsThatLast(PhaseReports):
    """A step is told only when it lasts, like any other phase."""

    def due_s(self, phase: str, since: float, step_limit_s: float, now: float) -> float | None:
        return None if now - since <= LONG_PHASE_S else super().due_s(phase, since, step_limit_s, now)


class OnceForEver(PhaseReports):
    """A wait for the feed is told once, however long it lasts."""

    def due_s(self, phase: str, since: float, step_limit_s: float, now: float) -> float | None:
        return None if phase == self.told else super().due_s(phase, since, step_limit_s, now)


class LimitsOfATable(PhaseReports):
    """Who ends a step says nothing of how long that may take."""

    def due_s(self, phase: str, since: float, step_limit_s: float, now: float) -> float | None:
        return super().due_s(phase, since, 0.0, now)


@pytest.mark.parametrize("wrong", [StepsThatLast, OnceForEver, LimitsOfATable])
def test_a_planted_mistake_is_seen(wrong: type[PhaseReports]) -> None:
    looks = [(FEED_WAIT, 40.0), (FEED_WAIT, 40.0), (FEED_WAIT, 40.0), (STEP, 0.5), (ENDING, 2.0)]
    assert holds(told(looks))
    assert not holds(told(looks, wrong))


def frames(*places: tuple[str, str]) -> list[FrameSummary]:
    """The innermost last."""
    return [FrameSummary(file, 12, name) for file, name in places]


LOOP = (loop.__file__, "_step")
LIBRARY = ("/usr/lib/python3/site-packages/torch/nn/modules/module.py", "_call_impl")
USER = ("/home/ann/model.py", "forward")
COLLECTIVE = ("/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", "all_reduce")


@pytest.mark.parametrize(
    ("phase", "stack", "kind", "place"),
    [
        (STEP, [LOOP, LIBRARY, USER], CODE, "model.py:12 in forward"),
        (STEP, [LOOP, LIBRARY, USER, LIBRARY], CODE, "model.py:12 in forward"),
        (STEP, [LOOP, LIBRARY], CODE, "module.py:12 in _call_impl"),
        (STEP, [LOOP, COLLECTIVE], PEERS, ""),
        (STEP, [LOOP, COLLECTIVE, (interruptible.__file__, "wait")], PEERS, ""),
        (STEP, [LOOP, LIBRARY, USER, COLLECTIVE], PEERS, ""),
        (FEED_WAIT, [LOOP], DATA, ""),
        (EVAL, [LOOP, LIBRARY, USER], EVALUATES, ""),
        (STEP, [], CODE, ""),
    ],
)
def test_what_a_loop_does_is_told_from_its_stack(
    phase: str, stack: list[tuple[str, str]], kind: str, place: str
) -> None:
    assert doing(phase, frames(*stack), 7.0) == Doing(kind=kind, place=place, since_s=7.0)
