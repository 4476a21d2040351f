"""What a launch says at its end."""

from __future__ import annotations

from orchestrator.launch.on_cluster import next_commands


def test_a_launch_that_trained_nothing_promises_no_proof() -> None:
    assert next_commands("runs/r", trained=False) == []
    assert [line for line in next_commands("runs/r", trained=True) if "audit runs/r" in line]
