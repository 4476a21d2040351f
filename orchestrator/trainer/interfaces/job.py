"""The inputs and the outcome of the training loop, as values that can be pickled.

Importing this module imports neither torch nor the configuration module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.planning.schedule import Budgets
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey

if TYPE_CHECKING:
    from orchestrator.config.schema import ResumeConfig
    from orchestrator.config.sections import ModelConfig, TrainConfig

DONE, STOPPED, LEFT = "done", "stopped", "left"  # reasons of an outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """The job settings that the loop uses. They are equal on every member (`config_digest` proves it).

    `device`: `cpu`, `cuda` or `cuda:N`.
    `forming_limit_s`: how long a group may take to form.
    `collective_limit_s`: the shortest time that a collective waits for a silent peer. The limit is five times
    the last step if that is longer, and `phases.PHASE_LIMITS_S` in the very first step and where a peer may
    be loading or saving.
    `document_attention`: tokens attend only to their own document.
    `num_shards`: the number of parts of the state (`planning.state.state_layout.layout_of`); 1: replicate.
    `until_tokens`: the launch stops after the step that reaches this many tokens, even if the budgets allow
    more.
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
        """Whether the gradient is combined in the fixed tree (`train.numerics`).

        `auto` is invariant on a CPU, and fast on a GPU or where the state is sharded.
        """
        auto = self.train.numerics == "auto" and self.num_shards == 1
        return not self.device.startswith("cuda") if auto else self.train.numerics == "invariant"

    def stops_at(self, cursor: Cursor) -> bool:
        """Whether the cursor has reached the place at which the launch is to stop."""
        return self.until_tokens is not None and cursor.consumed_tokens >= self.until_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the loop ended for this member.

    `done` and `stopped`: the state `key` is committed. `left`: the run was over for this member.
    """

    reason: str
    key: StateKey | None
    cursor: Cursor
