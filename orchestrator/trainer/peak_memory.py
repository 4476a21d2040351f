"""How much memory this process has taken at most, since it began: one system call, no walk over tensors."""

from __future__ import annotations

import resource

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """The most bytes that were taken at once: on a CUDA `device` by tensors of this process, else of the
    machine's memory by the whole process (its maximum resident set).
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux says it in KiB
