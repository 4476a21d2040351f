"""One optimizer step: the resulting state, and its journal record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StateKey:
    """Identity of one training state, ordered: (attempt, generation, step).

    The generation is the one in which its holder last agreed on the state.
    """

    attempt: int
    generation: int
    step: int

    @property
    def point_name(self) -> str:
        """The name of the resume point of this state, e.g. `00000480-a0003-g0007`."""
        return f"{self.step:08d}-a{self.attempt:04d}-g{self.generation:04d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step as stored in the journal.

    Counts are after the step. `loss` is the mean over the step's target tokens (nats), None for a step
    without targets. `digest` is the sum modulo 2^64 of the trained samples' digests (16 hex digits). `ended`
    is when the step was applied, in seconds since 1970 (UTC) by the clock of the rank that reported the
    record, which is rank 0 unless that died. `peak_memory_bytes` is the largest amount that a rank's process
    had taken by then (`trainer.loop`). Both are None in records from before these fields.
    """

    attempt: int
    generation: int
    step: int
    consumed_samples: int
    consumed_tokens: int
    target_tokens: int
    loss: float | None
    grad_norm: float
    lr: float
    digest: str
    step_s: float
    data_wait_s: float
    save_blocked_s: float
    ended: float | None = None
    peak_memory_bytes: int | None = None

    @property
    def key(self) -> StateKey:
        """The key of the state that this step produced."""
        return StateKey(attempt=self.attempt, generation=self.generation, step=self.step)
