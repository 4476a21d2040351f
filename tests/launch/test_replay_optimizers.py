"""A run that changed its optimizer is trained again through the change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import orchestrator
from tests.torchrun.ranks import Ranks

pytestmark = pytest.mark.xdist_group("forked")

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "format2"
LIMIT_S = 240.0


@pytest.mark.chaos
def test_a_change_of_the_optimizer_is_trained_again_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("example"))
    muon = ["train.optimizer=muon", "resume.optimizer=reset", "train.ema=0.5"]
    for number, words in enumerate((["train.max_steps=3"], [*muon, "train.max_steps=6"])):
        logs = tmp_path / f"attempt-{number}"
        logs.mkdir()
        rank = Ranks(folder, logs, 1, ["job.yaml", *words])
        try:
            assert rank.end(LIMIT_S) == [0], rank.said()
        finally:
            rank.kill()
    monkeypatch.chdir(folder)
    run = orchestrator.open(folder / "example")
    *before, _ = run.list_points()
    for point in before:  # so that the replay goes through the change
        file = next((folder / "example" / "points" / point["name"]).glob("*/*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    found = run.replay(5)
    assert (found.from_point, found.steps_compared, found.first_difference) == (None, 5, None)
    state = run.at(step=5)
    assert state.weights_digest == found.weights_digest
    assert state.optimizer_state["steps"] == 2, "the optimizer's state began anew"
    assert "muon.momentum_buffer" in state.optimizer_state
