"""Training states for tests."""

from __future__ import annotations

from typing import Any

from orchestrator.trainer.state.train_state import TrainState


def begun_state(*arguments: Any, **named: Any) -> TrainState:
    """A `TrainState` with its first weights."""
    state = TrainState(*arguments, **named)
    state.initialise()
    return state
