"""Which blocks are compiled, and what happens where they cannot be.

tests/torchrun/test_own_training.py trains compiled blocks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrator.config.sections import TrainConfig
from orchestrator.errors import ConfigError
from orchestrator.trainer.model.blocks import BlockSettings, require_blocks, with_settings
from orchestrator.trainer.model.compiled_kernels import keep_privately
from tests.raising import raises

GPU = torch.device("cuda")
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
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


def llama(kind: str = "llama") -> Any:
    settings = AutoConfig.for_model(
        kind, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    return AutoModelForCausalLM.from_config(settings)


def test_liger_is_refused_by_name_where_it_is_not_installed_or_has_nothing() -> None:
    train = TrainConfig.model_validate({**TRAIN, "kernels": "liger"})
    require_blocks(llama(), train, torch.device("cpu"))  # where a run is replayed
    if find_spec("liger_kernel") is None:
        with raises(ConfigError, "model.liger_not_installed", "pip install -e '.[gpu]'"):
            require_blocks(llama(), train, GPU)
        return
    require_blocks(llama(), train, GPU)
    with raises(ConfigError, "model.no_liger_kernels", "Linear"):
        require_blocks(torch.nn.Linear(1, 1), train, GPU)


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_liger_computes_norms_and_gated_layers_and_the_loss_stays_ours() -> None:
    model = llama()
    forward = type(model).forward
    train = TrainConfig.model_validate({**TRAIN, "kernels": "liger"})
    settings = BlockSettings.of(train, GPU, invariant=False)
    assert (settings.liger, settings.compiled) == (True, False)
    with_settings(model, settings)
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, layer.mlp, model.model.norm):
        assert "Liger" in module.forward.__func__.__qualname__
    assert type(model).forward is forward
    assert "forward" not in vars(model)


def test_kernels_are_kept_where_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(FOLDER, raising=False)
    keep_privately()
    own = Path(os.environ[FOLDER])
    assert (own.parent, own.stat().st_mode & 0o777) == (tmp_path, 0o700)
    keep_privately()
    assert os.environ[FOLDER] == str(own)

    own.chmod(0o777)  # somebody else may have written to it
    monkeypatch.delenv(FOLDER)
    keep_privately()
    other = Path(os.environ[FOLDER])
    assert other != own
    assert other.stat().st_mode & 0o777 == 0o700
    assert "drwxrwxrwx" in caplog.text

    monkeypatch.setenv(FOLDER, "/their/own")
    keep_privately()
    assert os.environ[FOLDER] == "/their/own"


COMPILES = """
import sys
import torch
from torch._dynamo.utils import counters
from orchestrator.trainer.model.blocks import BlockSettings, are_compiled, with_settings
from orchestrator.trainer.model.compiled_kernels import copies, take

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()

if len(sys.argv) > 2:
    take(open(sys.argv[1], "rb").read())
model = torch.nn.Module()
model.blocks = torch.nn.ModuleList([Block(), Block()])
with_settings(model, BlockSettings(compiled=True))
for rows in (2, 2, 3, 4):
    for block in model.blocks:
        block(torch.ones(rows, 4)).sum().backward()
assert are_compiled(model)
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
if len(sys.argv) == 2:
    open(sys.argv[1], "wb").write(copies())
"""


@pytest.mark.chaos
def test_a_process_on_another_machine_begins_with_the_kernels_of_this_one(tmp_path: Path) -> None:
    def compiles(folder: str, *more: str) -> tuple[int, int, str]:
        ended = subprocess.run(
            [sys.executable, "-c", COMPILES, str(tmp_path / "copies"), *more],
            env={**os.environ, FOLDER: str(tmp_path / folder)},
            capture_output=True,
            text=True,
            check=True,
        )
        misses, hits = map(int, ended.stdout.split())
        return misses, hits, ended.stderr

    misses, _, said = compiles("here")
    assert misses > 0
    assert len(re.findall("is compiled again", said)) == 1, "one line, for all shapes and blocks"
    assert "expected 2, actual 3" in said
    misses, hits, _ = compiles("there", "with copies")
    assert misses == 0
    assert hits > 0


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
