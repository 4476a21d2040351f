"""Where tensors of a test lie: on the CPU, and on a GPU where this machine has one."""

from __future__ import annotations

import pytest
import torch

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=GPU)]
PAIRS = [
    pytest.param(CPU, CPU, id="cpu to cpu"),
    pytest.param(CPU, CUDA, id="cpu to cuda", marks=GPU),
    pytest.param(CUDA, CPU, id="cuda to cpu", marks=GPU),
    pytest.param(CUDA, CUDA, id="cuda to cuda", marks=GPU),
]
