"""The state machines of saves: at which steps one is due, and the stages of one member's save.

`SaveTriggers` decides from steps, minutes and requests. Rank 0 queries it. Every rank updates it, so that
another rank that becomes rank 0 gives the same answers. `SaveSlot` goes from events to actions. It holds one
save at a time, from the step boundary at which it begins until its vote or report is answered. `saver.Saver`
carries its actions out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from orchestrator.records.membership import ControlRequests
from orchestrator.records.steps import StateKey

# control bits that rank 0 adds to the summary of a step
SAVE, STOP, REFORM = 1, 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTriggers:
    """The configured triggers and the last save.

    `every_steps` and `every_minutes` are as configured (None: disabled). `step` is the newest state that a
    save was begun of, or that the generation began with. `since_s` is the time of that, in seconds of one
    clock.

    Guarantees: a save that is due stays due until one has begun. If it could not begin because another was
    undecided, it begins later, once. Afterwards saves are due at the same multiples of `every_steps` as if
    none had been late.
    """

    every_steps: int | None
    every_minutes: float | None
    since_s: float
    step: int = 0

    def due(self, step: int, now_s: float) -> bool:
        """Whether the state of `step` is to be saved without a request."""
        by_steps = self.every_steps is not None and step // self.every_steps > self.step // self.every_steps
        return by_steps or (
            self.every_minutes is not None and now_s - self.since_s >= 60 * self.every_minutes
        )

    def begun(self, step: int, now_s: float) -> SaveTriggers:
        """All ranks have begun the save of `step`."""
        return dataclasses.replace(self, step=step, since_s=now_s)

    def formed(self, step: int) -> SaveTriggers:
        """A generation continues from the state of `step`.

        States saved beyond `step` are trained again and become due again. Saves that were due before stay
        due.
        """
        return dataclasses.replace(self, step=min(self.step, step))

    def first(self, step: int) -> SaveTriggers:
        """This member's first generation continues from `step`. Earlier saves were due on other members."""
        return dataclasses.replace(self, step=step)


def asked_for(wanted: ControlRequests, *, due: bool, is_free: bool, num_busy: int) -> int:
    """Computes the control bits that rank 0 adds to a summary.

    They are the coordinator's requests for the generation, and a save that is `due` or that precedes a
    planned re-form. `is_free`: no save of rank 0 is undecided. `num_busy`: the number of ranks with an
    undecided save at the previous step.

    A save that the coordinator did not request waits until rank 0 is free; with a re-form it waits until all
    ranks were free. Thus it does not prevent a requested save or re-form. A request of the
    coordinator is repeated until the first vote for it has arrived.
    """
    free = is_free and not (wanted.reform and num_busy)
    save = SAVE if wanted.save or (free and (due or wanted.resize)) else 0
    return save | (STOP if wanted.stop else 0) | (REFORM if wanted.reform else 0)


def carried_out(control: int, num_busy: int) -> int:
    """Returns the control bits of a summary that all ranks carry out at its step.

    `num_busy` of the ranks hold a save that is not answered. A save is begun by all ranks or by none, and
    only if all are free. A re-form that was requested together with the save waits for it, because no other
    rank may hold the group's state.
    """
    return control & ~(SAVE | REFORM) if num_busy and control & SAVE else control


# --------------------------------------------------------------------------------------------------- one save
class SlotStage(Enum):
    """The stage of a save. Before VOTED and REPORTING, the save uses the staging buffer."""

    FREE = "there is no save"
    STAGING = "the state is copied into the staging buffer"
    WRITING = "the staging buffer is hashed and written"
    VOTED = "the part is durable, and the vote for it is not answered"
    REPORTING = "the part is not written any more, and the report of that is not answered"


# ---------------------------------------------------------------------- events
@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """All ranks begin the save of `key` after this step. Requires a free slot."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """The copy is whole: the state may be written to again."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The part is durable."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """The part is no longer copied or written: that failed or was cancelled, as `reason` states."""

    key: StateKey
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOff:
    """The save of `key` will not be committed, or is no longer wanted, because of `reason`.

    It is ignored for another save, and for one that writes nothing any more.
    """

    key: StateKey
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """The vote for `key`, or the report about it, is answered."""

    key: StateKey


Event = Begin | Staged | Written | Stopped | CallOff | Answered


# ---------------------------------------------------------------------- actions
@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Copy the state into the staging buffer. `Staged` or `Stopped` follows."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Hash and write the staging buffer. `Written` or `Stopped` follows."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class StopWriting:
    """End the writing soon. The result of `Write` still follows, and can be a success."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class CastVote:
    """Vote for the save; `Answered` follows."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Report that this rank has no part of the save and will not write one; `Answered` follows."""

    key: StateKey
    reason: str


Action = Copy | Write | StopWriting | CastVote | Report


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSlot:
    """The one save of a member. `on` returns the next state and the actions to carry out.

    `called_off` is the reason for stopping the save, "" if it is not to be stopped.

    The guarantees require that the state is not written to while `copies`, and that a save begins only when
    `is_free`. Only one save writes to the staging buffer, and nothing else does until the save has stopped
    reading it. Each begun save is answered for by exactly one vote or one report, unless the process dies. A
    member that reports does not write any more. So there is one undecided save and one buffer, however slow
    the storage is.
    """

    stage: SlotStage = SlotStage.FREE
    key: StateKey | None = None
    called_off: str = ""

    @property
    def is_free(self) -> bool:
        """Whether a save may begin."""
        return self.stage is SlotStage.FREE

    @property
    def copies(self) -> bool:
        """Whether the state is being copied and must not be written to."""
        return self.stage is SlotStage.STAGING

    def on(self, event: Event) -> tuple[SaveSlot, tuple[Action, ...]]:
        """Returns the state after `event` and the resulting actions, in order."""
        match event:
            case Begin():
                assert self.is_free, f"a save of {event.key} is begun while {self.stage.value}: {self.key}"
                return dataclasses.replace(
                    self, stage=SlotStage.STAGING, key=event.key
                ), (Copy(key=event.key),)
            case CallOff():
                return self._call_off(event)
            case Staged():
                self._expect(event.key, SlotStage.STAGING)
                if self.called_off:
                    return self._report(self.called_off)
                return self._at(SlotStage.WRITING), (Write(key=event.key),)
            case Written():
                self._expect(event.key, SlotStage.WRITING)
                return self._at(SlotStage.VOTED), (CastVote(key=event.key),)
            case Stopped():
                self._expect(event.key, SlotStage.STAGING, SlotStage.WRITING)
                return self._report(self.called_off or event.reason)
            case Answered():
                self._expect(event.key, SlotStage.VOTED, SlotStage.REPORTING)
                return type(self)(), ()

    def _call_off(self, event: CallOff) -> tuple[SaveSlot, tuple[Action, ...]]:
        if event.key != self.key or self.called_off or self.stage not in (
            SlotStage.STAGING, SlotStage.WRITING
        ):
            return self, ()
        after = dataclasses.replace(self, called_off=event.reason)
        # A copy is short: it is awaited, and then nothing is written.
        return after, (StopWriting(key=event.key),) if self.stage is SlotStage.WRITING else ()

    def _report(self, reason: str) -> tuple[SaveSlot, tuple[Action, ...]]:
        assert self.key is not None, "a report is about a save"
        return self._at(SlotStage.REPORTING), (Report(key=self.key, reason=reason),)

    def _at(self, stage: SlotStage) -> SaveSlot:
        return dataclasses.replace(self, stage=stage)

    def _expect(self, key: StateKey, *stages: SlotStage) -> None:
        assert key == self.key, f"an event of the save of {key}, the slot holds {self.key}"
        assert self.stage in stages, f"unexpected while {self.stage.value}: {self.key}"
