"""What one member does about its save: a pure machine from events to actions. It holds one save at a time,
from the step boundary at which that begins until the vote or the report about it is answered.

It does no input or output and knows neither tensors nor threads; `saver.Saver` carries its actions out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from orchestrator.records.steps import StateKey


class Stage(Enum):
    """How far the save has come. Until it is VOTED or REPORTING the staging buffer belongs to it."""

    FREE = "there is no save"
    STAGING = "the state is copied into the staging buffer"
    WRITING = "the staging buffer is hashed and written"
    VOTED = "the part is durable, and the vote for it is not answered"
    REPORTING = "the part is not written any more, and the report of that is not answered"


# ---------------------------------------------------------------------- events
@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """All ranks begin the save of `key` after this step. Only a slot that is free may be told so."""

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
    """The part is not copied or written any more, because that failed or was called off; `reason` says it."""

    key: StateKey
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOff:
    """The save of `key` will not be committed, or is not wanted any more: `reason`. Of another save, or of
    one that nothing is written for any more, it says nothing.
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
    """Copy the state into the staging buffer, then say `Staged`, or `Stopped`."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Hash and write the staging buffer, then say `Written`, or `Stopped`."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class StopWriting:
    """Have the writing end soon. Its answer is still that of `Write`: it may have come to its end before."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class CastVote:
    """Vote for the save; `Answered` follows."""

    key: StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Report that this rank has no part of the save, and writes none any more; `Answered` follows."""

    key: StateKey
    reason: str


Action = Copy | Write | StopWriting | CastVote | Report


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSlot:
    """The one save of a member. `on` returns the next state and what to do.

    `called_off` is why the save is to be stopped, "" if it is not.

    Guarantees, where the state is not written to while `copies`, and a save is begun only when `is_free`: the
    staging buffer is written to by one save, and by nobody else until that has stopped reading it; each save
    that is begun is answered for by exactly one vote or one report, unless the process dies; a member that
    reports writes no more. So there is one undecided save and one buffer, however slow the storage is.
    """

    stage: Stage = Stage.FREE
    key: StateKey | None = None
    called_off: str = ""

    @property
    def is_free(self) -> bool:
        """Whether a save may begin."""
        return self.stage is Stage.FREE

    @property
    def copies(self) -> bool:
        """Whether the state is being copied: nobody may write to it."""
        return self.stage is Stage.STAGING

    def on(self, event: Event) -> tuple[SaveSlot, tuple[Action, ...]]:
        """The state after `event` and the actions it calls for, in order."""
        match event:
            case Begin():
                assert self.is_free, f"a save of {event.key} is begun while {self.stage.value}: {self.key}"
                return dataclasses.replace(self, stage=Stage.STAGING, key=event.key), (Copy(key=event.key),)
            case CallOff():
                return self._call_off(event)
            case Staged():
                self._expect(event.key, Stage.STAGING)
                if self.called_off:
                    return self._report(self.called_off)
                return self._at(Stage.WRITING), (Write(key=event.key),)
            case Written():
                self._expect(event.key, Stage.WRITING)
                return self._at(Stage.VOTED), (CastVote(key=event.key),)
            case Stopped():
                self._expect(event.key, Stage.STAGING, Stage.WRITING)
                return self._report(self.called_off or event.reason)
            case Answered():
                self._expect(event.key, Stage.VOTED, Stage.REPORTING)
                return type(self)(), ()

    def _call_off(self, event: CallOff) -> tuple[SaveSlot, tuple[Action, ...]]:
        if event.key != self.key or self.called_off or self.stage not in (Stage.STAGING, Stage.WRITING):
            return self, ()
        after = dataclasses.replace(self, called_off=event.reason)
        # a copy is short: it is awaited, and then nothing is written
        return after, (StopWriting(key=event.key),) if self.stage is Stage.WRITING else ()

    def _report(self, reason: str) -> tuple[SaveSlot, tuple[Action, ...]]:
        assert self.key is not None, "a report is about a save"
        return self._at(Stage.REPORTING), (Report(key=self.key, reason=reason),)

    def _at(self, stage: Stage) -> SaveSlot:
        return dataclasses.replace(self, stage=stage)

    def _expect(self, key: StateKey, *stages: Stage) -> None:
        assert key == self.key, f"an event of the save of {key}, the slot holds {self.key}"
        assert self.stage in stages, f"unexpected while {self.stage.value}: {self.key}"
