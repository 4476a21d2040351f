"""The state machine for one member's save, from events to actions.

It holds one save at a time, from the step boundary at which it begins until its vote or report is answered.
`saver.Saver` carries its actions out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from orchestrator.records.steps import StateKey


class Stage(Enum):
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

    stage: Stage = Stage.FREE
    key: StateKey | None = None
    called_off: str = ""

    @property
    def is_free(self) -> bool:
        """Whether a save may begin."""
        return self.stage is Stage.FREE

    @property
    def copies(self) -> bool:
        """Whether the state is being copied and must not be written to."""
        return self.stage is Stage.STAGING

    def on(self, event: Event) -> tuple[SaveSlot, tuple[Action, ...]]:
        """Returns the state after `event` and the resulting actions, in order."""
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
        # A copy is short: it is awaited, and then nothing is written.
        return after, (StopWriting(key=event.key),) if self.stage is Stage.WRITING else ()

    def _report(self, reason: str) -> tuple[SaveSlot, tuple[Action, ...]]:
        assert self.key is not None, "a report is about a save"
        return self._at(Stage.REPORTING), (Report(key=self.key, reason=reason),)

    def _at(self, stage: Stage) -> SaveSlot:
        return dataclasses.replace(self, stage=stage)

    def _expect(self, key: StateKey, *stages: Stage) -> None:
        assert key == self.key, f"an event of the save of {key}, the slot holds {self.key}"
        assert self.stage in stages, f"unexpected while {self.stage.value}: {self.key}"
