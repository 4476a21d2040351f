"""Which blocks are compiled, and what happens where they cannot be.

tests/torchrun/test_own_training.py trains compiled blocks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orchestrator.config.sections import TrainConfig
from orchestrator.trainer.model.blocks import BlockSettings

TRAIN = {"global_batch_size": 1, "micro_batch_size": 1, "max_steps": 1, "lr": 0.1}


@pytest.mark.parametrize(
    ("compile_", "device", "invariant", "compiled"),
    [
        ("auto", "cuda", False, True),
        ("auto", "cuda", True, False),
        ("auto", "cpu", False, False),
        ("blocks", "cpu", True, True),
        ("none", "cuda", False, False),
    ],
)
def test_what_is_compiled(compile_: str, device: str, invariant: bool, compiled: bool) -> None:
    train = TrainConfig.model_validate({**TRAIN, "compile": compile_})
    found = BlockSettings.of(train, torch.device(device), invariant)
    assert (found.compiled, found.falls_back) == (compiled, compile_ == "auto")


WITHOUT_COMPILER = """
import torch
from orchestrator.errors import TrainingError
from orchestrator.trainer.model.blocks import BlockSettings, with_settings

def model():
    torch.manual_seed(0)
    made = torch.nn.Module()
    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)]
    made.blocks = torch.nn.ModuleList(blocks)
    return made

expected, falling, strict = model(), model(), model()
with_settings(falling, BlockSettings(compiled=True, falls_back=True))
with_settings(strict, BlockSettings(compiled=True))
x = torch.ones(2, 4)
for block, other in zip(falling.blocks, expected.blocks):
    assert torch.equal(block(x), other(x))
try:
    strict.blocks[0](x)
except TrainingError as error:
    print(error.code)
"""


@pytest.mark.chaos
def test_without_a_compiler_auto_falls_back_and_blocks_is_refused_by_name(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.stdout.split() == ["model.not_compiled"], ended.stderr[-3000:]
    assert "train.compile=auto" in ended.stderr
