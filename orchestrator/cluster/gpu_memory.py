"""The memory of this machine's GPUs, from NVIDIA's driver.

It needs no torch, and makes no context on the GPUs.
"""

from __future__ import annotations

import os
import subprocess

_LIMIT_S = 5.0
_NONE = ("", "-1", "NoDevFiles")  # CUDA_VISIBLE_DEVICES where none are to be seen, or as Ray sets it


def gpu_rows(*fields: str) -> list[list[str]]:
    """These fields of `nvidia-smi --query-gpu` for each GPU, or for those in $CUDA_VISIBLE_DEVICES if it
    names some. Empty if there is no driver, or it does not answer within 5 s.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = [] if visible in _NONE else [f"--id={visible}"]
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *chosen]
    try:
        found = subprocess.run(  # noqa: S603  nothing of it is typed by anybody but who starts the process
            ["nvidia-smi", *query],  # noqa: S607  wherever the driver has put it
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.rsplit(", ", len(fields) - 1) for line in found.stdout.splitlines() if line.strip()]


def gpu_memory_here() -> tuple[int, ...]:
    """Total bytes of each GPU, including memory in use; 0 if the driver does not report them (a part of a
    GPU).
    """
    return tuple(int(text) << 20 if text.isdecimal() else 0 for (text,) in gpu_rows("memory.total"))
