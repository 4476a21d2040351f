"""What the callbacks of `train.callbacks` are called with.

A callback is a class `pkg.module:Class` whose `__init__` needs no arguments. It defines any of the methods of
`Callback`, and may inherit from it (docs/howto/callbacks.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.records.steps import EvalRecord, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The run, and where it stands.

    `run_uri`: its folder or URI, absolute. `step`: the label of the last finished step.
    """

    run_uri: str
    attempt: int
    step: int
    consumed_samples: int
    consumed_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChanged:
    """A training group was formed. `step`: the label of the last finished step that counts."""

    attempt: int
    generation: int
    world_size: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PointCommitted:
    """A resume point was committed: its name, and the label of its step."""

    name: str
    step: int


class Callback:
    """The methods that a callback may define. Each does nothing here."""

    def on_start(self, start: Started) -> None:
        """The first call in a process."""

    def on_group_change(self, group: GroupChanged) -> None:
        """A training group was formed; also the first one, after `on_start`."""

    def on_step(self, record: StepRecord) -> None:
        """A step is durable in the journal, with this record (`orchestrator.records.steps`)."""

    def on_eval(self, record: EvalRecord) -> None:
        """A part of the data was evaluated; its record (`orchestrator.records.steps`) is durable in the
        journal, as those of the other parts of this evaluation.
        """

    def on_point(self, point: PointCommitted) -> None:
        """A resume point was committed."""

    def on_end(self, reason: str) -> None:
        """The last call: training is `done`, `stopped`, `left` (this worker leaves), or `failed`."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
