"""The peak memory of this process since its start: one system call, no iteration over tensors."""

from __future__ import annotations

import resource

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the maximum of bytes in use at one time.

    On a CUDA `device` it counts the tensors of this process, else the machine memory of the whole process
    (its maximum resident set).
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports it in KiB
