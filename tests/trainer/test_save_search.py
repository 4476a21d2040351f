"""No interleaving of steps, saves, answers, deaths and stops tears a save or leaves anybody waiting, and the
search catches the mistakes that would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.trainer.saving.save_machines import (
    Action,
    Begin,
    CallOff,
    CastVote,
    Event,
    Report,
    SaveSlot,
    SlotStage,
    Staged,
    Stopped,
    StopWriting,
    Written,
)
from tests.trainer.save_model import Rules, search

FAULT = Rules(steps=2, faults=1, requests=0)
NO_FAULT = Rules(steps=3, faults=0)


STANDS_STILL = replace(FAULT, progress=True, stops=False)


@pytest.mark.quick("a fault")
@pytest.mark.parametrize(
    "rules", [FAULT, NO_FAULT, STANDS_STILL], ids=["a fault", "no fault", "parts that grow"]
)
def test_no_interleaving_tears_a_save_or_leaves_anybody_waiting(rules: Rules) -> None:
    result = search(rules)
    assert (result.broken, result.trace) == ("", ())
    assert result.states > 1000, "the search must be one"


@pytest.mark.chaos
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "rules", [Rules(), Rules(steps=2, faults=2, requests=0), Rules(steps=2, generations=3)]
)
def test_no_interleaving_does_so_in_wider_bounds(rules: Rules) -> None:
    result = search(rules)
    assert (result.broken, result.trace) == ("", ())


class VotesBeforeItIsWritten(SaveSlot):
    """Planted mistake: the vote is cast as soon as the state is staged, and its answer frees the buffer."""

    def on(self, event: Event) -> tuple[SaveSlot, tuple[Action, ...]]:
        if isinstance(event, Written):
            return self, ()
        after, actions = super().on(event)
        if isinstance(event, Staged) and after.stage is SlotStage.WRITING:
            return replace(after, stage=SlotStage.VOTED), (*actions, CastVote(key=event.key))
        return after, actions


class StopsWithoutAReport(SaveSlot):
    """Planted mistake: who is called off forgets the save."""

    def on(self, event: Event) -> tuple[SaveSlot, tuple[Action, ...]]:
        after, actions = super().on(event)
        if any(isinstance(action, Report) for action in actions) and after.called_off:
            return type(self)(), ()
        return after, actions


class ReportsWhileItWrites(SaveSlot):
    """Planted mistake: who is called off reports it before the writing has ended."""

    def on(self, event: Event) -> tuple[SaveSlot, tuple[Action, ...]]:
        if self.stage is SlotStage.REPORTING and isinstance(event, (Written, Stopped)):
            return self, ()
        after, actions = super().on(event)
        if isinstance(event, CallOff) and any(isinstance(action, StopWriting) for action in actions):
            return replace(after, stage=SlotStage.REPORTING), (Report(key=event.key, reason="called off"),)
        return after, actions


class HearsNothingOfForgottenSaves(SaveSlot):
    """Of a slot that was freed by a join; its writer writes on."""

    def on(self, event: Event) -> tuple[SaveSlot, tuple[Action, ...]]:
        return super().on(event) if isinstance(event, Begin) or event.key == self.key else (self, ())


class FreeOnceItHasVoted(SaveSlot):
    """Planted mistake: the next save, or the retry, begins while the one before is undecided."""

    @property
    def is_free(self) -> bool:
        return self.stage in (SlotStage.FREE, SlotStage.VOTED)


@pytest.mark.quick(
    "rules0-a COMMIT over a part that is missing, torn, or of another step",
    "rules5-files are deleted under a writer",
)
@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (
            replace(NO_FAULT, step_waits=False),
            "a COMMIT over a part that is missing, torn, or of another step",
        ),
        (
            replace(FAULT, join_frees=True, slot=HearsNothingOfForgottenSaves),
            "the staging buffer is written to while it is read",
        ),
        (replace(NO_FAULT, carried_out=lambda control, busy: control), "a save of"),
        (replace(NO_FAULT, slot=VotesBeforeItIsWritten), "a COMMIT over a part that is missing"),
        (replace(FAULT, slot=StopsWithoutAReport, steps=3), "files stay for ever"),
        (replace(FAULT, slot=ReportsWhileItWrites), "files are deleted under a writer"),
        (replace(NO_FAULT, slot=FreeOnceItHasVoted), "a save is begun while another one is undecided"),
    ],
)
def test_the_search_catches_a_planted_mistake(rules: Rules, reason: str) -> None:
    result = search(rules)
    assert result.broken.startswith(reason)
