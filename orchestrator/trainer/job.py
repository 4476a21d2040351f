"""What the loop is given and how it ends, as values that pickle.

No behaviour; it imports neither torch nor the configuration's module when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.planning.schedule import Budgets
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey

if TYPE_CHECKING:
    from orchestrator.config.schema import ResumeConfig
    from orchestrator.config.train_sections import ModelConfig, TrainConfig

DONE, STOPPED, LEFT = "done", "stopped", "left"  # reasons of an outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """What the loop needs of a job; equal on every member (`config_digest` proves it). `device` is `cpu`,
    `cuda` or `cuda:N`.

    `forming_limit_s`: how long a group may take to form. `collective_limit_s`: how long a collective waits at
    the least for a peer that says nothing; five times the last step if that is more, and
    `phases.PHASE_LIMITS_S` where a peer may be loading or saving, and in the very first step.
    `document_attention`: tokens attend to their own document alone.
    `num_shards`: into how many parts the state is cut (`planning.state_layout.layout_of`); 1: replicate.
    `until_tokens`: the launch stops after the step that reaches so many, whatever the budgets allow.
    """

    model: ModelConfig
    train: TrainConfig
    resume: ResumeConfig
    seq_len: int
    budgets: Budgets
    config_digest: str
    device: str = "cpu"
    document_attention: bool = False
    digest_every_steps: int | None = None
    num_shards: int | None = 1
    until_tokens: int | None = None
    forming_limit_s: float = 10.0
    collective_limit_s: float = 60.0

    @property
    def invariant(self) -> bool:
        """Whether `train.numerics` means the fixed tree: `auto` is invariant on a CPU, fast on a GPU and
        where the state is sharded.
        """
        auto = self.train.numerics == "auto" and self.num_shards == 1
        return not self.device.startswith("cuda") if auto else self.train.numerics == "invariant"

    def stops_at(self, cursor: Cursor) -> bool:
        """Whether the place is reached at which the launch was to stop."""
        return self.until_tokens is not None and cursor.consumed_tokens >= self.until_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the loop ended for this member: `done`, `stopped` (both: the state `key` is committed) or `left`
    (the run was over for it).
    """

    reason: str
    key: StateKey | None
    cursor: Cursor
